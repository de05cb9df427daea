"""Pooled connections to workers: one request at a time, bytes passed on as they arrive.

    idle ──send──> waiting for the head ──> body ──complete──> idle
                        │                     │
                        └──── closed ─────────┴──> gone

Each read goes to the request's `Receiver` in the same call. The number of connections has no limit: the
router decides how many requests a worker gets.

A connection has one timer for all its requests. When it ends, it asks the receiver how much longer to wait.
Making and cancelling a timer for each request was a third of what an attempt costs.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast
from urllib.parse import urlsplit

from kvrouter.core.wire.addresses import Network
from kvrouter.errors import KvRouterError, OutOfResourcesError
from kvrouter.relay.framing import (
    CHUNK_START_BYTES,
    MAX_HEAD_BYTES,
    Body,
    ChunkedBody,
    FramingError,
    ResponseHead,
    UntilCloseBody,
    body_of,
    chunk_bytes,
    parse_head,
)
from kvrouter.relay.streams import Streams
from kvrouter.resolving import addresses_of
from kvrouter.tls import tls_trouble, trusting

if TYPE_CHECKING:
    from kvrouter.relay.native import streams as native

# Idle connections close after this long. uvicorn, the server of vLLM and SGLang, closes its side after 5 s:
# a request sent just then would be lost.
IDLE_S = 4.0
CONNECT_TIMEOUT_S = 5.0
# Heads with a status of 1xx before the answer's own. Engines send one at most; without a bound a worker that
# sends them without end takes time that grows with the square of their bytes.
MOST_INTERIM_HEADS = 16
_END = b"\r\n\r\n"
# Connecting failed because of this process, not the worker: no descriptor, memory or port is left.
_OWN_FAULTS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
# The clock of uvloop (0.23) has whole ms, so a timer may end this much too early. With less than this it
# would end again and again within the same ms.
_TIMER_S = 0.001


class WorkerUnreachableError(KvRouterError):
    """The worker refuses connections, its name does not resolve, or its certificate is not accepted."""

    status = 502
    type = "BadGatewayError"


class Receiver(Protocol):
    """What a connection reports to its request. All are plain calls, made while the socket is being read."""

    def answered(self, head: ResponseHead, data: bytes) -> None:
        """The whole answer arrived in one read. No other call follows."""
        ...

    def opened(self, head: ResponseHead, body: Body) -> None:
        """The head has arrived."""
        ...

    def received(self, data: bytes) -> None:
        """Bytes of the body, framing included."""
        ...

    def received_chunk(self, data: bytes) -> None:
        """`received` for data that is exactly one chunk, as nearly every read of a stream is."""
        ...

    def taken_back(self, stream: native.Stream) -> None:
        """C passes on no longer (see `pass_natively`): what follows is reported here."""
        ...

    def ended(self) -> None:
        """The body is complete."""
        ...

    def lost(self, reason: str) -> None:
        """The connection ended before the body did."""
        ...

    def watch(self, now: float) -> float:
        """How many seconds to wait before the next call of this. The receiver may give up instead."""
        ...


class WorkerConnection(asyncio.Protocol):
    """One connection to one worker."""

    __slots__ = (
        "_body",
        "_got_eof",
        "_has_answered",
        "_has_served",
        "_head",
        "_idle_since",
        "_interim_heads",
        "_is_cut",
        "_keeps_alive",
        "_pool",
        "_receiver",
        "_stream",
        "_streams",
        "_timer",
        "_timer_ends_at",
        "_transport",
        "loop",
    )  # fmt: skip

    def __init__(self, pool: deque[WorkerConnection], streams: Streams | None = None) -> None:
        """`streams`: those that C passes on; None: it passes on none."""
        self._streams = streams if streams is not None and streams.is_native else None
        self._stream: native.Stream | None = None  # set while C passes on what arrives
        self._has_served = False
        self._has_answered = False
        self._got_eof = False
        self._is_cut = False
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

    @property
    def may_pass_natively(self) -> bool:
        """Whether C can pass on a stream of this connection."""
        return self._streams is not None

    @property
    def is_cut(self) -> bool:
        """Whether the other side ended it after the present request was sent."""
        return self._is_cut

    def send(self, data: bytes, receiver: Receiver, ask_by: float) -> None:
        """Send a request. All that follows goes to `receiver`; `watch` is first called at `ask_by`."""
        self._receiver, self._body, self._head, self._has_answered = receiver, None, b"", False
        self._interim_heads = 0
        if self._transport is None:
            self._lose("the connection was closed")
            return
        self._look_by(ask_by)
        self._transport.write(data)

    # A request is cancelled when its task wakes up. By then its answer may be complete and the connection
    # may serve another request. So each of these names the receiver it is for.

    def cancel(self, receiver: Receiver) -> None:
        """The answer is no longer wanted: close, so that the worker stops working on it."""
        if self._receiver is receiver:
            self.take_back(receiver)
            self._receiver = None
            self._close()

    def pause(self, receiver: Receiver) -> None:
        """Stop reading from the worker."""
        if self._receiver is receiver and self._transport is not None:
            self._transport.pause_reading()

    def resume(self, receiver: Receiver) -> None:
        """Continue to read from the worker."""
        if self._receiver is receiver and self._transport is not None:
            self._transport.resume_reading()

    def pass_natively(self, receiver: Receiver, most: int, client: int) -> native.Stream | None:
        """Have C pass on what follows to a client's socket; None: it cannot. `taken_back` ends it.

        `most`: bytes of which it keeps a record, if not 0: then it passes on whole events only.
        """
        body, transport = self._body, self._transport
        is_plain = isinstance(body, ChunkedBody) and body.is_at_boundary and self.is_usable
        if self._receiver is receiver and self._streams is not None and transport is not None and is_plain:
            self._stream = self._streams.add(transport, client, self._returned, most)
        return self._stream

    def take_back(self, receiver: Receiver) -> None:
        """Pass on in Python again. Does nothing if Python does."""
        stream, self._stream = self._stream, None
        if stream is None or self._receiver is not receiver:
            return
        stream.stop()
        if isinstance(self._body, ChunkedBody):
            self._body.go_on(stream.left)
        if self._transport is not None:
            self._transport.resume_reading()
        receiver.taken_back(stream)

    def _returned(self) -> None:
        """C has read, or could not send, what Python must see."""
        stream, receiver = self._stream, self._receiver
        if stream is None or receiver is None:
            return
        self.take_back(receiver)
        if stream.error:
            self._is_cut = True
            self._lose(str(OSError(stream.error, os.strerror(stream.error))))
        elif stream.received:
            self.data_received(stream.received)

    def close(self) -> None:
        """The worker is gone."""
        self._close()

    # asyncio.Protocol. asyncio and uvloop set TCP_NODELAY on the sockets they connect. Without it clients
    # would wait 40 ms for the first event of a stream, as behind sglang-router (docs/benchmarks.md).

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, since uvloop's transports are not subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        if transport.get_extra_info("sslcontext") is not None:
            self._streams = None
            # While TLS reading is paused, read nothing ahead: uvloop 0.23 drops what it has read and not yet
            # delivered if the connection ends meanwhile.
            cast(Any, transport).set_read_buffer_limits(high=1)

    def data_received(self, data: bytes) -> None:
        """Find the end of the head, then of the body; pass everything on."""
        receiver, body = self._receiver, self._body
        if receiver is None:
            self._close()  # bytes without a request: what comes next cannot be assigned to one
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
        """The worker ended the connection in order. A TLS connection that was cut off ends without this."""
        self._got_eof = True

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the loss, unless the body ends with the connection."""
        if self._receiver is not None:
            self.take_back(self._receiver)
        self._transport = None
        self._stop_timer()
        if self in self._pool:
            self._pool.remove(self)
        body = self._body
        if exc is None and self._got_eof and isinstance(body, UntilCloseBody):
            self._finish()
        elif self._receiver is not None:
            self._is_cut = True
            self._lose(str(exc) if exc else "closed the connection")

    def _begin(self, receiver: Receiver, data: bytes) -> None:
        """Collect the head; what follows it belongs to the body."""
        self._has_answered = True
        # the bytes before have been searched already
        begin = max(0, len(self._head) - len(_END)) if self._head else 0
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
            # Bytes after the body: do not reuse the connection, where they would begin the next answer.
            data, self._keeps_alive = data[:taken], False
        if body.trailer_bytes:
            data = data[: -body.trailer_bytes] + (b"\r\n" if body.is_over else b"")
        if data:
            receiver.received(data)
        if body.is_over:
            self._finish()

    def _finish(self) -> None:
        receiver = self._receiver
        self._release()
        if receiver is None:
            return
        try:
            receiver.ended()
        except Exception as error:  # nothing else would end its request
            receiver.lost(f"its answer could not be read: {error}")
            raise

    def _release(self) -> None:
        """The answer is complete: become idle, or close."""
        self._receiver = self._body = None
        transport = self._transport
        if not self._keeps_alive or transport is None or transport.is_closing():
            self._close()
            return
        self._has_served = True
        transport.resume_reading()  # the client may have been slow when the last bytes arrived
        self._idle_since = self.loop.time()
        self._look_by(self._idle_since + IDLE_S)
        self._pool.append(self)

    def _look_by(self, at: float) -> None:
        """Let the timer end at this time at the latest."""
        if self._timer is not None:
            if self._timer_ends_at <= at:
                return
            self._timer.cancel()
        self._timer_ends_at = at
        self._timer = self.loop.call_later(max(at - self.loop.time(), _TIMER_S), self._look)

    def _look(self) -> None:
        """The timer ended: close, unless the receiver waits longer or the connection may still be idle."""
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

    def __init__(
        self,
        tls: ssl.SSLContext | None = None,
        networks: Sequence[Network] = (),
        *,
        is_native: bool = True,
    ) -> None:
        """`tls` verifies workers with https:// URLs; None: with the system's certificate authorities.

        `networks`: those to which names of workers may lead; without any, all but what is never allowed.
        `is_native`: whether C passes on streams, where it is built.
        """
        self._streams = Streams(is_native=is_native)
        self._tls = tls
        self._networks = networks
        self._pools: dict[str, deque[WorkerConnection]] = {}

    def idle(self, url: str) -> WorkerConnection | None:
        """An idle connection to the worker, or None. The most recently used one: it is least likely stale."""
        pool = self._pools.get(url)
        while pool:
            connection = pool.pop()
            if connection.is_usable:
                return connection
        return None

    def pool(self, url: str) -> deque[WorkerConnection]:
        """The idle connections to a worker, the most recently used one last."""
        return self._pools.setdefault(url, deque())

    async def connect(self, url: str) -> WorkerConnection:
        """A new connection to the worker, which joins the pool after its first request.

        Raises WorkerUnreachableError, or OutOfResourcesError where this process is at its limits.
        """
        try:
            return await self._open(url, self.pool(url))
        except (OSError, TimeoutError, ValueError) as error:
            if isinstance(error, OSError) and error.errno in _OWN_FAULTS:
                reason = os.strerror(error.errno)
                raise OutOfResourcesError(
                    f"this replica cannot connect to a worker: {reason}; raise its limit of file descriptors"
                    " (ulimit -n), or run more replicas"
                ) from error
            raise WorkerUnreachableError(f"worker at {url} cannot be reached: {_reason(error)}") from error

    async def _open(self, url: str, pool: deque[WorkerConnection]) -> WorkerConnection:
        host, port, is_tls = address_of(url)
        tls = (self._tls or trusting(None)) if is_tls else None
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            addresses = await addresses_of(host, port, self._networks)
            new = partial(WorkerConnection, pool, self._streams)
            for address in addresses[:-1]:
                with contextlib.suppress(OSError):
                    return await _connect(new, address, port, host, tls)
            return await _connect(new, addresses[-1], port, host, tls)

    def forget(self, url: str) -> None:
        """The worker is gone: close its idle connections."""
        for connection in list(self._pools.pop(url, ())):
            connection.close()

    def close(self) -> None:
        """Close every idle connection, and leave the others to Python."""
        for url in list(self._pools):
            self.forget(url)
        self._streams.close()


async def _connect(
    new: Callable[[], WorkerConnection], address: str, port: int, host: str, tls: ssl.SSLContext | None
) -> WorkerConnection:
    """`host`: the name for which the worker's certificate must be."""
    name = host if tls is not None else None
    _, connection = await asyncio.get_running_loop().create_connection(
        new, address, port, ssl=tls, server_hostname=name
    )
    return connection


def address_of(url: str) -> tuple[str, int, bool]:
    """Host, port, and whether the URL asks for TLS. Raises ValueError."""
    parts = urlsplit(url)
    is_tls = parts.scheme == "https"
    return parts.hostname or "127.0.0.1", parts.port or (443 if is_tls else 80), is_tls


def _reason(error: Exception) -> str:
    # Some errors have an empty text: asyncio's TimeoutError, and ConnectionResetError during a handshake.
    fallback = "timed out" if isinstance(error, TimeoutError) else "it breaks off the connection"
    return tls_trouble(error) or str(error) or fallback
