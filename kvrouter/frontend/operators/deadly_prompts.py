"""GET and DELETE /deadly_prompts: the prompts that all replicas refuse, and how an operator lets them pass.

GET                          lists them
DELETE /deadly_prompts       lets all pass, and those that are only suspected, at all replicas
DELETE /deadly_prompts/HASH  lets one pass
"""

from __future__ import annotations

import asyncio

import structlog
from msgspec import Struct

from kvrouter.core.fleet.replica import Replica
from kvrouter.core.tables.deadly_prompts import Deadly
from kvrouter.core.wire.ids import PoolId, PromptHash
from kvrouter.errors import UnknownPromptError
from kvrouter.frontend.operators.views import json_answer
from kvrouter.relay.answer import Answer
from kvrouter.relay.request import Request
from kvrouter.replica.publishing import Publishing

log = structlog.get_logger()

PROMPTS_PATH = "/deadly_prompts"
PROMPT_PATH = "/deadly_prompts/"


class DeadlyPromptView(Struct, frozen=True):
    """`left_s`: how long it is still refused. `workers` were lost with it in hand."""

    hash: str
    pool: str
    workers: list[str]
    left_s: float


class DeadlyPromptList(Struct, frozen=True):
    """`suspected`: the prompts with which a worker was lost, and which may be sent again."""

    prompts: list[DeadlyPromptView]
    suspected: int


class Pardoned(Struct, frozen=True):
    """The hashes of the prompts that may pass now."""

    pardoned: list[str]


class DeadlyPromptViews:
    def __init__(self, replica: Replica, publishing: Publishing) -> None:
        self._replica = replica
        self._publishing = publishing

    async def show(self, _request: Request) -> Answer:
        """GET /deadly_prompts."""
        prompts, now = self._replica.deadly, asyncio.get_running_loop().time()
        found = [_view(one, now) for one in prompts.entries()]
        return json_answer(DeadlyPromptList(found, len(prompts.suspects())))

    async def pardon_all(self, _request: Request) -> Answer:
        """DELETE /deadly_prompts."""
        prompts = self._replica.deadly
        found = {one.prompt: one.pool for one in prompts.entries()}
        return self._pardon(found | dict(prompts.suspects()))

    async def pardon(self, request: Request) -> Answer:
        """DELETE /deadly_prompts/HASH. Raises UnknownPromptError."""
        name, prompts = request.path_after(PROMPT_PATH), self._replica.deadly
        found = {one.prompt: one.pool for one in prompts.entries()} | dict(prompts.suspects())
        wanted = {prompt: pool for prompt, pool in found.items() if prompt.hex() == name.lower()}
        if not wanted:
            raise UnknownPromptError(
                f"{name[:64]!r} is no prompt that is refused here: see GET {PROMPTS_PATH}"
            )
        return self._pardon(wanted)

    def _pardon(self, prompts: dict[PromptHash, PoolId]) -> Answer:
        now, routers = asyncio.get_running_loop().time(), self._replica.routers
        for prompt, pool_id in prompts.items():
            # a pool that has ended has no feed: any other tells the peers
            router = routers.get(pool_id) or next(iter(routers.values()), None)
            if router is not None:
                router.feed.pardon(prompt, now)
            else:
                self._replica.deadly.pardon(prompt, pool_id, self._replica.deadly.ttl_s, now)
        self._publishing.flush_soon()
        names = [prompt.hex() for prompt in prompts]
        if names:
            log.info("prompt.pardoned", prompts=names[:8], count=len(names))
        return json_answer(Pardoned(names))


def _view(one: Deadly, now: float) -> DeadlyPromptView:
    left_s = round(max(0.0, one.ends_at - now), 1)
    return DeadlyPromptView(one.prompt.hex(), one.pool, [*map(str, one.workers)], left_s)
