"""The client's side of the relay on aiohttp: its parser reads requests, we write responses ourselves."""

from __future__ import annotations

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import HttpVersion10


class AiohttpClient:
    """The client behind a request, as relay.Client wants it."""

    def __init__(self, request: web.Request) -> None:
        self.is_http_10 = request.version <= HttpVersion10
        self.wants_keep_alive = request.keep_alive
        self._request = request
        self._protocol = request.protocol

    def write(self, data: bytes) -> None:
        """Send; a client that has left is no error."""
        transport = self._protocol.transport
        if transport is not None:
            transport.write(data)

    def abort(self) -> None:
        """Tear the connection."""
        transport = self._protocol.transport
        if transport is not None:
            transport.abort()

    @property
    def is_slow(self) -> bool:
        """Whether the transport's buffer is above its high-water mark."""
        return self._protocol.writing_paused

    async def drained(self) -> None:
        """Wait until the buffer is below its low-water mark. Raises ConnectionError if the client left."""
        await self._request.writer.drain()


class AlreadyWritten(web.StreamResponse):
    """Tells aiohttp that the response has gone out, and whether the connection can be used again."""

    def __init__(self, status: int, *, keeps_alive: bool) -> None:
        super().__init__(status=status)
        self._keeps_alive = keeps_alive

    @property
    def keep_alive(self) -> bool | None:
        """Whether aiohttp may wait for another request."""
        return self._keeps_alive

    async def prepare(self, _request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Nothing to send."""
        return None

    async def write_eof(self, _data: bytes = b"") -> None:
        """Nothing to send."""
