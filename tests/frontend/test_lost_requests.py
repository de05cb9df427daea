"""Requests whose worker is lost with them in hand, and prompts that end their workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvrouter.bodies.prompt_hash import hash_of
from kvrouter.core.wire.ids import WorkerId
from kvrouter.core.wire.ops import DeadlyPrompt, LostWith
from kvrouter.frontend.run import RunningFrontend
from tests.frontend.clients import Response, ask, connected
from tests.frontend.fleet import POOL, Fleet, FleetOf, hears_itself
from tests.frontend.workers import (
    END,
    SSE_HEAD,
    FakeWorker,
    Received,
    Wire,
    answer,
    chunk,
    event,
    says,
    until,
)

POISON = {"model": "m", "prompt": "poison", "max_tokens": 4}
CODE = "request_ends_workers"


@dataclass
class Engine:
    """A worker's script: a poison ends it, a held request is answered once `release` is set."""

    release: asyncio.Event
    on_poison: Callable[[FakeWorker, Wire], Any] = lambda worker, _wire: worker.die()
    worker: FakeWorker = field(default_factory=lambda: FakeWorker("none", says()))

    async def __call__(self, received: Received, wire: Wire) -> None:
        body = received.body
        if b"poison" in body:
            if b'"stream": true' in body:
                await wire.send(SSE_HEAD + chunk(event("a")))
            self.on_poison(self.worker, wire)
        elif b"stream" in body:
            await wire.send(SSE_HEAD + chunk(event("a")))
            await self.release.wait()
            await wire.send(chunk(event("b", "stop")) + END)
        else:
            if b"held" in body:
                await self.release.wait()
            await wire.send(answer())


@pytest.fixture
def engines() -> list[Engine]:
    """Five engines of one test."""
    release = asyncio.Event()
    return [Engine(release) for _ in range(5)]


def embody(fleet: Fleet, engines: list[Engine]) -> None:
    """Let each script know its worker."""
    for engine, worker in zip(engines, fleet.workers, strict=False):
        engine.worker = worker


def poisoned(fleet: Fleet) -> list[str]:
    """The workers that got the poison, in order of their names."""
    return [one.id for one in fleet.workers for received in one.requests if b"poison" in received.body]


def held(number: int, *, stream: bool = False) -> dict[str, Any]:
    """A request that is answered once the engines are released."""
    return {"model": "m", "prompt": f"held {number}", "max_tokens": 4} | ({"stream": True} if stream else {})


async def delete(fleet: Fleet, path: str, number: int = 0) -> Response:
    """One DELETE on a frontend's admin listener."""
    async with connected(fleet.frontends[number].admin_url) as client:
        client.send(b"", path=path, method="DELETE")
        return await client.response()


def refuses(frontend: RunningFrontend) -> bool:
    """Whether the frontend refuses any prompt."""
    return bool(frontend.replica.deadly.entries())


async def test_two_workers_at_most(fleet_of: FleetOf, engines: list[Engine]) -> None:
    """A prompt that ends its workers ends two of five, and is then refused, in whatever form it comes."""
    async with fleet_of(scripts=tuple(engines)) as fleet:
        embody(fleet, engines)
        async with fleet.connected() as client:
            for _ in range(5):  # some of its connections have served before
                assert 200 == (await client.ask(held(0) | {"prompt": "hi"})).status
        response = await fleet.ask(POISON)

        assert (502, CODE) == (response.status, response.json["error"]["code"])
        assert 2 == len(poisoned(fleet))
        for more in ({}, {"stream": True}, {"user": "bob"}):
            again = await fleet.ask(POISON | more)
            assert (502, CODE) == (again.status, again.json["error"]["code"])
        assert 2 == len(poisoned(fleet))
        assert [200] * 3 == [(await fleet.ask(POISON | {"prompt": f"hi {n}"})).status for n in range(3)]
        (logged,) = fleet.logged("prompt.deadly")
        assert sorted(poisoned(fleet)) == sorted(logged["workers"])
        metrics = (await fleet.get("/metrics")).body.decode()
        assert 'kvrouter_failed_attempts_total{reason="died"} 2' in metrics


