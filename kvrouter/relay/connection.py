"""A client's connection as long as its requests are plain: read here, served, answered to its socket.

    waiting ──plain head──> serving ──answered──> waiting ──> …
       │ anything else         │ client gone: the request's task is cancelled
       v                       v
    handed over, bytes and all, to aiohttp, which keeps it from then on

So what HTTP knows beyond a POST with a length (other methods, HTTP/1.0, chunked and packed bodies,
`Expect`, upgrades, broken heads, bodies above the limit) is served by aiohttp, routes and errors included.

A client that has sent its request and shuts its sending side down counts as one that has left:
there is no telling the two apart.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from typing import TypeAlias, cast

from kvrouter.errors import BodiesFullError
from kvrouter.relay.answer import Served
from kvrouter.relay.request import ArrivingBytes, Request, RequestHead, Serve
from kvrouter.relay.request_parser import END, MAX_HEAD_BYTES, PlainHeads, may_be_plain
from kvrouter.relay.transport import is_unsent, reset

PIPELINED_BYTES = 64 * 1024
"""More than this of requests to come is left unread while one is served."""
UNSENT_BYTES = 64 * 1024
"""More than this for a slow client is not taken from the worker; over TLS uvloop's own limit is 512 KiB."""
_TIMER_S = 0.001
"""The loop's clock ticks in ms: a timer may come this much too early."""

NewConnection: TypeAlias = Callable[[], asyncio.Protocol]


class Connections:
    """What all connections of a server share, and which of them are open."""

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
        """One, for the next client."""
        return PlainConnection(self)

    @property
    def unread(self) -> int:
        """Connections with something that is written and not sent, since their clients have not read on."""
        return sum(connection.has_unread for connection in self.open)

    def close(self) -> None:
        """End the connections that are left."""
        for connection in list(self.open):
            connection.close()


class PlainConnection(asyncio.Protocol):
    """One client's connection; for its requests, the client (relay.Client)."""

    is_http_10 = False

    def __init__(self, connections: Connections) -> None:
        self.is_slow = False
        self.has_begun = False
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._unread = b""
        """What has come and belongs to no request yet."""
        self._body: _ArrivingBody | None = None
        """Set while the body of the request being served is not complete."""
        self._task: asyncio.Task[None] | None = None
        """Set while a request is served."""
        self._is_reading = True
        self._waiting: list[Callable[[], None]] = []
        self._heard_at = 0.0
        self._timer: asyncio.TimerHandle
        """From when the client has come: a TLS handshake may fail, and then it never does."""

    # relay.Client

    def write(self, data: bytes) -> None:
        """Send; a client that has left is no error."""
        self.has_begun = True
        if self._transport is not None:
            self._transport.write(data)

    def when_drained(self, call: Callable[[], None]) -> None:
        """Call once the client has caught up; never, if it leaves instead."""
        self._waiting.append(call)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has come."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one, but no subclass
        self._connections.open.add(self)
        self._heard_at = self._loop.time()
        self._timer = self._loop.call_later(self._connections.keep_alive_s, self._watch)
        if transport.get_extra_info("sslcontext") is not None:
            self._transport.set_write_buffer_limits(high=UNSENT_BYTES)
        raw = transport.get_extra_info("socket")
        if raw is not None:  # a client that vanishes without a word is noticed, some day
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        """It has left: so does its request."""
        self._transport = None
        self._timer.cancel()
        self._connections.open.discard(self)
        if self._body is not None:
            self._body.let_go()
        if self._task is not None:
            self._task.cancel()
            self._task = None  # it will hold its error, whose frames hold us: a ring that outlives both

    def pause_writing(self) -> None:
        """What we send piles up."""
        self.is_slow = True

    def resume_writing(self) -> None:
        """The client has caught up."""
        self.is_slow = False
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()

    def data_received(self, data: bytes) -> None:
        """The next piece: of a body, of the next head, or of what has to wait for its turn."""
        if self._body is not None:
            self._heard_at = self._loop.time()
            data = self._body.feed(data)
            if self._body.is_whole:
                self._body = None
        self._unread = self._unread + data if self._unread else data
        if self._task is None:
            self._next()
        if len(self._unread) > PIPELINED_BYTES:
            self._pause()

    # One request after the other

    def _next(self) -> None:
        """Serve the next request, once its head is here."""
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
        """With its body, or as much of it as is here."""
        if len(begun) == length:
            return Request(head, self, begun)
        self._heard_at = self._loop.time()
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
        self._heard_at = self._loop.time()  # so long it may take the client to read what is left
        if served.needs_reset:
            reset(transport)
        elif not served.keeps_alive or self._body is not None:
            transport.close()
        elif self.is_slow:  # a client that reads no answers must not fill our memory with them
            self._pause()
            self.when_drained(self._go_on)
        else:
            self._go_on()

    def _pause(self) -> None:
        if self._is_reading:
            self._is_reading = False
            cast(asyncio.Transport, self._transport).pause_reading()

    def _go_on(self) -> None:
        """The client has what was sent: the next request."""
        transport = self._transport
        if transport is None or transport.is_closing() or self._task is not None:
            return
        if self._unread:
            self._next()
        if len(self._unread) <= PIPELINED_BYTES:  # else each request served would let in another read
            self._resume(transport)

    def _resume(self, transport: asyncio.Transport) -> None:
        if not self._is_reading:
            self._is_reading = True
            transport.resume_reading()

    def _hand_over(self) -> None:
        """From here on it is aiohttp's, with everything that belongs to no request yet."""
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
        """Whether a part of what was written is still here."""
        return is_unsent(self._transport)

    def close(self) -> None:
        """The server ends: so do its connections."""
        if self._transport is not None:
            self._transport.close()

    def _watch(self) -> None:
        """The timer: a client that sends no head, or nothing more of a body, is not waited for."""
        left_s = self._heard_at + self._connections.keep_alive_s - self._loop.time()
        if self._task is not None and self._body is None:
            left_s = self._connections.keep_alive_s  # it is our turn
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
        """Whether nothing is missing."""
        return self._missing <= 0

    def feed(self, data: bytes) -> bytes:
        """Take what belongs to the body; returns the rest."""
        taken, rest = data[: self._missing], data[self._missing :]
        self._missing -= len(taken)
        if self._done.done():
            return rest  # it is no longer wanted
        try:
            self._arriving.take(len(taken))
        except BodiesFullError as error:
            self.let_go()
            self._done.set_exception(error)
            self._done.exception()  # looked at: should its request have gone, nobody else will
            return rest
        self._data += taken
        if self.is_whole:
            self._done.set_result(bytes(self._data))
            self.let_go()
        return rest

    def let_go(self) -> None:
        """It is whole, or nobody waits for it any longer."""
        self._arriving.give_back(len(self._data))
        self._data = bytearray()

    async def whole(self) -> bytes:
        """All of it."""
        return await self._done
