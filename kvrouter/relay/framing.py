"""HTTP/1.1 responses as bytes: where the head ends, where the body ends. Pure; nothing is decoded.

The relay passes a worker's bytes on as they are, chunk framing included. It needs to know only what kind of
answer it is (the head) and when it ends (then the connection can serve another request).
"""

from __future__ import annotations

import re
from functools import lru_cache

from msgspec import Struct

from kvrouter.errors import KvRouterError

MAX_HEAD_BYTES = 64 * 1024
_MAX_SIZE_LINE = 1024
# Longer heads are parsed each time. With 512 of them the cache holds half a MiB of heads at most.
_MOST_REMEMBERED_BYTES = 1024
# No answer has 10^18 bytes, and `int` raises for numbers of more than 4,300 digits.
_MAX_LENGTH_DIGITS = 18
# Not allowed in a head. A client may take a lone CR or LF for the end of a line, and see another header.
_CONTROL_CHARACTERS = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")

_BLANK = re.compile(rb"[ \t]")

_MEDIA = (b"audio/", b"image/", b"video/", b"application/octet-stream")

# Headers of one connection, which are not forwarded (RFC 9110, 7.6.1).
HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)


def hop_by_hop(connection: bytes) -> frozenset[bytes]:
    """The headers not to forward: HOP_BY_HOP, and what the `connection` header names."""
    if not connection:
        return HOP_BY_HOP
    named = {name.strip() for name in connection.lower().split(b",")}
    return HOP_BY_HOP | (named - {b"content-length"})  # without it the body's end is unknown


class FramingError(KvRouterError):
    """The worker's answer is not an HTTP/1.1 response."""

    status = 502
    type = "BadGatewayError"


class ResponseHead(Struct, frozen=True):
    """A response head. `length`: None if the body is chunked or ends with the connection.

    `headers` are by name in lower case; of several with one name the last. `forwarded` are the lines for the
    client, without hop-by-hop headers and the headers that the router sets itself. `is_media`: audio, images
    or other bytes that are not text.
    """

    status: int
    headers: dict[bytes, bytes]
    forwarded: bytes
    length: int | None
    is_chunked: bool
    keeps_alive: bool
    is_event_stream: bool
    is_media: bool


def parse_head(data: bytes) -> ResponseHead:
    """Read a head, without its closing empty line. Raises FramingError.

    A worker's heads are equal except for the second in `date`, so the last ones are remembered.
    """
    return _remembered(data) if len(data) <= _MOST_REMEMBERED_BYTES else _parse(data)


@lru_cache(maxsize=512)
def _remembered(data: bytes) -> ResponseHead:
    return _parse(data)


def _parse(data: bytes) -> ResponseHead:
    status_line, *lines = data.split(b"\r\n")
    version, _, rest = status_line.partition(b" ")
    status, _, reason = rest.partition(b" ")
    is_status_line = version in {b"HTTP/1.1", b"HTTP/1.0"} and len(status) == 3 and status.isdigit()
    if not is_status_line or status < b"100" or _CONTROL_CHARACTERS.search(reason):
        raise FramingError(f"no HTTP status line: {status_line[:80]!r}")
    everything = [_split_line(line) for line in lines]
    own = _by_name(everything)
    connection = b",".join(value for name, value in everything if name == b"connection").lower()
    keeps_alive = b"close" not in connection and (version == b"HTTP/1.1" or b"keep-alive" in connection)
    length, is_chunked = _body_framing(int(status), own)
    left_out = hop_by_hop(connection)
    if is_chunked:
        # With both, a client could read another length than the relay: request smuggling (RFC 9112, 6.3).
        left_out |= {b"content-length"}
    forwarded = [b"HTTP/1.1 %b %b" % (status, reason)]
    forwarded += [
        b"%b: %b" % field for field in everything if field[0] not in left_out and not _is_ours(field[0])
    ]
    kind = own.get(b"content-type", b"").lower()
    return ResponseHead(
        status=int(status),
        headers=own,
        forwarded=b"\r\n".join(forwarded) + b"\r\n",
        length=length,
        is_chunked=is_chunked,
        keeps_alive=keeps_alive,
        is_event_stream=b"text/event-stream" in kind,
        is_media=kind.startswith(_MEDIA),
    )


def _is_ours(name: bytes) -> bool:
    """Whether the router sets this header: vLLM echoes x-request-id with --enable-request-id-headers."""
    return name in {b"x-request-id", b"x-accel-buffering"} or name.startswith(b"x-kvrouter-")


