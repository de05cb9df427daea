"""Requests that wait for a worker: their order, number, longest wait, and what wakes them."""

from __future__ import annotations

import asyncio
import random
import re
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from kvrouter.core.feeds.trust import FeedState
from kvrouter.core.fleet.replica import Replica
from kvrouter.core.fleet.router import Router
from kvrouter.core.routing.admission import AdmissionSettings
from kvrouter.core.routing.policy import RouteRequest
from kvrouter.core.tables.tenants import TenantTable
from kvrouter.frontend.requests.admission_queue import WaitingRoom
from kvrouter.telemetry.metrics import RequestMetrics
from tests.core.fleet.test_must_wait import new_router
from tests.core.worlds import T1, book, card, new_pool
from tests.frontend.clients import Client, connected
from tests.frontend.fleet import BODY, Fleet, FleetOf
from tests.frontend.workers import WAIT_S, until
from tests.relay.gates import Gate, numbered, one_at_work, waiting

KV = ("--router-mode", "kv", "--router-queue-threshold", "0.5")
SYNCED = ("--router-replica-sync", *KV)
STEP: dict[str, Any] = {"max_batched_tokens": 64}
"""A worker with one prompt of 64 tokens to compute is full."""
RECEIVED = 'kvrouter_bus_messages_total{event="received"}'
SOON_S = 5.0
"""Long before --router-queue-timeout-s."""


async def metric(fleet: Fleet, line: str) -> float:
    """The value of one line of /metrics."""
    text = (await fleet.get("/metrics")).body.decode()
    found = re.search(rf"^{re.escape(line)} (\S+)$", text, re.MULTILINE)
    assert found, f"no {line} in /metrics"
    return float(found[1])


async def test_no_request_waits_by_default(fleet_of: FleetOf) -> None:
    """Without a threshold all requests are sent, even to a full worker."""
    gate = Gate()
    async with fleet_of("--router-mode", "kv", scripts=(gate.script,), **STEP) as fleet:
        tasks = [asyncio.create_task(fleet.ask(numbered(number))) for number in range(5)]
        await until(lambda: len(gate.arrived) == 5, "all reach the worker")
        gate.open()

        assert [200] * 5 == [response.status for response in await asyncio.gather(*tasks)]


async def test_arrival_order_is_kept(fleet_of: FleetOf) -> None:
    """Twenty requests wait, and reach the worker one at a time in the order of their arrival."""
    gate = Gate()
    async with fleet_of(*KV, scripts=(gate.script,), **STEP) as fleet, one_at_work(fleet, gate) as crowd:
        for number in range(1, 21):
            await crowd.add(number)
        for number in range(1, 21):
            gate.permits.release()
            await gate.until_sent(number + 1)
        gate.open()

        assert [200] * 20 == await crowd.statuses()
        assert list(range(21)) == gate.arrived
        assert 20 == await metric(fleet, 'kvrouter_queue_wait_seconds_count{outcome="admitted"}')


def line_of(room: WaitingRoom) -> Any:
    """The queue of the only pool."""
    (line,) = room._lines.values()
    return line


def looks_after(room: WaitingRoom, chance: float) -> None:
    """Whether it looks at once (0), or only when the test calls look_now (1e6)."""
    room._chance = lambda: chance


def look_now(room: WaitingRoom) -> None:
    """Run the look that is due now."""
    line = line_of(room)
    assert line.look is not None
    line.look.cancel()
    room._look(line)


async def test_newcomer_does_not_overtake(fleet_of: FleetOf) -> None:
    """A request that arrives between the change and the look waits behind the first one."""
    gate = Gate()
    async with fleet_of(*SYNCED, scripts=(gate.script,), replicas=2, **STEP) as fleet:
        first = fleet.frontend.waiting_room
        looks_after(first, 1e6)
        await until(lambda: fleet.frontend.replica.peers, "the peer is known")
        async with one_at_work(fleet, gate) as crowd:
            await crowd.add(1)
            gate.permits.release()
            await until(lambda: fleet.bookings() == 0, "there is room")
            await crowd.add(2)
            gate.open()
            looks_after(first, 0.0)
            look_now(first)

            assert [200, 200] == await crowd.statuses()
            assert [0, 1, 2] == gate.arrived


async def test_priority(fleet_of: FleetOf) -> None:
    """Lower values go first. The header wins over `priority` in the body."""
    gate = Gate()
    flags = (*KV, "--router-queue-policy", "priority")
    async with fleet_of(*flags, scripts=(gate.script,), **STEP) as fleet, one_at_work(fleet, gate) as crowd:
        await crowd.add(1)
        await crowd.add(2, priority=5)
        await crowd.add(3, priority=-5)
        await crowd.add(4, "x-kvrouter-priority: -7", priority=7)
        gate.open()

        assert [200] * 4 == await crowd.statuses()
        assert [0, 4, 3, 1, 2] == gate.arrived


