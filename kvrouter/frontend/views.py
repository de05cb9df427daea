"""Views: routes that the router answers itself. One is written once, for both listeners.

Request ──view──> Answer ──reply──> Served
            └──> Lines ──line by line──┘
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import NamedTuple, TypeAlias

import msgspec
import structlog

from kvrouter.errors import KvRouterError
from kvrouter.frontend.bodies.openai import error_answer
from kvrouter.frontend.operators import Gate
from kvrouter.relay.answer import Answer, Served, internal_error
from kvrouter.relay.connection import Refused
from kvrouter.relay.request import Request, Serve, request_id_of

log = structlog.get_logger()


class Lines(NamedTuple):
    """A long answer, made while it is sent: JSON lines. An empty one is a pause for other work."""

    lines: Iterator[bytes]


View: TypeAlias = Callable[[Request], Awaitable[Answer | Lines]]
"""Raises KvRouterError for the answer of an error. The body has been read."""

TEXT = "text/plain; charset=utf-8"


def json_answer(body: object, status: int = 200) -> Answer:
    return Answer(status, msgspec.json.encode(body) + b"\n", {})


def answering(view: View, gate: Gate, on_refused: Refused = lambda *_: None) -> Serve:
    """Make a route of a view. Every error becomes an OpenAI body."""
    return partial(_serve, view, gate, on_refused)


async def _serve(view: View, gate: Gate, on_refused: Refused, request: Request) -> Served:
    closes = False
    try:
        await request.read()  # in any case: what is not read would be taken for the next request
        gate(f"{request.head.method} {request.head.route}", request.headers)
        answer = await view(request)
        if isinstance(answer, Lines):
            return await _stream(request, answer.lines)
    except KvRouterError as error:
        request_id = request_id_of(request.headers)
        on_refused(request, request_id, error, request.client.address)
        answer, closes = error_answer(error, request_id), error.is_body_left
    except Exception:
        log.exception("request.failed", path=request.head.route)
        answer = error_answer(internal_error(), request_id_of(request.headers))
    return request.reply(answer, closes=closes)


# Without a length, the end of the connection is the end of the answer: its last line says that it is whole.
_LINES_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\nconnection: close\r\n\r\n"


async def _stream(request: Request, lines: Iterator[bytes]) -> Served:
    """Write line by line, with other work in between, and no faster than the client reads."""
    client, is_whole = request.client, True
    client.write(_LINES_HEAD)
    if request.head.method == "HEAD":
        return Served(200, keeps_alive=False)
    try:
        for line in lines:
            if line:
                client.write(line)
            if client.is_slow:
                read = asyncio.Event()
                client.when_drained(read.set)
                await read.wait()
            else:
                await asyncio.sleep(0)
    except Exception:
        log.exception("request.failed", path=request.head.route)
        is_whole = False
    return Served(200, keeps_alive=False, needs_reset=not is_whole)
