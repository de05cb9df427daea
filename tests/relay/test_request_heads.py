"""Which heads are plain, and what is read from them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.relay.request import (
    MAX_LINE_BYTES,
    MOST_HEADS,
    PlainHeads,
    RequestHead,
    may_be_plain,
    parse_plain,
)


def head(*lines: bytes, start: bytes = b"POST /v1/completions HTTP/1.1", length: bytes = b"7") -> bytes:
    """A plain head with these lines added."""
    length_line = [b"content-length: " + length] if length else []
    return b"\r\n".join([start, b"host: t", *lines, *length_line]) + b"\r\n\r\n"


def test_plain() -> None:
    """The path is unchanged, names are in lower case, values without outer blanks."""
    parsed = parse_plain(head(b"X-One:  a b ", b"x-one:\xff", start=b"POST /a%20b?c=d HTTP/1.1"))

    assert parsed is not None
    read, length = parsed
    assert ("/a%20b?c=d", "/a%20b", 7, True) == (read.path, read.route, length, read.wants_keep_alive)
    assert [("host", "t"), ("x-one", "a b"), ("x-one", "\udcff")] == read.fields


def test_connection_close() -> None:
    """`Connection: close` is recognized, also with a body of 0 bytes."""
    for length in (b"7", b"0"):
        parsed = parse_plain(head(b"Connection: close", length=length))

        assert parsed is not None
        assert not parsed[0].wants_keep_alive


@pytest.mark.parametrize(
    "data",
    [
        head(start=b"POST /v1/completions HTTP/1.0"),
        head(start=b"OPTIONS * HTTP/1.1"),
        head(start=b"CONNECT t:1 HTTP/1.1"),
        head(start=b"POST /v1/completions HTTP/1.2"),
        head(start=b"POST http://t/v1/completions HTTP/1.1"),
        head(start=b"POST /a\xff HTTP/1.1"),
        head(start=b"POST /a b HTTP/1.1"),
        head(length=b"-7"),
        head(length=b"+7"),
        head(length=b"7, 7"),
        head(length=b"9" * 40),
        head(b"content-length: 7"),
        head(b"content-length: 8"),
        head(b"transfer-encoding: chunked"),
        head(b"transfer-encoding: chunked", length=b""),
        head(b"Transfer-Encoding: identity"),
        head(b"content-encoding: gzip"),
        head(b"expect: 100-continue"),
        head(b"connection: upgrade", b"upgrade: websocket"),
        head().replace(b"host: t\r\n", b""),
        head(b"host: t"),
        head().replace(b"host: t", b"host: a b"),
        head(start=b"POST /v1/completions HTTP/2.0"),
        head(b"no colon"),
        head(b"blank : 1"),
        head(b": no name"),
        head(b"folded: 1", b" 2"),
        head(b"x: a\nx-evil: 1"),
        head(b"x: a\rx-evil: 1"),
        head(b"x: a\x00"),
        head().replace(b"\r\n", b"\n"),
        b"\r\n" + head()[:-2],
        b"\r\n\r\n",
    ],
)
def test_not_plain(data: bytes) -> None:
    """A head that is ambiguous, or changes how the body is read, is left to HeadReader."""
    assert parse_plain(data) is None


@given(st.binary(max_size=200))
def test_garbage(data: bytes) -> None:
    """Arbitrary bytes raise nothing."""
    parse_plain(b"POST /" + data + b"\r\n\r\n")


def test_beginnings() -> None:
    """The rest of a head is waited for only while the head may become plain."""
    plain = head()

    assert all(may_be_plain(plain[:end]) for end in range(len(plain)))
    assert not any(may_be_plain(data) for data in (b"GET", b"PUT /", b"\x16\x03\x01", b"\r\n", b"POST http"))
    assert not may_be_plain(b"POST /" + b"a" * MAX_LINE_BYTES)


def test_other_methods() -> None:
    """Without a length there is no body."""
    for method in (b"GET", b"DELETE", b"POST"):
        parsed = parse_plain(head(start=method + b" /a?b HTTP/1.1", length=b""))

        assert parsed is not None
        assert (method.decode(), "/a", 0) == (parsed[0].method, parsed[0].route, parsed[1])


LINES = [
    b"POST /v1/completions HTTP/1.1",
    b"POST /reservations/a HTTP/1.1",
    b"DELETE /reservations/b HTTP/1.1",
    *[b"GET " + path + b" HTTP/1.1" for path in (b"/root/a", b"/root", b"/a%20b", b"/a?b", b"/a#b", b" /a")],
    b"GET /a HTTP/1.0",
    b"PUT //a HTTP/1.1",
    b"CONNECT /a HTTP/1.1",
    b"get /a HTTP/1.1",
]
FIELDS = [
    (b"host: t", b"content-length: LENGTH"),
    (b"Content-Length:LENGTH", b"host: t"),
    (b"host: t", b"content-length: LENGTH", b"content-length: 7"),
    (b"host: t", b"content-length: 7", b"content-length: LENGTH"),
    (b"host: t", b"content-length: LENGTH", b"connection: close"),
    (b"host: t", b"content-length: +LENGTH"),
    (b"host: t", b"content-length: LENGTH ", b"transfer-encoding: chunked"),
    (b"host: t", b"x-length: LENGTH"),
    (b"host: t",),
    (b"host: t", b"x: y"),
    (b"host: t", b"connection: upgrade", b"upgrade: websocket"),
]
"""Heads that begin alike."""


@given(
    st.lists(st.tuples(st.sampled_from(LINES), st.sampled_from(FIELDS), st.integers(0, 10**16)), max_size=12)
)
def test_remembered_heads_equal_parsed_ones(heads: list[tuple[bytes, tuple[bytes, ...], int]]) -> None:
    """Heads that were read before do not change how a head is read."""
    remembering = PlainHeads("/root")
    for line, fields, length in heads:
        for _ in range(2):
            data = b"\r\n".join([line, *fields, b"", b""])
            data = data.replace(b"LENGTH", b"%d" % length)
            assert _facts(parse_plain(data, "/root")) == _facts(remembering.read(data))


def _facts(read: tuple[RequestHead, int] | None) -> tuple[object, ...] | None:
    if read is None:
        return None
    head, length = read
    facts = [getattr(head, name) for name in RequestHead.__slots__]
    return (*facts, length)


def test_remembered_heads_are_bounded() -> None:
    """Heads that differ in every request do not fill the memory."""
    heads = PlainHeads()
    for number in range(3 * MOST_HEADS):
        assert heads.read(head(b"x-request-id: %d" % number)) is not None

        assert heads.read(head(start=b"GET /%d HTTP/1.1" % number)) is not None

    assert MOST_HEADS >= max(len(heads._known), len(heads._alike))


def test_end_with_bare_line_feeds() -> None:
    """A head that ends with bare LFs is complete for its writer: it is left to HeadReader, not waited for."""
    data = head().replace(b"\r\n", b"\n")

    assert may_be_plain(data[:-1])
    assert not may_be_plain(data)


def test_head_within_another() -> None:
    """What stands below a line is remembered only if that line needs no parser."""
    heads, first = PlainHeads(), head(start=b"POST /v1/completions?a=b HTTP/1.1")

    assert heads.read(first) is not None
    assert heads.read(b"GET /health HTTP/1.1\r\n" + first) is None