async def test_operators_see_it_and_let_it_pass(fleet_of: FleetOf, engines: list[Engine]) -> None:
    """GET /deadly_prompts lists it, /ready and /workers report it, and DELETE ends it."""
    async with fleet_of(scripts=tuple(engines)) as fleet:
        embody(fleet, engines)
        await fleet.ask(POISON)
        (row,) = (await fleet.get("/deadly_prompts")).json["prompts"]
        fleet.frontend.audit.run()
        ready, workers = await fleet.get("/ready"), await fleet.get("/workers")

        assert sorted(poisoned(fleet)) == sorted(row["workers"])
        assert 590 < row["left_s"] <= 600
        assert any("2 workers lost on one request" in reason for reason in ready.json["reasons"])
        assert row["hash"] in workers.json["pools"][0]["problems"][0]
        assert 404 == (await delete(fleet, "/deadly_prompts/00")).status
        passed = await delete(fleet, f"/deadly_prompts/{row['hash']}")
        assert (200, [row["hash"]]) == (passed.status, passed.json["pardoned"])
        assert [] == (await fleet.get("/deadly_prompts")).json["prompts"]
        fleet.frontend.audit.run()
        assert "lost on one request" not in str((await fleet.get("/ready")).json)
        for engine in engines:
            engine.on_poison = lambda _worker, wire: wire.writer.write(answer())
        assert 200 == (await fleet.ask(POISON)).status
        assert [] == (await delete(fleet, "/deadly_prompts")).json["pardoned"]


async def test_no_retry_after_a_death(fleet_of: FleetOf, engines: list[Engine]) -> None:
    """`--retries-after-death 0`: one worker a request; the second request's loss is the prompt's second."""
    async with fleet_of("--retries-after-death", "0", scripts=tuple(engines)) as fleet:
        embody(fleet, engines)
        first = await fleet.ask(POISON)
        assert (502, 502, 1) == (first.status, first.json["error"]["code"], len(poisoned(fleet)))
        assert "--retries-after-death" in first.json["error"]["message"]

        second, third = await fleet.ask(POISON), await fleet.ask(POISON)
        assert [CODE, CODE] == [second.json["error"]["code"], third.json["error"]["code"]]
        assert 2 == len(poisoned(fleet))


async def test_nothing_is_refused(fleet_of: FleetOf, engines: list[Engine]) -> None:
    """`--deadly-prompt-ttl-s 0`: each request ends two workers at most, and no prompt is refused."""
    async with fleet_of("--deadly-prompt-ttl-s", "0", "--retries", "4", scripts=tuple(engines)) as fleet:
        embody(fleet, engines)
        for deaths in (2, 4):
            assert CODE == (await fleet.ask(POISON)).json["error"]["code"]
            assert deaths == len(poisoned(fleet))
        assert not refuses(fleet.frontend)


async def test_refused_connections_are_no_loss(fleet_of: FleetOf, engines: list[Engine]) -> None:
    """Workers that refuse the connection are skipped, up to --retries, and no prompt is suspected."""
    async with fleet_of("--retries", "4", scripts=tuple(engines)) as fleet:
        embody(fleet, engines)
        for worker in fleet.workers[:4]:
            worker.die()

        assert ["w4"] * 3 == [
            (await fleet.ask(held(n) | {"prompt": "hi"})).header("x-kvrouter-worker") for n in range(3)
        ]
        assert fleet.frontend.replica.deadly.is_empty


async def test_a_draining_worker_ends(fleet_of: FleetOf, engines: list[Engine]) -> None:
    """A worker that was draining ends its requests on purpose: they move, and are not suspected."""
    async with fleet_of(scripts=tuple(engines[:2])) as fleet:
        embody(fleet, engines)
        asking = asyncio.create_task(fleet.ask(held(1)))
        await until(lambda: fleet.requests)
        (first,) = [worker for worker in fleet.workers if worker.requests]
        fleet.announce(first, "draining")
        await until(lambda: len(fleet.targets(fleet.frontend)) == 1)
        engines[0].release.set()
        first.die()

        assert 200 == (await asking).status
        assert fleet.frontend.replica.deadly.is_empty


async def test_streams_that_have_begun(fleet_of: FleetOf, engines: list[Engine]) -> None:
    """A worker lost amid a stream counts: the client gets its error event, and the third time a refusal."""
    async with fleet_of(scripts=tuple(engines)) as fleet:
        embody(fleet, engines)
        *broken, refused = [await fleet.ask(POISON | {"stream": True}) for _ in range(3)]

        assert [(200, 502)] * 2 == [(one.status, one.events[-1]["error"]["code"]) for one in broken]
        assert CODE == refused.json["error"]["code"]
        assert 2 == len(poisoned(fleet))


