"""A client's connection: its requests are read here, one after another, and served by the routes.

    waiting ──plain head──────────────────> serving ──answered──> waiting ──> …
       │ any other head, or a part of one      │ client gone: the request's task is cancelled
       v                                       │ body left unread
    HeadReader ──complete──> serving           v
       └──invalid, or refused────────────> lingering ──> closed

Nearly all requests are plain (`PlainHeads` in request.py). HTTP/1.0, chunked and packed bodies and `Expect`
take a few more steps.

A client that shuts down its sending side after its request counts as gone: the two look the same. So does one
that sends more than PIPELINED_BYTES behind a request and leaves.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, cast

from kvrouter.errors import (
    KvRouterError,
    NoRouteError,
    RequestStalledError,
    WrongMethodError,
)
from kvrouter.relay.answer import Answer, Served
from kvrouter.relay.arriving import ArrivingBody
from kvrouter.relay.begun import Begun
from kvrouter.relay.codings import codings_of, too_large, unpacked
from kvrouter.relay.request import (
    END,
    MAX_LINE_BYTES,
    ArrivingBytes,
    PlainHeads,
    Request,
    RequestHead,
    Serve,
    content_encoding,
    may_be_plain,
    request_id_of,
)
from kvrouter.relay.request_parser import AnyHead, ChunkFraming, HeadReader, LengthFraming, unexpected
from kvrouter.relay.routes import Routes
from kvrouter.relay.transport import has_ended, is_unsent, reset

if TYPE_CHECKING:
    from kvrouter.relay.native import streams as native

# While a request is served, at most this much of the following requests is read. Without the bound a client
# that sends faster than it is served made the buffer grow from 64 to 197 MB in 4 s.
PIPELINED_BYTES = 64 * 1024
# A client that leaves behind so many bytes is not noticed by reading: its connection is looked at instead.
LOOK_EVERY_S = 1.0
# A slow client's unsent bytes: beyond this its worker is paused. uvloop (0.23) has this limit for TCP, but
# 512 KiB for TLS.
UNSENT_BYTES = 64 * 1024
# The clock of uvloop (0.23) has whole ms, so a timer may end this much too early.
_TIMER_S = 0.001

# How long a client may go on sending a body that is not read. Closing at once would reset the connection, and
# the client might lose the answer.
LINGER_S = 10.0
_LINE_END = b"\r\n"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

ErrorAnswer: TypeAlias = Callable[[str, KvRouterError, str], Answer]
"""Makes the answer of a path, an error and a request id. The path is empty if it could not be read."""

Refused: TypeAlias = Callable[[Request | None, str, KvRouterError, str], None]
"""Called with a request that no route serves, its id, the error, and the address of its client.

