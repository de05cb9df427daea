"""Connections to workers: pooled, raw, one request at a time, bytes handed on as they arrive.

    idle ──send──> waiting for the head ──> body ──over──> idle
                        │                     │
                        └──── closed ─────────┴──> gone

What arrives goes, in the same call that read it, to the `Receiver` of the request. No limit is
put on the number of connections: the router decides how much a worker gets.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

from kvrouter.errors import KvRouterError
from kvrouter.frontend.framing import (
    MAX_HEAD_BYTES,
    Body,
    FramingError,
    Head,
    UntilCloseBody,
    body_of,
    parse_head,
)
from kvrouter.tls import tls_trouble, trusting

IDLE_S = 4.0
"""Idle connections are closed after this long: uvicorn, vLLM's server, closes its side after 5 s."""
CONNECT_TIMEOUT_S = 5.0
_TIMER_S = 0.001
"""The loop's clock ticks in ms: a timer may come this much too early."""


class WorkerUnreachableError(KvRouterError):
    """The worker refuses connections, its name does not resolve, or its certificate is not accepted."""

    status = 502
    type = "BadGatewayError"


class Receiver(Protocol):
    """What a request wants to be told. All plain calls, made while the socket is being read."""

    def opened(self, head: Head, body: Body) -> None:
        """The head has arrived."""
        ...

    def received(self, data: bytes) -> None:
        """Bytes of the body, framing included."""
        ...

    def ended(self) -> None:
        """The body is complete."""
        ...

    def lost(self, reason: str) -> None:
        """The connection ended before the body did."""
        ...


class Connection(asyncio.Protocol):
    """One connection to one worker."""

    def __init__(self, pool: deque[Connection]) -> None:
        self._has_served = False
        self._has_answered = False
        self._was_told_end = False
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._receiver: Receiver | None = None
        self._head = b""
        self._body: Body | None = None
        self._keeps_alive = True
        self._loop = asyncio.get_running_loop()
        self._idle_since = 0.0
        self._idle_timer: asyncio.TimerHandle | None = None
        """Runs on while the connection serves: one that is idle again is looked at when it ends."""

    @property
    def is_usable(self) -> bool:
        """Whether a request can be sent on it."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_stale(self) -> bool:
        """Whether it served before, and has not answered the present request with a single byte."""
        return self._has_served and not self._has_answered

    def send(self, data: bytes, receiver: Receiver) -> None:
        """Send a request; the receiver is told what happens from now on."""
        self._receiver, self._body, self._head, self._has_answered = receiver, None, b"", False
        if self._transport is None:
            self._lose("the connection was closed")
            return
        self._transport.write(data)

    # A request is cancelled when its handler wakes up. By then its answer may be complete, and the
    # connection serve another: so each of these names the receiver it means.

    def cancel(self, receiver: Receiver) -> None:
        """Nobody wants the answer any more: the worker notices at once."""
        if self._receiver is receiver:
            self._receiver = None
            self._close()

    def pause(self, receiver: Receiver) -> None:
        """Stop reading: the client is slower than the worker."""
        if self._receiver is receiver and self._transport is not None:
            self._transport.pause_reading()

    def resume(self, receiver: Receiver) -> None:
        """Go on reading."""
        if self._receiver is receiver and self._transport is not None:
            self._transport.resume_reading()

    def close(self) -> None:
        """The worker is gone."""
        self._close()

    # asyncio.Protocol (asyncio and uvloop set TCP_NODELAY on the sockets they connect)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one, but no subclass
        if transport.get_extra_info("sslcontext") is not None:
            # while paused read nothing ahead: uvloop drops it if the connection ends meanwhile
            cast(Any, transport).set_read_buffer_limits(high=1)

    def data_received(self, data: bytes) -> None:
        """Find the end of the head, then of the body; hand everything on."""
        if self._receiver is None:
            self._close()  # bytes that nobody asked for
            return
        try:
            if self._body is not None:
                self._read_body(self._body, self._receiver, data)
            else:
                self._begin(data)
        except FramingError as error:
            self._lose(str(error))

    def eof_received(self) -> None:
        """The worker says that there is no more; a TLS connection may end without, and was cut off then."""
        self._was_told_end = True

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the receiver, unless the body ends with the connection."""
        self._transport = None
        self._stop_idle_timer()
        if self in self._pool:
            self._pool.remove(self)
        body = self._body
        if exc is None and self._was_told_end and isinstance(body, UntilCloseBody):
            self._finish()
        elif self._receiver is not None:
            self._lose(str(exc) if exc else "closed the connection")

    def _begin(self, data: bytes) -> None:
        """Collect the head; what comes after it belongs to the body."""
        self._has_answered = True
        self._head += data
        head = self._next_head()
        while head is not None and head.status < 200:
            head = self._next_head()  # 1xx: the answer itself is still to come
        receiver = self._receiver
        if head is None or receiver is None:
            return
        rest, self._head = self._head, b""
        self._keeps_alive = head.keeps_alive
        self._body = body_of(head)
        receiver.opened(head, self._body)
        if rest or self._body.is_over:
            self._read_body(self._body, receiver, rest)

    def _next_head(self) -> Head | None:
        end = self._head.find(b"\r\n\r\n")
        if end < 0:
            if len(self._head) > MAX_HEAD_BYTES:
                raise FramingError(f"the response head exceeds {MAX_HEAD_BYTES} bytes")
            return None
        head, self._head = parse_head(self._head[:end]), self._head[end + 4 :]
        return head

    def _read_body(self, body: Body, receiver: Receiver, data: bytes) -> None:
        taken = body.feed(data)
        if taken < len(data):
            data, self._keeps_alive = data[:taken], False  # more than the body: not to be trusted again
        if data:
            receiver.received(data)
        if body.is_over:
            self._finish()

    def _finish(self) -> None:
        receiver, self._receiver, self._body = self._receiver, None, None
        if self._keeps_alive and self.is_usable:
            self._rest()
        else:
            self._close()
        if receiver is not None:
            receiver.ended()

    def _rest(self) -> None:
        self._has_served = True
        if self._transport is not None:
            self._transport.resume_reading()  # it may have been paused when the last bytes came
        self._idle_since = self._loop.time()
        if self._idle_timer is None:
            self._idle_timer = self._loop.call_later(IDLE_S, self._watch_idleness)
        self._pool.append(self)

    def _watch_idleness(self) -> None:
        """The timer: close, unless it serves, or has served meanwhile."""
        self._idle_timer = None
        if self._receiver is not None:
            return
        left_s = self._idle_since + IDLE_S - self._loop.time()
        if left_s > 0:
            self._idle_timer = self._loop.call_later(max(left_s, _TIMER_S), self._watch_idleness)
        else:
            self._close()

    def _lose(self, reason: str) -> None:
        receiver, self._receiver = self._receiver, None
        self._close()
        if receiver is not None:
            receiver.lost(reason)

    def _close(self) -> None:
        if self in self._pool:
            self._pool.remove(self)
        if self._transport is not None:
            self._transport.abort()

    def _stop_idle_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None


