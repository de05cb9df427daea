"""The body of a request while it arrives."""

from __future__ import annotations

import asyncio

from kvrouter.errors import KvRouterError
from kvrouter.relay.codings import too_large
from kvrouter.relay.request import ArrivingBytes
from kvrouter.relay.request_parser import ChunkFraming, LengthFraming


class ArrivingBody:
    """A body of which a part is still to come. Once it has failed, all that arrives is dropped."""

    def __init__(
        self,
        framing: LengthFraming | ChunkFraming,
        done: asyncio.Future[bytes],
        arriving: ArrivingBytes,
        *,
        most: int,
    ) -> None:
        """`most`: bytes allowed."""
        self._framing = framing
        self._done = done
        self._arriving = arriving
        self._most = most
        self._data = bytearray()
        self._has_failed = False

    def allow(self, most: int, by: str) -> None:
        """Allow no more than so many bytes. Raises RequestTooLargeError."""
        self._most = min(self._most, most)
        if len(self._data) + self._framing.missing > most:
            error = too_large(most, by)
            self.fail(error)
            raise error

    @property
    def is_whole(self) -> bool:
        return self._framing.is_whole and not self._has_failed

    def feed(self, data: bytes) -> bytes:
        """Take what belongs to the body; returns the rest."""
        if self._has_failed:
            return b""
        try:
            content, rest = self._framing.take(data)
            if self._done.done():
                return rest  # its request is gone: only skip it
            if len(self._data) + len(content) > self._most:
                raise too_large(self._most)
            self._arriving.take(len(content))
        except KvRouterError as error:
            self.fail(error)
            return b""
        self._data += content
        if self.is_whole:
            self._done.set_result(bytes(self._data))
            self.drop()
        return rest

    def fail(self, error: KvRouterError) -> bool:
        """End it with this error; returns whether the request still waits for its body."""
        self._has_failed = True
        self.drop()
        if self._done.done():
            return False
        self._done.set_exception(error)
        self._done.exception()  # marks it as retrieved: asyncio would log it if the request is gone
        return True

    def drop(self) -> None:
        """Free the bytes: the body is complete, or its request is gone."""
        self._arriving.give_back(len(self._data))
        self._data = bytearray()

    async def whole(self) -> bytes:
        return await self._done