Without a request, if it could not be read.
"""


class Connections:
    """What the connections of a server share, and the set of open ones."""

    def __init__(
        self,
        routes: Routes,
        error_answer: ErrorAnswer,
        *,
        max_body_bytes: int,
        arriving: ArrivingBytes,
        keep_alive_s: float,
        on_refused: Refused = lambda *_: None,
        root_path: str = "",
    ) -> None:
        self.routes = routes
        self.error_answer = error_answer
        self.arriving = arriving
        self.max_body_bytes = max_body_bytes
        self.keep_alive_s = keep_alive_s
        self.on_refused = on_refused
        self.open: set[ClientConnection] = set()
        self.root_path = root_path
        self.heads = PlainHeads(root_path)

    async def reject(self, error: KvRouterError, request: Request) -> Served:
        """Serve a request that no route takes."""
        try:
            await request.read()
        except KvRouterError as of_body:
            error = of_body
        request_id = request_id_of(request.headers)
        self.on_refused(request, request_id, error, request.client.address)
        answer = self.error_answer(request.head.route, error, request_id)
        return request.reply(answer, closes=error.is_body_left)

    def new(self) -> ClientConnection:
        return ClientConnection(self)

    @property
    def unread(self) -> int:
        """The number of connections whose clients have not yet read all that was written for them."""
        return sum(connection.has_unread for connection in self.open)

    def close(self) -> None:
        for connection in list(self.open):
            connection.close()


class ClientConnection(asyncio.Protocol):
    """One client's connection, and the ClientSide (exchange.py) of its requests."""

    def __init__(self, connections: Connections) -> None:
        self.is_http_10 = False
        self.is_slow = False
        self.has_begun = False
        self.begun: Begun | None = None
        self.address = ""
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._unread = b""  # arrived, and not yet part of a request
        self._reader: HeadReader | None = None  # set while a head that is not plain is incomplete
        self._body: ArrivingBody | None = None  # set while the served request's body is incomplete
        self._task: asyncio.Task[None] | None = None  # set while a request is served
        self._is_reading = True
        self._is_lingering = False
        self._waiting: list[Callable[[], None]] = []
        self._look: asyncio.TimerHandle | None = None  # set while nothing is read
        self._stream: native.Stream | None = None  # the last one of the request to which the socket was lent
        self._active_at = 0.0
        self._timer: asyncio.TimerHandle  # not before connection_made: a TLS handshake may fail

    # ClientSide

    def write(self, data: bytes) -> None:
        """Send. If the client has left, this does nothing."""
        self.has_begun = True
        if self._transport is not None:
            self._transport.write(data)

    def lend(self, begin: Callable[[int], native.Stream | None]) -> native.Stream | None:
        """Lend the socket to a stream that C passes on, if nothing waits for it and it is not encrypted."""
        transport = self._transport
        if transport is None or transport.is_closing() or transport.get_write_buffer_size():
            return None
        raw = transport.get_extra_info("socket")
        if raw is None or transport.get_extra_info("sslcontext") is not None:
            return None
        self._stream = begin(raw.fileno())
        return self._stream

    def when_drained(self, call: Callable[[], None]) -> None:
        """Call once the client has caught up; never if it leaves."""
        self._waiting.append(call)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, since uvloop's transports are not subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._connections.open.add(self)
        self._active_at = self._loop.time()
        self._timer = self._loop.call_later(self._connections.keep_alive_s, self._watch)
        if transport.get_extra_info("sslcontext") is not None:
            self._transport.set_write_buffer_limits(high=UNSENT_BYTES)
        peer = transport.get_extra_info("peername")
        if isinstance(peer, tuple):  # else the socket has no address
            self.address = peer[0]
        raw = transport.get_extra_info("socket")
        if raw is not None:  # else a client whose host vanished during a long answer would never be noticed
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has left: cancel its request."""
        if self._stream is not None:
            self._stream.stop()  # from now on another connection may have the descriptor
        self._transport = None
        self._timer.cancel()
        if self._look is not None:
            self._look.cancel()
        self._connections.open.discard(self)
        if self._body is not None:
            self._body.drop()
        if self._task is not None:
            self._task.cancel()
            # The task keeps its CancelledError, whose frames refer to this object: without this the two form
            # a cycle that only the garbage collector frees.
            self._task = None

    def pause_writing(self) -> None:
        self.is_slow = True

    def resume_writing(self) -> None:
        self.is_slow = False
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()

    def data_received(self, data: bytes) -> None:
        """Bytes of a body, of the next head, or of requests that wait for their turn."""
        if self._is_lingering or self._transport is None or self._transport.is_closing():
            return
        if self._body is not None:
            self._active_at = self._loop.time()
            data = self._body.feed(data)
            if self._body.is_whole:
                self._body = None
        self._unread = self._unread + data if self._unread else data
        if self._task is None:
            self._next()
        if len(self._unread) > PIPELINED_BYTES:
            self._pause()

    # One request after another

    def _next(self) -> None:
        """Serve the next request once its head is complete."""
        data = self._unread
        if self._reader is None:
            end = data.find(END, 0, MAX_LINE_BYTES)
            if end < 0 and may_be_plain(data):
                return
            body_at = end + len(END)
            read = self._connections.heads.read(data[:body_at]) if end > 0 else None
            if read is not None:
                head, length = read
                routes = self._connections.routes
                serve = routes.exact.get((head.method, head.route)) or routes.get(head.method, head.route)
                if serve is not None and length <= self._connections.max_body_bytes:
                    body_end = body_at + length
                    self._unread = data[body_end:]
                    self.has_begun = self.is_http_10 = False
                    self.begun = None
                    request = self._request(head, data[body_at:body_end], length)
                    self._task = self._loop.create_task(self._serve(serve, request))
                    return
        self._read_on(data)

    def _request(self, head: RequestHead, begun: bytes, length: int) -> Request:
        """A plain request with the part of its body that has arrived."""
        if len(begun) == length:
            return Request(head, self, begun)
        body = self._arriving(LengthFraming(length))
        body.feed(begun)
        self._body = body
        return Request(head, self, None, body.whole, body.allow)

    def _arriving(self, framing: LengthFraming | ChunkFraming) -> ArrivingBody:
        self._active_at = self._loop.time()
        shared = self._connections
        return ArrivingBody(framing, self._loop.create_future(), shared.arriving, most=shared.max_body_bytes)

    def _read_on(self, data: bytes) -> None:
        """Read a head that is not plain, and serve its request once it is complete."""
        reader = self._reader
        if reader is None:
            while data.startswith(_LINE_END):  # before a request they are ignored (RFC 9112, 2.2)
                data = data[len(_LINE_END) :]
            if _LINE_END.startswith(data):
                self._unread = data
                return
            reader = self._reader = HeadReader(self._connections.root_path)
        try:
            self._unread = reader.feed(data)
            if reader.is_complete:
                self._reader = None
                self._begin(reader.head())
        except KvRouterError as error:
            self._refuse(reader.route, error, request_id_of(reader.headers))

    def _begin(self, read: AnyHead) -> None:
        """Serve a request whose head is not plain. Raises KvRouterError to refuse it at once."""
        head, most = read.head, self._connections.max_body_bytes
        codings = codings_of(content_encoding(head.fields))
        if read.length is not None and read.length > most:
            raise too_large(most)
        self._answer_expectation(read)
        try:
            serve = self._connections.routes.find(head.method, head.path)
        except (NoRouteError, WrongMethodError) as error:
            serve = partial(self._connections.reject, error)
        self.has_begun, self.is_http_10, self.begun = False, read.is_http_10, None
        body = self._arriving(ChunkFraming() if read.length is None else LengthFraming(read.length))
        self._unread = body.feed(self._unread)
        self._body = None if body.is_whole else body
        is_packed = codings and read.length != 0
        whole = partial(unpacked, body.whole, codings, most) if is_packed else body.whole
        self._task = self._loop.create_task(self._serve(serve, Request(head, self, None, whole, body.allow)))

    def _answer_expectation(self, read: AnyHead) -> None:
        """Invite the body if the client waits for that. Raises KvRouterError if it would be rejected."""
        expected = read.head.headers.get("expect", "")
        if not expected or read.is_http_10 or self._transport is None:
            return
        if expected.lower() != "100-continue":
            raise unexpected(expected)
        self._connections.routes.find(read.head.method, read.head.path)
        self._transport.write(_CONTINUE)

    def _refuse(self, route: str, error: KvRouterError, request_id: str) -> None:
        """Answer a request that is not served, and close the connection: what follows is not known."""
        answer = self._connections.error_answer(route, error, request_id)
        self._connections.on_refused(None, request_id, error, self.address)
        self.write(answer.encode(keeps_alive=False))
        self._linger()

    async def _serve(self, serve: Serve, request: Request) -> None:
        served = await serve(request)
        self._task = self._stream = None
        self._finish(served)

    def _finish(self, served: Served) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self._active_at = self._loop.time()  # the client has keep_alive_s to read the rest of the answer
        if served.needs_reset:
            reset(transport)
        elif self._body is not None:
            self._linger()
        elif not served.keeps_alive:
            transport.close()
        elif self.is_slow:  # else a client that sends requests and reads no answers would fill the memory
            self._pause()
            self.when_drained(self._continue)
        else:
            self._serve_next(transport)

    def _pause(self) -> None:
        if self._is_reading:
            self._is_reading = False
            cast(asyncio.Transport, self._transport).pause_reading()
            if self._look is None:
                self._look = self._loop.call_later(LOOK_EVERY_S, self._look_whether_left)

    def _look_whether_left(self) -> None:
        transport, self._look = self._transport, None
        if transport is None or self._is_reading:
            return
        if self._task is not None and has_ended(transport):
            transport.abort()
        else:
            self._look = self._loop.call_later(LOOK_EVERY_S, self._look_whether_left)

    def _continue(self) -> None:
        """The client has received enough of the answer: serve the next request."""
        transport = self._transport
        if transport is not None and not transport.is_closing() and self._task is None:
            self._serve_next(transport)

    def _serve_next(self, transport: asyncio.Transport) -> None:
        if self._unread:
            self._next()
        if len(self._unread) <= PIPELINED_BYTES:  # else each served request would allow another read
            self._resume(transport)

    def _resume(self, transport: asyncio.Transport) -> None:
        if not self._is_reading:
            self._is_reading = True
            transport.resume_reading()

    # Ends

    def _linger(self) -> None:
        """Close, but read and drop what the client still sends: see LINGER_S."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self._is_lingering, self._unread, self._reader = True, b"", None
        if not transport.can_write_eof():
            transport.close()  # TLS: its own end waits for the client's
            return
        self._timer.cancel()
        self._timer = self._loop.call_later(LINGER_S, transport.abort)
        transport.write_eof()
        self._resume(transport)

    @property
    def has_unread(self) -> bool:
        """Whether a part of what was written has not reached the client's host."""
        return is_unsent(self._transport)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _watch(self) -> None:
        """The timer: close if the client has sent no head, or no more of its body, for keep_alive_s."""
        left_s = self._active_at + self._connections.keep_alive_s - self._loop.time()
        if self._task is not None and self._body is None:
            left_s = self._connections.keep_alive_s  # the router is at work, not the client
        if left_s > 0:
            self._timer = self._loop.call_later(max(left_s, _TIMER_S), self._watch)
        elif self._body is not None and self._body.fail(self._stalled()):
            self._timer = self._loop.call_later(self._connections.keep_alive_s, self._watch)
        elif self._transport is not None:
            self._transport.abort()

    def _stalled(self) -> RequestStalledError:
        limit = f"{self._connections.keep_alive_s:g} s"
        return RequestStalledError(f"no more of the request body arrived for {limit}")
