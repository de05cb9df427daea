"""Packed bodies of requests (`content-encoding`): lists of the codings that clients use, within one limit."""

from __future__ import annotations

import asyncio
import sys
import zlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import brotli

from kvrouter.errors import BadRequestError, RequestTooLargeError, UnsupportedCodingError

if sys.version_info >= (3, 14):
    from compression.zstd import DecompressionParameter, ZstdDecompressor, ZstdError
else:
    from backports.zstd import DecompressionParameter, ZstdDecompressor, ZstdError

_GZIP_BITS = 31  # zlib: 16 for gzip, plus the largest window
_ZLIB_BITS = 15
_RAW_BITS = -15
# 8 MiB (RFC 9659): a body states how much memory its unpacking takes.
_ZSTD_WINDOW_LOG = 23
# Nobody packs a body more often, and each coding may make it a thousand times longer.
_MOST_CODINGS = 3
# A gzip file may have several members, zstd data several frames; bgzip begins a new one every 64 KiB.
_MOST_PARTS = 4096
_SLICE_BYTES = 64 * 1024
_ERRORS = (zlib.error, ZstdError, brotli.error)


def too_large(most: int, by: str = "--max-body-mib") -> RequestTooLargeError:
    return RequestTooLargeError(f"the request body is too large: {most} bytes are allowed ({by})")


def codings_of(content_encoding: str) -> tuple[str, ...]:
    """How a body was packed, in this order; empty if it was not. Raises UnsupportedCodingError."""
    named = [coding.strip().lower() for coding in content_encoding.split(",")]
    codings = tuple([coding for coding in named if coding not in {"", "identity"}])
    unknown = [coding for coding in codings if coding not in _UNPACKERS]
    if unknown or len(codings) > _MOST_CODINGS:
        raise UnsupportedCodingError(
            f"content-encoding {content_encoding[:100]!r} is not supported: use {ACCEPTED}, at most"
            f" {_MOST_CODINGS} of them"
        )
    return codings


async def unpacked(whole: Callable[[], Awaitable[bytes]], codings: Sequence[str], most: int) -> bytes:
    """The unpacked body. Raises BadRequestError, or RequestTooLargeError beyond `most` bytes."""
    # In a thread: 64 KB may become 64 MB, which takes 0.1 s.
    return await asyncio.to_thread(unpack, await whole(), codings, most)


def unpack(packed: bytes, codings: Sequence[str], most: int) -> bytes:
    """Unpack a whole body, the last coding first. Raises BadRequestError or RequestTooLargeError."""
    data = packed
    for coding in reversed(codings):
        data = _unpack(data, coding, most)
    return data


class _Unpacker(Protocol):
    def take(self, data: bytes, most: int) -> bytes:
        """Unpack this part of the data: at most so many bytes."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether the end of the packed data was reached."""
        ...

    @property
    def rest(self) -> bytes:
        """The bytes behind that end."""
        ...


def _unpack(data: bytes, coding: str, most: int) -> bytes:
    contents: list[bytes] = []
    at, parts, left = 0, 1, most
    unpacker = _UNPACKERS[coding](data)
    while True:
        piece = data[at : at + _SLICE_BYTES]  # what follows a part is copied: little of it
        at += len(piece)
        try:
            contents.append(unpacker.take(piece, left + 1))
        except _ERRORS as error:
            raise _invalid(coding, str(error)) from None
        left -= len(contents[-1])
        if left < 0:
            raise too_large(most)
        if unpacker.is_over:
            at -= len(unpacker.rest)
            if at == len(data):
                return b"".join(contents)
            if coding not in _OF_PARTS:
                raise _invalid(coding, "bytes follow its end")
            parts += 1
            if parts > _MOST_PARTS:
                raise _invalid(coding, f"it has more than {_MOST_PARTS} parts")
            unpacker = _UNPACKERS[coding](data)
        elif at == len(data):
            raise _invalid(coding, "its end is missing")


def _invalid(coding: str, reason: str) -> BadRequestError:
    return BadRequestError(f"the body is not valid {coding}: {reason}")


class _Zlib:
    def __init__(self, bits: int) -> None:
        self._unpacker = zlib.decompressobj(bits)

    def take(self, data: bytes, most: int) -> bytes:
        return self._unpacker.decompress(data, most)

    @property
    def is_over(self) -> bool:
        return self._unpacker.eof

    @property
    def rest(self) -> bytes:
        return self._unpacker.unused_data


class _Zstd:
    def __init__(self, _data: bytes) -> None:
        self._unpacker = ZstdDecompressor(options={DecompressionParameter.window_log_max: _ZSTD_WINDOW_LOG})

    def take(self, data: bytes, most: int) -> bytes:
        return self._unpacker.decompress(data, most)

    @property
    def is_over(self) -> bool:
        return self._unpacker.eof

    @property
    def rest(self) -> bytes:
        return self._unpacker.unused_data


class _Brotli:
    rest = b""  # bytes behind the end are an error of `process`

    def __init__(self, _data: bytes) -> None:
        self._unpacker = brotli.Decompressor()

    def take(self, data: bytes, most: int) -> bytes:
        content = bytearray(self._unpacker.process(data, output_buffer_limit=most))
        while len(content) < most and not self._unpacker.can_accept_more_data():
            more = self._unpacker.process(b"", output_buffer_limit=most - len(content))
            if not more:
                break
            content += more
        return bytes(content)

    @property
    def is_over(self) -> bool:
        return bool(self._unpacker.is_finished())


def _deflate(data: bytes) -> _Zlib:
    """Clients send it with and without the header of zlib, whose first half-byte is 8."""
    return _Zlib(_ZLIB_BITS if data[:1] and data[0] & 15 == 8 else _RAW_BITS)


def _gzip(_data: bytes) -> _Zlib:
    return _Zlib(_GZIP_BITS)


_UNPACKERS: dict[str, Callable[[bytes], _Unpacker]] = {
    "gzip": _gzip,
    "x-gzip": _gzip,
    "deflate": _deflate,
    "zstd": _Zstd,
    "br": _Brotli,
}
# RFC 1952, section 2.2, and RFC 8878, section 3.
_OF_PARTS = frozenset({"gzip", "x-gzip", "zstd"})
ACCEPTED = "gzip, deflate, br, zstd"
