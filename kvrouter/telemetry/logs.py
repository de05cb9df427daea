"""Logs: structlog to stderr, one event name per fact (`worker.lost`) with its values as fields.

    log.info(…) ──> bounded queue ──> thread ──> stderr: a file on a full disk, or a pipe that is not read

The thread writes, so that a stream that blocks or fails cannot hold up or end the process. A line that cannot
be queued or written is lost; the next line that can be written is preceded by the number of lost ones.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import json
import logging
import os
import queue
import sys
import threading
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any, TextIO, cast

import structlog

from kvrouter.settings.declare import without_password

log = structlog.get_logger()

LEVELS = ("debug", "info", "warning", "error")

# Beyond this, lines are lost: a pipe that is not read must not fill the memory.
MAX_LINES = 10_000
_TOGETHER = 100
# The process must end even if its logs cannot be written: Python's streams hung at exit on a stalled reader.
_CLOSE_S = 2.0


def set_up_logs(level: str = "info", form: str = "console") -> None:
    """Send this process's logs to stderr. `form` json: one object a line, also for libraries and crashes."""
    stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115  # None if started with 2>&-
    stream = _stream_to(stderr, is_json=form == "json")
    renderers: list[structlog.types.Processor] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if form == "json"
        else [_console(colors=stderr.isatty())]
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.MaybeTimeStamper(fmt="iso"),
            _without_passwords,
            *renderers,
        ],
        logger_factory=structlog.WriteLoggerFactory(stream),
        cache_logger_on_first_use=False,  # a cached logger would keep its level
    )
    set_log_level(level)
    logging.basicConfig(level=logging.WARNING, stream=stream, format="%(name)s: %(message)s")
    if form == "json":
        logging.basicConfig(level=logging.WARNING, handlers=[_AsEvents()], force=True)
        sys.excepthook = lambda *crash: log.critical("process.crashed", exc_info=crash)
    logging.getLogger("nats").setLevel(logging.CRITICAL)  # the bus logs the same events, once and shorter


def _console(*, colors: bool) -> structlog.dev.ConsoleRenderer:
    # not with rich, which prints the values of all variables
    plain = structlog.dev.plain_traceback
    return structlog.dev.ConsoleRenderer(colors=colors, sort_keys=False, exception_formatter=plain)


def set_log_level(level: str) -> None:
    """Log from this level on."""
    structlog.configure(
        **structlog.get_config()
        | {"wrapper_class": structlog.make_filtering_bound_logger(getattr(logging, level.upper()))}
    )


class _AsEvents(logging.Handler):
    """Logs what a library logs as an event."""

    def emit(self, record: logging.LogRecord) -> None:
        facts: dict[str, Any] = {"logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            facts["exc_info"] = record.exc_info
        log.log(record.levelno, "library.logged", **facts)


def _without_passwords(_logger: object, _level: str, fields: MutableMapping[str, Any]) -> Mapping[str, Any]:
    """The fields, without the user and password of URLs: of engines, NATS servers, in errors of either."""
    return {
        name: without_password(value) if isinstance(value, str) and "@" in value else value
        for name, value in fields.items()
    }


def _stream_to(stderr: TextIO, *, is_json: bool) -> TextIO:
    """A stream that neither fails nor blocks; stderr itself if it has no file descriptor (LabelledText)."""
    try:
        return cast(TextIO, LogStream(stderr.fileno(), is_json=is_json))
    except (OSError, ValueError):
        return stderr


class LogStream:
    """The part of a text stream that logging needs. Queued lines are written at exit, within 2 s.

    It writes to the file descriptor itself. Python's streams keep unwritten data and their locks until the
    interpreter ends, and then fail or hang.
    """

    def __init__(self, descriptor: int, *, is_json: bool) -> None:
        self._is_json = is_json
        self._descriptor = descriptor
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._lost = 0
        self._thread = threading.Thread(target=self._write_all, name="logs", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def write(self, text: str) -> int:
        """Queue whole lines."""
        if self._lines.qsize() < MAX_LINES:
            self._lines.put(text)
        else:
            self._lost += 1
        return len(text)

    def flush(self) -> None:
        """Do nothing: logging calls it after each line, and must not wait."""

    def close(self) -> None:
        """Write the queued lines, within _CLOSE_S."""
        self._lines.put(None)
        self._thread.join(_CLOSE_S)

    def _write_all(self) -> None:
        is_open = True
        while is_open:
            queued = [self._lines.get()]
            # One write for all that wait: each makes the threads change places twice.
            while not self._lines.empty() and len(queued) < _TOGETHER:
                queued.append(self._lines.get())
            texts = [text for text in queued if text is not None]
            is_open = len(texts) == len(queued)
            if lost := self._lost:
                texts.insert(0, _lost_line(lost, is_json=self._is_json))
            unwritten = self._write(texts)
            if lost and unwritten < len(texts):
                self._lost -= lost  # not = 0: another thread may have added to it
            self._lost += min(unwritten, len(texts) - bool(lost))

    def _write(self, texts: list[str]) -> int:
        """Write; returns how many could not be written, or only in part: the last ones."""
        # backslashreplace: a field may quote half a surrogate pair
        pieces = [text.encode(errors="backslashreplace") for text in texts]
        left = memoryview(b"".join(pieces))
        with contextlib.suppress(OSError):
            while left:
                left = left[os.write(self._descriptor, left) :]
        missing, unwritten = len(left), 0
        while missing > 0:
            unwritten += 1
            missing -= len(pieces[-unwritten])
        return unwritten


def _lost_line(lost: int, *, is_json: bool) -> str:
    if not is_json:
        return f"log lines lost: {lost}\n"
    now = datetime.datetime.now(datetime.UTC).isoformat()
    fact = {"lines": lost, "event": "log.lost", "level": "warning", "timestamp": now}
    return json.dumps(fact) + "\n"
