"""How a script runs and ends: console, signals, errors, log directory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

INTERRUPTED = 130
# Columns if the output is not a terminal: enough for the widest table.
PIPE_WIDTH = 200


class ScriptError(Exception):
    """Ends a script with exit code 1 and this text."""


def run(name: str, script: Coroutine[Any, Any, int], *more_errors: type[Exception]) -> int:
    """Run a script until its end or a signal; returns its exit code, 1 for one of the errors."""
    errors: tuple[type[Exception], ...] = (ScriptError, *more_errors)
    try:
        return uvloop.run(until_signalled(name, script))
    except errors as error:
        print(f"{name}: failed: {error}", file=sys.stderr)
        return 1


def new_console() -> Console:
    """The console of a script; as usual, $COLUMNS overrides its width."""
    is_wide = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if is_wide else PIPE_WIDTH)


def table_of(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A table whose columns are figures, except for the first."""
    table = Table(title=title, title_justify="left")
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", no_wrap=not number)
    for row in rows:
        table.add_row(*map(str, row))
    return table


async def until_signalled(name: str, script: Coroutine[Any, Any, int]) -> int:
    """Run `script`. Ctrl-C or SIGTERM cancels it once, and its context managers stop everything."""
    task = asyncio.ensure_future(script)
    is_signalled = False

    def interrupt() -> None:
        nonlocal is_signalled
        if not is_signalled:  # a second signal must not interrupt the stopping of processes
            is_signalled = True
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, interrupt)
    try:
        return await task
    except asyncio.CancelledError:
        print(f"{name}: stopped; no process is left running", file=sys.stderr)
        return INTERRUPTED


@contextlib.contextmanager
def log_directory(name: str) -> Iterator[Path]:
    """A directory for logs and the model. It is kept if the script fails, and deleted otherwise."""
    directory = Path(tempfile.mkdtemp(prefix=f"kvrouter-{name}-"))
    try:
        yield directory
    except Exception:
        print(f"{name}: the logs of all processes are in {directory}", file=sys.stderr)
        raise
    except asyncio.CancelledError:
        shutil.rmtree(directory)
        raise
    shutil.rmtree(directory)