async def test_clients_that_leave(fleet_of: FleetOf, engines: list[Engine]) -> None:
    """A client that leaves as soon as its worker is lost does not hide the loss."""
    async with fleet_of(scripts=tuple(engines)) as fleet:
        embody(fleet, engines)
        for deaths in (1, 2):
            async with fleet.connected() as client:
                client.send(POISON)
                await until(lambda: len(fleet.logged("worker.failed_request")) == deaths)  # noqa: B023
        await until(lambda: refuses(fleet.frontend))

        assert 2 == len(poisoned(fleet))


async def test_broken_stream_of_a_living_worker(fleet_of: FleetOf, engines: list[Engine]) -> None:
    """A stream that breaks off while its worker accepts connections is no loss of a worker."""
    async with fleet_of(scripts=tuple(engines)) as fleet:
        for engine in engines:
            engine.on_poison = lambda _worker, wire: wire.reset()
        for _ in range(3):
            assert 200 == (await fleet.ask(POISON | {"stream": True})).status
        await fleet.frontend.completions.lost.look()

        assert not refuses(fleet.frontend)
        assert 3 == len(poisoned(fleet))


async def test_the_engine_says_that_it_died(fleet_of: FleetOf, engines: list[Engine]) -> None:
    """VLLM's server answers 500 when its engine process has died: that is a loss, too."""
    message = b'{"error":{"message":"EngineCore encountered an issue. See stack trace (above)","code":500}}'
    for engine in engines:
        engine.on_poison = lambda _worker, wire: wire.writer.write(answer(message, 500))
    async with fleet_of(scripts=tuple(engines)) as fleet:
        assert CODE == (await fleet.ask(POISON)).json["error"]["code"]
        assert 2 == len(poisoned(fleet))


async def test_amid_traffic(fleet_of: FleetOf, engines: list[Engine]) -> None:
    """Amid 20 requests on each worker, half of them streams, the poison ends three workers at most.

    Every other request without output is answered, unless it was sent to two workers of which one ended (on
    a busy machine the other one may not answer its probe in time, or end before it has read the request),
    and none is refused.
    """
    async with fleet_of(scripts=tuple(engines)) as fleet:
        embody(fleet, engines)
        streams = [asyncio.create_task(fleet.ask(held(n, stream=True))) for n in range(50)]
        waiting = [asyncio.create_task(fleet.ask(held(n))) for n in range(100, 150)]
        await until(lambda: len(fleet.requests) == 100)
        asking = asyncio.create_task(fleet.ask(POISON))
        await until(lambda: poisoned(fleet))
        engines[0].release.set()
        responses = [await asking, *[await fleet.ask(POISON) for _ in range(4)]]

        assert {502} == {response.status for response in responses}
        assert CODE == responses[-1].json["error"]["code"]
        assert len(poisoned(fleet)) <= 3
        assert {200} == {response.status for response in await asyncio.gather(*streams)}
        ended = set(poisoned(fleet))
        for response in await asyncio.gather(*waiting):
            request = response.header("x-request-id")
            lost_at = {
                one["worker"] for one in fleet.logged("worker.failed_request") if one["request"] == request
            }
            may_end = len(lost_at) >= 2 and lost_at & ended
            assert 200 == response.status or (may_end and CODE == response.json["error"]["code"])
        (entry,) = fleet.frontend.replica.deadly.entries()
        assert set(entry.workers) <= set(map(WorkerId, poisoned(fleet)))


@pytest.mark.parametrize("prompts", [50, 1])
async def test_a_node_fails(fleet_of: FleetOf, engines: list[Engine], prompts: int) -> None:
    """Three of five workers end at once under 50 requests: the others answer all, and none is charged."""
    async with fleet_of(scripts=tuple(engines)) as fleet:
        embody(fleet, engines)
        waiting = [asyncio.create_task(fleet.ask(held(n % prompts))) for n in range(50)]
        await until(lambda: len(fleet.requests) == 50)
        for worker in fleet.workers[:3]:
            worker.die()
        engines[0].release.set()

        assert {200} == {response.status for response in await asyncio.gather(*waiting)}
        assert not refuses(fleet.frontend)
        assert fleet.frontend.replica.deadly.is_empty


