"""The calls of Dynamo's selection service, which are this service's own: /workers to /ready.

Fields mean what they mean there; kvrouter's own are in docs/placement.md. Unknown fields are ignored. Not
here: /dump (`kvrouter index` lists blocks), and peers, which find each other on NATS.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Annotated, Any

from msgspec import Meta, Struct

from kvrouter.core.fleet.pool import Pool
from kvrouter.core.routing.policy import Candidate
from kvrouter.core.routing.worker import Worker
from kvrouter.core.tables.bookings import MOST_TOKENS
from kvrouter.core.wire.ids import Target
from kvrouter.errors import BadRequestError, NatsAwayError
from kvrouter.frontend.operators.views import View, json_answer
from kvrouter.relay.answer import Answer
from kvrouter.relay.request import Request
from kvrouter.router.asked import DEFAULT, PlacementAsk
from kvrouter.router.bodies import read
from kvrouter.router.placing import Placing, endpoint_of, pause_after, place_of, public_id, tier_depths
from kvrouter.router.registrations import Registration
from kvrouter.router.workers import LOOK_S, REGISTER_S, RegisteredEngines

Readiness = Callable[[], tuple[int, dict[str, Any]]]

RESERVATIONS, WORKERS = "/reservations/", "/workers/"
_OK = {"status": "ok"}
_NO_SHARED_CACHE = {"enabled": False, "total_hit_blocks": 0, "ranges": [], "error": None}
_MOST_CALLER = 128


class OutputSoFar(Struct, frozen=True):
    """Dynamo's `decay_fraction` is not needed: a booked block counts in full until it is freed."""

    output_tokens: Annotated[int, Meta(ge=0, le=MOST_TOKENS)] | None = None


