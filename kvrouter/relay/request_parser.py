"""Reads heads that are not plain, and chunked bodies, with llhttp (httptools), the parser of Node.

    HeadReader    a head, in reads of any size; each line is checked as it arrives
    ChunkFraming  a chunked body

What is invalid for llhttp is rejected, and a few things more: REQUEST_LINE, `_path`, `_body_length`.
"""

from __future__ import annotations

import re

import httptools
from msgspec import Struct

from kvrouter.errors import (
    BadRequestError,
    ExpectationError,
    HeadTooLargeError,
    HttpVersionError,
    InvalidBodyError,
    TargetTooLongError,
)
from kvrouter.relay.request import (
    HOST,
    MAX_LINE_BYTES,
    REQUEST_LINE,
    CollectedHead,
    Field,
    RequestHead,
    connection_words,
    host_error,
    without_root,
)

# Of a whole head, and of the trailers of a chunked body.
MAX_HEAD_BYTES = 64 * 1024

# The absolute form of a target, which clients send to proxies (RFC 9112, 3.2.2).
_ABSOLUTE = re.compile(r"https?://([^/?#]+)([/?].*)?", re.IGNORECASE)

# A first line that llhttp does not read, as it knows neither this version nor the method of HTTP/2's preface.
_OTHER_VERSION = re.compile(rb"[A-Z]+ [!-~]+ HTTP/([02-9])\.[0-9]")


def unreadable(reason: object) -> BadRequestError:
    """The error for a request that is not valid HTTP."""
    return BadRequestError(f"the request cannot be read: {reason}")


def unknown_version(major: int) -> HttpVersionError:
    return HttpVersionError(f"HTTP/{major} is not supported: use HTTP/1.1")


def unexpected(expectation: str) -> ExpectationError:
    return ExpectationError(f"expect {expectation[:100]!r} is not supported: only 100-continue is")


class AnyHead(Struct, frozen=True):
    """A head that HeadReader has read. `length` is None for a chunked body."""

    head: RequestHead
    length: int | None
    is_http_10: bool


class HeadReader:
    """Reads one head.

    llhttp gets it line by line: so the first thing that is wrong with it decides about the error, no matter
    in which pieces the head arrives.
    """

    def __init__(self, root_path: str = "") -> None:
        self._root_path = root_path
        self._collected = CollectedHead()
        self._parser = httptools.HttpRequestParser(self._collected)
        self._line = b""
        self._size = 0
        self._is_first_line = True

    @property
    def is_complete(self) -> bool:
        return self._collected.is_complete

    @property
    def headers(self) -> dict[str, str]:
        """Those read so far; of several with one name the first."""
        return dict(reversed(self._collected.fields))

    @property
    def route(self) -> str:
        """The path as far as it was read, also if the head is invalid; empty if none was."""
        target = self._collected.url.decode("ascii", "replace")
        absolute = _ABSOLUTE.fullmatch(target)
        path = re.split("[?#]", absolute[2] or "" if absolute else target, maxsplit=1)[0]
        return without_root(path, self._root_path)

    def feed(self, data: bytes) -> bytes:
        """Take the bytes of the head; returns the rest.

        Raises BadRequestError, TargetTooLongError, HeadTooLargeError or HttpVersionError.
        """
        at = 0
        while at < len(data) and not self.is_complete:
            line_end = data.find(b"\n", at) + 1 or len(data)
            end = min(line_end, at + MAX_LINE_BYTES - len(self._line), at + MAX_HEAD_BYTES - self._size)
            self._feed_part(data[at:end])
            at = end
        return data[at:]

    def _feed_part(self, part: bytes) -> None:
        self._line += part
        self._size += len(part)
        try:
            self._parser.feed_data(part)
        except httptools.HttpParserUpgrade:
            pass  # after the last line: the request is served as HTTP/1.1 (RFC 9110, 7.8)
        except httptools.HttpParserError as error:
            if self._is_first_line and (version := _OTHER_VERSION.match(self._line)):
                raise unknown_version(int(version[1])) from None
            raise unreadable(error) from None
        if part.endswith(b"\n"):
            self._end_line()
        elif len(self._line) == MAX_LINE_BYTES:
            self._reject_line()
        if self._size == MAX_HEAD_BYTES and not self.is_complete:
            raise HeadTooLargeError(f"the request's head has more than {MAX_HEAD_BYTES} bytes")

    def _end_line(self) -> None:
        if self._is_first_line:
            match = REQUEST_LINE.fullmatch(self._line)
            if match is None:
                raise unreadable("the first line is not METHOD TARGET HTTP/1.1")
            if match[1] != b"1":
                raise unknown_version(int(match[1]))
        self._is_first_line = False
        self._line = b""

    def _reject_line(self) -> None:
        if self._is_first_line:
            raise TargetTooLongError(f"the request's first line has more than {MAX_LINE_BYTES} bytes")
        raise HeadTooLargeError(f"a header of the request has more than {MAX_LINE_BYTES} bytes")

    def head(self) -> AnyHead:
        """The head, once it is complete. Raises BadRequestError."""
        fields = self._collected.fields
        is_http_10 = self._parser.get_http_version() == "1.0"
        if wrong := host_error(_values(fields, "host"), is_http_10=is_http_10):
            raise BadRequestError(wrong)
        connection = connection_words(fields)
        keeps_alive = "close" not in connection and (not is_http_10 or "keep-alive" in connection)
        return AnyHead(
            RequestHead(
                self._parser.get_method().decode("ascii"),
                without_root(_path(self._collected.url.decode("ascii")), self._root_path),
                [field for field in fields if field[0] != "content-length"],
                wants_keep_alive=keeps_alive,
            ),
            _body_length(fields, is_http_10=is_http_10),
            is_http_10,
        )


