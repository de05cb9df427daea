"""The least of an engine: it answers every completion with the same few events, at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import cast

EVENTS = 4


class _Connection(asyncio.Protocol):
    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, blank, body = self._data.partition(b"\r\n\r\n")
        if not blank:
            return
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
        if len(body) >= length:
            self._data = body[length:]
            self._transport.write(self._answer)


def _answer(prompt_tokens: int) -> bytes:
    def event(body: object) -> bytes:
        data = b"data: " + (body if isinstance(body, bytes) else json.dumps(body).encode()) + b"\n\n"
        return b"%x\r\n%b\r\n" % (len(data), data)

    text = {"id": "c", "choices": [{"index": 0, "text": "word ", "finish_reason": None}]}
    usage = {
        "id": "c",
        "choices": [],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": EVENTS,
            "total_tokens": prompt_tokens + EVENTS,
        },
    }
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + event(text) * EVENTS + event(usage) + event(b"[DONE]") + b"0\r\n\r\n"


@contextlib.asynccontextmanager
async def mock_engine(prompt_tokens: int) -> AsyncIterator[str]:
    """Its URL, while it listens on the running loop."""
    answer = _answer(prompt_tokens)
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(answer), "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