class DynamoCalls:
    def __init__(
        self,
        placing: Placing,
        engines: RegisteredEngines,
        readiness: Readiness,
        is_connected: Callable[[], bool],
    ) -> None:
        self._placing = placing
        self._engines = engines
        self._readiness = readiness
        self._is_connected = is_connected

    def views(self) -> Iterator[tuple[str, str, View]]:
        """Method, path and view of each."""
        yield "POST", "/select", self._select
        yield "POST", "/select_and_reserve", self._select_and_reserve
        yield "POST", "/reservations", self._reserve
        yield "POST", RESERVATIONS, self._report
        yield "DELETE", RESERVATIONS, self._free
        yield "POST", "/workers", self._add_worker
        yield "GET", "/workers", self._list_workers
        yield "PATCH", WORKERS, self._change_worker
        yield "DELETE", WORKERS, self._remove_worker
        yield "GET", "/loads", self._loads
        yield "POST", "/potential_loads", self._potential_loads
        yield "POST", "/overlap_scores", self._overlap_scores
        yield "GET", "/health", _health
        yield "GET", "/ready", self._ready

    async def _select(self, request: Request) -> Answer:
        return await self._placed(await self._placing.select(await read(request, PlacementAsk)))

    async def _select_and_reserve(self, request: Request) -> Answer:
        asked = await read(request, PlacementAsk)
        return await self._placed(await self._placing.reserve(asked, caller_of(request)))

    async def _reserve(self, request: Request) -> Answer:
        asked, caller = await read(request, PlacementAsk), caller_of(request)
        if asked.id is None:
            raise BadRequestError(
                "`selection_id` is missing: that of /select, or a new one", param="selection_id"
            )
        if asked.worker_id is None and asked.pinned_worker is None:
            return await self._placed(self._placing.reserve_kept(asked, caller), 201)
        return await self._placed(await self._placing.reserve(asked, caller), 201)

    async def _report(self, request: Request) -> Answer:
        reservation_id, _, what = request.path_after(RESERVATIONS).rpartition("/")
        if what == "prefill_complete":
            self._placing.prefill_complete(reservation_id)
        elif what == "output_block":
            output = await read(request, OutputSoFar) if await request.read() else OutputSoFar()
            self._placing.progress(reservation_id, output.output_tokens)
        else:
            raise BadRequestError(
                f"POST {request.head.route[:100]}: use …/prefill_complete or …/output_block"
            )
        return json_answer(_OK)

    async def _free(self, request: Request) -> Answer:
        self._placing.free(request.path_after(RESERVATIONS))
        return json_answer(_OK)

    async def _add_worker(self, request: Request) -> Answer:
        engine = await read(request, Registration)
        await self._connected()
        await self._engines.upsert(engine)
        return json_answer(self._worker(engine.name), 201)

    async def _change_worker(self, request: Request) -> Answer:
        name, changes = request.path_after(WORKERS), await read(request, dict[str, Any])
        await self._connected()
        await self._engines.change(name, changes)
        return json_answer(self._worker(name))

    async def _remove_worker(self, request: Request) -> Answer:
        name = request.path_after(WORKERS)
        await self._connected()
        shown = self._worker(name)
        await self._engines.delete(name)
        self._placing.free_worker(name)
        return json_answer(shown | {"lifecycle": "unschedulable"})

    async def _connected(self) -> None:
        """Wait for NATS, without which no other replica would hear of a change. Raises NatsAwayError."""
        try:
            async with asyncio.timeout(REGISTER_S):
                while not self._is_connected():  # noqa: ASYNC110  # a connection has no event
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            raise NatsAwayError(
                "NATS is away: no worker was changed; send the call again once it is back"
            ) from None

    async def _list_workers(self, request: Request) -> Answer:
        return json_answer(self._workers(request.in_query("model_name")))

    async def _loads(self, request: Request) -> Answer:
        return json_answer(self._placing.loads(request.in_query("model_name")))

    async def _potential_loads(self, request: Request) -> Answer:
        _, _, candidates = await self._placing.candidates(await read(request, PlacementAsk))
        names = ("potential_prefill_tokens", "potential_decode_blocks")
        amounts = [(one, (one.prefill_tokens, one.decode_blocks)) for one in candidates]
        return json_answer(
            [place_of(one.target, one.card) | dict(zip(names, both, strict=True)) for one, both in amounts]
        )

    async def _overlap_scores(self, request: Request) -> Answer:
        pool, isl, candidates = await self._placing.candidates(await read(request, PlacementAsk))
        size = max(1, pool.block_size)
        facts = {"block_size": size, "num_blocks": isl // size, "shared_cache": _NO_SHARED_CACHE}
        return json_answer(facts | {"workers": [_score(one, isl, size) for one in candidates]})

    async def _ready(self, _request: Request) -> Answer:
        status, facts = self._readiness()
        count = sum(one["lifecycle"] == "schedulable" for one in self._workers(None))
        status = status if count else 503
        # without the workers that Dynamo lists: anyone may ask this
        return json_answer({"ready": status == 200, "schedulable_workers": count} | facts, status)

    async def _placed(self, placed: dict[str, Any], status: int = 200) -> Answer:
        await pause_after(placed["isl_tokens"])
        return json_answer(placed, status)

    def _workers(self, model: str | None) -> list[dict[str, Any]]:
        pools = self._placing.pools(model)
        return [self._shown(pool, worker) for pool in pools for worker in pool.workers.values()]

    def _worker(self, name: str) -> dict[str, Any]:
        found = [one for one in self._workers(None) if str(one["worker_id"]) == name]
        return found[0] if found else {"worker_id": public_id(name), "lifecycle": "incomplete"}

    def _shown(self, pool: Pool, worker: Worker) -> dict[str, Any]:
        card = worker.card
        place = place_of(Target(card.worker_id), card)  # type: ignore[arg-type]  # as cards have it
        is_up, stands = worker.state == "up" and not worker.silent, "unschedulable"
        return {
            "worker_id": place["worker_id"],
            "model_name": pool.model,
            "routing_group": DEFAULT,
            "tenant_id": DEFAULT,
            "lifecycle": "schedulable" if is_up else "draining" if worker.state == "draining" else stands,
            "endpoint": endpoint_of(card),
            "block_size": card.block_size,
            "data_parallel_start_rank": place["dp_rank"],
            "data_parallel_size": card.ranks,
            "max_num_batched_tokens": card.max_batched_tokens or None,
            "total_kv_blocks": card.tiers.get("device") or None,
            "is_eagle": card.speculates,
            "is_registered_here": card.worker_id in self._engines,
        }


async def _health(_request: Request) -> Answer:
    return json_answer(_OK)


def caller_of(request: Request) -> str:
    """Whose reservations they are: what the caller names itself, else its address."""
    given = request.headers.get("x-kvrouter-caller", "")[:_MOST_CALLER]
    return given.encode("ascii", "backslashreplace").decode() or request.client.address


def _score(one: Candidate, isl: int, size: int) -> dict[str, Any]:
    device, host, disk = tier_depths(one)
    return place_of(one.target, one.card) | {
        "device_blocks": device,
        "host_pinned_blocks": host,
        "disk_blocks": disk,
        "host_pinned_extension_blocks": host - device,
        "disk_extension_blocks": disk - host,
        "shared_beyond_device_blocks": None,
        "router_credit_blocks": (isl - one.own_prefill_tokens) / size,
    }
