"""How a script runs and ends: console, signals, log directory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

INTERRUPTED = 130
# Columns if the output is not a terminal: enough for the widest table.
PIPE_WIDTH = 200


def new_console() -> Console:
    """The console of a script; as usual, $COLUMNS overrides its width."""
    is_wide = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if is_wide else PIPE_WIDTH)


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