async def test_fifo_knows_no_priority(fleet_of: FleetOf) -> None:
    """The default policy is first come, first served."""
    gate = Gate()
    async with fleet_of(*KV, scripts=(gate.script,), **STEP) as fleet, one_at_work(fleet, gate) as crowd:
        await crowd.add(1)
        await crowd.add(2, priority=-100)
        gate.open()

        await crowd.statuses()
        assert [0, 1, 2] == gate.arrived


@pytest.mark.parametrize(
    ("body", "header"), [({}, ("1.5",)), ({}, ("x",)), ({"nvext": {"agent_hints": {"priority": "high"}}}, ())]
)
async def test_wrong_priority(fleet_of: FleetOf, body: dict[str, Any], header: tuple[str, ...]) -> None:
    """A priority that is not a number is a 400 that names the field."""
    async with fleet_of() as fleet:
        response = await fleet.ask({**BODY, **body}, *(f"x-kvrouter-priority: {given}" for given in header))

        assert 400 == response.status
        assert response.json["error"]["param"] in {"x-kvrouter-priority", "nvext"}


@pytest.mark.parametrize("priority", ["high", 2**40, 1.5, "7"])
async def test_priorities_of_the_engine(fleet_of: FleetOf, priority: object) -> None:
    """A priority in the body is the engine's field: it judges one that cannot be read here."""
    async with fleet_of() as fleet:
        assert 200 == (await fleet.ask({**BODY, "priority": priority})).status


async def test_no_request_starves(fleet_of: FleetOf) -> None:
    """Under a steady stream of urgent requests, waiting raises the priority of the others."""
    gate = Gate()
    flags = (*KV, "--router-queue-policy", "priority", "--router-queue-ageing-s", "0.05")
    async with fleet_of(*flags, scripts=(gate.script,), **STEP) as fleet, one_at_work(fleet, gate) as crowd:
        await crowd.add(1)
        number = 1
        while 1 not in gate.arrived:  # always one urgent request in the queue with it
            number += 1
            await crowd.add(number, priority=-4)
            gate.permits.release()
            await gate.until_sent(number)
        waited_behind = gate.arrived.index(1)
        gate.open()

        assert {200} == set(await crowd.statuses())
        assert waited_behind > 1, "urgent ones went first"


async def test_wait_is_bounded(fleet_of: FleetOf) -> None:
    """After --router-queue-timeout-s the client gets a 503 with Retry-After; the log has the wait."""
    gate = Gate()
    flags = (*KV, "--router-queue-timeout-s", "0.2", "--access-log", "all")
    async with fleet_of(*flags, scripts=(gate.script,), **STEP) as fleet, one_at_work(fleet, gate) as crowd:
        await crowd.add(1)
        (refused,) = await asyncio.gather(*crowd.tasks)

        assert (503, "1") == (refused.status, refused.header("retry-after"))
        assert "busy for 0.2 s" in refused.json["error"]["message"]
        assert 0 == waiting(fleet)
        assert [0] == gate.arrived
        assert 1 == await metric(fleet, 'kvrouter_queue_wait_seconds_count{outcome="timeout"}')
        (failed,) = fleet.logged("request.failed")
        assert ("failed", True) == (failed["outcome"], failed["queue_s"] > 0.1)


async def test_full_queue(fleet_of: FleetOf) -> None:
    """One more than --router-queue-size gets a 503 at once; the others are served."""
    gate = Gate()
    flags = (*KV, "--router-queue-size", "2")
    async with fleet_of(*flags, scripts=(gate.script,), **STEP) as fleet, one_at_work(fleet, gate) as crowd:
        await crowd.add(1)
        await crowd.add(2)
        refused = await fleet.ask(numbered(3))

        assert (503, "1") == (refused.status, refused.header("retry-after"))
        assert "2 requests in the queue" in refused.json["error"]["message"]
        assert 1 == await metric(fleet, 'kvrouter_queue_wait_seconds_count{outcome="full"}')
        gate.open()
        assert [200, 200] == await crowd.statuses()


async def test_client_that_leaves(fleet_of: FleetOf) -> None:
    """A client that disconnects leaves the queue at once, and its request reaches no worker."""
    gate = Gate()
    async with fleet_of(*KV, scripts=(gate.script,), **STEP) as fleet, one_at_work(fleet, gate) as crowd:
        async with connected(fleet.url) as client:
            await _join(fleet, client, 1)
            await crowd.add(2)
            client.leave()
            await until(lambda: waiting(fleet) == 1, "it has left", within_s=SOON_S)
        gate.open()

        assert [200] == await crowd.statuses()
        assert [0, 2] == gate.arrived
        assert 1 == await metric(fleet, 'kvrouter_queue_wait_seconds_count{outcome="left"}')


