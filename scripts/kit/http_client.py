"""A small HTTP/1.1 client on asyncio Protocols: light enough to share two cores with what it measures.

It has its own framing of answers: with kvrouter's, a mistake in it would go unnoticed.

    idle ──send──> head ──> body ──over──> idle
                     │        │
                     └─closed─┴──> gone
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast
from urllib.parse import SplitResult, urlsplit

_MAX_HEAD_BYTES = 64 << 10


class HttpError(Exception):
    """No answer, or a malformed one."""


class RefusedError(HttpError):
    """No connection: the server has not received the request."""


@dataclass(frozen=True, slots=True)
class Head:
    """Status and headers of an answer; header names in lower case."""

    status: int
    headers: Mapping[str, str]


class _Body(Protocol):
    def feed(self, data: bytes) -> tuple[bytes, bool]:
        """The payload in `data`, and whether the body is complete."""
        ...


class _Sized:
    def __init__(self, length: int) -> None:
        self._left = length

    def feed(self, data: bytes) -> tuple[bytes, bool]:
        if len(data) > self._left:
            raise HttpError(f"{len(data) - self._left} bytes more than content-length")
        self._left -= len(data)
        return data, self._left == 0


class _UntilClose:
    def feed(self, data: bytes) -> tuple[bytes, bool]:
        return data, False


class _Chunked:
    def __init__(self) -> None:
        self._rest = b""
        self._left = 0
        self._is_last = False

    def feed(self, data: bytes) -> tuple[bytes, bool]:
        parts: list[bytes] = []
        data = self._rest + data
        position = 0
        while True:
            part = data[position : position + self._left]
            parts.append(part)
            self._left -= len(part)
            position += len(part)
            end = data.find(b"\r\n", position)
            if self._left or end < 0:
                break
            is_over = self._line(data[position:end])
            position = end + 2
            if is_over:
                return b"".join(parts), True
        self._rest = data[position:]
        return b"".join(parts), False

    def _line(self, line: bytes) -> bool:
        """Read a chunk's size, the line end after a chunk, or a trailer; True after the body's last line."""
        if self._is_last or not line:
            return self._is_last and not line
        try:
            self._left = int(line.split(b";")[0], 16)
        except ValueError:
            raise HttpError(f"chunk size expected, got {line[:40]!r}") from None
        self._is_last = self._left == 0
        return False


def _parse_head(raw: bytes) -> Head:
    first, *lines = raw.decode("latin-1").split("\r\n")
    version, _, status = first.partition(" ")
    if not version.startswith("HTTP/1.") or not status[:3].isdecimal():
        raise HttpError(f"not an HTTP answer: {first[:60]!r}")
    pairs = (line.partition(":") for line in lines)
    return Head(int(status[:3]), {name.strip().lower(): value.strip() for name, _, value in pairs})


def _body_of(head: Head) -> _Body:
    if "chunked" in head.headers.get("transfer-encoding", "").lower():
        return _Chunked()
    if "content-length" in head.headers:
        return _Sized(int(head.headers["content-length"]))
    return _UntilClose()


class _Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self.is_open = False
        self.was_answered = False
        self._transport: asyncio.Transport | None = None
        self._raw_head = b""
        self._head: Head | None = None
        self._body: _Body | None = None
        self._on_body: Callable[[bytes], None] | None = None
        self._over: asyncio.Future[Head] | None = None

    async def exchange(self, request: bytes, on_body: Callable[[bytes], None]) -> Head:
        """Send a request, pass on the body in pieces, and return the head when the body is complete."""
        assert self._transport is not None
        self._head, self._body, self._raw_head, self.was_answered = None, None, b"", False
        self._on_body = on_body
        self._over = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._over
        finally:
            self._on_body = None
            if self._over.cancelled():
                self.abort()

    def abort(self) -> None:
        """Close at once, by which the server notices that the client has gone."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # a cast, not isinstance: uvloop's transport is not a subclass of asyncio.Transport
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        if self._over is None or self._over.done():
            self.abort()  # bytes without a request
            return
        self.was_answered = True
        try:
            self._receive(data)
        except (HttpError, ValueError) as error:
            self._fail(str(error))
            self.abort()

    def _receive(self, data: bytes) -> None:
        if self._body is None:
            raw, blank, data = (self._raw_head + data).partition(b"\r\n\r\n")
            if not blank:
                self._raw_head = raw
                if len(raw) > _MAX_HEAD_BYTES:
                    raise HttpError("the head never ends")
                return
            self._head = _parse_head(raw)
            self._body = _body_of(self._head)
        payload, is_over = self._body.feed(data)
        if payload and self._on_body is not None:
            self._on_body(payload)
        if is_over:
            self._finish()

    def _finish(self) -> None:
        assert self._head is not None
        assert self._over is not None
        if self._head.headers.get("connection", "").lower() == "close":
            self.abort()
        if not self._over.done():
            self._over.set_result(self._head)

    def _fail(self, reason: str) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_exception(HttpError(reason))

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if isinstance(self._body, _UntilClose) and exc is None and self._over and not self._over.done():
            self._finish()
        self._fail(f"connection lost: {exc}" if exc else "connection closed before the answer was complete")


