"""The tokenizer of each model: from the command line, else the directory that an engine reports.

--tokenizer auto    the frontends find the directory on the card, and compare its ids with the engine's
--tokenizer local   engines report ──> learn ──> flags, when the frontends start; later ones are reported
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvrouter.prompts.settings import TokenOptions
from kvrouter.worker.engines.facts import EngineFacts
from kvrouter.worker.options import AgentOptions

NO_TOKENIZER = (
    "no tokenizer: {where}; give --model-path {model}=DIR, a directory with tokenizer.json. Until then, "
    "texts and chats are routed by load, and only prompts given as token ids by cache"
)
NOT_IN_USE = (
    "tokenizer of {model} is not in use, as the frontends started without it: restart kvrouter serve, "
    "or give --model-path {model}={path}"
)
_IF_EQUAL = "{path}, if its ids are the engine's; else its /tokenize"
_ELSEWHERE = {
    "auto": "the engine's own /tokenize",
    "remote": "the engine's own /tokenize (--tokenizer remote)",
    "none": "none: routed by text (--tokenizer none)",
}


@dataclass(frozen=True, slots=True)
class TokenizerReport:
    """The text of an engine's report about its tokenizer."""

    text: str
    lack: str = ""


class Tokenizers:
    """The tokenizers of all models. A frontend gets them as flags, so `flags` fixes which are in use."""

    def __init__(self, options: TokenOptions) -> None:
        self._options = options
        self._found: dict[str, Path] = {}
        self._given: dict[str, Path] | None = None

    def learn(self, agent: AgentOptions, facts: EngineFacts) -> None:
        """Keep the directory reported by an engine, unless one is known for its model."""
        path = tokenizer_of(facts)
        if path is not None:
            self._found.setdefault(model_of(agent, facts), path)

    def flags(self) -> list[str]:
        """Flags of the frontends in addition to those of the command line."""
        if self._options.way == "auto":
            # the engines are those of the command line, so a directory that they name may be read
            return [] if self._options.root is not None else [f"--tokenizer-root={Path('/')}"]
        takes_more = self._options.way == "local" and self._options.model_path is None
        named = self._options.model_paths
        more = {model: path for model, path in self._found.items() if takes_more and model not in named}
        self._given = more
        # Always with the model's name: without it, a path would be used for engines of other models that
        # are started later, and tokenize their prompts wrongly.
        return [f"--model-path={model}={path}" for model, path in more.items()]

    def of(self, agent: AgentOptions, facts: EngineFacts) -> TokenizerReport:
        """The tokenizer that the frontends use, or will use, for an engine's model."""
        if self._options.way in {"remote", "none"}:
            return TokenizerReport(_ELSEWHERE[self._options.way])
        model = model_of(agent, facts)
        path = self._path(model, facts.models.served_names)
        if path is not None:
            return TokenizerReport(str(path))
        if self._options.way == "auto":
            found = tokenizer_of(facts)
            return TokenizerReport(_IF_EQUAL.format(path=found) if found else _ELSEWHERE["auto"])
        if model in self._found:
            return TokenizerReport("none", NOT_IN_USE.format(model=model, path=self._found[model]))
        return TokenizerReport("none", NO_TOKENIZER.format(where=_where(facts), model=model))

    def _path(self, model: str, names: Sequence[str]) -> Path | str | None:
        """The path for any of the model's names, else the default, as the frontends look it up."""
        known: Mapping[str, Path | str] = self._found if self._given is None else self._given
        if self._options.way == "auto":
            known = {}
        for name, path in (*self._options.model_paths.items(), *known.items()):
            if name == model or name in names:
                return path
        return self._options.model_path


def model_of(agent: AgentOptions, facts: EngineFacts) -> str:
    """The name of the engine's pool."""
    return agent.model or facts.models.served_names[0]


def tokenizer_of(facts: EngineFacts) -> Path | None:
    """The directory of the engine's tokenizer, if it exists on this machine."""
    path = Path(facts.tokenizer) if facts.tokenizer else None
    return path if path is not None and (path / "tokenizer.json").is_file() else None


def _where(facts: EngineFacts) -> str:
    if not facts.tokenizer:
        return "the engine does not report its model's directory"
    return f"the engine's {facts.tokenizer!r} is not a model directory on this machine"
