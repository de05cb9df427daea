"""POST /v1/route: where a request would go, and why. The body is the request itself.

A body with `messages` is a chat, any other a completion. The field `path` (`/v1/embeddings`) or `kind`
(`chat`, `completion`, `other`) overrides this.
"""

from __future__ import annotations

import asyncio
from typing import Literal

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from kvrouter.errors import BadRequestError
from kvrouter.frontend import passthrough
from kvrouter.frontend.accept import Accept, Parse
from kvrouter.frontend.bodies import openai
from kvrouter.frontend.decision_views import DecisionViews
from kvrouter.relay.answer import Answer
from kvrouter.relay.request import Request, request_id_of

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
    def __init__(self, accept: Accept, views: DecisionViews) -> None:
        self._accept = accept
        self._views = views

    async def route(self, request: Request) -> Answer:
        """POST /v1/route. Raises the errors that the request itself would raise."""
        kind = _kind(await request.read())
        now = asyncio.get_running_loop().time()
        request_id = request_id_of(request.headers)
        work = await self._accept.work(request, _PARSERS[kind], request_id, now)
        return self._views.preview(work)


def _kind(body: bytes) -> str:
    try:
        described = msgspec.json.decode(body, type=_Kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequestError(f"/v1/route takes the JSON body of a request: {error}") from None
    if described.kind is not None:
        return described.kind
    if described.path is None:
        return "completion" if described.messages is UNSET else "chat"
    if described.path not in _KINDS and described.path not in passthrough.POST_ROUTES:
        known = ", ".join([*_KINDS, *passthrough.POST_ROUTES])
        raise BadRequestError(f"`path`: {described.path!r} is not served; use one of {known}", param="path")
    return _KINDS.get(described.path, "other")
