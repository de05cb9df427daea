"""Requests whose worker reads blocks from a peer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvrouter.core.fleet.router import Router
from kvrouter.core.wire.ids import Target, WorkerId
from tests.core.worlds import book
from tests.frontend.fleet import BODY, STREAM, Fleet, FleetOf
from tests.frontend.test_pairs import metric
from tests.frontend.workers import (
    OK,
    Script,
    answer,
    in_turn,
    says,
    says_and_closes,
    says_and_stalls,
    turns,
    until,
    until_found,
)

W0 = Target(WorkerId("w0"))
# Prompts are taken for cached where they were computed: the first request makes w0 warm.
FLAGS = ("--router-mode", "kv", "--kv-from-peers", "--no-use-kv-events", "--retries", "2")
# 64 ms for the prompt, so that reading 48 of its 64 tokens pays.
CARD: dict[str, Any] = {"kv_connector": "p2p", "prefill_tokens_per_s": 1000, "started_at_us": 2}


def whole(cached_tokens: int) -> bytes:
    usage = {
        "prompt_tokens": 64,
        "completion_tokens": 1,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    choice = {"index": 0, "text": "hi", "finish_reason": "length"}
    return answer(json.dumps({"id": "c", "choices": [choice], "usage": usage}).encode())


def announce(fleet: Fleet, number: int, state: Any = "up", **card: Any) -> None:
    fleet.announce(fleet.workers[number], state, kv_address=f"10.0.0.{number}:5710", **(CARD | card))


@asynccontextmanager
async def warm(fleet_of: FleetOf, *others: Script) -> AsyncIterator[tuple[Fleet, Router]]:
    """w0 holds the prompt, and has much to compute."""
    async with fleet_of(*FLAGS, scripts=(OK, *others), replicas=1) as fleet:
        (router,) = fleet.frontend.replica.routers.values()
        for number in range(len(fleet.workers)):
            announce(fleet, number)
        await until(lambda: len(router.pool.split.peers) == len(fleet.workers))
        await fleet.ask(BODY, "x-kvrouter-mode: direct", "x-kvrouter-target: w0")
        assert ["w0"] == fleet.requests
        key = book(router.pool, W0, [10**9], 5000)
        yield fleet, router
        router.pool.active.free(key)


async def test_the_worker_gets_the_peers_address(fleet_of: FleetOf) -> None:
    async with warm(fleet_of, OK) as (fleet, _):
        for _ in range(2):  # the second one finds it at w1
            response = await fleet.ask(BODY)
            assert 200 == response.status

        first, second = fleet.workers[1].requests
        named = first.json["kv_transfer_params"]["remote_kv_source"]
        assert {"remote_host": "10.0.0.0", "remote_port": 5710} == {
            name: named[name] for name in ("remote_host", "remote_port")
        }
        assert len(named["kv_request_id"]) > 16
        assert BODY["prompt"] == first.json["prompt"]
        assert "kv_transfer_params" not in second.json
        assert await metric(fleet, 'kvrouter_pd_requests_total{path="pull"} 1')


async def test_it_is_shown(fleet_of: FleetOf) -> None:
    """In a dry run, in a header, and in the decision."""
    async with warm(fleet_of, OK) as (fleet, _):
        planned = (await fleet.ask(BODY, path="/v1/route")).json
        response = await fleet.ask(BODY)
        kept = (await fleet.get(f"/decisions/{response.header('x-request-id')}")).json["decisions"][0]

        assert ("w1", "w0") == tuple(
            response.header(f"x-kvrouter-{name}") for name in ("worker", "kv-source")
        )
        for one in (planned, kept):
            seconds = {each["worker_id"]: each["terms"]["seconds"] for each in one["candidates"]}
            assert 0 == seconds["w0"]["transfer"] < seconds["w1"]["transfer"]


@pytest.mark.parametrize("fails", [says(answer(b"{}", status=500)), says_and_closes(b"")])
async def test_the_next_try_computes(fleet_of: FleetOf, fails: Script) -> None:
    """An engine may fail a request whose blocks did not come: the client gets an answer all the same."""
    async with warm(fleet_of, fails) as (fleet, router):
        response = await fleet.ask(BODY)

        assert 200 == response.status
        assert "kv_transfer_params" in fleet.workers[1].requests[0].json
        assert "kv_transfer_params" not in fleet.workers[0].requests[-1].json
        assert router.tables.transfers.has_failures
        assert not response.headers("x-kvrouter-kv-source")


async def test_a_peer_that_gives_nothing_rests(fleet_of: FleetOf) -> None:
    """Its blocks are gone, or nobody answers there: engines compute, and tell that nothing was cached."""
    async with warm(fleet_of, says(whole(0))) as (fleet, router):
        for _ in range(3):
            await fleet.ask(BODY)
            router.pool.approx.drop(Target(WorkerId("w1")))
        assert [(WorkerId("w0"), WorkerId("w1"))] == router.tables.transfers.resting(
            asyncio.get_running_loop().time()
        )

        response = await fleet.ask(BODY)

        assert 200 == response.status
        assert not response.headers("x-kvrouter-kv-source")


@pytest.mark.parametrize("end", ["down", "leave"])
async def test_the_peer_dies(fleet_of: FleetOf, end: str) -> None:
    """VLLM asks it for 30 s before it computes: the request moves, and is computed elsewhere."""
    waits = in_turn(says_and_stalls(), OK)
    async with warm(fleet_of, waits, waits) as (fleet, _):
        asking = asyncio.create_task(fleet.ask(STREAM))
        await until(lambda: any(worker.requests for worker in fleet.workers[1:]))
        announce(fleet, 0, end, started_at_us=3)

        await until_found(fleet.frontend.hung_engines.look, lambda _: asking.done(), within_s=20)
        assert 200 == (await asking).status


async def test_alone_it_waits(fleet_of: FleetOf) -> None:
    """Without another worker the request stays: its engine will compute it."""
    go = asyncio.Event()

    async def slow(received: Any, wire: Any) -> None:
        await go.wait()
        await OK(received, wire)

    async with warm(fleet_of, slow) as (fleet, router):
        asking = asyncio.create_task(fleet.ask(BODY))
        await until(lambda: bool(fleet.workers[1].requests))
        announce(fleet, 0, "leave", started_at_us=3)
        await until(lambda: W0 not in router.pool.targets)
        for _ in range(5):
            await fleet.frontend.hung_engines.look()
            await turns(20)
        go.set()

        assert 200 == (await asking).status
        assert 1 == len(fleet.workers[1].requests)
