"""One prompt encoder for each model; `--model-path` says which directory is whose."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvrouter.core.pool import Pool
from kvrouter.tokens.prompt import PromptEncoder


class Encoders:
    """`default` serves every pool that has no encoder of its own."""

    def __init__(self, default: PromptEncoder, by_name: Mapping[str, PromptEncoder] | None = None) -> None:
        self.default = default
        self.by_name = dict(by_name or {})

    @classmethod
    @contextlib.contextmanager
    def load(cls, default: Path | None, by_name: Mapping[str, Path], *, threads: int) -> Iterator[Encoders]:
        """Read the model directories. Raises ConfigError for a broken one."""
        with contextlib.ExitStack() as stack:

            def load(path: Path | None) -> PromptEncoder:
                return stack.enter_context(PromptEncoder.load(path, threads=threads))

            yield cls(load(default), {name: load(path) for name, path in by_name.items()})

    def of(self, pool: Pool) -> PromptEncoder:
        """The encoder of a pool, found by any name that its base model is served by."""
        for name, encoder in self.by_name.items():
            if name == pool.model or name in pool.names:
                return encoder
        return self.default
