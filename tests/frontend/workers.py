"""Scripted workers on raw streams. They can send any bytes in any pieces, or nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")
OK_BODY = b'{"id":"c1","choices":[{"index":0,"text":"hi","finish_reason":"stop"}]}'
SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
WAIT_S = 10.0
"""The longest wait of a test."""


async def until(condition: Callable[[], object], what: str = "", within_s: float = WAIT_S) -> None:
    """Return as soon as the condition holds. Fail if it does not hold in time."""
    deadline = asyncio.get_running_loop().time() + within_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"in vain: {what or condition}"
        await asyncio.sleep(0.001)


async def until_found(
    look: Callable[[], Awaitable[T]],
    is_so: Callable[[T], object] = bool,
    what: str = "",
    within_s: float = WAIT_S,
) -> T:
    """Look until this is found; returns it. Fail if it is not found in time."""
    last: object = None
    try:
        async with asyncio.timeout(within_s):
            while True:
                last = found = await look()
                if is_so(found):
                    return found
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"in vain: {what or look}: {last}") from None


async def until_still(count: Callable[[], int]) -> None:
    """Return when the count is above 0 and has been the same for many turns."""
    await until(count)
    last, same = count(), 0
    while same < 300:
        await asyncio.sleep(0.001)
        last, same = (last, same + 1) if count() == last else (count(), 0)


async def turns(count: int = 4) -> None:
    """Let the loop turn, so that what was written is read before more is written."""
    for _ in range(count):
        await asyncio.sleep(0)


def answer(body: bytes = OK_BODY, status: int = 200, headers: bytes = b"") -> bytes:
    """A whole JSON answer."""
    head = b"HTTP/1.1 %d Some Reason\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
    return head % (status, len(body)) + headers + b"\r\n" + body


def chunk(data: bytes) -> bytes:
    """One chunk."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(text: str, finish_reason: str | None = None) -> bytes:
    """One server-sent event."""
    choice = {"index": 0, "text": text, "finish_reason": finish_reason}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


END = chunk(b"data: [DONE]\n\n") + LAST_CHUNK
"""The end of a good stream."""


def stream(*texts: str) -> bytes:
    """A whole stream: an event a chunk."""
    return SSE_HEAD + b"".join(chunk(event(text)) for text in texts) + END


@dataclass(frozen=True)
class Received:
    """A request as it reached the worker."""

    head: bytes
    body: bytes

    def headers(self, name: str) -> list[str]:
        """All values of a header."""
        lines = [line.partition(":") for line in self.head.decode("latin-1").split("\r\n")[1:]]
        return [value.strip() for key, _, value in lines if key.lower() == name]

    @property
    def json(self) -> Any:
        """The body."""
        return json.loads(self.body)


class Wire:
    """One connection from the router, as the worker sees it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.is_open = True
        self.requests = 0

    async def next_request(self) -> Received:
        """The next request; raises EOFError if the router closes instead."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        received = Received(head, b"")
        length = int((received.headers("content-length") or ["0"])[0])
        return Received(head, await self.reader.readexactly(length))

    async def send(self, *pieces: bytes) -> None:
        """Write the pieces one after the other, so that each is one read."""
        for piece in pieces:
            if self.writer.is_closing():
                raise ConnectionResetError
            self.writer.write(piece)
            await self.writer.drain()
            await turns()

    async def until_left(self) -> None:
        """Send nothing until the router closes the connection."""
        with contextlib.suppress(ConnectionError):
            await self.reader.read()
        self.is_open = False

    def reset(self) -> None:
        """Reset the connection, as a killed process does."""
        raw = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    def close(self) -> None:
        """Close in order."""
        self.writer.close()


Script = Callable[[Received, Wire], Awaitable[None]]


def says(*pieces: bytes) -> Script:
    """Answers with these pieces."""

    async def script(_received: Received, wire: Wire) -> None:
        await wire.send(*pieces)

    return script


def says_and_closes(*pieces: bytes) -> Script:
    """Answers with these pieces, then closes the connection."""

    async def script(_received: Received, wire: Wire) -> None:
        await wire.send(*pieces)
        wire.close()

    return script


def says_and_resets(*pieces: bytes) -> Script:
    """Answers with these pieces, then resets the connection."""

    async def script(_received: Received, wire: Wire) -> None:
        await wire.send(*pieces)
        wire.reset()

    return script


def says_and_stalls(*pieces: bytes) -> Script:
    """Answers with these pieces, then nothing more until the router closes the connection."""

    async def script(_received: Received, wire: Wire) -> None:
        await wire.send(*pieces)
        await wire.until_left()

    return script


OK = says(answer())


def in_turn(*scripts: Script) -> Script:
    """One script per request, then the last one always. Several workers may share the turns."""
    left = list(scripts)

    async def script(received: Received, wire: Wire) -> None:
        await (left.pop(0) if len(left) > 1 else left[0])(received, wire)

    return script


@dataclass
class FakeWorker:
    """A worker that answers by script."""

    id: str
    script: Script
    url: str = ""
    tls: ssl.SSLContext | None = None
    hangs: bool = False
    """Whether it does not answer probes: /health and /v1/models."""
    requests: list[Received] = field(default_factory=list)
    """The requests to its script: all but probes."""
    wires: list[Wire] = field(default_factory=list)
    server: asyncio.Server | None = None

    def die(self) -> None:
        """End as a killed process does: reset every connection and refuse new ones."""
        assert self.server is not None
        self.server.close()
        for wire in self.open_wires:
            wire.reset()

    @property
    def open_wires(self) -> list[Wire]:
        """The connections that neither side has closed."""
        return [wire for wire in self.wires if wire.is_open]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = Wire(reader, writer)
        self.wires.append(wire)
        try:
            while not writer.is_closing():
                received = await wire.next_request()
                if received.head.startswith((b"GET /health ", b"GET /v1/models ")):
                    await (wire.until_left() if self.hangs else wire.send(answer(b"")))
                    continue
                wire.requests += 1
                self.requests.append(received)
                await self.script(received, wire)
        except (ConnectionError, EOFError):
            pass
        finally:
            wire.is_open = False
            writer.close()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[FakeWorker]:
        """Listen while inside."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=2**26, ssl=self.tls)
        self.server = server
        scheme = "http" if self.tls is None else "https"
        self.url = f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            for wire in self.wires:
                wire.writer.transport.abort()
            await until(lambda: not self.open_wires, "the worker's connections end")
