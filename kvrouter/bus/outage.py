"""Why NATS is unreachable, and the warnings about it.

A server that rejects a password also closes the connection, so one cause shows up as several errors. The
most specific one is kept as the reason until the connection works again.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl

import nats.errors
import structlog

from kvrouter.bus.local_users import REJECTED, LocalUser
from kvrouter.long_wait import LongWait

log = structlog.get_logger()

# nats-py reports one error per attempt (every 0.2 s) and one per dropped message: without a limit, a minute
# fills the log with thousands of equal lines. While NATS is away, each error is logged once: the LongWait
# repeats the last one.
LOG_EVERY_S = 10.0
# Error texts come from the server, so an odd server can invent new ones without end.
MOST_WARNINGS = 256

NO_SERVER = (
    "start a NATS server: `kvrouter nats`, --nats embedded, or nats-server; or give --nats the URL of one. "
    "Connecting again until one answers"
)
NO_ANSWER = "no NATS server answers at this address: check --nats. Connecting again until one does"
NO_RIGHT = (
    "the server's file does not let this user do that: give this process the user of its part (--nats-nkey), "
    "or write the file again (`kvrouter nats accounts` with the same directory and names), and send "
    "nats-server a SIGHUP"
)
OTHER_WORKER = (
    "the NATS user of this agent may not announce this worker id: give the agent the user of its worker "
    "(--nats-nkey), or a --worker-id of its user's group, as vllm.NAME for user vllm=vllm.*; "
    "`kvrouter nats accounts DIR --agent …` makes a user for more workers"
)
NO_TLS = "check --nats-tls-ca, --nats-tls-cert and --nats-tls-key, and whether the server has TLS on"
OTHERWISE = "check --nats, and look at the log of the NATS server. Connecting again until it answers"

# What an agent does in its worker's name (kvrouter/bus/rights.py).
_AS_WORKER = re.compile(
    r'publish to "\S+\.(live\.worker|live\.kv|answer\.kv)\.|subscription to "\S+\.kv-replay\.'
)

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

    def __init__(self, servers: str, user: LocalUser | None = None) -> None:
        """`user`: who this client is on an embedded server; None: flags or URLs say who it is."""
        # Empty while NATS is connected.
        self.reason = ""
        self.remedy = NO_ANSWER
        self.is_rejected = False
        self._servers = servers
        self._user = user
        self._wait: LongWait | None = None
        self._specific_at = float("-inf")
        self._logged_at: dict[str, float] = {}

    def look(self, now: float, *, is_connected: bool) -> None:
        """Log that NATS is awaited, if that is due (see LongWait). Call it every second."""
        if is_connected:
            self._wait = None
            return
        if self._wait is None:
            self._wait = LongWait("nats.awaited", "NATS", now, servers=self._servers)
        self._wait.look(now, self.reason or "no answer yet", self.remedy)

    def failed(self, error: BaseException) -> None:
        """Record that an attempt to connect, or a connection, has failed."""
        now = asyncio.get_running_loop().time()
        if isinstance(error, _VAGUE) and now - self._specific_at < LOG_EVERY_S:
            return
        text = _text(error)
        self.is_rejected = "authorization" in text.lower()
        self.reason, self.remedy = text, self._rejected() if self.is_rejected else _remedy(error, text)
        if not isinstance(error, _VAGUE):
            self._specific_at = now
        self.warn("nats.error", error=text, servers=self._servers, remedy=self.remedy)

    def end(self) -> None:
        """The connection works: forget the reason. The next error counts as a new outage."""
        self.reason = ""
        self.remedy = NO_ANSWER
        self.is_rejected = False
        self._wait = None
        self._specific_at = float("-inf")

    def _rejected(self) -> str:
        return (self._user and self._user.trouble) or REJECTED

    def warn(self, event: str, **facts: object) -> None:
        """Log a warning, unless the same event with the same error was logged less than 10 s ago.

        While NATS is away: unless it was logged since then.
        """
        now = asyncio.get_running_loop().time()
        key = f"{event}: {facts.get('error')}"
        lasts_s = LOG_EVERY_S if self._wait is None else float("inf")
        recent = {known: at for known, at in self._logged_at.items() if now - at < lasts_s}
        if key not in recent and len(recent) < MOST_WARNINGS:
            self._logged_at = recent | {key: now}
            log.warning(event, **facts)


def _remedy(error: BaseException, text: str) -> str:
    if "permissions violation" in text.lower():
        return OTHER_WORKER if _AS_WORKER.search(text.lower()) else NO_RIGHT
    if isinstance(error, ConnectionRefusedError):
        return NO_SERVER
    if isinstance(error, socket.gaierror | TimeoutError | nats.errors.TimeoutError):
        return NO_ANSWER
    return NO_TLS if isinstance(error, ssl.SSLError) else OTHERWISE


def _text(error: BaseException) -> str:
    """The error's message in one line; with its type where the message alone explains nothing."""
    text = " ".join(str(error).split())[:300]
    if isinstance(error, OSError | nats.errors.Error) and text:
        return text
    return f"{type(error).__name__}: {text}".rstrip(": ")
