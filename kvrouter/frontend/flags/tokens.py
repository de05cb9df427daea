"""The flags of tokenizing (docs/tokens.md)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kvrouter.config import not_negative_int, positive_int, read_key
from kvrouter.errors import ConfigError
from kvrouter.tokens.prefix_tokens import CacheSettings

Way = Literal["local", "remote", "none"]
_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class TokenOptions:
    way: Way = "local"
    model_path: str | None = None
    """A directory or a repository of a hub, for models that are not in `model_paths`."""
    model_paths: dict[str, str] = field(default_factory=dict)
    cache_directory: Path | None = None
    chat_template: Path | None = None
    threads: int = 8
    prefix_cache: CacheSettings | None = None
    compare: bool = True
    engine_api_key: str | None = None


def add_token_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--tokenizer",
        choices=["local", "remote", "none"],
        default="local",
        help="local: that of --model-path (without one, only prompts of token ids are routed by KV overlap); "
        "remote: the engines' /tokenize; none: by text alone, which implies --no-kv-events",
    )
    add(
        "--model-path",
        type=_model_path,
        action="append",
        default=[],
        metavar="[MODEL=]DIR|ORG/NAME",
        help="directory or hub id with tokenizer and chat template; may be repeated, once for each model",
    )
    add("--tokenizer-cache-dir", type=Path, metavar="DIR", help="directory for downloaded files of a hub")
    add(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="replaces the model's chat template; give the engines the same",
    )
    add("--tokenizer-workers", type=positive_int, default=8, help="threads that tokenize")
    add(
        "--token-comparison",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare token ids with an engine's /tokenize, at the start and for one prompt in a thousand",
    )
    add("--engine-api-key-file", type=Path, metavar="FILE", help="bearer token for the engines' /tokenize")
    add(
        "--prefix-store-blocks",
        type=not_negative_int,
        default=500_000,
        help="prefix cache of the tokenizer: most pieces of text whose tokens are kept; 0 switches it off",
    )
    add(
        "--prefix-store-block-chars",
        type=positive_int,
        default=256,
        help="characters of one piece of the prefix cache",
    )
    add("--prefix-store-mb", type=positive_int, default=512, help="memory of the prefix cache, in MiB")
    add(
        "--min-prefix-overlap-ratio",
        type=_share,
        default=None,
        metavar="R",
        help="if this share of a prompt's characters is in the prefix cache, do not tokenize the rest "
        "(Heimdall: 0.8); overlap is then found in the cached part only",
    )


def token_options(flags: argparse.Namespace) -> TokenOptions:
    """Raises ConfigError for flags that contradict each other."""
    default = _default_path(flags.model_path)
    if flags.tokenizer != "local" and flags.model_path:
        raise ConfigError(f"--model-path is for --tokenizer local, not {flags.tokenizer}: drop one of them")
    if flags.chat_template is not None and default is None:
        raise ConfigError(
            "--chat-template needs a --model-path without MODEL=: it replaces that model's template"
        )
    # One prefix cache for all models: its memory limit is for the process.
    cache = CacheSettings(
        max_parts=flags.prefix_store_blocks,
        part_characters=flags.prefix_store_block_chars,
        max_bytes=flags.prefix_store_mb * _MIB,
        enough=flags.min_prefix_overlap_ratio,
    )
    return TokenOptions(
        way=flags.tokenizer,
        model_path=default,
        model_paths={name: path for name, path in flags.model_path if name},
        cache_directory=flags.tokenizer_cache_dir,
        chat_template=flags.chat_template,
        threads=flags.tokenizer_workers,
        prefix_cache=cache if cache.max_parts else None,
        compare=flags.token_comparison,
        engine_api_key=read_key("--engine-api-key-file", flags.engine_api_key_file),
    )


def _model_path(text: str) -> tuple[str, str]:
    """`DIR` or `MODEL=DIR`. An existing directory may contain `=` in its name."""
    name, equals, path = text.partition("=")
    # A directory whose name contains `=` must stay usable.
    if not equals or Path(text).is_dir():
        return "", text
    if not name or not path:
        raise argparse.ArgumentTypeError(f"{text!r}: must be DIR or MODEL=DIR")
    return name, path


def _default_path(paths: Sequence[tuple[str, str]]) -> str | None:
    """The last path without a model's name."""
    return next((path for name, path in reversed(paths) if not name), None)


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be above 0 and at most 1")
    return value
