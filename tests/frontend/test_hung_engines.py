"""Requests that wait for a hung engine move to another one; requests to healthy engines stay."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kvrouter.core.fleet.router import Router
from kvrouter.core.routing.policy import RouteRequest
from kvrouter.core.routing.worker import Worker
from kvrouter.core.wire.heartbeats import State
from kvrouter.core.wire.ids import WorkerId
from kvrouter.frontend.requests import hung_engines
from kvrouter.frontend.requests.hung_engines import MOST_PROBES, HungEngines, probing
from tests.core.worlds import card, new_pool
from tests.frontend.clients import Response
from tests.frontend.fleet import BODY, POOL, STREAM, Fleet, FleetOf
from tests.frontend.workers import (
    SSE_HEAD,
    FakeWorker,
    chunk,
    event,
    says,
    says_and_stalls,
    stream,
    turns,
    until,
)

STALLS = says_and_stalls()
FAST = says(stream("hi"))


@pytest.fixture(autouse=True)
def _looks_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hung_engines, "LOOK_EVERY_S", 1e6)
    monkeypatch.setattr(hung_engines, "PROBE_TIMEOUT_S", 1.0)


async def look(fleet: Fleet) -> int:
    """One look, as once a second; returns how many requests moved."""
    return await fleet.frontend.hung_engines.look()


async def look_often(fleet: Fleet) -> int:
    """Look until a request moves, or until several probes have ended."""
    for _ in range(4):
        if moved := await look(fleet):
            return moved
        if probes := fleet.frontend.hung_engines._probes.values():
            await asyncio.wait(probes)
    return 0


@asynccontextmanager
async def waiting(
    fleet: Fleet, body: dict[str, Any] = STREAM, count: int = 1
) -> AsyncIterator[list[asyncio.Task[Response]]]:
    """Requests wait at the only worker; then a fast worker joins. On exit the waiting ones are answered."""
    tasks = [asyncio.create_task(fleet.ask(body)) for _ in range(count)]
    try:
        await until(lambda: len(fleet.workers[0].requests) == count, "all requests wait")
        async with FakeWorker("w1", FAST).serving() as other:
            fleet.workers.append(other)
            fleet.announce(other)
            await until(lambda: len(fleet.targets(fleet.frontend)) == 2, "the other worker is known")
            yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def hear(fleet: Fleet, state: State) -> None:
    """The first worker's agent reports this state, and the frontend has received it."""
    fleet.announce(fleet.workers[0], state)
    pool = fleet.frontend.replica.routers[POOL].pool
    await until(
        lambda: WorkerId("w0") not in {target.worker_id for target in pool.targets}, "the state is received"
    )


async def retried(fleet: Fleet) -> str:
    """The line of the metric."""
    metrics = (await fleet.get("/metrics")).body.decode()
    return next((line for line in metrics.splitlines() if '{reason="retried"}' in line), "none").split()[-1]


@pytest.mark.parametrize(("body", "moves"), [(STREAM, 1), (BODY, 0)], ids=["streamed", "not streamed"])
async def test_engine_reported_down(fleet_of: FleetOf, body: dict[str, Any], moves: int) -> None:
    """The agent's report moves a stream, but not other requests: those may be half done."""
    async with fleet_of(scripts=(STALLS,)) as fleet, waiting(fleet, body) as (task,):
        assert 0 == await look(fleet)  # the engine is not suspected
        await hear(fleet, "down")

        assert moves == await look_often(fleet)
        if moves:
            assert "w1" == (await task).header("x-kvrouter-worker")
            assert "1.0" == await retried(fleet)


@pytest.mark.parametrize("state", ["down", "leave"])
@pytest.mark.parametrize("body", [STREAM, BODY], ids=["streamed", "not streamed"])
async def test_engine_without_an_answer(fleet_of: FleetOf, body: dict[str, Any], state: State) -> None:
    """An engine that does not answer a probe loses all its requests, in any state of its agent."""
    async with fleet_of(scripts=(STALLS,)) as fleet, waiting(fleet, body) as (task,):
        fleet.workers[0].hangs = True
        await hear(fleet, state)

        assert 1 == await look_often(fleet)
        assert "w1" == (await task).header("x-kvrouter-worker")


