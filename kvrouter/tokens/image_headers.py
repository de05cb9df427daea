"""Width, height and colours of an image, from its header alone: nothing is decompressed.

PNG, JPEG, WebP and GIF, the formats that chats carry. A decoder would read more formats, and would run a
client's bytes through much more code than the few numbers need.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

# Markers before a JPEG's frame header, blocks before a GIF's first frame. Real files have a few.
_MOST_STEPS = 1024

# JPEG markers that start a frame: SOF0 to SOF15 without DHT, JPG and DAC.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# Markers without a length: TEM, RST0 to RST7, SOI.
_BARE = frozenset({0x01, *range(0xD0, 0xD9)})


class ImageHeader(NamedTuple):
    """`is_rgb`: whether Pillow reads it as "RGB", so that an engine need not convert it."""

    width: int
    height: int
    is_rgb: bool


def read_header(data: bytes) -> ImageHeader | None:
    """The header of an image file; None if the format is another one, or the header is not whole."""
    for signature, read in _READERS:
        if data.startswith(signature):
            try:
                header = read(data)
            except IndexError:
                return None
            return header if header is not None and header.width and header.height else None
    return None


def _png(data: bytes) -> ImageHeader | None:
    if data[12:16] != b"IHDR" or len(data) < 29:
        return None
    return ImageHeader(_big(data, 16, 4), _big(data, 20, 4), data[25] == 2)


def _jpeg(data: bytes) -> ImageHeader | None:
    at = 2
    for _ in range(_MOST_STEPS):
        if data[at] != 0xFF:
            at += 1  # decoders skip bytes between segments
            continue
        marker = data[at + 1]
        if marker == 0xFF:
            at += 1  # a fill byte
        elif marker in _BARE:
            at += 2
        elif marker in _FRAMES:
            components = data[at + 9]
            return ImageHeader(_big(data, at + 7, 2), _big(data, at + 5, 2), components == 3)
        elif marker == 0xDA:
            return None  # the picture begins without a frame header
        else:
            at += 2 + _big(data, at + 2, 2)
    return None


def _webp(data: bytes) -> ImageHeader | None:
    if data[8:12] != b"WEBP":
        return None
    kind = data[12:16]
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        return ImageHeader(_little(data, 26, 2) & 0x3FFF, _little(data, 28, 2) & 0x3FFF, True)
    if kind == b"VP8L" and data[20] == 0x2F:
        bits = _little(data, 21, 4)
        return ImageHeader((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1, not bits >> 28 & 1)
    if kind == b"VP8X":
        return ImageHeader(_little(data, 24, 3) + 1, _little(data, 27, 3) + 1, not data[20] & 0x10)
    return None


def _gif(data: bytes) -> ImageHeader | None:
    """The screen, enlarged to the first frame as Pillow does. Its first frame has a palette."""
    at, in_extension = 13 + _palette(data[10]), False
    for _ in range(_MOST_STEPS):
        if in_extension:
            in_extension = data[at] > 0  # its last block is empty
            at += 1 + data[at]
        elif data[at] == 0x2C:
            right = _little(data, at + 1, 2) + _little(data, at + 5, 2)
            bottom = _little(data, at + 3, 2) + _little(data, at + 7, 2)
            return ImageHeader(max(_little(data, 6, 2), right), max(_little(data, 8, 2), bottom), False)
        elif data[at] == 0x21:
            at, in_extension = at + 2, True
        else:
            return None
    return None


def _palette(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _big(data: bytes, at: int, size: int) -> int:
    return int.from_bytes(_part(data, at, size), "big")


def _little(data: bytes, at: int, size: int) -> int:
    return int.from_bytes(_part(data, at, size), "little")


def _part(data: bytes, at: int, size: int) -> bytes:
    part = data[at : at + size]
    if len(part) < size:
        raise IndexError(at)
    return part


_READERS: tuple[tuple[bytes, Callable[[bytes], ImageHeader | None]], ...] = (
    (b"\x89PNG\r\n\x1a\n", _png),
    (b"\xff\xd8", _jpeg),
    (b"RIFF", _webp),
    (b"GIF8", _gif),
)
