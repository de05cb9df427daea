"""What goes wrong with NATS: said rarely, and the most telling of it kept until all is well again."""

from __future__ import annotations

import asyncio

import nats.errors
import structlog

log = structlog.get_logger()

LOG_EVERY_S = 10.0
MOST_KNOWN = 256
"""How many kinds of trouble are told apart; their texts come from outside."""

_VAGUE = (
    ConnectionResetError,
    BrokenPipeError,
    TimeoutError,
    nats.errors.TimeoutError,
    nats.errors.UnexpectedEOF,
    nats.errors.ConnectionClosedError,
)
"""They follow other errors: a server that refuses a password hangs up, too."""


class Trouble:
    """The same trouble is logged once in 10 s: nats-py reports one error per attempt or dropped message."""

    def __init__(self, servers: str) -> None:
        self.reason = ""
        """Why NATS is away, as far as it is known; empty while it is not."""
        self._servers = servers
        self._told_at = float("-inf")
        self._logged_at: dict[str, float] = {}

    def met(self, error: BaseException) -> None:
        """An attempt to connect, or a connection, has failed."""
        now = asyncio.get_running_loop().time()
        if isinstance(error, _VAGUE) and now - self._told_at < LOG_EVERY_S:
            return  # what was said a moment ago says more
        text = _text(error)
        facts = {"error": text, "servers": self._servers}
        self.reason = text
        if "authorization" in text.lower():
            facts["remedy"] = "NATS refuses these credentials; see the --nats-… flags in --help"
            self.reason = f"{text}: {facts['remedy']}"
        if not isinstance(error, _VAGUE):
            self._told_at = now
        self.log("nats.error", **facts)

    def over(self) -> None:
        """Connected: what is met from now on is news."""
        self.reason = ""
        self._told_at = float("-inf")

    def log(self, event: str, **facts: object) -> None:
        """A warning, unless the same was logged less than 10 s ago."""
        now = asyncio.get_running_loop().time()
        trouble = f"{event}: {facts.get('error')}"
        if now - self._logged_at.get(trouble, float("-inf")) < LOG_EVERY_S:
            return
        fresh = {known: at for known, at in self._logged_at.items() if now - at < LOG_EVERY_S}
        if len(fresh) < MOST_KNOWN:
            self._logged_at = fresh | {trouble: now}
            log.warning(event, **facts)


def _text(error: BaseException) -> str:
    """What it says, in one line; what it is where it says nothing, or is no error of NATS or the network."""
    text = " ".join(str(error).split())[:300]
    if isinstance(error, OSError | nats.errors.Error) and text:
        return text
    return f"{type(error).__name__}: {text}".rstrip(": ")
