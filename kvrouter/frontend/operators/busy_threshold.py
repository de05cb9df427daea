"""GET and POST /busy_threshold, as in NVIDIA Dynamo: the thresholds of filter `busy` at run time.

POST {"model": "m", "active_decode_blocks_threshold": 0.85}   sets one; null switches it off
POST {"model": "m"}                                           replies with both
GET                                                           replies with those of every model
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from kvrouter.core.fleet.replica import Replica
from kvrouter.core.fleet.router import Router
from kvrouter.errors import BadRequestError
from kvrouter.frontend.operators.views import json_answer
from kvrouter.frontend.requests.rules import Rules
from kvrouter.relay.answer import Answer
from kvrouter.relay.request import Request

_Share = Annotated[float, Meta(ge=0, le=1)]
_Tokens = Annotated[int, Meta(ge=0, le=2**48)]


# Unknown fields are rejected: a misspelt threshold would otherwise change nothing without an error.
class ThresholdsRequest(Struct, forbid_unknown_fields=True):
    model: str | None = None
    active_decode_blocks_threshold: _Share | UnsetType | None = UNSET
    active_prefill_tokens_threshold: _Tokens | UnsetType | None = UNSET


class Thresholds(Struct, frozen=True):
    """Those of one model; None: off."""

    model: str
    active_decode_blocks_threshold: float | None
    active_prefill_tokens_threshold: int | None


class AllThresholds(Struct, frozen=True):
    thresholds: list[Thresholds]


class BusyThresholds:
    """The thresholds of this replica. Other replicas keep theirs: set them at each one."""

    def __init__(self, replica: Replica, rules: Rules) -> None:
        self._replica = replica
        self._rules = rules

    async def show(self, _request: Request) -> Answer:
        routers = [router for router in self._replica.routers.values() if router.pool.names]
        return json_answer(AllThresholds([self._view(router) for router in routers]))

    async def change(self, request: Request) -> Answer:
        """POST. Raises BadRequestError or UnknownModelError."""
        wanted = _read(await request.read())
        router = self._replica.router_for(wanted.model)
        now, blocks = self._rules.filters(router.pool.id), wanted.active_decode_blocks_threshold
        tokens = wanted.active_prefill_tokens_threshold
        self._rules.set_thresholds(
            router,
            now.active_decode_blocks_threshold if blocks is UNSET else blocks,
            now.active_prefill_tokens_threshold if tokens is UNSET else tokens,
        )
        return json_answer(self._view(router))

    def _view(self, router: Router) -> Thresholds:
        settings = self._rules.filters(router.pool.id)
        return Thresholds(
            router.pool.model,
            settings.active_decode_blocks_threshold,
            settings.active_prefill_tokens_threshold,
        )


def _read(body: bytes) -> ThresholdsRequest:
    try:
        return msgspec.json.decode(body, type=ThresholdsRequest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        names = ", ".join(ThresholdsRequest.__struct_fields__)
        raise BadRequestError(f"/busy_threshold: {error}; fields: {names}") from None
