"""Heads and bodies as bytes, in reads of any size."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.relay.framing import (
    CHUNK_START_BYTES,
    LAST_CHUNK,
    MAX_HEAD_BYTES,
    Body,
    ChunkContent,
    ChunkedBody,
    FramingError,
    LengthBody,
    ResponseHead,
    UntilCloseBody,
    body_of,
    chunk,
    chunk_bytes,
    content_of,
    hop_by_hop,
    parse_head,
)

contents = st.lists(st.binary(min_size=1, max_size=40), max_size=8)
extensions = st.sampled_from([b"", b";a=b", b" ; x"])
trailers = st.sampled_from([b"", b"x-one: 1\r\n", b"x-one: 1\r\nx-two: 2\r\n"])


@st.composite
def chunked_bodies(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A chunked body and its content."""
    parts = draw(contents)
    framed = b"".join(b"%X%s\r\n%s\r\n" % (len(part), draw(extensions), part) for part in parts)
    return framed + b"0\r\n" + draw(trailers) + b"\r\n", b"".join(parts)


@st.composite
def cuts(draw: st.DrawFn, data: bytes) -> list[bytes]:
    """The data in pieces."""
    ends = sorted(draw(st.lists(st.integers(0, len(data)), max_size=10)))
    starts = [0, *ends]
    return [data[start:end] for start, end in zip(starts, [*ends, len(data)], strict=True)]


def feed(body: Body, pieces: list[bytes]) -> int:
    """How many bytes of the pieces belong to the body."""
    taken = 0
    for piece in pieces:
        if body.is_over:
            break
        taken += body.feed(piece)
    return taken


def head(*lines: bytes) -> ResponseHead:
    """A parsed head of status 200 with these header lines."""
    return parse_head(b"\r\n".join([b"HTTP/1.1 200 OK", *lines]))


@given(st.data(), chunked_bodies(), st.binary(max_size=20))
def test_any_cut(data: st.DataObject, body: tuple[bytes, bytes], more: bytes) -> None:
    """A chunked body ends at the same byte in reads of any size, and what follows it is not taken."""
    pieces = data.draw(cuts(body[0] + more))
    chunked = ChunkedBody()

    assert len(body[0]) == feed(chunked, pieces)
    assert chunked.is_over


@given(st.data(), chunked_bodies())
def test_any_cut_has_the_same_content(data: st.DataObject, body: tuple[bytes, bytes]) -> None:
    """The content is complete in reads of any size."""
    taken_out = ChunkContent()

    assert body[1] == b"".join(taken_out.feed(piece) for piece in data.draw(cuts(body[0])))


@given(st.data(), chunked_bodies())
def test_content_of_a_beginning(data: st.DataObject, body: tuple[bytes, bytes]) -> None:
    """The content of a whole body, of one chunk, or of any beginning of a body can be extracted."""
    one = chunk(data.draw(st.binary(min_size=1, max_size=300)))
    beginning = (one + body[0])[: data.draw(st.integers(0, len(one + body[0])))]

    assert body[1] == content_of(body[0])
    assert one == chunk(content_of(one))
    assert ChunkContent().feed(beginning) == content_of(beginning)


@given(chunked_bodies(), contents)
def test_boundaries(body: tuple[bytes, bytes], parts: list[bytes]) -> None:
    """The places between two chunks are boundaries, and no others."""
    ends = {0}
    framed = b""
    for part in parts:
        framed += chunk(part)
        ends.add(len(framed))

    for end in range(len(framed) + 1):
        chunked = ChunkedBody()
        chunked.feed(framed[:end])
        assert (end in ends) == chunked.is_at_boundary


@given(st.integers(1, 5000), st.booleans())
def test_first_bytes_of_a_chunk(size: int, is_upper: bool) -> None:
    """They give the length of a chunk below 4 KiB, but not of a longer one or of the last."""
    line = b"%X\r\n" % size if is_upper else b"%x\r\n" % size
    framed = line + b"x" * size + b"\r\n"

    assert (len(framed) if size < 4096 else 0) == chunk_bytes(framed[:CHUNK_START_BYTES])
    assert 0 == chunk_bytes(LAST_CHUNK[:CHUNK_START_BYTES])


@given(st.data(), chunked_bodies())
def test_whole_chunks_need_not_be_fed(data: st.DataObject, body: tuple[bytes, bytes]) -> None:
    """A body ends at the same byte whether whole chunks at boundaries are fed or not."""
    chunked = ChunkedBody()
    pieces = [piece for piece in data.draw(cuts(body[0])) if piece]
    for piece in pieces:
        assert not chunked.is_over
        if not (chunked.is_at_boundary and chunk_bytes(piece[:CHUNK_START_BYTES]) == len(piece)):
            assert len(piece) == chunked.feed(piece)

    assert chunked.is_over


@given(st.binary(max_size=200))
def test_garbage(data: bytes) -> None:
    """Arbitrary bytes are parsed or raise FramingError; nothing else is raised."""
    for parse in (parse_head, ChunkedBody().feed, chunk_bytes):
        with contextlib.suppress(FramingError):
            parse(data)


