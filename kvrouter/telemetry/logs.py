"""Logs: structlog to stderr, one event name per fact (`worker.lost`), values beside it."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import sys
import threading
from pathlib import Path
from typing import TextIO, cast

import structlog

MAX_LINES = 10_000
_CLOSE_S = 2.0


def set_up_logs(level: str = "info", form: str = "console") -> None:
    """Send this process's logs to stderr. `form` json: one object a line."""
    stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115  # started with 2>&-
    stream = _stream_to(stderr)
    renderers: list[structlog.types.Processor] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if form == "json"
        else [structlog.dev.ConsoleRenderer(colors=stderr.isatty(), sort_keys=False)]
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            *renderers,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.WriteLoggerFactory(stream),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(level=logging.WARNING, stream=stream, format="%(name)s: %(message)s")
    logging.getLogger("nats").setLevel(logging.CRITICAL)  # our bus says the same, once and shorter


def _stream_to(stderr: TextIO) -> TextIO:
    """One that neither fails nor blocks. Where several processes share an output, stderr is one itself."""
    try:
        return cast(TextIO, LogStream(stderr.fileno()))
    except (OSError, ValueError):
        return stderr


class LogStream:
    """What logging needs of a text stream. What waits at the exit is still written, for 2 s at most.

    It writes to the file descriptor itself: Python's own streams keep what could not be written, and their
    locks, until the interpreter ends, which then fails or hangs.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_LINES)
        self._lost = 0
        self._thread = threading.Thread(target=self._write_all, name="logs", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def write(self, text: str) -> int:
        """Take in whole lines."""
        try:
            self._lines.put_nowait(text)
        except queue.Full:
            self._lost += 1
        return len(text)

    def flush(self) -> None:
        """Nothing is to be waited for."""

    def close(self) -> None:
        """Write what waits, for a short time at most."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=_CLOSE_S)
            self._thread.join(_CLOSE_S)

    def _write_all(self) -> None:
        while (text := self._lines.get()) is not None:
            try:
                if lost := self._lost:
                    self._write(f"log lines lost: {lost}\n")
                    self._lost -= lost
                self._write(text)
            except OSError:
                self._lost += 1

    def _write(self, text: str) -> None:
        left = memoryview(text.encode(errors="backslashreplace"))
        while left:
            left = left[os.write(self._descriptor, left) :]