async def _join(fleet: Fleet, client: Client, number: int) -> None:
    client.send(numbered(number))
    await until(lambda: waiting(fleet) == 1, f"request {number} waits")


async def test_first_byte_makes_room(fleet_of: FleetOf) -> None:
    """Requests wait for prefill only: the next is sent while the first answer is still streaming."""
    gate = Gate(streams=True)
    async with fleet_of(*KV, scripts=(gate.script,), **STEP) as fleet:
        tasks = [asyncio.create_task(fleet.ask(numbered(number, stream=True))) for number in range(3)]
        await until(lambda: len(gate.arrived) == 3, "all are at the worker, and none has ended", SOON_S)
        gate.open()

        assert [200] * 3 == [response.status for response in await asyncio.gather(*tasks)]


async def test_peer_makes_room(fleet_of: FleetOf) -> None:
    """A request waits for a request of another replica, and is sent as soon as that one ends."""
    gate = Gate()
    opened = fleet_of(*SYNCED, scripts=(gate.script,), replicas=2, **STEP)
    async with opened as fleet, one_at_work(fleet, gate, frontend=0) as crowd:
        await until(lambda: fleet.bookings() == 2, "the peer knows of it")
        await crowd.add(1, frontend=1)
        gate.permits.release()
        await until(lambda: gate.arrived == [0, 1], "it is sent", SOON_S)
        gate.open()

        assert [200] == await crowd.statuses()


async def test_one_free_admits_one(fleet_of: FleetOf) -> None:
    """Two replicas see the same room; the later one sees that it is taken."""
    gate = Gate()
    async with fleet_of(*SYNCED, scripts=(gate.script,), replicas=2, **STEP) as fleet:
        looks_after(fleet.frontends[0].waiting_room, 0.0)
        late = fleet.frontends[1].waiting_room
        looks_after(late, 1e6)
        await until(lambda: fleet.frontends[1].replica.peers, "the peer is known")
        async with one_at_work(fleet, gate) as crowd:
            readers = fleet.frontends[1].replica.readers
            await until(
                lambda: [FeedState.LIVE] == [one.state for one in readers.values()] and fleet.bookings() == 2,
                "the peer knows of it",
            )
            await crowd.add(1, frontend=0)
            await crowd.add(2, frontend=1)
            gate.permits.release()
            await until(lambda: gate.arrived == [0, 1], "one is sent")
            await until(lambda: line_of(late).look, "the peer has received the Free")
            await until(lambda: fleet.bookings() == 2, "and the AddRequest that takes the room")
            look_now(late)

            assert [0, 1] == gate.arrived
            assert 1 == waiting(fleet, 1)
            looks_after(late, 0.0)
            gate.open()
            assert [200, 200] == await crowd.statuses()


async def test_new_worker_makes_room(fleet_of: FleetOf) -> None:
    """The first heartbeat of a new worker wakes the queue."""
    gate, other = Gate(), Gate()
    async with fleet_of(*KV, scripts=(gate.script, other.script), **STEP) as fleet:
        joining = fleet.workers[1]
        fleet.announce(joining, state="leave", **STEP)
        await until(lambda: len(fleet.targets(fleet.frontend)) == 1, "it has left")
        async with one_at_work(fleet, gate) as crowd:
            await crowd.add(1)
            fleet.announce(joining, **STEP)
            await until(lambda: other.arrived == [1], "it gets the request", SOON_S)
            other.open()

            assert [200] == await crowd.statuses()


async def test_last_worker_leaves(fleet_of: FleetOf) -> None:
    """When the last worker leaves, waiting requests get a 503 at once."""
    gate = Gate()
    async with fleet_of(*KV, scripts=(gate.script,), **STEP) as fleet, one_at_work(fleet, gate) as crowd:
        await crowd.add(1)
        fleet.announce(fleet.workers[0], state="leave", **STEP)

        assert [503] == await crowd.statuses()


