"""`POST /query` and `/query_by_hash` of Mooncake's conductor: the overlap of a prompt on each instance.

Answers {tenant: {instance: {longest_matched, GPU, DP, CPU, DISK}}} in tokens. /register and /unregister are
not here: agents announce engines, or POST /workers does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from msgspec import Raw, Struct

from kvrouter.core.routing.policy import Candidate
from kvrouter.core.wire.values import Line
from kvrouter.frontend.operators.views import View, json_answer
from kvrouter.relay.answer import Answer
from kvrouter.relay.request import Request
from kvrouter.router.asked import DEFAULT, PlacementAsk
from kvrouter.router.bodies import read
from kvrouter.router.placing import Placing, matched, tier_depths

_NAMES = ("GPU", "DP", "CPU", "DISK")


class Query(Struct, frozen=True):
    model: Line = DEFAULT
    lora_name: Line | None = None
    token_ids: list[int] | None = None
    seq_hashes: Raw = Raw()
    tenant_id: Line | None = None
    instance_id: Line | None = None
    block_size: int | None = None
    cache_salt: Line | None = None


class MooncakeCalls:
    def __init__(self, placing: Placing) -> None:
        self._placing = placing

    def views(self) -> Iterator[tuple[str, str, View]]:
        """Method, path and view of each."""
        yield "POST", "/query", self._query
        yield "POST", "/query_by_hash", self._query

    async def _query(self, request: Request) -> Answer:
        query = await read(request, Query)
        asked = PlacementAsk(
            model_name=query.model,
            tenant_id=query.tenant_id,
            token_ids=query.token_ids,
            sequence_hashes=query.seq_hashes,
            lora_name=query.lora_name or None,
            cache_salt=query.cache_salt or None,
            block_size=query.block_size,
        )
        _, _, candidates = await self._placing.candidates(asked)
        found = {}
        # in the order of targets: the ranks of a worker are neighbours
        for name, group in groupby(candidates, key=lambda one: str(one.target.worker_id)):
            ranks = [*group]
            if query.instance_id in {None, "", name}:
                found[name] = matched(_deepest(ranks), ranks, _NAMES)
        return json_answer({query.tenant_id or DEFAULT: found})


def _deepest(ranks: Sequence[Candidate]) -> Candidate:
    return max(ranks, key=tier_depths)
