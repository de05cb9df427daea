"""Requests that are not valid HTTP, or ambiguous: each is refused, and none is served.

An intermediary in front of the router may read such bytes in another way than the router does: what it takes
for a body the router might take for a request (request smuggling).
"""

from __future__ import annotations

import json

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.errors import HeadTooLargeError, KvRouterError
from kvrouter.relay.request import MAX_LINE_BYTES
from kvrouter.relay.request_parser import MAX_HEAD_BYTES, ChunkFraming, HeadReader
from tests.frontend.fleet import BODY, FleetOf
from tests.frontend.workers import turns, until
from tests.long import examples
from tests.relay.test_connection import PATH, Scene, pieces_of, plain

HOST = b"host: t"
CHUNKED = b"transfer-encoding: chunked"
EVIL = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: 4\r\n\r\nevil"
"""What a smuggled request looks like."""


def head(*lines: bytes, start: bytes = b"POST /v1/completions HTTP/1.1") -> bytes:
    return b"\r\n".join([start, *lines]) + b"\r\n\r\n"


def chunks(text: bytes) -> bytes:
    return head(HOST, CHUNKED) + text + EVIL


def line(text: bytes) -> bytes:
    """A request whose only fault is in this header line."""
    return head(HOST, b"content-length: 2", text) + b"{}"


