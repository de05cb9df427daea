"""Connections to workers: pooled, raw, one request at a time, bytes handed on as they arrive.

    idle ──send──> waiting for the head ──> body ──over──> idle
                        │                     │
                        └──── closed ─────────┴──> gone

What arrives goes, in the same call that read it, to the `Receiver` of the request. No limit is
put on the number of connections: the router decides how much a worker gets.

A connection has one timer, which runs on while requests come and go: when it ends, whoever waits is asked how
long he goes on waiting. A timer of each request's own would cost it more than its bytes do.
"""

from __future__ import annotations

import asyncio
import errno
import os
import ssl
from collections import deque
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

from kvrouter.errors import KvRouterError, OutOfResourcesError
from kvrouter.relay.framing import (
    CHUNK_START_BYTES,
    MAX_HEAD_BYTES,
    Body,
    FramingError,
    ResponseHead,
    UntilCloseBody,
    body_of,
    chunk_bytes,
    parse_head,
)
from kvrouter.tls import tls_trouble, trusting

IDLE_S = 4.0
"""Idle connections are closed after this long: uvicorn, vLLM's server, closes its side after 5 s."""
CONNECT_TIMEOUT_S = 5.0
MOST_INTERIM_HEADS = 16
"""Heads with a status of 1xx before the answer's own; engines send one at most."""
_END = b"\r\n\r\n"
_OWN_FAULTS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""Why connecting fails here, whatever the worker does: no descriptor, no memory or no port is left."""
_TIMER_S = 0.001
"""The loop's clock ticks in ms: a timer may come this much too early."""


class WorkerUnreachableError(KvRouterError):
    """The worker refuses connections, its name does not resolve, or its certificate is not accepted."""

    status = 502
    type = "BadGatewayError"


class Receiver(Protocol):
    """What a request wants to be told. All plain calls, made while the socket is being read."""

    def answered(self, head: ResponseHead, data: bytes) -> None:
        """Head and body have arrived together: the answer is complete, and nothing else is told of it."""
        ...

    def opened(self, head: ResponseHead, body: Body) -> None:
        """The head has arrived."""
        ...

    def received(self, data: bytes) -> None:
        """Bytes of the body, framing included."""
        ...

    def received_chunk(self, data: bytes) -> None:
        """The same for data that is one whole chunk, as nearly everything in a stream is."""
        ...

    def ended(self) -> None:
        """The body is complete."""
        ...

    def lost(self, reason: str) -> None:
        """The connection ended before the body did."""
        ...

    def watch(self, now: float) -> float:
        """Asked now and then: for how many more seconds it waits; it may give up instead."""
        ...


