"""A client's connection while its requests are plain: read here, served, and answered to its socket.

    waiting ──plain head──> serving ──answered──> waiting ──> …
       │ anything else         │ client gone: the request's task is cancelled
       v
    handed over to aiohttp, with all unread bytes; aiohttp keeps it from then on

A plain request is a POST with a length (`PlainHeads` in request.py). aiohttp serves all else, routes and
errors included: other methods, HTTP/1.0, chunked and compressed bodies, `Expect`, upgrades, invalid heads,
bodies above the limit.

A client that shuts down its sending side after its request counts as gone: the two look the same.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from typing import TypeAlias, cast

from kvrouter.errors import BodiesFullError
from kvrouter.relay.answer import Served
from kvrouter.relay.request import (
    END,
    MAX_HEAD_BYTES,
    ArrivingBytes,
    PlainHeads,
    Request,
    RequestHead,
    Serve,
    may_be_plain,
)
from kvrouter.relay.transport import is_unsent, reset

# While a request is served, at most this much of the following requests is read. Without the bound a client
# that sends faster than it is served made the buffer grow from 64 to 197 MB in 4 s.
PIPELINED_BYTES = 64 * 1024
# A slow client's unsent bytes: beyond this its worker is paused. uvloop (0.23) has this limit for TCP, but
# 512 KiB for TLS.
UNSENT_BYTES = 64 * 1024
# The clock of uvloop (0.23) has whole ms, so a timer may end this much too early.
_TIMER_S = 0.001

NewConnection: TypeAlias = Callable[[], asyncio.Protocol]


class Connections:
    """What the connections of a server share, and the set of open ones."""

    def __init__(
        self,
        routes: Mapping[str, Serve],
        new_aiohttp: NewConnection,
        *,
        max_body_bytes: int,
        arriving: ArrivingBytes,
        keep_alive_s: float,
    ) -> None:
        self.routes = routes
        self.arriving = arriving
        self.new_aiohttp = new_aiohttp
        self.max_body_bytes = max_body_bytes
        self.keep_alive_s = keep_alive_s
        self.open: set[PlainConnection] = set()
        self.heads = PlainHeads()

    def new(self) -> PlainConnection:
        return PlainConnection(self)

    @property
    def unread(self) -> int:
        """The number of connections whose clients have not yet read all that was written for them."""
        return sum(connection.has_unread for connection in self.open)

    def close(self) -> None:
        for connection in list(self.open):
            connection.close()


class PlainConnection(asyncio.Protocol):
    """One client's connection, and the ClientSide (exchange.py) of its requests."""

    is_http_10 = False

    def __init__(self, connections: Connections) -> None:
        self.is_slow = False
        self.has_begun = False
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._unread = b""  # arrived, and not yet part of a request
        self._body: _ArrivingBody | None = None  # set while the served request's body is incomplete
        self._task: asyncio.Task[None] | None = None  # set while a request is served
        self._is_reading = True
        self._waiting: list[Callable[[], None]] = []
        self._active_at = 0.0
        self._timer: asyncio.TimerHandle  # not before connection_made: a TLS handshake may fail

    # ClientSide

    def write(self, data: bytes) -> None:
        """Send. If the client has left, this does nothing."""
        self.has_begun = True
        if self._transport is not None:
            self._transport.write(data)

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
        raw = transport.get_extra_info("socket")
        if raw is not None:  # else a client whose host vanished during a long answer would never be noticed
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has left: cancel its request."""
        self._transport = None
        self._timer.cancel()
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
        end = data.find(END, 0, MAX_HEAD_BYTES)
        if end < 0 and may_be_plain(data):
            return
        body_at = end + len(END)
        read = self._connections.heads.read(data[:body_at]) if end > 0 else None
        serve = self._connections.routes.get(read[0].route) if read is not None else None
        if read is None or serve is None or read[1] > self._connections.max_body_bytes:
            self._hand_over()
            return
        head, length = read
        body_end = body_at + length
        self._unread = data[body_end:]
        self.has_begun = False
        request = self._request(head, data[body_at:body_end], length)
        self._task = self._loop.create_task(self._serve(serve, request))

    def _request(self, head: RequestHead, begun: bytes, length: int) -> Request:
        """A request with the part of its body that has arrived."""
        if len(begun) == length:
            return Request(head, self, begun)
        self._active_at = self._loop.time()
        self._body = _ArrivingBody(length, self._loop.create_future(), self._connections.arriving)
        self._body.feed(begun)
        return Request(head, self, arriving=self._body.whole)

    async def _serve(self, serve: Serve, request: Request) -> None:
        served = await serve(request)
        self._task = None
        self._finish(served)

    def _finish(self, served: Served) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self._active_at = self._loop.time()  # the client has keep_alive_s to read the rest of the answer
        if served.needs_reset:
            reset(transport)
        elif not served.keeps_alive or self._body is not None:
            transport.close()
        elif self.is_slow:  # else a client that sends requests and reads no answers would fill the memory
            self._pause()
            self.when_drained(self._continue)
        else:
            self._continue()

    def _pause(self) -> None:
        if self._is_reading:
            self._is_reading = False
            cast(asyncio.Transport, self._transport).pause_reading()

    def _continue(self) -> None:
        """The client has received enough of the answer: serve the next request."""
        transport = self._transport
        if transport is None or transport.is_closing() or self._task is not None:
            return
        if self._unread:
            self._next()
        if len(self._unread) <= PIPELINED_BYTES:  # else each served request would allow another read
            self._resume(transport)

    def _resume(self, transport: asyncio.Transport) -> None:
        if not self._is_reading:
            self._is_reading = True
            transport.resume_reading()

    def _hand_over(self) -> None:
        """Give the connection to aiohttp, with all bytes that are not yet part of a request."""
        transport = cast(asyncio.Transport, self._transport)
        self._timer.cancel()
        self._connections.open.discard(self)
        successor = self._connections.new_aiohttp()
        transport.set_protocol(successor)
        self._resume(transport)
        successor.connection_made(transport)
        if self._unread:
            successor.data_received(self._unread)
        self._transport, self._unread = None, b""

    # Ends

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
        elif self._transport is not None:
            self._transport.abort()


class _ArrivingBody:
    """A body of which a part is still to come."""

    def __init__(self, length: int, done: asyncio.Future[bytes], arriving: ArrivingBytes) -> None:
        self._data = bytearray()
        self._missing = length
        self._done = done
        self._arriving = arriving

    @property
    def is_whole(self) -> bool:
        return self._missing <= 0

    def feed(self, data: bytes) -> bytes:
        """Take what belongs to the body; returns the rest."""
        taken, rest = data[: self._missing], data[self._missing :]
        self._missing -= len(taken)
        if self._done.done():
            return rest  # rejected, or its request is gone: only skip it
        try:
            self._arriving.take(len(taken))
        except BodiesFullError as error:
            self.drop()
            self._done.set_exception(error)
            self._done.exception()  # marks it as retrieved: asyncio would log it if the request is gone
            return rest
        self._data += taken
        if self.is_whole:
            self._done.set_result(bytes(self._data))
            self.drop()
        return rest

    def drop(self) -> None:
        """Free the bytes: the body is complete, or its request is gone."""
        self._arriving.give_back(len(self._data))
        self._data = bytearray()

    async def whole(self) -> bytes:
        return await self._done
