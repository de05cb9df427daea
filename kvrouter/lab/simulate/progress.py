"""How far a long run is: a bar in a terminal, a line every tenth elsewhere, both on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress

_LINES = 10


@contextmanager
def shown_progress(name: str) -> Iterator[Callable[[int, int], None]]:
    """`on_done(done, all)` for what runs inside."""
    console = Console(stderr=True)
    if console.is_terminal:
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task(name, total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total)
    else:
        yield _Lines(name)


class _Lines:
    def __init__(self, name: str) -> None:
        self._name = name
        self._said = 0

    def __call__(self, done: int, total: int) -> None:
        tenth = _LINES * done // max(1, total)
        if tenth > self._said:
            self._said = tenth
            print(f"{self._name}: {done} of {total}", file=sys.stderr, flush=True)  # noqa: T201
