"""Logs: structlog to stderr, one event name per fact (`worker.lost`), values beside it."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TextIO, cast

import structlog

from kvrouter.telemetry.log_stream import LogStream


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
