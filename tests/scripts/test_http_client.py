"""The HTTP client of scripts: pieces of a body, keep-alive, and errors for malformed answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from scripts.kit.http_client import Client, HttpError, RefusedError

OK = b"HTTP/1.1 200 OK\r\n"


@asynccontextmanager
async def serving(*answers: bytes) -> AsyncIterator[str]:
    """A server that accepts connections one after the other, and answers each request with the same bytes.

    An answer that ends in `CLOSE` closes the connection.
    """
    left = iter(answers)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer = next(left, b"CLOSE")  # aiohttp sends a GET once more, on another connection
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
    async with Client() as client:
        yield client


async def test_status_head_and_body(client: Client) -> None:
    """Of any status; names of headers are in lower case."""
    parts: list[bytes] = []
    async with serving(b"HTTP/1.1 503 Busy\r\nX-Why: full\r\ncontent-length: 2\r\n\r\nno") as url:
        head = await client.send("POST", url, parts.append, b"{}")

    assert (503, "full", b"no") == (head.status, head.headers["x-why"], b"".join(parts))


@pytest.mark.parametrize(
    "raw",
    [
        b"CLOSE",
        OK + b"content-length: 3\r\n\r\nnoCLOSE",
        OK + b"content-length: many\r\n\r\n",
        OK + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        OK + b"transfer-encoding: chunked\r\n\r\n3\r\nnoCLOSE",
        b"SSH-2.0\r\n\r\n",
    ],
)
async def test_broken_answers(client: Client, raw: bytes) -> None:
    """Each malformed answer is an HttpError."""
    async with serving(raw) as url:
        with pytest.raises(HttpError, match="connection lost"):
            await client.get(url)


async def test_no_server_listens(client: Client, free_port: Callable[[], int]) -> None:
    """A refused connection is an HttpError of its own kind."""
    with pytest.raises(RefusedError, match=r"cannot connect to 127\.0\.0\.1"):
        await client.get(f"http://127.0.0.1:{free_port()}")


async def test_keep_alive(client: Client) -> None:
    """A connection is reused: this server accepts only one."""
    async with serving(OK + b"content-length: 2\r\n\r\nok") as url:
        assert (200, b"ok") == await client.get(url)
        assert (200, b"ok") == await client.get(url)


async def test_connection_closed_after_use(client: Client) -> None:
    """A request on a connection that the server has closed is sent once more, on another."""
    good = OK + b"content-length: 2\r\n\r\n{}"
    async with serving(good + b"CLOSE", good) as url:
        assert {} == await client.post_json(url, b"{}")
        assert {} == await client.post_json(url, b"{}")


async def test_json(client: Client) -> None:
    """A status other than 200 is an error that shows the body."""
    async with serving(OK + b'content-length: 7\r\n\r\n{"a":1}') as url:
        assert {"a": 1} == await client.get_json(url)
    async with serving(b"HTTP/1.1 404 No\r\ncontent-length: 4\r\n\r\ngone") as url:
        with pytest.raises(HttpError, match="answers 404: gone"):
            await client.get_json(url)


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