def _values(fields: list[Field], name: str) -> list[str]:
    return [value for key, value in fields if key == name]


def _path(target: str) -> str:
    """The path and query of the target. Raises BadRequestError."""
    if "#" in target:
        raise unreadable("the target has a fragment (#)")
    if target.startswith("/") or target == "*":
        return target
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is None or not HOST.fullmatch(absolute[1]):
        raise unreadable("the target is neither a path nor a URL")
    path = absolute[2] or "/"
    return path if path.startswith("/") else f"/{path}"


def _body_length(fields: list[Field], *, is_http_10: bool) -> int | None:
    """Bytes of the body; None if it is chunked. Raises BadRequestError.

    llhttp has rejected a second length, one that is not a number, and a length with chunks. It accepts chunks
    in HTTP/1.0, which intermediaries read in different ways (RFC 9112, 6.1), and other codings before them.
    """
    codings = _values(fields, "transfer-encoding")
    if codings and (is_http_10 or [one.lower() for one in codings] != ["chunked"]):
        version = " in HTTP/1.0" if is_http_10 else ""
        raise unreadable(f"transfer-encoding {', '.join(codings)[:100]!r}{version}")
    if codings:
        return None
    lengths = _values(fields, "content-length")
    return int(lengths[0]) if lengths else 0


class LengthFraming:
    """A body of known length."""

    def __init__(self, length: int) -> None:
        self.missing = length

    @property
    def is_whole(self) -> bool:
        return self.missing <= 0

    def take(self, data: bytes) -> tuple[bytes, bytes]:
        """What belongs to the body, and the rest."""
        taken, rest = data[: self.missing], data[self.missing :]
        self.missing -= len(taken)
        return taken, rest


class ChunkFraming:
    """A chunked body. llhttp checks and unpacks it; this class only finds the ends of lines and chunks.

    llhttp gets no byte after the body's last: it would read the next request.
    """

    missing = 0
    """How many bytes are still to come is not known."""

    def __init__(self) -> None:
        self._content: list[bytes] = []
        self.is_whole = False
        self._chunk_left = 0  # of the current chunk, with its closing CRLF
        self._line = b""
        self._trailer_bytes = 0
        self._in_trailers = False
        # The request's own parser would not read the body of a request with `upgrade`.
        self._parser = httptools.HttpRequestParser(self)
        self._parser.feed_data(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n")

    # Of httptools

    def on_body(self, content: bytes) -> None:
        self._content.append(content)

    def on_message_complete(self) -> None:
        self.is_whole = True

    def take(self, data: bytes) -> tuple[bytes, bytes]:
        """The content in the data, and what follows the body. Raises InvalidBodyError."""
        at = 0
        while at < len(data) and not self.is_whole:
            at = self._take_content(data, at) if self._chunk_left else self._take_line(data, at)
        content, self._content = b"".join(self._content), []
        return content, data[at:]

    def _take_content(self, data: bytes, at: int) -> int:
        end = min(at + self._chunk_left, len(data))
        self._feed(data[at:end])
        self._chunk_left -= end - at
        return end

    def _take_line(self, data: bytes, at: int) -> int:
        line_end = data.find(b"\n", at) + 1 or len(data)
        end = min(line_end, at + MAX_LINE_BYTES - len(self._line))
        part = data[at:end]
        self._line += part
        self._feed(part)
        if part.endswith(b"\n"):
            self._end_line()
        elif len(self._line) == MAX_LINE_BYTES:
            raise InvalidBodyError(f"a line between chunks has more than {MAX_LINE_BYTES} bytes")
        return end

    def _end_line(self) -> None:
        if self._in_trailers:
            self._trailer_bytes += len(self._line)
            if self._trailer_bytes > MAX_HEAD_BYTES:
                raise InvalidBodyError(f"the trailers have more than {MAX_HEAD_BYTES} bytes")
        else:
            size = int(self._line.partition(b";")[0], 16)
            self._in_trailers = size == 0
            self._chunk_left = size + len(b"\r\n") if size else 0
        self._line = b""

    def _feed(self, part: bytes) -> None:
        try:
            self._parser.feed_data(part)
        except httptools.HttpParserError as error:
            raise InvalidBodyError(f"the chunked body cannot be read: {error}") from None