class Upstream:
    """The pools of idle connections, by worker."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        """`tls`: whom to trust behind https:// URLs; None: the system's authorities."""
        self._tls = tls
        self._pools: dict[str, deque[Connection]] = {}

    async def connect(self, url: str, *, fresh: bool = False) -> Connection:
        """An idle connection to the worker, or a new one. Raises WorkerUnreachableError.

        `fresh`: a new one in any case, after an idle one turned out to be dead.
        """
        pool = self._pools.get(url)
        if pool is None:
            pool = self._pools[url] = deque()
        while pool and not fresh:
            connection = pool.pop()
            if connection.is_usable:
                return connection
        try:
            return await self._open(url, pool)
        except (OSError, TimeoutError, ValueError) as error:
            raise WorkerUnreachableError(f"worker at {url} cannot be reached: {_reason(error)}") from error

    async def _open(self, url: str, pool: deque[Connection]) -> Connection:
        host, port, is_tls = address_of(url)
        tls = (self._tls or trusting(None)) if is_tls else None
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: Connection(pool), host, port, ssl=tls
            )
        return connection

    def forget(self, url: str) -> None:
        """The worker is gone: close what is idle."""
        for connection in list(self._pools.pop(url, ())):
            connection.close()

    def close(self) -> None:
        """Close every idle connection."""
        for url in list(self._pools):
            self.forget(url)


def address_of(url: str) -> tuple[str, int, bool]:
    """Host, port, and whether TLS is spoken there. Raises ValueError."""
    parts = urlsplit(url)
    is_tls = parts.scheme == "https"
    return parts.hostname or "127.0.0.1", parts.port or (443 if is_tls else 80), is_tls


def _reason(error: Exception) -> str:
    wordless = "timed out" if isinstance(error, TimeoutError) else "it breaks off the connection"
    return tls_trouble(error) or str(error) or wordless