@given(st.lists(st.tuples(st.binary(max_size=20), st.binary(max_size=20)), max_size=4))
def test_heads_of_garbage(lines: list[tuple[bytes, bytes]]) -> None:
    """No control character reaches the client in a header."""
    try:
        parsed = head(*(name + b": " + value for name, value in lines))
    except FramingError:
        return
    joined = b"".join(name + value for name, value in parsed.headers.items())
    assert not {*joined, *parsed.forwarded.replace(b"\r\n", b"")} & {0, 10, 13, 127}


def test_head() -> None:
    """Names are in lower case, values without outer blanks, the reason is unchanged."""
    parsed = parse_head(b"HTTP/1.1 299 Very Fine\r\nX-One:  1 \r\nx-one:2\r\nContent-Length: 7")

    assert (299, 7, False, True) == (parsed.status, parsed.length, parsed.is_chunked, parsed.keeps_alive)
    assert b"HTTP/1.1 299 Very Fine\r\nx-one: 1\r\nx-one: 2\r\ncontent-length: 7\r\n" == parsed.forwarded
    assert {b"x-one": b"2", b"content-length": b"7"} == parsed.headers


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"HTTP/2 200 OK",
        b"HTTP/1.1 20 OK",
        b"HTTP/1.1 099 OK",
        b"HTTP/1.1 2000 OK",
        b"HTTP/1.1 200 O\nK",
        b"HTTP/1.1 200 OK\r\nno colon",
        b"HTTP/1.1 200 OK\r\n: no name",
        b"HTTP/1.1 200 OK\r\n folded: 1",
        b"HTTP/1.1 200 OK\r\nname : 1",
        b"HTTP/1.1 200 OK\r\nx: 1\nset-cookie: 2",
        b"HTTP/1.1 200 OK\r\nx: 1\rset-cookie: 2",
        b"HTTP/1.1 200 OK\r\nx: \x00",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1, 1",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\nContent-Length: 1",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\ntransfer-encoding: chunked",
        b"HTTP/1.1 200 OK\r\nin ner: 1",
        b"HTTP/1.1 200 OK\r\ncontent-length: " + b"9" * 5000,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked",
    ],
)
def test_invalid_heads(data: bytes) -> None:
    """Heads that cannot be forwarded to a client are rejected."""
    with pytest.raises(FramingError):
        parse_head(data)


def test_hop_by_hop() -> None:
    """Hop-by-hop headers are left out, and what `connection` names, but never the length."""
    parsed = head(
        b"connection: x-private, content-length",
        b"connection: X-Other",
        b"keep-alive: 5",
        b"x-private: 1",
        b"x-other: 2",
        b"content-length: 3",
        b"x-kept: 4",
    )

    assert b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\nx-kept: 4\r\n" == parsed.forwarded
    assert b"x-a" in hop_by_hop(b"close , X-A")


def test_chunks_beat_length() -> None:
    """With both, the chunks count, and the length is not forwarded: a client might use it."""
    parsed = head(b"content-length: 3", b"transfer-encoding: chunked")

    assert (True, None, b"HTTP/1.1 200 OK\r\n") == (parsed.is_chunked, parsed.length, parsed.forwarded)


@pytest.mark.parametrize(
    ("lines", "kind"),
    [
        ([b"content-length: 3"], LengthBody),
        ([b"transfer-encoding: chunked"], ChunkedBody),
        ([b"transfer-encoding: identity", b"content-length: 3"], LengthBody),
        ([], UntilCloseBody),
    ],
)
def test_kinds_of_body(lines: list[bytes], kind: type[Body]) -> None:
    """The head defines how the body ends."""
    assert isinstance(body_of(head(*lines)), kind)


@pytest.mark.parametrize(
    ("data", "keeps"),
    [
        (b"HTTP/1.1 200 OK", True),
        (b"HTTP/1.1 200 OK\r\nconnection: Close", False),
        (b"HTTP/1.0 200 OK", False),
        (b"HTTP/1.0 200 OK\r\nconnection: Keep-Alive", True),
    ],
)
def test_keep_alive(data: bytes, keeps: bool) -> None:
    """The head defines whether the worker's connection can be used again."""
    assert keeps == parse_head(data).keeps_alive


def test_event_stream() -> None:
    """Parameters and case of the content type do not matter."""
    assert head(b"Content-Type: Text/Event-Stream; charset=utf-8").is_event_stream
    assert not head(b"content-type: application/json").is_event_stream


@pytest.mark.parametrize("line", [b"\r\n", b"g\r\n", b"-1\r\n", b"1" * 17 + b"\r\n", b"0x5\r\n", b"x" * 2000])
def test_invalid_chunk_size(line: bytes) -> None:
    """An invalid size line raises, and one without an end as well."""
    with pytest.raises(FramingError):
        ChunkedBody().feed(line)


def test_limit_of_heads() -> None:
    """The limit for heads is above what any engine sends."""
    assert MAX_HEAD_BYTES >= 64 * 1024
