"""The body of a request while it arrives, and bodies that are packed (content-encoding)."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable

from kvrouter.errors import BadRequestError, KvRouterError, RequestTooLargeError
from kvrouter.relay.request import ArrivingBytes
from kvrouter.relay.request_parser import ChunkFraming, LengthFraming

_GZIP_BITS = 31  # zlib: 16 for gzip, plus the largest window
_ZLIB_BITS = 15
_RAW_BITS = -15
_CODINGS = frozenset({"gzip", "x-gzip", "deflate"})


def too_large(most: int) -> RequestTooLargeError:
    return RequestTooLargeError(f"the request body is too large: {most} bytes are allowed (--max-body-mib)")


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


def coding_of(content_encoding: str) -> str:
    """How a body is packed; empty if it is not. Raises BadRequestError."""
    coding = content_encoding.strip().lower()
    if coding in {"", "identity"}:
        return ""
    if coding not in _CODINGS:
        raise BadRequestError(f"content-encoding {coding[:100]!r} is not supported: use gzip or deflate")
    return coding


async def unpacked(whole: Callable[[], Awaitable[bytes]], coding: str, most: int) -> bytes:
    """The unpacked body. Raises BadRequestError, or RequestTooLargeError beyond `most` bytes."""
    # In a thread: 64 KB may become 64 MB, which takes 0.1 s.
    return await asyncio.to_thread(unpack, await whole(), coding, most)


def unpack(packed: bytes, coding: str, most: int) -> bytes:
    """Unpack a whole body. Raises BadRequestError or RequestTooLargeError."""
    # Clients send "deflate" with and without the header of zlib, whose first half-byte is 8.
    bits = (
        _GZIP_BITS
        if coding.endswith("gzip")
        else _ZLIB_BITS
        if packed[:1] and packed[0] & 15 == 8
        else _RAW_BITS
    )
    unpacker = zlib.decompressobj(bits)
    try:
        data = unpacker.decompress(packed, most + 1)
    except zlib.error as error:
        raise BadRequestError(f"the body is not valid {coding}: {error}") from None
    if len(data) > most:
        raise too_large(most)
    if not unpacker.eof or unpacker.unused_data:
        wrong = "bytes follow its end" if unpacker.eof else "its end is missing"
        raise BadRequestError(f"the body is not valid {coding}: {wrong}")
    return data
