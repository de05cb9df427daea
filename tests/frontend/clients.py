"""A client on raw streams, and its responses."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

from tests.frontend.workers import WAIT_S


@dataclass(frozen=True)
class Response:
    """An answer. `is_whole` is False if the connection broke before its end."""

    status: int
    head: bytes
    body: bytes
    is_whole: bool = True

    def headers(self, name: str) -> list[str]:
        """All values of a header."""
        lines = [line.partition(":") for line in self.head.decode("latin-1").split("\r\n")[1:]]
        return [value.strip() for key, _, value in lines if key.lower() == name]

    def header(self, name: str) -> str:
        """The only value of a header."""
        (value,) = self.headers(name)
        return value

    @property
    def json(self) -> Any:
        """The body."""
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The JSON of the server-sent events, without [DONE]."""
        datas = [line[5:].strip() for line in self.body.split(b"\n") if line.startswith(b"data:")]
        return [json.loads(data) for data in datas if data != b"[DONE]"]


class Client:
    """One connection to a frontend."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str = "test"
    ) -> None:
        self.reader = reader
        self.writer = writer
        self.host = host

    def send(
        self,
        body: Any,
        *headers: str,
        path: str = "/v1/completions",
        version: str = "HTTP/1.1",
        method: str = "POST",
    ) -> None:
        """Send a request. A body that is not bytes is encoded as JSON, and named so."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        if not isinstance(body, bytes) and not any(
            one.lower().startswith("content-type:") for one in headers
        ):
            headers = (*headers, "content-type: application/json")
        lines = [f"{method} {path} {version}", f"host: {self.host}", f"content-length: {len(data)}", *headers]
        self.writer.write("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + data)

    async def ask(self, body: Any, *headers: str, path: str = "/v1/completions") -> Response:
        """Send a request and read the answer."""
        self.send(body, *headers, path=path)
        return await self.response()

    async def get(self, path: str) -> Response:
        """GET."""
        self.writer.write(f"GET {path} HTTP/1.1\r\nhost: {self.host}\r\n\r\n".encode())
        return await self.response()

    async def response(self) -> Response:
        """Read an answer to its end, or to the end of the connection."""
        async with asyncio.timeout(WAIT_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            started = Response(int(head[9:12]), head[:-4], b"")
            body, is_whole = await self._body(started)
            return Response(started.status, started.head, body, is_whole)

    async def _body(self, response: Response) -> tuple[bytes, bool]:
        if response.headers("transfer-encoding") == ["chunked"]:
            assert not response.headers("content-length")
            return await self._chunks()
        length = response.headers("content-length")
        try:
            return await (self.reader.readexactly(int(length[0])) if length else self.reader.read()), True
        except asyncio.IncompleteReadError as error:
            return error.partial, False
        except ConnectionError:
            return b"", False

    async def _chunks(self) -> tuple[bytes, bool]:
        body = bytearray()
        try:
            while size := int((await self.reader.readuntil(b"\r\n")).partition(b";")[0], 16):
                body += (await self.reader.readexactly(size + 2))[:-2]
            while await self.reader.readuntil(b"\r\n") != b"\r\n":
                pass  # trailers
        except (asyncio.IncompleteReadError, ConnectionError):
            return bytes(body), False
        return bytes(body), True

    async def read_until(self, text: bytes) -> bytes:
        """All bytes up to and including this text."""
        async with asyncio.timeout(WAIT_S):
            return await self.reader.readuntil(text)

    async def is_closed(self) -> bool:
        """Whether the frontend closes the connection without sending more."""
        async with asyncio.timeout(WAIT_S):
            try:
                return await self.reader.read() == b""
            except ConnectionError:
                return True

    def stop_reading(self) -> None:
        """Stop reading from the socket."""
        cast(asyncio.Transport, self.writer.transport).pause_reading()

    def go_on_reading(self) -> None:
        """Read from the socket again."""
        cast(asyncio.Transport, self.writer.transport).resume_reading()

    def leave(self) -> None:
        """Abort the connection."""
        self.writer.transport.abort()


@contextlib.asynccontextmanager
async def connected(url: str, tls: ssl.SSLContext | None = None) -> AsyncIterator[Client]:
    """A connection to the frontend at `url`. `tls`: the trusted authorities."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=2**20, ssl=tls)
    try:
        yield Client(reader, writer, address.netloc)
    finally:
        writer.transport.abort()


async def ask(url: str, body: Any, *headers: str, path: str = "/v1/completions") -> Response:
    """One request on a new connection."""
    async with connected(url) as client:
        return await client.ask(body, *headers, path=path)


async def get(url: str, path: str) -> Response:
    """One GET on a new connection."""
    async with connected(url) as client:
        return await client.get(path)