async def test_other_requests_avoid_lost_workers(fleet_of: FleetOf, engines: list[Engine]) -> None:
    """Requests that were at no lost worker are not sent to one either, before its agent has reported it."""
    async with fleet_of("--retries", "0", scripts=tuple(engines)) as fleet:
        embody(fleet, engines)
        waiting = [asyncio.create_task(fleet.ask(held(n))) for n in range(50)]
        await until(lambda: len(fleet.requests) == 50)
        for worker in fleet.workers[:3]:
            worker.die()
        await until(
            lambda: (
                len(list(fleet.frontend.replica.deadly.lost_workers(asyncio.get_running_loop().time()))) == 3
            )
        )
        engines[0].release.set()

        assert {200} == {(await fleet.ask(held(n))).status for n in range(100, 110)}
        await asyncio.gather(*waiting)


async def test_forged_words_of_a_peer(fleet_of: FleetOf, engines: list[Engine]) -> None:
    """Whoever publishes in a replica's name has no prompt refused or held whose workers live."""
    flags = ("--router-replica-sync",)
    async with fleet_of(*flags, scripts=tuple(engines), replicas=2) as fleet:
        embody(fleet, engines)
        first, forger = fleet.frontends
        prompt = hash_of(POOL, "/v1/completions", json.dumps(held(1)).encode())
        router = forger.replica.routers[POOL]
        engines[0].release.set()
        claims = first.replica.claimed_losses
        claims._began_at, verdicts = -1e6, claims._verdicts  # it has been there for long
        for _ in range(3):
            for worker in fleet.workers:
                router.feed.publish(LostWith(prompt, worker.id, 1000, 0))
            router.feed.publish(DeadlyPrompt(prompt, [worker.id for worker in fleet.workers], 600_000))
            forger.replica_loop.publishing.flush_soon()
            await until(lambda: verdicts)
            assert 200 == (await ask(first.url, held(1))).status
            verdicts.clear()

        assert first.replica.deadly.is_empty


async def test_a_node_fails_bit_by_bit(fleet_of: FleetOf, engines: list[Engine]) -> None:
    """What was at both workers that ended is tried nowhere else; no prompt is blamed."""
    async with fleet_of(scripts=tuple(engines)) as fleet:
        embody(fleet, engines)
        waiting = [asyncio.create_task(fleet.ask(held(n))) for n in range(50)]
        await until(lambda: len(fleet.requests) == 50)
        first = {received.body for received in fleet.workers[0].requests}
        fleet.workers[0].die()
        await until(lambda: len(fleet.requests) == 60)
        at_both = first & {received.body for received in fleet.workers[1].requests}
        fleet.workers[1].die()
        engines[0].release.set()
        responses = await asyncio.gather(*waiting)

        ended = [response for response in responses if response.status != 200]
        assert len(at_both) == len(ended) > 0
        assert {(502, CODE)} == {(response.status, response.json["error"]["code"]) for response in ended}
        assert not refuses(fleet.frontend)
        assert {200} == {(await fleet.ask(held(n))).status for n in range(50)}


async def test_all_replicas(fleet_of: FleetOf, engines: list[Engine]) -> None:
    """A loss at each of two replicas makes all refuse the prompt, also a later one. DELETE ends it."""
    flags = ("--retries-after-death", "0", "--router-replica-sync")
    async with fleet_of(*flags, scripts=tuple(engines), replicas=2) as fleet:
        embody(fleet, engines)
        await ask(fleet.frontends[0].url, POISON)
        await until(lambda: all(each.replica.deadly.suspects() for each in fleet.frontends))
        await ask(fleet.frontends[1].url, POISON)
        await until(lambda: all(map(refuses, fleet.frontends)))
        async with fleet.new_frontend() as late:
            await until(lambda: hears_itself(late.replica))
            for worker in fleet.workers:
                fleet.announce(worker)
            await until(lambda: len(fleet.targets(late)) == 5)
            await until(lambda: refuses(late), "a replica that starts later learns it")
            for frontend in (*fleet.frontends, late):
                assert CODE == (await ask(frontend.url, POISON)).json["error"]["code"]
            await delete(fleet, "/deadly_prompts", 1)
            await until(lambda: not any(map(refuses, (*fleet.frontends, late))))

        assert 2 == len(poisoned(fleet))
