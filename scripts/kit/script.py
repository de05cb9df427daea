"""How a script runs and ends: once, whole, and with nothing left behind."""

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
# Columns where no terminal says how many it has: the widest table, unbroken.
PIPE_WIDTH = 200


def new_console() -> Console:
    """For what a script prints; $COLUMNS counts as it does everywhere."""
    is_wide = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if is_wide else PIPE_WIDTH)


async def until_signalled(name: str, script: Coroutine[Any, Any, int]) -> int:
    """Run; Ctrl-C or SIGTERM cancels, once, and everything is stopped on the way out."""
    task = asyncio.ensure_future(script)
    is_signalled = False

    def interrupt() -> None:
        nonlocal is_signalled
        if not is_signalled:  # a second one must not interrupt the stopping
            is_signalled = True
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, interrupt)
    try:
        return await task
    except asyncio.CancelledError:
        print(f"{name}: stopped; nothing is left running", file=sys.stderr)
        return INTERRUPTED


@contextlib.contextmanager
def log_directory(name: str) -> Iterator[Path]:
    """A directory for logs and the model. It stays if the script fails, and goes otherwise."""
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
