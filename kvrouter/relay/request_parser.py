"""Heads of plain requests: what we read ourselves, and what is better left to aiohttp. Pure.

Plain is a POST of HTTP/1.1 with a host and a length, and nothing that changes how its body is to be read.
httptools (llhttp, the parser of Node and of aiohttp) reads the whole head; what it objects to is not plain.
"""

from __future__ import annotations

import httptools

from kvrouter.relay.request import Field, RequestHead, host_error

START = b"POST /"
END = b"\r\n\r\n"
_LF_END = b"\n\n"
"""Ends no head, though its writer may think so, and would wait for an answer."""
MAX_HEAD_BYTES = 8190
"""aiohttp's own limit for one line: a head that is longer may have a line that is too long."""

MOST_HEADS = 256
_LENGTH = b"\r\ncontent-length:"
_MOST_DIGITS = 15
_CHANGES_BODY = frozenset({"transfer-encoding", "content-encoding", "expect", "upgrade"})
"""Headers after which the body is not simply what follows."""


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
        self._known: dict[bytes, RequestHead] = {}
        """By the head without those digits, and the blanks before them."""

    def read(self, head: bytes) -> tuple[RequestHead, int] | None:
        """`parse_plain`, or what it was the last time."""
        at = head.lower().find(_LENGTH) + len(_LENGTH)
        end = head.find(b"\r\n", at)
        digits = head[at:end].lstrip(b" ")
        if at < len(_LENGTH) or not digits.isdigit() or len(digits) > _MOST_DIGITS:
            return parse_plain(head)
        name = head[:at] + head[end:]
        known = self._known.get(name)
        if known is not None:
            return known, int(digits)
        read = parse_plain(head)
        if read is not None:
            if len(self._known) >= MOST_HEADS:
                self._known.clear()
            self._known[name] = read[0]
        return read


def parse_plain(head: bytes) -> tuple[RequestHead, int] | None:
    """A head with its closing empty line, and the bytes of its body; None if it is not plain."""
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
    hosts = [value for name, value in reader.fields if name == "host"]
    if not length or host_error(hosts, is_http_10=False):
        return None
    fields = [field for field in reader.fields if field[0] != "content-length"]
    path = reader.url.decode("ascii")
    return RequestHead("POST", path, fields, wants_keep_alive=not _closes(fields)), int(length)


def _closes(fields: list[Field]) -> bool:
    """Whether the client wants no other answer here; the parser forgets it once a body of 0 bytes is over."""
    said = [value for name, value in fields if name == "connection"]
    return any(word.strip().lower() == "close" for word in ",".join(said).split(","))


def may_be_plain(data: bytes) -> bool:
    """Whether the beginning of a head may become a plain one."""
    begins_so = data.startswith(START) or START.startswith(data)
    return begins_so and len(data) <= MAX_HEAD_BYTES and _LF_END not in data
