"""A stream that has begun without output: the client has its head, and any worker may go on with it.

    nothing sent ──opening, comment or ping of a worker, or a KeepAlive──> begun ──output──> committed
         │                                                                  │
         └──output──> committed: its worker's own bytes, as they are         └──no worker left──> error event

The head is that of the worker that sent the first event, or the router's own, which names no worker. Pieces
that follow are framed here, so that workers with different framings can follow each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import Struct

from kvrouter.relay.framing import LAST_CHUNK, chunk

if TYPE_CHECKING:
    from kvrouter.relay.exchange import ClientSide

COMMENT = b": keep-alive\n\n"
# nginx buffers a proxied stream unless the response has this header.
UNBUFFERED = b"x-accel-buffering: no\r\n"
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
_CHUNKED = b"transfer-encoding: chunked\r\n"


class Begun(Struct):
    """What the client of one request has so far. All attempts of the request share it."""

    is_chunked: bool
    keeps_alive: bool
    openings: set[str]
    """The openings that were sent: those of the next worker are dropped."""
    has_output: bool = False
    """Whether a worker has been chosen for good."""
    ends_event: bool = True
    """Whether the last piece ended an event, so that another one may follow."""

    def frame(self, content: bytes) -> bytes:
        """A piece of the stream, as the client gets it."""
        is_comment = self.ends_event and content.startswith(b":") and content.endswith((b"\n", b"\r"))
        self.ends_event = is_comment or content.endswith((b"\n\n", b"\n\r\n", b"\r\r"))
        return chunk(content) if self.is_chunked else content

    def close(self, event: bytes = b"") -> bytes:
        """The last piece, and what ends the body. Without chunks the connection's end does."""
        return (self.frame(event) if event else b"") + (LAST_CHUNK if self.is_chunked else b"")


def begin(client: ClientSide, head: bytes, *, keeps_alive: bool) -> Begun:
    """Send the head of a stream, which is chunked unless its client speaks HTTP/1.0."""
    begun = client.begun = Begun(not client.is_http_10, keeps_alive, set())
    client.write(head)
    return begun


def begin_unplaced(client: ClientSide, headers: bytes, *, may_stay: bool) -> Begun:
    """Send the router's own head of a stream, with these lines."""
    keeps_alive = may_stay and not client.is_http_10
    connection = b"connection: keep-alive\r\n" if keeps_alive else b"connection: close\r\n"
    framing = b"" if client.is_http_10 else _CHUNKED
    head = b"".join((_HEAD, framing, UNBUFFERED, connection, headers, b"\r\n"))
    return begin(client, head, keeps_alive=keeps_alive)


class KeepAlive:
    """Sends a comment every `every_s` while a stream's request waits in the queue or in prefill.

    The first one begins the stream. Stops by itself once a worker's output is sent; `stop` ends it before.
    """

    def __init__(self, client: ClientSide, begin: Callable[[], Begun], every_s: float) -> None:
        self._client = client
        self._begin = begin
        self._every_s = every_s
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(every_s, self._send)

    def stop(self) -> None:
        self._timer.cancel()

    def _send(self) -> None:
        client, begun = self._client, self._client.begun
        if begun is None and not client.has_begun:
            begun = self._begin()
        if begun is None or begun.has_output:
            return
        if not client.is_slow:
            client.write(begun.frame(COMMENT))
        self._timer = self._loop.call_later(self._every_s, self._send)
