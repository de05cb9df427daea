"""POST /v1/route: where a request would go, and why. The body is the request itself.

A body with `messages` is a chat, any other a completion. The field `path` (`/v1/messages`) or `kind`
(`chat`, `completion`, `messages`, `responses`, `other`) overrides this.
"""

from __future__ import annotations

import asyncio
from typing import Literal

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from kvrouter.bodies import apis
from kvrouter.bodies.apis import Api
from kvrouter.errors import BadRequestError
from kvrouter.frontend.operators.decision_views import DecisionViews
from kvrouter.frontend.records.record import Record, clock
from kvrouter.frontend.requests.accept import Accept
from kvrouter.frontend.requests.engine_routes import relayed
from kvrouter.relay.answer import Answer
from kvrouter.relay.request import Request, request_id_of

_KINDS: dict[str, Api] = {
    "chat": apis.CHAT,
    "completion": apis.COMPLETION,
    "messages": apis.MESSAGES,
    "responses": apis.RESPONSES,
    "other": apis.PASSED_ON,
}
_POSTS = {path: api for method, path, api in relayed() if method == "POST"}


class _ApiKind(Struct):
    messages: Raw | UnsetType = UNSET
    path: str | None = None
    kind: Literal["chat", "completion", "messages", "responses", "other"] | None = None


class DryRoute:
    def __init__(self, accept: Accept, views: DecisionViews) -> None:
        self._accept = accept
        self._views = views

    async def route(self, request: Request) -> Answer:
        """POST /v1/route. Raises the errors that the request itself would raise."""
        api = api_of(await request.read())
        now, request_id = asyncio.get_running_loop().time(), request_id_of(request.headers)
        record = Record(request, request_id, now, clock())
        return self._views.preview(await self._accept.work(record, api, None))


def api_of(body: bytes) -> Api:
    """The API that a body is for. Raises BadRequestError."""
    try:
        described = msgspec.json.decode(body, type=_ApiKind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequestError(f"/v1/route takes the JSON body of a request: {error}") from None
    if described.kind is not None:
        return _KINDS[described.kind]
    if described.path is None:
        return apis.COMPLETION if described.messages is UNSET else apis.CHAT
    if described.path not in _POSTS:
        known = ", ".join(_POSTS)
        raise BadRequestError(f"`path`: {described.path!r} is not served; use one of {known}", param="path")
    return _POSTS[described.path]