def _by_name(fields: list[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Of several with one name the last. Raises FramingError if two state how the body ends."""
    names = [name for name, _ in fields]
    for name in (b"content-length", b"transfer-encoding"):
        if names.count(name) > 1:
            raise FramingError(f"more than one {name.decode()} header")
    return dict(fields)


def _split_line(line: bytes) -> tuple[bytes, bytes]:
    name, colon, value = line.partition(b":")
    if not colon or not name or _BLANK.search(name) or _CONTROL_CHARACTERS.search(line):
        raise FramingError(f"no HTTP header line: {line[:80]!r}")
    return name.lower(), value.strip()


def _body_framing(status: int, headers: dict[bytes, bytes]) -> tuple[int | None, bool]:
    if status in {204, 304}:  # they have no body, and may have a length all the same (RFC 9110, 8.6)
        return 0, False
    coding = headers.get(b"transfer-encoding", b"identity").lower()
    if coding == b"chunked":
        return None, True
    if coding != b"identity":
        raise FramingError(f"transfer-encoding is {coding[:40]!r}")
    length = headers.get(b"content-length")
    if length is None:
        return None, False
    if not length.isdigit() or len(length) > _MAX_LENGTH_DIGITS:
        raise FramingError(f"content-length is {length[:40]!r}")
    return int(length), False


class LengthBody:
    """A body of known length. `feed` returns how many bytes of the data belong to it."""

    __slots__ = ("_left", "is_over")

    is_at_boundary = False
    trailer_bytes = 0

    def __init__(self, length: int) -> None:
        self._left = length
        self.is_over = length == 0

    def feed(self, data: bytes) -> int:
        """Bytes of `data` that belong to the body; sets `is_over` with the last one."""
        taken = min(len(data), self._left)
        self._left -= taken
        self.is_over = self._left == 0
        return taken


class UntilCloseBody:
    """A body that ends with the connection."""

    __slots__ = ()

    is_over = False
    is_at_boundary = False
    trailer_bytes = 0

    def feed(self, data: bytes) -> int:
        return len(data)


class ChunkedBody:
    """A chunked body: steps from size line to size line, without reading what is between them.

        1a CRLF  26 bytes  CRLF  …  0 CRLF  [trailers]  CRLF

    `_left` counts the bytes of the current chunk still to come, its closing CRLF included.
    `_line` keeps a size line (or trailer) of which only a part has arrived.
    `is_at_boundary`: the next byte begins a chunk, so the relay could insert one of its own here. A read that
    is one whole chunk (see `chunk_bytes`) and arrives at a boundary changes nothing: it need not be fed.
    `trailer_bytes`: at the end of the bytes fed last, what follows the last chunk. No client gets trailers.
    """

    __slots__ = ("_in_trailers", "_left", "_line", "is_at_boundary", "is_over", "trailer_bytes")

    def __init__(self) -> None:
        self._left = 0
        self._line = b""
        self._in_trailers = False
        self.is_at_boundary = True
        self.is_over = False
        self.trailer_bytes = 0

    def feed(self, data: bytes) -> int:
        """Bytes of `data` that belong to the body; sets `is_over` with the last one."""
        position = self._left
        end = len(data)
        trailers_at = 0 if self._in_trailers else end
        while position < end:
            line_end = data.find(b"\n", position)
            if line_end < 0:
                self._keep_line(data[position:])
                position = end
                break
            line = data[position:line_end]
            if self._line:
                line, self._line = self._line + line, b""
            position = line_end + 1
            if not self._in_trailers:
                size = _chunk_size(line)
                if size:
                    position += size + len(b"\r\n")
                else:
                    self._in_trailers, trailers_at = True, position
            elif not line.rstrip(b"\r"):
                self.is_over, self.is_at_boundary = True, False
                self.trailer_bytes = position - trailers_at
                return position
        self.trailer_bytes = end - trailers_at
        self._left = position - end
        self.is_at_boundary = position == end and not self._line and not self._in_trailers
        return end

    def go_on(self, left: int) -> None:
        """Whole chunks, and all but `left` bytes of another one, were passed on elsewhere."""
        self._left, self.is_at_boundary = left, left == 0

    def _keep_line(self, part: bytes) -> None:
        self._line += part
        if len(self._line) > _MAX_SIZE_LINE:
            raise FramingError("a chunk's size line does not end")


@lru_cache(maxsize=4096)
def _chunk_size(line: bytes) -> int:
    """The size in a size line. Cached: most events of a stream have one of a few sizes."""
    digits = line.partition(b";")[0].strip()
    if not digits or len(digits) > 16 or digits.strip(b"0123456789abcdefABCDEF"):
        raise FramingError(f"a chunk's size line is {line[:40]!r}")
    return int(digits, 16)


# Three hex digits and CRLF: the size line of a chunk below 4 KiB, as events are.
CHUNK_START_BYTES = 5


@lru_cache(maxsize=4096)
def chunk_bytes(start: bytes) -> int:
    """Length of the chunk, framing included, whose first CHUNK_START_BYTES these are.

    0 if the length is not known from them: the last chunk, or a longer size line. Raises FramingError.
    """
    line, newline, _ = start.partition(b"\n")
    size = _chunk_size(line) if newline else 0
    return len(line) + len(b"\n") + size + len(b"\r\n") if size else 0


Body = LengthBody | UntilCloseBody | ChunkedBody


def body_of(head: ResponseHead) -> Body:
    if head.is_chunked:
        return ChunkedBody()
    return UntilCloseBody() if head.length is None else LengthBody(head.length)


class ChunkContent:
    """Extracts the content of a chunked body, piece by piece. A ChunkedBody has checked the pieces."""

    def __init__(self) -> None:
        self._left = 0
        self._line = b""
        self._is_over = False

    def feed(self, data: bytes) -> bytes:
        is_amid = self._left or self._line or self._is_over
        if not is_amid and chunk_bytes(data[:CHUNK_START_BYTES]) == len(data):
            return data[data.find(b"\n") + 1 : -len(b"\r\n")]  # as a stream's first event is
        parts, position = [], 0
        while position < len(data) and not self._is_over:
            if self._left == 0:
                position = self._read_size(data, position)
                continue
            content_left = max(0, self._left - len(b"\r\n"))
            parts.append(data[position : position + content_left])
            taken = min(self._left, len(data) - position)
            self._left -= taken
            position += taken
        return b"".join(parts)

    def _read_size(self, data: bytes, position: int) -> int:
        line_end = data.find(b"\n", position)
        if line_end < 0:
            self._line += data[position:]
            return len(data)
        size = _chunk_size(self._line + data[position:line_end])
        self._line = b""
        self._left = size + len(b"\r\n")
        self._is_over = size == 0  # what follows are trailers
        return line_end + 1


def content_of(data: bytes) -> bytes:
    """The content of a chunked body, or of its beginning. A ChunkedBody has checked the data."""
    return ChunkContent().feed(data)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


LAST_CHUNK = b"0\r\n\r\n"