async def test_nothing_polls(fleet_of: FleetOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten wait: each message causes one look, or two if a slice took its whole millisecond."""
    looks, must_wait = 0, Router.must_wait

    def counted(router: Router, *asked: Any, spare: int = 0) -> bool:
        nonlocal looks
        looks += 1
        return must_wait(router, *asked, spare=spare)

    monkeypatch.setattr(Router, "must_wait", counted)
    gate = Gate()
    flags = (*KV, "--heartbeat-s", "0.05", "--no-router-track-output-blocks")  # progress has its own timer
    async with fleet_of(*flags, scripts=(gate.script,), **STEP) as fleet, one_at_work(fleet, gate) as crowd:
        for number in range(1, 11):
            await crowd.add(number)
        looks, seen, received, began = 0, 0, 0.0, await metric(fleet, RECEIVED)
        async with asyncio.timeout(WAIT_S):
            while received < 5:
                seen, received = looks, await metric(fleet, RECEIVED) - began

        assert 0 < seen <= 2 * received + 1, "one may have been due before"
        gate.open()
        assert [200] * 10 == await crowd.statuses()


async def test_queue_is_in_workers_and_metrics(fleet_of: FleetOf) -> None:
    """/workers and /metrics contain the number of waiting requests and the longest wait."""
    gate = Gate()
    async with fleet_of(*KV, scripts=(gate.script,), **STEP) as fleet, one_at_work(fleet, gate) as crowd:
        await crowd.add(1)
        await crowd.add(2)
        (pool,) = (await fleet.get("/workers")).json["pools"]

        assert 2 == pool["queue"]["waiting"]
        assert 0 <= pool["queue"]["longest_wait_s"] < 10
        assert 2 == await metric(fleet, 'kvrouter_queue_length{pool="m-12345678"}')
        gate.open()
        assert [200, 200] == await crowd.statuses()


async def test_any_mode(fleet_of: FleetOf) -> None:
    """For the queue, prompts are tokenized even if the mode does not need tokens."""
    gate = Gate()
    flags = ("--router-mode", "round-robin", *KV[2:])
    async with fleet_of(*flags, scripts=(gate.script,), **STEP) as fleet, one_at_work(fleet, gate) as crowd:
        await crowd.add(1)
        gate.open()

        assert [200] == await crowd.statuses()


async def test_worker_without_max_batched_tokens(fleet_of: FleetOf) -> None:
    """A worker without max_batched_tokens is never full. /workers lists it, as a problem of the pool."""
    gate = Gate()
    async with fleet_of(*KV, scripts=(gate.script,)) as fleet, one_at_work(fleet, gate):
        other = asyncio.create_task(fleet.ask(numbered(1)))
        await until(lambda: gate.arrived == [0, 1], "it is at the worker")
        (pool,) = (await fleet.get("/workers")).json["pools"]
        gate.open()

        assert 200 == (await other).status
        assert ["w0"] == pool["queue"]["never_full"]
        await until(lambda: bool(fleet.logged("worker.problem")), "the audit has seen it")
        (pool,) = (await fleet.get("/workers")).json["pools"]
        (problem,) = pool["problems"]
        assert "--router-queue-threshold has no effect" in problem
        assert "w0, whose cards have no max_batched_tokens" in problem
        assert [problem] == [one["problem"] for one in fleet.logged("worker.problem") if not one["worker"]]


async def test_waiting_when_the_draining_ends(fleet_of: FleetOf) -> None:
    """Waiting requests are served during the drain; those left at its end get a 503."""
    gate = Gate()
    async with fleet_of(*KV, scripts=(gate.script,), **STEP) as fleet, one_at_work(fleet, gate) as crowd:
        await crowd.add(1)
        await crowd.add(2)
        fleet.frontend.drain()
        gate.permits.release()
        await until(lambda: gate.arrived == [0, 1], "the next one is sent")
        fleet.frontend.completions.in_flight.cut_off()

        assert [503, 503] == await crowd.statuses()
        assert 0 == waiting(fleet)


async def test_first_leaves_as_it_is_woken() -> None:
    """If the first one's client leaves in the turn in which there is room, the next one gets the room."""
    pool = new_pool(card("w1", max_batched_tokens=64))
    router = new_router(pool)
    replica = cast("Replica", SimpleNamespace(sharing_peers=lambda: 0, tenants=TenantTable()))
    settings = AdmissionSettings(threshold=0.5)
    waiting_room = WaitingRoom(
        replica, settings, RequestMetrics(CollectorRegistry()).queue_wait, random.random
    )
    key = book(pool, T1, [1], prefill_tokens=64)
    tasks = [asyncio.create_task(waiting_room.admitted(router, RouteRequest(name))) for name in "ab"]
    await until(lambda: waiting_room.waiting() == 2, "they wait")
    pool.active.free(key)

    waiting_room.wake()
    look_now(waiting_room)
    tasks[0].cancel()

    async with asyncio.timeout(WAIT_S):
        assert isinstance((await asyncio.gather(*tasks, return_exceptions=True))[0], asyncio.CancelledError)
    assert tasks[1].exception() is None


async def test_other_routes_do_not_wait(fleet_of: FleetOf) -> None:
    """Routes of passthrough.py never wait: their tokens are unknown."""
    gate = Gate()
    async with fleet_of(*KV, scripts=(gate.script,), **STEP) as fleet, one_at_work(fleet, gate):
        passed = asyncio.create_task(fleet.ask({"model": "m", "seed": 9}, path="/v1/embeddings"))
        await until(lambda: gate.arrived == [0, 9], "it is at the worker")
        gate.open()

        assert 200 == (await passed).status