MALFORMED: dict[str, tuple[int, bytes]] = {
    # Two statements about the body's end
    "length and chunks": (400, head(HOST, b"content-length: 3", CHUNKED) + b"0\r\n\r\n" + EVIL),
    "chunks and length": (400, head(HOST, CHUNKED, b"content-length: 3") + b"0\r\n\r\n" + EVIL),
    "two equal lengths": (400, head(HOST, b"content-length: 2", b"content-length: 2") + b"{}"),
    "two lengths": (400, head(HOST, b"content-length: 0", b"content-length: 2") + b"{}"),
    "two lengths in one line": (400, head(HOST, b"content-length: 2, 2") + b"{}"),
    "two cases of length": (400, head(HOST, b"content-length: 2", b"Content-LENGTH: 4") + b"{}"),
    # Lengths
    "negative length": (400, head(HOST, b"content-length: -2")),
    "signed length": (400, head(HOST, b"content-length: +2") + b"{}"),
    "hex length": (400, head(HOST, b"content-length: 0x2") + b"{}"),
    "fraction as length": (400, head(HOST, b"content-length: 2.0") + b"{}"),
    "underscore in length": (400, head(HOST, b"content-length: 1_0") + b"{}"),
    "blank in length": (400, head(HOST, b"content-length: 1 0") + b"{}"),
    "empty length": (400, head(HOST, b"content-length:") + b"{}"),
    "word as length": (400, head(HOST, b"content-length: two") + b"{}"),
    "length beyond 64 bits": (400, head(HOST, b"content-length: " + b"9" * 40)),
    "length in quotes": (400, head(HOST, b'content-length: "2"') + b"{}"),
    "length in other digits": (400, head(HOST, "content-length: ²".encode()) + b"{}"),
    "length above the limit": (413, head(HOST, b"content-length: 99999999")),
    # transfer-encoding
    "unknown coding": (400, head(HOST, b"transfer-encoding: xchunked") + b"0\r\n\r\n"),
    "identity": (400, head(HOST, b"transfer-encoding: identity") + EVIL),
    "gzip before chunked": (400, head(HOST, b"transfer-encoding: gzip, chunked") + b"0\r\n\r\n"),
    "gzip line before chunked": (400, head(HOST, b"transfer-encoding: gzip", CHUNKED) + b"0\r\n\r\n"),
    "chunked is not last": (400, head(HOST, b"transfer-encoding: chunked, identity") + b"0\r\n\r\n"),
    "chunked twice": (400, head(HOST, b"transfer-encoding: chunked, chunked") + b"0\r\n\r\n"),
    "two lines chunked": (400, head(HOST, CHUNKED, CHUNKED) + b"0\r\n\r\n"),
    "chunked in quotes": (400, head(HOST, b'transfer-encoding: "chunked"') + b"0\r\n\r\n"),
    "chunked and a semicolon": (400, head(HOST, b"transfer-encoding: chunked;") + b"0\r\n\r\n"),
    "vertical tab before chunked": (400, head(HOST, b"transfer-encoding:\x0bchunked") + b"0\r\n\r\n"),
    "NUL after chunked": (400, head(HOST, b"transfer-encoding: chunked\x00") + b"0\r\n\r\n"),
    "no coding": (400, head(HOST, b"transfer-encoding:") + EVIL),
    "blank before the colon of a coding": (400, head(HOST, b"transfer-encoding : chunked") + b"0\r\n\r\n"),
    "chunked on a folded line": (400, head(HOST, b"transfer-encoding:", b" chunked") + b"0\r\n\r\n"),
    "chunks in HTTP/1.0": (
        400,
        head(HOST, CHUNKED, start=b"POST /v1/completions HTTP/1.0") + b"0\r\n\r\n" + EVIL,
    ),
    "chunks in HTTP/1.0, kept alive": (
        400,
        head(HOST, CHUNKED, b"connection: keep-alive", start=b"POST /v1/completions HTTP/1.0") + EVIL,
    ),
    # Chunks
    "bare LF after a size": (400, chunks(b"2\n{}\r\n0\r\n\r\n")),
    "bare LF after a chunk": (400, chunks(b"2\r\n{}\n0\r\n\r\n")),
    "bare CR after a size": (400, chunks(b"2\r{}\r\n0\r\n\r\n")),
    "chunk longer than its size": (400, chunks(b"2\r\n{}}\r\n0\r\n\r\n")),
    "chunk shorter than its size": (400, chunks(b"3\r\n{}\r\n0\r\n\r\n")),
    "hex prefix of a size": (400, chunks(b"0x2\r\n{}\r\n0\r\n\r\n")),
    "signed size": (400, chunks(b"+2\r\n{}\r\n0\r\n\r\n")),
    "negative size": (400, chunks(b"-2\r\n{}\r\n0\r\n\r\n")),
    "underscore in a size": (400, chunks(b"0_2\r\n{}\r\n0\r\n\r\n")),
    "blank before a size": (400, chunks(b" 2\r\n{}\r\n0\r\n\r\n")),
    "blank after a size": (400, chunks(b"2 \r\n{}\r\n0\r\n\r\n")),
    "tab after a size": (400, chunks(b"2\t\r\n{}\r\n0\r\n\r\n")),
    "no size": (400, chunks(b"\r\n{}\r\n0\r\n\r\n")),
    "word as size": (400, chunks(b"two\r\n{}\r\n0\r\n\r\n")),
    "size beyond 64 bits": (400, chunks(b"f" * 17 + b"\r\n{}\r\n0\r\n\r\n")),
    "size above the limit": (413, chunks(b"3e9\r\n" + b"{" * 1001 + b"\r\n0\r\n\r\n")),
    "NUL in an extension": (400, chunks(b"2;a\x00\r\n{}\r\n0\r\n\r\n")),
    "bare LF in an extension": (400, chunks(b"2;a\nb\r\n{}\r\n0\r\n\r\n")),
    "bare CR in an extension": (400, chunks(b"2;a\rb\r\n{}\r\n0\r\n\r\n")),
    "empty extension": (400, chunks(b"2;\r\n{}\r\n0\r\n\r\n")),
    "extension in open quotes": (400, chunks(b'2;a="b\r\n{}\r\n0\r\n\r\n')),
    "bare LF in quotes of an extension": (400, chunks(b'2;a="\n"\r\n{}\r\n0\r\n\r\n')),
    "endless extension": (400, chunks(b"2;" + b"a" * MAX_LINE_BYTES + b"\r\n{}\r\n0\r\n\r\n")),
    "endless size": (400, chunks(b"0" * MAX_LINE_BYTES + b"2\r\n{}\r\n0\r\n\r\n")),
    "trailer without a colon": (400, chunks(b"2\r\n{}\r\n0\r\nx y\r\n\r\n")),
    "length in the trailers": (400, chunks(b"2\r\n{}\r\n0\r\ncontent-length: 5\r\n\r\n")),
    "folded trailer": (400, chunks(b"2\r\n{}\r\n0\r\n x: y\r\n\r\n")),
    "bare LF after the trailers": (400, chunks(b"2\r\n{}\r\n0\r\n\n")),
    "NUL in a trailer": (400, chunks(b"2\r\n{}\r\n0\r\nx: \x00\r\n\r\n")),
    "many trailers": (400, chunks(b"2\r\n{}\r\n0\r\n" + b"x: y\r\n" * 12_000 + b"\r\n")),
    # Lines
    "bare LFs": (400, head(HOST, b"content-length: 2").replace(b"\r\n", b"\n") + b"{}"),
    "bare LF after the request line": (400, b"POST /v1/completions HTTP/1.1\nhost: t\r\n\r\n"),
    "bare LF after a header": (400, line(b"x: y\nx-evil: 1")),
    "bare LF as empty line": (400, head(HOST)[:-2] + b"\n" + EVIL),
    "bare LF before the request": (400, b"\n" + plain(b"{}")),
    "bare CR in a header": (400, line(b"x: y\rx-evil: 1")),
    "bare CR before the request": (400, b"\r" + plain(b"{}")),
    "folded line": (400, line(b"x: y\r\n z")),
    "line folded with a tab": (400, line(b"x: y\r\n\tz")),
    "folded first line": (400, head(b" x: y", HOST)),
    "blank before a colon": (400, line(b"x : y")),
    "tab before a colon": (400, line(b"x\t: y")),
    "blank before the colon of host": (400, head(b"host : t", b"content-length: 2") + b"{}"),
    "no name": (400, line(b": y")),
    "no colon": (400, line(b"x")),
    "parentheses in a name": (400, line(b"(x): y")),
    "name that is not ASCII": (400, line("x-é: y".encode())),
    "NUL in a name": (400, line(b"x\x00: y")),
    "NUL in a value": (400, line(b"x: \x00")),
    "control character in a value": (400, line(b"x: \x01")),
    "DEL in a value": (400, line(b"x: \x7f")),
    # host
    "no host": (400, head(b"content-length: 2") + b"{}"),
    "two hosts": (400, head(HOST, b"host: u", b"content-length: 2") + b"{}"),
    "two equal hosts": (400, head(HOST, HOST, b"content-length: 2") + b"{}"),
    "two hosts in HTTP/1.0": (400, head(HOST, HOST, start=b"POST /v1/completions HTTP/1.0")),
    "two hosts in one line": (400, head(b"host: t, u", b"content-length: 2") + b"{}"),
    "blank in host": (400, head(b"host: a b", b"content-length: 2") + b"{}"),
    "path in host": (400, head(b"host: t/x", b"content-length: 2") + b"{}"),
    "user in host": (400, head(b"host: a@b", b"content-length: 2") + b"{}"),
    "open bracket in host": (400, head(b"host: [::1", b"content-length: 2") + b"{}"),
    "word as port": (400, head(b"host: t:http", b"content-length: 2") + b"{}"),
    "host that is not ASCII": (400, head("host: é".encode(), b"content-length: 2") + b"{}"),
    # Request lines
    "HTTP/0.9": (400, b"GET /live\r\n\r\n"),
    "HTTP/0.9 with a version": (505, head(HOST, start=b"GET /live HTTP/0.9")),
    "HTTP/2.0": (505, head(HOST, start=b"GET /live HTTP/2.0")),
    "preface of HTTP/2": (505, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "HTTP/3.0": (505, head(HOST, start=b"GET /live HTTP/3.0")),
    "HTTP/1.2": (400, head(HOST, start=b"GET /live HTTP/1.2")),
    "HTTP/1": (400, head(HOST, start=b"GET /live HTTP/1")),
    "HTTP/11": (400, head(HOST, start=b"GET /live HTTP/11")),
    "http/1.1": (400, head(HOST, start=b"GET /live http/1.1")),
    "HTTPS/1.1": (400, head(HOST, start=b"GET /live HTTPS/1.1")),
    "ICE/1.0": (400, head(HOST, start=b"SOURCE /live ICE/1.0")),
    "RTSP/1.0": (400, head(HOST, start=b"ANNOUNCE /live RTSP/1.0")),
    "two blanks before the target": (400, head(HOST, start=b"GET  /live HTTP/1.1")),
    "two blanks before the version": (400, head(HOST, start=b"GET /live  HTTP/1.1")),
    "tab before the target": (400, head(HOST, start=b"GET\t/live HTTP/1.1")),
    "blank after the version": (400, head(HOST, start=b"GET /live HTTP/1.1 ")),
    "blank before the method": (400, head(HOST, start=b" GET /live HTTP/1.1")),
    "blank in the target": (400, head(HOST, start=b"GET /li ve HTTP/1.1")),
    "no target": (400, head(HOST, start=b"GET HTTP/1.1")),
    "small letters": (400, head(HOST, start=b"get /live HTTP/1.1")),
    "unknown method": (400, head(HOST, start=b"FETCH /live HTTP/1.1")),
    "NUL in the target": (400, head(HOST, start=b"GET /li\x00ve HTTP/1.1")),
    "target that is not ASCII": (400, head(HOST, start="GET /é HTTP/1.1".encode())),
    "fragment": (400, head(HOST, b"content-length: 2", start=b"POST /v1/completions#x HTTP/1.1") + b"{}"),
    "relative target": (400, head(HOST, start=b"GET live HTTP/1.1")),
    "authority as target": (400, head(HOST, start=b"CONNECT t:80 HTTP/1.1")),
    "another scheme": (400, head(HOST, start=b"GET ftp://t/live HTTP/1.1")),
    "URL without a host": (400, head(HOST, start=b"GET http:///live HTTP/1.1")),
    "URL with a user": (400, head(HOST, start=b"GET http://a@t/live HTTP/1.1")),
    "URL with a broken host": (400, head(HOST, start=b"GET http://[::1/live HTTP/1.1")),
    "TLS": (400, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
    "text": (400, b"nonsense\r\n\r\n"),
    # Sizes
    "endless target": (414, head(HOST, start=b"GET /" + b"a" * MAX_LINE_BYTES + b" HTTP/1.1")),
    "endless target of a plain request": (414, b"POST /" + b"a" * MAX_LINE_BYTES),
    "endless header": (431, line(b"x: " + b"y" * MAX_LINE_BYTES)),
    "endless name": (431, line(b"x" * MAX_LINE_BYTES + b": y")),
    "many headers": (431, head(HOST, *[b"x: " + b"y" * 1000] * 70)),
    "endless headers": (431, b"GET /live HTTP/1.1\r\nhost: t\r\n" + b"x: y\r\n" * 12_000),
    # What is expected, and how the body is packed
    "expectation": (417, line(b"expect: wonders")),
    "two expectations": (417, line(b"expect: 100-continue, wonders")),
    "unknown packing": (415, line(b"content-encoding: compress")),
    "packed too often": (415, line(b"content-encoding: gzip, gzip, gzip, gzip")),
    "expectation on an unknown path": (
        404,
        head(HOST, b"content-length: 2", b"expect: 100-continue", start=b"POST /nowhere HTTP/1.1") + b"{}",
    ),
    "body above the limit, expected": (
        413,
        head(HOST, b"content-length: 99999999", b"expect: 100-continue"),
    ),
}


def test_enough_cases() -> None:
    """The corpus has at least 90 cases."""
    assert len(MALFORMED) >= 90


async def _refused(sent: list[bytes]) -> tuple[list[int], list[tuple[str, bytes]], bytes]:
    """Statuses, what was served, and all that was written for these reads."""
    scene = Scene()
    scene.read(*sent)
    await until(lambda: scene.transport.said_eof, "it is refused")
    scene.end()
    return scene.statuses, scene.served, scene.transport.written


@pytest.mark.parametrize("name", MALFORMED)
async def test_refused(name: str) -> None:
    """Each gets one answer in OpenAI's form and then the end of the connection. Nothing is served."""
    status, sent = MALFORMED[name]
    statuses, served, written = await _refused([sent])
    answer_head, _, body = written.partition(b"\r\n\r\n")

    assert ([status], []) == (statuses, served)
    assert status == json.loads(body)["error"]["code"]
    assert b"connection: close" in answer_head


@pytest.mark.parametrize("name", MALFORMED)
async def test_refused_after_a_good_one(name: str) -> None:
    """After a request that is served, pipelined, the answer is the same."""
    status, sent = MALFORMED[name]
    scene = Scene()
    scene.read(plain(b"good") + sent)
    await until(lambda: scene.transport.said_eof, "it is refused")
    scene.end()

    assert ([status], [(PATH, b"good")]) == (scene.statuses, scene.served)


def _without_id(written: bytes) -> bytes:
    lines = written.split(b"\r\n")
    return b"\r\n".join(each for each in lines if not each.startswith(b"x-request-id"))


@given(data=st.data(), name=st.sampled_from(sorted(MALFORMED)))
async def test_any_cut(data: st.DataObject, name: str) -> None:
    """The same answer, to the last byte, comes for reads of any size."""
    _, sent = MALFORMED[name]
    *_, whole = await _refused([sent])
    *_, in_pieces = await _refused(data.draw(pieces_of(sent)))

    assert _without_id(whole) == _without_id(in_pieces)


async def test_no_worker_gets_one(fleet_of: FleetOf) -> None:
    """Through a frontend: each is refused, no worker gets a request, and the connection ends."""
    too_small = {"size above the limit", "length above the limit", "body above the limit, expected"}
    async with fleet_of("--max-body-mib", "1") as fleet:
        for name, (status, sent) in MALFORMED.items():
            if name in too_small:
                continue  # for the limit of this frontend
            async with fleet.connected() as client:
                client.writer.write(sent)
                response = await client.response()

                assert status == response.status == response.json["error"]["code"], name
                assert await client.is_closed(), name
        assert not fleet.requests
        assert 200 == (await fleet.ask(BODY)).status


FRAGMENTS = [
    plain(b"good"),
    head(HOST, start=b"GET /live HTTP/1.1"),
    head(HOST, CHUNKED),
    b"4\r\nbody\r\n",
    b"0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\n",
    b"GET /nowhere HTTP/1.0\r\n",
    b"host: t\r\n",
    b"content-length: 4\r\n",
    b"content-length: 1001\r\n",
    b"transfer-encoding: chunked\r\n",
    b"expect: 100-continue\r\n",
    b"connection: close\r\n",
    b"connection: upgrade\r\nupgrade: h2c\r\n",
    b"x: " + b"y" * 4000 + b"\r\n",
    b"\r\n",
    b"\n",
    b"body",
    b"\x00",
]


@examples(300)
@given(data=st.data(), fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=10))
async def test_any_bytes(data: st.DataObject, fragments: list[bytes]) -> None:
    """Any mixture of good and bad requests: what is served and written does not depend on the reads."""
    sent = b"".join(fragments)

    assert await _outcome([sent]) == await _outcome(data.draw(pieces_of(sent)))


async def test_nothing_is_served_after_a_close() -> None:
    """Bytes that arrive once the connection closes: TLS hands some over while it ends."""
    scene = Scene()
    scene.read(b"GET /live HTTP/1.0\r\n\r\n")
    await until(lambda: scene.transport.ended, "the connection closes")
    scene.read(plain(b"late"))
    await turns(10)
    assert [("/live", b"")] == scene.served
    scene.end()


async def _outcome(reads: list[bytes]) -> tuple[list[tuple[str, bytes]], bytes, bool]:
    """What was served and written, and whether the connection was ended."""
    scene = Scene()
    for read in reads:
        scene.read(read)
        await turns(60)
    scene.end()
    return (
        scene.served,
        _without_id(scene.transport.written),
        scene.transport.said_eof or scene.transport.ended,
    )


# Against llhttp, which reads the same bytes in one piece

TOKENS = [
    b"0",
    b"2",
    b"a",
    b"{}",
    b"\r\n",
    b"\n",
    b"\r",
    b";",
    b"=",
    b'"',
    b"\\",
    b" ",
    b"\x00",
    b"x: y",
    b":",
    b"5\r\nhello",
]


class _Whole:
    """What llhttp reports of a message and of what follows it."""

    def __init__(self) -> None:
        self.body = b""
        self.is_complete = False

    def on_body(self, body: bytes) -> None:
        if not self.is_complete:
            self.body += body

    def on_message_complete(self) -> None:
        self.is_complete = True


def _by_llhttp(text: bytes) -> tuple[bool, bytes]:
    whole = _Whole()
    parser = httptools.HttpRequestParser(whole)
    try:
        parser.feed_data(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n" + text)
    except httptools.HttpParserError:
        if not whole.is_complete:
            return False, b""
    return whole.is_complete, whole.body


@examples(500)
@given(data=st.data(), tokens=st.lists(st.sampled_from(TOKENS), max_size=12))
def test_chunks_as_llhttp_reads_them(data: st.DataObject, tokens: list[bytes]) -> None:
    """Any bytes as a chunked body, in reads of any size: end and content are the same as for llhttp."""
    text = b"".join(tokens) + data.draw(st.sampled_from([b"", b"0\r\n\r\n", b"\r\n0\r\n\r\n"]))
    framing, content = ChunkFraming(), b""
    try:
        for piece in data.draw(pieces_of(text)):
            content += framing.take(piece)[0]
    except KvRouterError:
        assert not framing.is_whole

    assert _by_llhttp(text) == (framing.is_whole, content if framing.is_whole else _by_llhttp(text)[1])


@given(data=st.data(), garbage=st.binary(max_size=120))
def test_garbage_as_head(data: st.DataObject, garbage: bytes) -> None:
    """Any bytes, in reads of any size, give the same head or the same error."""
    text = data.draw(st.sampled_from([b"", b"GET / HTTP/1.1\r\n", head(HOST)[:-2]])) + garbage + b"\r\n\r\n"

    assert _head_of([text]) == _head_of(data.draw(pieces_of(text)))


def _head_of(pieces: list[bytes]) -> object:
    reader, rest = HeadReader(), b""
    try:
        for piece in pieces:
            rest += reader.feed(piece) if not reader.is_complete else piece
        if not reader.is_complete:
            return None
        read = reader.head()
    except KvRouterError as error:
        return str(error)
    return read.head.method, read.head.path, read.head.fields, read.length, rest


def test_largest_head() -> None:
    """A head of the largest size is read; one byte more is too much."""
    lines = [b"x: " + b"y" * 8000] * 8
    fill = MAX_HEAD_BYTES - len(head(HOST, *lines, b"x: "))
    largest, larger = HeadReader(), HeadReader()

    assert largest.feed(head(HOST, *lines, b"x: " + b"y" * fill)) == b""
    assert largest.is_complete
    with pytest.raises(HeadTooLargeError):
        larger.feed(head(HOST, *lines, b"x: " + b"y" * (fill + 1)))
