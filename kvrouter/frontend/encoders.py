"""One prompt encoder for each model; `--model-path` says which directory is whose."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

from kvrouter.core.fleet.pool import Pool
from kvrouter.tokens.prompt import PromptEncoder


class Encoders:
    """`default` serves every pool that has no encoder of its own."""

    def __init__(self, default: PromptEncoder, by_name: Mapping[str, PromptEncoder] | None = None) -> None:
        self.default = default
        self.by_name = dict(by_name or {})

    @classmethod
    @contextlib.contextmanager
    def load(
        cls, read: Callable[[str | None], PromptEncoder], default: str | None, by_name: Mapping[str, str]
    ) -> Iterator[Encoders]:
        """Read the models; `read` knows how. Raises ConfigError for a broken one."""
        with contextlib.ExitStack() as stack:
            named = {name: stack.enter_context(read(path)) for name, path in by_name.items()}
            yield cls(stack.enter_context(read(default)), named)

    def of(self, pool: Pool) -> PromptEncoder:
        """The encoder of a pool, found by any name that its base model is served by."""
        for name, encoder in self.by_name.items():
            if name == pool.model or name in pool.names:
                return encoder
        return self.default

    def all(self) -> dict[str, PromptEncoder]:
        """By model; the default one under an empty name."""
        return {"": self.default, **self.by_name}
