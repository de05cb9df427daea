"""Where log lines go: a thread writes them, so that what takes them cannot hold up or end the process.

    log.info(…) ──> bounded queue ──> thread ──> stderr: a file on a disk that is full, a pipe nobody reads

A line that cannot be queued or written is lost. The next one that can be tells how many were.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading

MAX_LINES = 10_000
_CLOSE_S = 2.0


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
