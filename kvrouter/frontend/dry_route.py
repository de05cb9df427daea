"""POST /v1/route: where a request would go, and why. The body is that of the request itself.

Whether it is a chat or a completion shows in its fields; `path` (`/v1/embeddings`) or `kind` (`chat`,
`completion`, `other`) say it where they do not.
"""

from __future__ import annotations

import asyncio
from typing import Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, Raw, Struct, UnsetType

from kvrouter.errors import BadRequestError
from kvrouter.frontend import passthrough
from kvrouter.frontend.accept import Accept, Parse
from kvrouter.frontend.aiohttp_connection import as_response
from kvrouter.frontend.aiohttp_requests import from_aiohttp
from kvrouter.frontend.bodies import openai
from kvrouter.frontend.decision_views import DecisionViews
from kvrouter.relay.request import request_id_of

_PARSERS: dict[str, Parse | None] = {
    "chat": openai.parse_chat,
    "completion": openai.parse_completion,
    "other": None,
}
_KINDS = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}


class _Kind(Struct):
    messages: Raw | UnsetType = UNSET
    path: str | None = None
    kind: Literal["chat", "completion", "other"] | None = None


class DryRoute:
    """Answers what routing would do."""

    def __init__(self, accept: Accept, views: DecisionViews) -> None:
        self._accept = accept
        self._views = views

    async def route(self, http: web.Request) -> web.Response:
        """POST /v1/route. Raises what the request itself would be refused with."""
        request = from_aiohttp(http)
        kind = _kind(await request.read())
        now = asyncio.get_running_loop().time()
        request_id = request_id_of(request.headers)
        work = await self._accept.work(request, _PARSERS[kind], request_id, now)
        return as_response(self._views.foretold(work))


def _kind(body: bytes) -> str:
    try:
        said = msgspec.json.decode(body, type=_Kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequestError(f"/v1/route takes the JSON body of a request: {error}") from None
    if said.kind is not None:
        return said.kind
    if said.path is None:
        return "completion" if said.messages is UNSET else "chat"
    if said.path not in _KINDS and said.path not in passthrough.POST_ROUTES:
        known = ", ".join([*_KINDS, *passthrough.POST_ROUTES])
        raise BadRequestError(f"`path`: {said.path!r} is not served; use one of {known}", param="path")
    return _KINDS.get(said.path, "other")
