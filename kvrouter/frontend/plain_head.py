"""Heads of plain requests: what we read ourselves, and what is better left to aiohttp. Pure.

Plain is a POST of HTTP/1.1 with a length, and nothing that changes how its body is to be read. httptools
(llhttp, the parser of Node and of aiohttp) reads the head, whole; whatever it objects to is not plain.
"""

from __future__ import annotations

import re

import httptools
from msgspec import Struct

from kvrouter.frontend.request import Field

START = b"POST /"
END = b"\r\n\r\n"
_LF_END = b"\n\n"
"""Ends no head, though its writer may think so, and would wait for an answer."""
MAX_HEAD_BYTES = 8190
"""aiohttp's own limit for one line: a head that is longer may have a line that is too long."""

MOST_HEADS = 256
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d{1,15})\r\n", re.IGNORECASE)
_CHANGES_BODY = frozenset({"transfer-encoding", "content-encoding", "expect", "upgrade"})
"""Headers after which the body is not simply what follows."""


class PlainHead(Struct, frozen=True):
    """The head of a plain request."""

    path: str
    """As the client wrote it, query included."""
    fields: list[Field]
    length: int
    """Bytes of the body."""
    wants_keep_alive: bool


class _Reader:
    """What httptools tells of a head."""

    __slots__ = ("fields", "is_complete", "url")

    def __init__(self) -> None:
        self.url = b""
        self.fields: list[Field] = []
        self.is_complete = False

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.fields.append((name.decode("ascii").lower(), value.rstrip().decode("utf-8", "surrogateescape")))

    def on_headers_complete(self) -> None:
        self.is_complete = True


class PlainHeads:
    """Reads heads, and remembers them: a client's are the same but for the length of the body.

    A head that equals one read before in everything but the digits of its first `content-length` is as plain
    as that was. `MOST_HEADS` are remembered; then all are forgotten.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[PlainHead, int]] = {}
        """By the head without those digits; with the place of the field among its fields."""

    def read(self, head: bytes) -> PlainHead | None:
        """`parse_plain`, or what it was the last time."""
        found = _LENGTH.search(head)
        if found is None:
            return parse_plain(head)
        digits = found[1]
        name = head[: found.start(1)] + head[found.end(1) :]
        known = self._known.get(name)
        if known is not None:
            plain, place = known
            fields = plain.fields.copy()
            fields[place] = ("content-length", digits.decode())
            return PlainHead(plain.path, fields, int(digits), plain.wants_keep_alive)
        read = parse_plain(head)
        if read is not None:
            self._remember(name, read)
        return read

    def _remember(self, name: bytes, read: PlainHead) -> None:
        places = [place for place, (key, _) in enumerate(read.fields) if key == "content-length"]
        if len(places) != 1:
            return
        if len(self._known) >= MOST_HEADS:
            self._known.clear()
        self._known[name] = read, places[0]


def parse_plain(head: bytes) -> PlainHead | None:
    """A head with its closing empty line; None if it is not plain."""
    reader = _Reader()
    parser = httptools.HttpRequestParser(reader)
    try:
        parser.feed_data(head)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        return None
    is_post = reader.is_complete and parser.get_method() == b"POST" and parser.get_http_version() == "1.1"
    names = dict(reader.fields)  # two of one name that matter here are no valid head
    if not is_post or not reader.url.startswith(b"/") or not _CHANGES_BODY.isdisjoint(names):
        return None
    length = names.get("content-length", "")
    if not length:
        return None
    path = reader.url.decode("ascii")
    return PlainHead(path, reader.fields, int(length), parser.should_keep_alive())


def may_be_plain(data: bytes) -> bool:
    """Whether the beginning of a head may become a plain one."""
    begins_so = data.startswith(START) or START.startswith(data)
    return begins_so and len(data) <= MAX_HEAD_BYTES and _LF_END not in data
