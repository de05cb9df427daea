"""Which tokenizer each model has: what the command line names, else the directory that an engine names.

engines tell ──> learn ──> flags, when the frontends start ──> what comes later is not in use, and said
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvrouter.frontend.flags.tokens import TokenOptions
from kvrouter.worker.engines.facts import EngineFacts
from kvrouter.worker.options import AgentOptions

NO_TOKENIZER = (
    "no tokenizer: {where}; give --model-path {model}=DIR, a directory with tokenizer.json. Until then texts "
    "and chats go by load, prompts as token ids by cache"
)
NOT_IN_USE = (
    "tokenizer of {model} is not in use, the frontends run without it: start kvrouter serve again, "
    "or give --model-path {model}={path}"
)
_ELSEWHERE = {
    "remote": "the engine's own /tokenize (--tokenizer remote)",
    "none": "none: routed by text (--tokenizer none)",
}


@dataclass(frozen=True, slots=True)
class TokenizerReport:
    """What of it is to be said of one engine."""

    shown: str
    lack: str = ""


class Tokenizers:
    """Those of all models. Once `flags` has been called, nothing is added to what the frontends have."""

    def __init__(self, options: TokenOptions) -> None:
        self._options = options
        self._found: dict[str, Path] = {}
        self._given: dict[str, Path] | None = None

    def learn(self, agent: AgentOptions, facts: EngineFacts) -> None:
        """Take the directory that an engine names; the first of a model is kept."""
        path = tokenizer_of(facts)
        if path is not None:
            self._found.setdefault(model_of(agent, facts), path)

    def flags(self) -> list[str]:
        """What the frontends are to be started with beside the command line's own."""
        takes_more = self._options.way == "local" and self._options.model_path is None
        named = self._options.model_paths
        more = {model: path for model, path in self._found.items() if takes_more and model not in named}
        self._given = more
        return [f"--model-path={model}={path}" for model, path in more.items()]

    def of(self, agent: AgentOptions, facts: EngineFacts) -> TokenizerReport:
        """What the frontends have, or will have, for an engine's model."""
        if self._options.way != "local":
            return TokenizerReport(_ELSEWHERE[self._options.way])
        model = model_of(agent, facts)
        path = self._path(model, facts.models.served_names)
        if path is not None:
            return TokenizerReport(str(path))
        if model in self._found:
            return TokenizerReport("none", NOT_IN_USE.format(model=model, path=self._found[model]))
        return TokenizerReport("none", NO_TOKENIZER.format(where=_where(facts), model=model))

    def _path(self, model: str, names: Sequence[str]) -> Path | str | None:
        """As the frontends look it up: any name of the model will do, and last the unnamed default."""
        known: Mapping[str, Path | str] = self._found if self._given is None else self._given
        for name, path in (*self._options.model_paths.items(), *known.items()):
            if name == model or name in names:
                return path
        return self._options.model_path


def model_of(agent: AgentOptions, facts: EngineFacts) -> str:
    """The name of the engine's pool."""
    return agent.model or facts.models.served_names[0]


def tokenizer_of(facts: EngineFacts) -> Path | None:
    """The engine's tokenizer, if it is a directory on this machine."""
    path = Path(facts.tokenizer) if facts.tokenizer else None
    return path if path is not None and (path / "tokenizer.json").is_file() else None


def _where(facts: EngineFacts) -> str:
    if not facts.tokenizer:
        return "the engine does not say where its model is from"
    return f"the engine's {facts.tokenizer!r} is no such directory on this machine"
