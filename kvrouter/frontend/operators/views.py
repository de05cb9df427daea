"""Views: routes that the router answers itself. One is written once, for both listeners.

Request ──view──> Answer ──reply──> Served
            ├──> Lines ──line by line──┤
            └──> Events ──one by one───┘
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from functools import partial
from typing import TypeAlias

import msgspec
import structlog

from kvrouter.errors import KvRouterError
from kvrouter.frontend.operators.rights import Gate, Rights
from kvrouter.relay.answer import Answer, AnswerLines, Events, Served, internal_error
from kvrouter.relay.connection import Refused
from kvrouter.relay.exchange import ClientSide
from kvrouter.relay.request import Request, Serve, request_id_of

log = structlog.get_logger()


View: TypeAlias = Callable[[Request], Awaitable[Answer | AnswerLines | Events]]
"""Raises KvRouterError for the answer of an error. The body has been read."""

TEXT = "text/plain; charset=utf-8"


def json_answer(body: object, status: int = 200) -> Answer:
    return Answer(status, msgspec.json.encode(body) + b"\n", {})


def answering(view: View, rights: Rights, gate: Gate, on_refused: Refused = lambda *_: None) -> Serve:
    """Make a route of a view. Every error gets the form of the path's API, as `rights` has it."""
    return partial(_serve, view, rights, gate, on_refused)


async def _serve(view: View, rights: Rights, gate: Gate, on_refused: Refused, request: Request) -> Served:
    closes = False
    try:
        await request.read()  # in any case: what is not read would be taken for the next request
        gate(f"{request.head.method} {request.head.route}", request.headers)
        answer = await view(request)
        if isinstance(answer, AnswerLines):
            return await _stream(request, answer.lines)
        if isinstance(answer, Events):
            return await _send_events(request, answer.events)
    except KvRouterError as error:
        request_id = request_id_of(request.headers)
        on_refused(request, request_id, error, request.client.address)
        answer, closes = rights.error_answer(request, error, request_id), error.is_body_left
    except Exception:
        log.exception("request.failed", path=request.head.route)
        answer = rights.error_answer(request, internal_error(), request_id_of(request.headers))
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
            await _caught_up(client)
    except Exception:
        log.exception("request.failed", path=request.head.route)
        is_whole = False
    return Served(200, keeps_alive=False, needs_reset=not is_whole)


# nginx collects an answer before it passes it on, unless a header says otherwise.
_EVENTS_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-store\r\n"
    b"x-accel-buffering: no\r\nconnection: close\r\n\r\n"
)


async def _send_events(request: Request, events: AsyncGenerator[bytes, None]) -> Served:
    client = request.client
    client.write(_EVENTS_HEAD)
    if request.head.method == "HEAD":
        return Served(200, keeps_alive=False)
    try:
        async with contextlib.aclosing(events):
            async for event in events:
                client.write(event)
                await _caught_up(client)
    except Exception:
        log.exception("request.failed", path=request.head.route)
    return Served(200, keeps_alive=False)


async def _caught_up(client: ClientSide) -> None:
    """Return once the client has read enough; other work comes in between in any case."""
    if not client.is_slow:
        await asyncio.sleep(0)
        return
    read = asyncio.Event()
    client.when_drained(read.set)
    await read.wait()