class Client:
    """Reuses connections; opens another one when all are busy."""

    def __init__(self) -> None:
        self._idle: dict[tuple[str, int], list[_Connection]] = {}

    async def send(self, url: str, request: bytes, on_body: Callable[[bytes], None]) -> Head:
        """Send a request made with `request_bytes` to the server of `url`; raises HttpError."""
        address = _address(urlsplit(url))
        idle = self._idle.setdefault(address, [])
        while idle:
            connection = idle.pop()
            if connection.is_open:
                try:
                    return await self._exchange(connection, idle, request, on_body)
                except HttpError:
                    if connection.was_answered:
                        raise
                    # a reused connection may have been closed by the server while idle: try a new one
        return await self._exchange(await _connect(address), idle, request, on_body)

    async def _exchange(
        self,
        connection: _Connection,
        idle: list[_Connection],
        request: bytes,
        on_body: Callable[[bytes], None],
    ) -> Head:
        head = await connection.exchange(request, on_body)
        if connection.is_open:
            idle.append(connection)
        return head

    async def get(self, url: str) -> tuple[int, bytes]:
        """Status and body of a GET."""
        body = bytearray()
        head = await self.send(url, request_bytes("GET", url), body.extend)
        return head.status, bytes(body)

    async def get_json(self, url: str) -> Any:
        """The JSON of a GET; raises HttpError unless the status is 200."""
        return _json(url, *await self.get(url))

    async def post_json(self, url: str, body: bytes) -> Any:
        """The JSON of a POST; raises HttpError unless the status is 200."""
        answer = bytearray()
        head = await self.send(url, request_bytes("POST", url, body), answer.extend)
        return _json(url, head.status, bytes(answer))

    def close(self) -> None:
        """Close the idle connections."""
        for idle in self._idle.values():
            while idle:
                idle.pop().abort()


def _json(url: str, status: int, body: bytes) -> Any:
    if status != 200:
        raise HttpError(f"{url} answers {status}: {body[:200].decode(errors='replace')}")
    return json.loads(body)


def request_bytes(
    method: str, url: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> bytes:
    """A complete request as bytes."""
    parts = urlsplit(url)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    lines = [f"{method} {target} HTTP/1.1", f"Host: {parts.netloc}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def _address(parts: SplitResult) -> tuple[str, int]:
    return parts.hostname or "127.0.0.1", parts.port or 80


async def _connect(address: tuple[str, int]) -> _Connection:
    try:
        _, connection = await asyncio.get_running_loop().create_connection(_Connection, *address)
    except OSError as error:
        raise RefusedError(
            f"cannot connect to {address[0]}:{address[1]}: {error.strerror or error}"
        ) from error
    return connection
