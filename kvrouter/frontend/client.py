"""The client's side of the relay on aiohttp: its parser reads requests, we write responses ourselves."""

from __future__ import annotations

import asyncio
import socket
import struct

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import HttpVersion10


class AiohttpClient:
    """The client behind a request, as relay.Client wants it."""

    def __init__(self, request: web.Request, *, may_stay: bool = True) -> None:
        self.is_http_10 = request.version <= HttpVersion10
        self.wants_keep_alive = request.keep_alive and may_stay
        self._request = request
        self._protocol = request.protocol

    def write(self, data: bytes) -> None:
        """Send; a client that has left is no error."""
        transport = self._protocol.transport
        if transport is not None:
            transport.write(data)

    @property
    def is_slow(self) -> bool:
        """Whether the transport's buffer is above its high-water mark."""
        return self._protocol.writing_paused

    async def drained(self) -> None:
        """Wait until the buffer is below its low-water mark. Raises ConnectionError if the client left."""
        await self._request.writer.drain()


class AlreadyWritten(web.StreamResponse):
    """Tells aiohttp that the response has gone out, and whether the connection can be used again."""

    def __init__(self, status: int, *, keeps_alive: bool, is_torn: bool = False) -> None:
        super().__init__(status=status)
        self._keeps_alive = keeps_alive
        self._is_torn = is_torn
        self._client: web.BaseRequest | None = None

    @property
    def keep_alive(self) -> bool | None:
        """Whether aiohttp may wait for another request."""
        return self._keeps_alive

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Nothing to send."""
        self._client = request
        return None

    async def write_eof(self, _data: bytes = b"") -> None:
        """Nothing to send; if the answer is not whole, the connection is torn."""
        if self._is_torn and self._client is not None:
            _tear(self._client.transport)


def _tear(transport: asyncio.Transport | None) -> None:
    """Reset the connection: an answer that ends with it would look whole after an orderly end."""
    if transport is None:
        return
    linger_0_s = struct.pack("ii", 1, 0)
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger_0_s)
    transport.abort()
