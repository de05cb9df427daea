"""Why NATS is unreachable, and the warnings about it.

A server that rejects a password also closes the connection, so one cause shows up as several errors. The
most specific one is kept as the reason until the connection works again.
"""

from __future__ import annotations

import asyncio
import socket

import nats.errors
import structlog

log = structlog.get_logger()

# nats-py reports one error per attempt (every 0.2 s) and one per dropped message: without a limit, an
# outage of a minute fills the log with thousands of equal lines.
LOG_EVERY_S = 10.0
# Error texts come from the server, so an odd server can invent new ones without end.
MOST_WARNINGS = 256

NO_SERVER = (
    "start a NATS server: `kvrouter nats`, --nats embedded, or nats-server; or give --nats the URL of one. "
    "Connecting again until one answers"
)

NO_ANSWER = "no NATS server answers at this address: check --nats. Connecting again until one does"

# These follow a more specific error: a server that rejects a password closes the connection, too.
_VAGUE = (
    ConnectionResetError,
    BrokenPipeError,
    TimeoutError,
    nats.errors.TimeoutError,
    nats.errors.UnexpectedEOF,
    nats.errors.ConnectionClosedError,
)


class Outage:
    """The reason why NATS is away, and warnings of which each is logged once in LOG_EVERY_S."""

    def __init__(self, servers: str) -> None:
        # Empty while NATS is connected.
        self.reason = ""
        self._servers = servers
        self._specific_at = float("-inf")
        self._logged_at: dict[str, float] = {}

    def failed(self, error: BaseException) -> None:
        """Record that an attempt to connect, or a connection, has failed."""
        now = asyncio.get_running_loop().time()
        if isinstance(error, _VAGUE) and now - self._specific_at < LOG_EVERY_S:
            return
        text = _text(error)
        facts = {"error": text, "servers": self._servers}
        self.reason = text
        if "authorization" in text.lower():
            facts["remedy"] = "NATS rejects these credentials; see the --nats-… flags in --help"
            self.reason = f"{text}: {facts['remedy']}"
        if isinstance(error, ConnectionRefusedError):
            facts["remedy"] = NO_SERVER
        elif isinstance(error, socket.gaierror | TimeoutError | nats.errors.TimeoutError):
            facts["remedy"] = NO_ANSWER
        if not isinstance(error, _VAGUE):
            self._specific_at = now
        self.warn("nats.error", **facts)

    def end(self) -> None:
        """The connection works: forget the reason. The next error counts as a new outage."""
        self.reason = ""
        self._specific_at = float("-inf")

    def warn(self, event: str, **facts: object) -> None:
        """Log a warning, unless the same event with the same error was logged less than 10 s ago."""
        now = asyncio.get_running_loop().time()
        key = f"{event}: {facts.get('error')}"
        if now - self._logged_at.get(key, float("-inf")) < LOG_EVERY_S:
            return
        recent = {known: at for known, at in self._logged_at.items() if now - at < LOG_EVERY_S}
        if len(recent) < MOST_WARNINGS:
            self._logged_at = recent | {key: now}
            log.warning(event, **facts)


def _text(error: BaseException) -> str:
    """The error's message in one line; with its type where the message alone explains nothing."""
    text = " ".join(str(error).split())[:300]
    if isinstance(error, OSError | nats.errors.Error) and text:
        return text
    return f"{type(error).__name__}: {text}".rstrip(": ")