@pytest.mark.parametrize(
    ("health", "models", "is_alive"),
    [
        (200, 200, True), (404, 200, True), (401, 401, True), (200, 404, True), (404, 404, True),
        (200, 503, False), (200, 500, False), (503, 200, False), (404, 502, False),
    ],
)  # fmt: skip
async def test_statuses_of_probes(health: int, models: int, *, is_alive: bool) -> None:
    """An engine lives if neither path has a server error; each is asked once at most."""
    asked: list[str] = []

    async def serve(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(status=health if request.path == "/health" else models)

    app = web.Application()
    app.router.add_get("/{rest:.*}", serve)
    async with TestServer(app) as server, probing(None) as probe:
        assert is_alive == await probe(str(server.make_url("")).rstrip("/"))

    assert (["/health"] if health >= 500 else ["/health", "/v1/models"]) == asked


async def test_dead_agent_of_a_healthy_engine(fleet_of: FleetOf) -> None:
    """No request moves while the engine answers; when it stops, all of them move."""
    async with fleet_of(scripts=(STALLS,)) as fleet, waiting(fleet) as (task,):
        await hear(fleet, "leave")
        assert 0 == await look_often(fleet)

        fleet.workers[0].hangs = True
        assert 1 == await look_often(fleet)
        assert "w1" == (await task).header("x-kvrouter-worker")


async def test_answers_that_have_begun_stay(fleet_of: FleetOf) -> None:
    """A request whose client has received a part of its answer does not move."""
    begun = says_and_stalls(SSE_HEAD + chunk(event("a")))
    async with fleet_of(scripts=(begun,)) as fleet, waiting(fleet):
        fleet.workers[0].hangs = True
        await hear(fleet, "down")

        assert 0 == await look_often(fleet)


async def test_without_an_alternative(fleet_of: FleetOf) -> None:
    """A request stays if no other worker could accept it: its engine may recover."""
    async with fleet_of(scripts=(STALLS,)) as fleet, waiting(fleet):
        await hear(fleet, "down")
        fleet.announce(fleet.workers[1], "draining")
        await until(lambda: not fleet.targets(fleet.frontend), "no worker accepts requests")

        assert 0 == await look_often(fleet)


async def test_many_without_an_alternative(fleet_of: FleetOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a few are tried in a second, since each costs as much as routing; all get their turn."""
    monkeypatch.setattr(hung_engines, "MOST_MISSES", 4)
    asked: list[str] = []

    def nobody(_router: Router, request: RouteRequest, *_: object, **__: object) -> bool:
        asked.append(request.request_id)
        return False

    monkeypatch.setattr(Router, "has_eligible", nobody)
    async with fleet_of(scripts=(STALLS,)) as fleet, waiting(fleet, count=10):
        await hear(fleet, "down")
        for looks in range(1, 4):
            assert 0 == await look(fleet)
            assert 4 * looks == len(asked)

        assert 10 == len(set(asked))


async def test_without_retries(fleet_of: FleetOf) -> None:
    """`--retries` bounds how often a request moves."""
    async with fleet_of("--retries", "0", scripts=(STALLS,)) as fleet, waiting(fleet):
        await hear(fleet, "down")

        assert 0 == await look_often(fleet)


async def test_a_tenth_moves_at_once(fleet_of: FleetOf) -> None:
    """Of 25 requests in flight two move in a second, the oldest first, until all have moved."""
    async with fleet_of(scripts=(STALLS,)) as fleet, waiting(fleet, count=25) as tasks:
        await hear(fleet, "down")

        assert 2 == await look(fleet)
        await until(lambda: sum(task.done() for task in tasks) == 2, "two were answered elsewhere")
        moved = 2
        for _ in range(25):
            more = await look(fleet)
            assert more <= 2
            moved += more
            await until(partial(lambda count: sum(task.done() for task in tasks) == count, moved))
        assert 25 == moved
        assert "25.0" == await retried(fleet)


async def test_last_worker_without_an_agent(fleet_of: FleetOf) -> None:
    """It is kept while its engine answers: a forged card does not keep a pool."""
    async with fleet_of() as fleet:
        pool = fleet.frontend.replica.routers[POOL].pool
        pool.silence({WorkerId("w0")})
        await look_often(fleet)
        assert {WorkerId("w0")} == pool.workers.keys()
        assert 200 == (await fleet.ask()).status

        fleet.workers[0].hangs = True
        await look_often(fleet)
        await look_often(fleet)
        assert not pool.workers


async def test_many_suspected_engines() -> None:
    """If more engines are suspected than are probed at once, each gets its turn."""
    asked: set[str] = set()

    async def probe(url: str) -> bool:
        asked.add(url)
        return False

    urls = {f"http://engine-{number}:8000" for number in range(2 * MOST_PROBES)}
    silent = [(new_pool(), Worker(card(url=url))) for url in urls]
    engines = HungEngines({}, lambda: silent, probe, asyncio.get_running_loop().time)

    for _ in range(2):
        await engines.look()
        await turns()

    assert urls == asked
