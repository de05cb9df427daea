"""The small HTTP client: framing, keep-alive, and errors for malformed answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.kit.http_client import Client, HttpError, _Chunked, request_bytes

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = b"5\r\nhello\r\n8;why=not\r\n\r\nworld!\r\n0\r\nx-trailer: 1\r\n\r\n"


@asynccontextmanager
async def serving(*answers: bytes) -> AsyncIterator[str]:
    """A server that accepts connections one after the other, and answers each request with the same bytes.

    An answer that ends in `CLOSE` closes the connection.
    """
    left = iter(answers)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer = next(left)
        while await reader.readline():
            while await reader.readline() not in {b"\r\n", b""}:
                pass
            writer.write(answer.removesuffix(b"CLOSE"))
            if answer.endswith(b"CLOSE"):
                break
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    """Closed after the test."""
    client = Client()
    yield client
    client.close()


async def answer(client: Client, raw: bytes) -> tuple[int, bytes]:
    """The client's result for an answer."""
    async with serving(raw) as url:
        return await client.get(url)


@given(st.sets(st.integers(1, len(CHUNKED) - 1)))
def test_chunks_however_they_arrive(cuts: set[int]) -> None:
    """The payload is the same for any segmentation by TCP."""
    body = _Chunked()
    edges = [0, *sorted(cuts), len(CHUNKED)]
    fed = [body.feed(CHUNKED[start:end]) for start, end in pairwise(edges)]

    assert b"hello\r\nworld!" == b"".join(payload for payload, _ in fed)
    assert [False] * (len(fed) - 1) + [True] == [is_over for _, is_over in fed]


async def test_framings(client: Client) -> None:
    """A body has chunks, a length, or ends with the connection."""
    assert (200, b"hello\r\nworld!") == await answer(
        client, OK + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKED
    )
    assert (503, b"no") == await answer(client, b"HTTP/1.1 503 Busy\r\ncontent-length: 2\r\n\r\nno")
    assert (200, b"all of it") == await answer(client, OK + b"\r\nall of itCLOSE")


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"CLOSE", "closed before the answer was complete"),
        (OK + b"content-length: 3\r\n\r\nnoCLOSE", "closed before the answer was complete"),
        (OK + b"content-length: 3\r\n\r\nmore", "1 bytes more than content-length"),
        (OK + b"content-length: many\r\n\r\n", "invalid literal"),
        (OK + b"transfer-encoding: chunked\r\n\r\nzz\r\n", "chunk size expected, got b'zz'"),
        (OK + b"transfer-encoding: chunked\r\n\r\n3\r\nnoCLOSE", "closed before the answer was complete"),
        (b"SSH-2.0\r\n\r\n", "not an HTTP answer: 'SSH-2.0'"),
        (b"x" * 100_000, "the head never ends"),
    ],
)
async def test_broken_answers(client: Client, raw: bytes, says: str) -> None:
    """Each malformed answer is an HttpError with its reason."""
    with pytest.raises(HttpError, match=says):
        await answer(client, raw)


async def test_no_server_listens(client: Client, free_port: Callable[[], int]) -> None:
    """A refused connection is an HttpError."""
    with pytest.raises(HttpError, match=r"cannot connect to 127\.0\.0\.1"):
        await client.get(f"http://127.0.0.1:{free_port()}")


async def test_keep_alive(client: Client) -> None:
    """A connection is reused: this server accepts only one."""
    async with serving(OK + b"content-length: 2\r\n\r\nok") as url:
        assert (200, b"ok") == await client.get(url)
        assert (200, b"ok") == await client.get(url)


async def test_connection_closed_after_use(client: Client) -> None:
    """A request on a connection that the server has closed is sent once more, on another."""
    good = OK + b"content-length: 2\r\n\r\nok"
    async with serving(good + b"CLOSE", good) as url:
        assert (200, b"ok") == await client.get(url)
        assert (200, b"ok") == await client.get(url)


async def test_json(client: Client) -> None:
    """A status other than 200 is an error that shows the body."""
    async with serving(OK + b'content-length: 7\r\n\r\n{"a":1}') as url:
        assert {"a": 1} == await client.get_json(url)
    async with serving(b"HTTP/1.1 404 No\r\ncontent-length: 4\r\n\r\ngone") as url:
        with pytest.raises(HttpError, match="answers 404: gone"):
            await client.get_json(url)


def test_request_bytes() -> None:
    """A request has path, query, headers, body and its length."""
    raw = request_bytes("POST", "http://host:1/a/b?c=d", b"{}", {"x-request-id": "7"})

    assert (
        b"POST /a/b?c=d HTTP/1.1\r\nHost: host:1\r\nx-request-id: 7\r\n"
        b"Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
    ) == raw


async def test_cancelled_request_closes_its_connection(client: Client) -> None:
    """A cancelled request closes its connection, so that the server notices."""
    arrived, gone = asyncio.Event(), asyncio.Event()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        arrived.set()
        with suppress(ConnectionResetError):
            await reader.read()
        gone.set()
        writer.close()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        request = asyncio.ensure_future(client.get(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
        await arrived.wait()
        request.cancel()
        await gone.wait()
