"""`SelectionService`: one for each ingress replica, here in one process (Ray's: test_ray_tracker.py)."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvrouter.compat.dynamo import SelectionService
from kvrouter.errors import BadRequestError, UnknownReservationError, UnknownTargetError
from tests.frontend.workers import until

PROMPT = list(range(160))


def engine(number: int) -> dict[str, Any]:
    """As Ray describes it, here without events."""
    facts = {"worker_id": number, "model_name": "default", "tenant_id": "default", "block_size": 16}
    ranks = {"data_parallel_start_rank": 0, "data_parallel_size": 1, "kv_events_endpoints": {}}
    return {**facts, **ranks, "endpoint": f"ray://{number}", "max_num_batched_tokens": 2048}


@pytest.fixture
async def services(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[SelectionService]]:
    """Two that have registered the same two engines."""
    monkeypatch.setenv("KVROUTER_NATS", nats_url)
    monkeypatch.setenv("KVROUTER_NAMESPACE", uuid.uuid4().hex)
    made = [SelectionService(indexer_threads=4), SelectionService(indexer_threads=4)]
    await asyncio.gather(*[one.upsert_worker(engine(number)) for one in made for number in (1, 2)])
    await until(lambda: all(len(targets(one)) == 2 for one in made), "both see both")
    yield made
    for one in made:
        await one.shutdown()


def opened(service: SelectionService) -> Any:
    """What it has opened: calls of Dynamo's class show none of it."""
    inside = service._service
    assert inside is not None
    return inside


def replica(service: SelectionService) -> Any:
    return opened(service).replica


def targets(service: SelectionService) -> list[Any]:
    return [target for router in replica(service).routers.values() for target in router.pool.targets]


def booked(service: SelectionService) -> int:
    """Requests in flight, of all replicas."""
    return sum(sum(one.pool.active.owners().values()) for one in replica(service).routers.values())


async def reserve(service: SelectionService, name: str, **more: Any) -> dict[str, Any]:
    body = {"model_name": "default", "selection_id": name, "token_ids": PROMPT, "allowed_worker_ids": [1, 2]}
    return await service.select_and_reserve(body | more)


async def test_a_request_that_all_report_on(services: list[SelectionService]) -> None:
    """A reserves and broadcasts; engines report to both. Every replica counts it once, until its end."""
    a, b = services
    found = await reserve(a, "r")
    assert {1, 2} >= {found["worker_id"]}
    named = ("worker_id", "dp_rank", "sequence_hashes", "isl_tokens", "effective_prefill_tokens")
    await b.create_reservation({"selection_id": "r", **{name: found[name] for name in named}})
    for one in services:
        await one.prefill_complete("r")
        one.add_output_block("r", decay_fraction=0.5)
    await until(lambda: [1, 1] == [*map(booked, services)], "counted once")
    (owned,) = replica(a).routers.values()
    assert 11 == owned.pool.active.blocks(owned.pool.active.bookings(replica(a).router_id)[0].target)
    for one in services:
        await one.free_reservation("r")
    await until(lambda: [0, 0] == [*map(booked, services)], "freed")


async def test_they_decide_as_one(services: list[SelectionService]) -> None:
    """Each knows of the other's requests: new prompts go to the engine with fewer."""
    a, b = services
    first = await reserve(a, "a", token_ids=list(range(1000, 1160)))
    await until(lambda: 1 == booked(b), "the peer knows")
    second = await reserve(b, "b", token_ids=list(range(2000, 2160)))
    assert {1, 2} == {first["worker_id"], second["worker_id"]}


async def test_explicit_and_kept_reservations(services: list[SelectionService]) -> None:
    """What no peer has booked is booked here; without a worker, what `select` has kept."""
    a, _ = services
    await a.select({"selection_id": "kept", "token_ids": PROMPT})
    await a.create_reservation({"selection_id": "kept"})
    await a.create_reservation({"selection_id": "own", "worker_id": 2, "dp_rank": 0, "isl_tokens": 64})
    assert 2 == booked(a)
    for name in ("kept", "own"):
        await a.free_reservation(name)


async def test_an_engine_that_goes_ends_its_requests(services: list[SelectionService]) -> None:
    """Also those that nobody frees."""
    a, b = services
    await reserve(a, "r", allowed_worker_ids=[1])
    for one in services:
        await one.delete_worker(1)
    await until(lambda: all([0, 1] == [booked(one), len(targets(one))] for one in services), "gone")
    with pytest.raises(UnknownTargetError, match="was not registered here"):
        await b.delete_worker(1)


async def test_bad_input(services: list[SelectionService]) -> None:
    """The errors of the HTTP service."""
    a, _ = services
    with pytest.raises(UnknownReservationError):
        a.add_output_block("never")
    for call in (a.prefill_complete, a.free_reservation):
        with pytest.raises(UnknownReservationError, match="'never'"):
            await call("never")
    with pytest.raises(BadRequestError, match="token_ids"):
        await reserve(a, "r", token_ids="text")
    with pytest.raises(BadRequestError, match="tokenizer"):
        await a.select({"text": "hello"})
    with pytest.raises(BadRequestError, match="tcp://"):
        await a.upsert_worker(engine(3) | {"kv_events_endpoints": {0: "ipc:///tmp/x"}})
    with pytest.raises(UnknownReservationError, match="await select_and_reserve first"):
        SelectionService().add_output_block("r")
    assert 0 == booked(a)


async def test_shutdown_hands_everything_over(services: list[SelectionService]) -> None:
    """Its bookings end at once, and the other one is the agent of all engines."""
    a, b = services
    await reserve(a, "r")
    await until(lambda: 1 == booked(b), "the peer knows")
    await a.shutdown()
    await until(lambda: 0 == booked(b), "its bookings are gone")
    await until(lambda: {"1", "2"} == opened(b).engines.acting, "the other one is the agent")
    await until(lambda: 2 == len(targets(b)), "it hears itself")
    await reserve(b, "again")
    await b.free_reservation("again")
    with contextlib.suppress(UnknownReservationError):
        await a.free_reservation("r")  # opens it again, as a new replica
