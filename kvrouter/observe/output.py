"""How commands print: whole on a terminal, and without a word if its reader has enough."""

from __future__ import annotations

import os
import sys

from rich.console import Console

# Columns if the output is not a terminal: the usual 80 would break digests.
_PIPE_WIDTH = 160


def console() -> Console:
    is_wide = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if is_wide else _PIPE_WIDTH)


def forget_stdout() -> None:
    """After a BrokenPipeError, as of `| head`: what Python flushes at its end goes nowhere, too."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
