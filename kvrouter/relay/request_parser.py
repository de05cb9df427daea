"""Reads the heads of plain requests; all others are left to aiohttp. Pure.

A plain request is a POST with HTTP/1.1, a host, a length, and nothing that changes how its body is read.
httptools (llhttp, the parser of Node and of aiohttp) reads the whole head. What it rejects is not plain.
"""

from __future__ import annotations

import httptools

from kvrouter.relay.request import Field, RequestHead, host_error

START = b"POST /"
END = b"\r\n\r\n"
# A client that ends its head like this waits for an answer, while the head never ends for us. aiohttp rejects
# it with 400 at once.
_LF_END = b"\n\n"
# aiohttp's limit for one line: a longer head may have a line that is too long.
MAX_HEAD_BYTES = 8190

# Clients with more different heads than this are rare; 256 heads are 2 MiB at most.
MOST_HEADS = 256
_LENGTH = b"\r\ncontent-length:"
_MOST_DIGITS = 15
# With one of these the body is not simply the bytes after the head.
_CHANGES_BODY = frozenset({"transfer-encoding", "content-encoding", "expect", "upgrade"})


class _Reader:
    """Collects what httptools reports of a head."""

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
    """Reads heads and remembers them: those of one client differ only in the length of the body.

    A head that equals a remembered one in all but the digits of its first `content-length` is plain as well.
    After `MOST_HEADS` all are forgotten.
    """

    def __init__(self) -> None:
        # By the head without those digits and the blanks before them.
        self._known: dict[bytes, RequestHead] = {}

    def read(self, head: bytes) -> tuple[RequestHead, int] | None:
        """`parse_plain`, from memory if possible."""
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
    """Parse a head that ends with its empty line; returns it and its body's length, or None if not plain."""
    reader = _Reader()
    parser = httptools.HttpRequestParser(reader)
    try:
        parser.feed_data(head)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        return None
    is_post = reader.is_complete and parser.get_method() == b"POST" and parser.get_http_version() == "1.1"
    names = dict(reader.fields)  # llhttp rejects a second length; of the others only the presence matters
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
    """Whether the client asks to close the connection.

    httptools (0.9) cannot be asked: `should_keep_alive` is reset as soon as a body of 0 bytes has ended.
    """
    values = [value for name, value in fields if name == "connection"]
    return any(word.strip().lower() == "close" for word in ",".join(values).split(","))


def may_be_plain(data: bytes) -> bool:
    """Whether the beginning of a head may become a plain one."""
    is_post = data.startswith(START) or START.startswith(data)
    return is_post and len(data) <= MAX_HEAD_BYTES and _LF_END not in data
