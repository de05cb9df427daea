"""The settings of token ids: which way makes them, and what each way needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

from kvrouter.config import read_key
from kvrouter.errors import ConfigError
from kvrouter.settings.declare import Settings, mib, read_mib, setting
from kvrouter.tokens.prefix_tokens import CacheSettings
from kvrouter.tokens.tokenizer import MOST_WAITING

Tokenizer = Literal["auto", "local", "remote", "none"]


def _read_model_path(text: str) -> tuple[str, str]:
    """`DIR` or `MODEL=DIR`. An existing directory may contain `=` in its name."""
    name, equals, path = text.partition("=")
    if text and (not equals or Path(text).is_dir()):
        return "", text
    if not name or not path:
        raise ValueError("must be DIR or MODEL=DIR")
    return name, path


def _model_path_text(pair: tuple[str, str]) -> str:
    return "=".join(filter(None, pair))


@dataclass(frozen=True, slots=True)
class TokenOptions(Settings):
    heading = "Tokens"

    paths: tuple[tuple[str, str], ...] = setting(
        (),
        "directory or hub id with tokenizer and chat template; once for each model",
        name="model-path",
        metavar="[MODEL=]DIR|ORG/NAME",
        read=_read_model_path,
        text=_model_path_text,
        is_repeated=True,
        is_top=True,
    )
    """Names of models, or "" for all others; and a directory, or a repository of a hub."""
    way: Tokenizer = setting(
        "auto",
        "auto: --model-path if given, else the engines' /tokenize, else the text; local: --model-path only; "
        "remote: not --model-path; none: by text alone, which implies --no-use-kv-events",
        name="tokenizer",
        is_top=True,
    )
    cache_directory: Path | None = setting(
        None, "directory for downloaded files of a hub", name="tokenizer-cache-dir", metavar="DIR"
    )
    root: Path | None = setting(
        None,
        "use the model directory or cached hub id that workers' cards name, if it is below this directory",
        name="tokenizer-root",
        metavar="DIR",
    )
    chat_template: Path | None = setting(
        None, "replaces the model's chat template; give the engines the same"
    )
    threads: int = setting(8, "threads that tokenize", name="tokenizer-workers", least=1)
    backend: Literal["auto", "huggingface"] = setting(
        "auto",
        "auto: fastokens, where installed (kvrouter[fast]) and equal; huggingface: the library tokenizers",
        name="tokenizer-backend",
    )
    most_waiting: int = setting(
        MOST_WAITING,
        "text that may wait for these threads, in MiB; above it prompts get 503",
        name="tokenizer-queue-mib",
        metavar="MIB",
        read=read_mib,
        text=mib,
        least=1,
    )
    compare: bool = setting(
        True,
        "compare token ids with an engine's /tokenize, at the start and for one prompt in a thousand",
        name="token-comparison",
    )
    engine_api_key_file: Path | None = setting(
        None, "bearer token for the engines' /tokenize", reloadable=True
    )
    cache: CacheSettings = field(default_factory=CacheSettings)
    """One prefix cache for all models: its memory limit is for the process."""
    hub_token: str | None = setting(
        None,
        "token of the account at the hub; others see flags, so use the variable",
        name="hf-token",
        variable="HF_TOKEN",
        default_text="$HF_TOKEN",
        is_secret=True,
    )
    send_ids: Literal["auto", "off"] = setting(
        "auto",
        "auto: engines that take the token ids of a chat get those computed here, once they were compared; "
        "needs --token-comparison",
        name="send-token-ids",
    )

    def checked(self) -> Self:
        if self.way in {"remote", "none"} and self.paths:
            raise ConfigError(f"--model-path is not used with --tokenizer {self.way}: drop one of them")
        if self.chat_template is not None and self.model_path is None:
            raise ConfigError(
                "--chat-template needs a --model-path without MODEL=: it replaces that model's template"
            )
        read_key("--engine-api-key-file", self.engine_api_key_file)
        return self

    @property
    def model_path(self) -> str | None:
        """For models that are not in `model_paths`: the last path without a model's name."""
        return next((path for name, path in reversed(self.paths) if not name), None)

    @property
    def model_paths(self) -> dict[str, str]:
        return {name: path for name, path in self.paths if name}

    @property
    def prefix_cache(self) -> CacheSettings | None:
        return self.cache if self.cache.max_parts else None

    @property
    def engine_api_key(self) -> str | None:
        return read_key("--engine-api-key-file", self.engine_api_key_file)
