"""Views: routes that the router answers itself. One is written once, for both listeners.

Request ──view──> Answer ──reply──> Served
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeAlias

import msgspec
import structlog

from kvrouter.errors import KvRouterError
from kvrouter.frontend.bodies.openai import error_answer
from kvrouter.frontend.operators import Gate
from kvrouter.relay.answer import Answer, Served, internal_error
from kvrouter.relay.request import Request, Serve, request_id_of

log = structlog.get_logger()

View: TypeAlias = Callable[[Request], Awaitable[Answer]]
"""Raises KvRouterError for the answer of an error. The body has been read."""

TEXT = "text/plain; charset=utf-8"


def json_answer(body: object, status: int = 200) -> Answer:
    return Answer(status, msgspec.json.encode(body) + b"\n", {})


def answering(view: View, gate: Gate) -> Serve:
    """Make a route of a view. Every error becomes an OpenAI body."""
    return partial(_serve, view, gate)


async def _serve(view: View, gate: Gate, request: Request) -> Served:
    closes = False
    try:
        await request.read()  # in any case: what is not read would be taken for the next request
        gate(f"{request.head.method} {request.head.route}", request.headers)
        answer = await view(request)
    except KvRouterError as error:
        answer, closes = error_answer(error, request_id_of(request.headers)), error.is_body_left
    except Exception:
        log.exception("request.failed", path=request.head.route)
        answer = error_answer(internal_error(), request_id_of(request.headers))
    return request.reply(answer, closes=closes)