class WorkerConnection(asyncio.Protocol):
    """One connection to one worker."""

    __slots__ = (
        "_body", "_has_answered", "_has_served", "_head", "_idle_since", "_interim_heads", "_keeps_alive",
        "_pool", "_receiver", "_timer", "_timer_ends_at", "_transport", "_was_told_end", "loop",
    )  # fmt: skip

    def __init__(self, pool: deque[WorkerConnection]) -> None:
        self._has_served = False
        self._has_answered = False
        self._was_told_end = False
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._receiver: Receiver | None = None
        self._head = b""
        self._interim_heads = 0
        self._body: Body | None = None
        self._keeps_alive = True
        self.loop = asyncio.get_running_loop()
        self._idle_since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ends_at = 0.0

    @property
    def is_usable(self) -> bool:
        """Whether a request can be sent on it."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_stale(self) -> bool:
        """Whether it served before, and has not answered the present request with a single byte."""
        return self._has_served and not self._has_answered

    def send(self, data: bytes, receiver: Receiver, ask_by: float) -> None:
        """Send a request; the receiver is told what happens from now on, and asked by then if it waits."""
        self._receiver, self._body, self._head, self._has_answered = receiver, None, b"", False
        self._interim_heads = 0
        if self._transport is None:
            self._lose("the connection was closed")
            return
        self._look_by(ask_by)
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
        receiver, body = self._receiver, self._body
        if receiver is None:
            self._close()  # bytes that nobody asked for
            return
        try:
            if body is None:
                self._begin(receiver, data)
            elif body.is_at_boundary and chunk_bytes(data[:CHUNK_START_BYTES]) == len(data):
                receiver.received_chunk(data)
            else:
                self._read_body(body, receiver, data)
        except FramingError as error:
            self._lose(str(error))

    def eof_received(self) -> None:
        """The worker says that there is no more; a TLS connection may end without, and was cut off then."""
        self._was_told_end = True

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the receiver, unless the body ends with the connection."""
        self._transport = None
        self._stop_timer()
        if self in self._pool:
            self._pool.remove(self)
        body = self._body
        if exc is None and self._was_told_end and isinstance(body, UntilCloseBody):
            self._finish()
        elif self._receiver is not None:
            self._lose(str(exc) if exc else "closed the connection")

    def _begin(self, receiver: Receiver, data: bytes) -> None:
        """Collect the head; what comes after it belongs to the body."""
        self._has_answered = True
        begin = max(0, len(self._head) - len(_END))  # before it no head ends
        self._head += data
        head = self._next_head(begin)
        while head is not None and head.status < 200:
            self._interim_heads += 1  # the answer itself is still to come
            if self._interim_heads > MOST_INTERIM_HEADS:
                raise FramingError(f"more than {MOST_INTERIM_HEADS} heads of 1xx before the answer")
            head = self._next_head(0)
        if head is None:
            return
        rest, self._head = self._head, b""
        self._keeps_alive = head.keeps_alive
        if len(rest) == head.length:
            self._release()
            receiver.answered(head, rest)
            return
        self._body = body_of(head)
        receiver.opened(head, self._body)
        if rest or self._body.is_over:
            self._read_body(self._body, receiver, rest)

    def _next_head(self, begin: int) -> ResponseHead | None:
        end = self._head.find(_END, begin)
        if (end if end >= 0 else len(self._head)) > MAX_HEAD_BYTES:
            raise FramingError(f"the response head exceeds {MAX_HEAD_BYTES} bytes")
        if end < 0:
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
        receiver = self._receiver
        self._release()
        if receiver is not None:
            receiver.ended()

    def _release(self) -> None:
        """The answer is complete: rest until the next request."""
        self._receiver = self._body = None
        if not self._keeps_alive or not self.is_usable:
            self._close()
            return
        self._has_served = True
        if self._transport is not None:
            self._transport.resume_reading()  # it may have been paused when the last bytes came
        self._idle_since = self.loop.time()
        self._look_by(self._idle_since + IDLE_S)
        self._pool.append(self)

    def _look_by(self, at: float) -> None:
        """Have the timer end then at the latest."""
        if self._timer is not None:
            if self._timer_ends_at <= at:
                return
            self._timer.cancel()
        self._timer_ends_at = at
        self._timer = self.loop.call_later(max(at - self.loop.time(), _TIMER_S), self._look)

    def _look(self) -> None:
        """The timer: close, unless who waits, or the next request, may still have to wait."""
        self._timer = None
        now, receiver = self.loop.time(), self._receiver
        left_s = self._idle_since + IDLE_S - now if receiver is None else receiver.watch(now)
        if left_s > 0:
            self._look_by(now + left_s)
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
        self._stop_timer()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Upstream:
    """The pools of idle connections, by worker."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        """`tls`: whom to trust behind https:// URLs; None: the system's authorities."""
        self._tls = tls
        self._pools: dict[str, deque[WorkerConnection]] = {}

    def idle(self, url: str) -> WorkerConnection | None:
        """A connection to the worker that has served before, if there is one."""
        pool = self._pools.get(url)
        while pool:
            connection = pool.pop()
            if connection.is_usable:
                return connection
        return None

    def pool(self, url: str) -> deque[WorkerConnection]:
        """The idle connections to a worker, the last one to serve at the end."""
        return self._pools.setdefault(url, deque())

    async def connect(self, url: str) -> WorkerConnection:
        """A new connection to the worker, idle here after its request.

        Raises WorkerUnreachableError, or OutOfResourcesError where it is not the worker's fault.
        """
        try:
            return await self._open(url, self.pool(url))
        except (OSError, TimeoutError, ValueError) as error:
            if isinstance(error, OSError) and error.errno in _OWN_FAULTS:
                why = os.strerror(error.errno)
                raise OutOfResourcesError(
                    f"this replica cannot connect to a worker: {why}; raise its limit of file descriptors"
                    " (ulimit -n), or run more replicas"
                ) from error
            raise WorkerUnreachableError(f"worker at {url} cannot be reached: {_reason(error)}") from error

    async def _open(self, url: str, pool: deque[WorkerConnection]) -> WorkerConnection:
        host, port, is_tls = address_of(url)
        tls = (self._tls or trusting(None)) if is_tls else None
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: WorkerConnection(pool), host, port, ssl=tls
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
