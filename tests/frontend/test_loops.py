"""A replica as its own worker: cards that name one, and requests that come back to one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest

from kvrouter.core.fleet.places import place_of
from kvrouter.core.wire.heartbeats import RouterBeat, encode
from kvrouter.core.wire.ids import RouterId, WorkerId
from kvrouter.core.wire.ops import VERSION
from kvrouter.frontend.run import RunningFrontend
from tests.frontend.fleet import BODY, STREAM, Fleet, FleetOf
from tests.frontend.workers import OK, FakeWorker, Received, Script, Wire, answer, says, until

LOOP = answer(b'{"error":{"message":"loop detected: elsewhere","code":508}}', 508)


def leads_to(url: Callable[[], str]) -> Script:
    """As a balancer does it: passes the request on to this URL, and the answer back."""

    async def script(received: Received, wire: Wire) -> None:
        place = urlsplit(url())
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        writer.write(received.head.rstrip() + b"\r\nconnection: close\r\n\r\n" + received.body)
        await wire.send(await reader.read())
        writer.close()

    return script


def rows(fleet: Fleet, worker_id: str) -> list[tuple[bool, list[str]]]:
    """Whether a worker's targets are eligible, and its problems, at each replica."""
    found = []
    for each in fleet.frontends:
        each.audit.run()
        audited = each.audit.problems
        for pool_id, router in each.replica.routers.items():
            pool = router.pool
            assert WorkerId(worker_id) in pool.workers
            is_target = any(target.worker_id == worker_id for target in pool.targets)
            found.append((is_target, [one.kind for one in audited(pool_id, worker_id)]))
    return found


def announce(fleet: Fleet, url: str) -> None:
    """The card of a worker `loop` with this URL."""
    fleet.announce(FakeWorker("loop", OK, url))


async def until_known(fleet: Fleet) -> None:
    """Every replica has the card of `loop`."""

    def knows(each: RunningFrontend) -> bool:
        return any("loop" in router.pool.workers for router in each.replica.routers.values())

    await until(lambda: all(map(knows, fleet.frontends)), "its card")


@pytest.mark.parametrize("port", ["clients", "admin"])
async def test_own_address(fleet_of: FleetOf, port: str) -> None:
    """It gets no request, and /ready and /workers say why."""
    async with fleet_of() as fleet:
        url = fleet.url if port == "clients" else fleet.frontend.admin_url
        announce(fleet, url.replace("127.0.0.1", "localhost"))
        await until_known(fleet)

        for _ in range(4):
            assert 200 == (await fleet.ask()).status

        assert 4 == len(fleet.requests)
        assert [(False, ["loop"])] == rows(fleet, "loop")
        while (ready := (await fleet.get("/ready")).json)["status"] == "starting":
            pass
        (reason,) = [one for one in ready["reasons"] if "worker loop" in one]
        targets = (await fleet.get("/workers")).json["targets"]
        (row,) = [one for one in targets if one["worker_id"] == "loop"]
        assert ("degraded", False) == (ready["status"], row["eligible"])
        for part in ("has the address of this replica", "--engine-url"):
            assert part in reason
            assert part in str(row["problems"])
        asked = await fleet.ask({**BODY, "kvrouter": {"mode": "direct", "target": "loop"}})
        assert 503 == asked.status


async def test_address_of_a_peer(fleet_of: FleetOf) -> None:
    """No replica of the fleet sends requests to another one, as whose worker it was announced before."""
    async with fleet_of(replicas=2) as fleet:
        first, other = fleet.frontends
        announce(fleet, other.url)
        await until_known(fleet)
        known = first.replica.peers.places
        await until(lambda: place_of(other.url) in known.names, "the address has answered")

        assert [(False, ["loop"])] * 2 == rows(fleet, "loop")


async def test_forged_peer(fleet_of: FleetOf) -> None:
    """A forged heartbeat with a worker's address takes nothing from it: it does not answer as a replica."""
    async with fleet_of() as fleet:
        beat = RouterBeat(VERSION, 1, "up", fleet.workers[0].url, {}, 1)
        fleet.bus.publish(fleet.subjects.live_router(RouterId("forged")), encode(beat))
        replica = fleet.frontend.replica
        await until(lambda: "forged" in replica.peers, "the claim")
        await until(lambda: replica.peers.has_failed(RouterId("forged")), "it was asked")

        assert 200 == (await fleet.ask()).status
        assert [(True, [])] == rows(fleet, "w0")


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "stream"])
async def test_hidden_loop(fleet_of: FleetOf, body: dict[str, object]) -> None:
    """A request that comes back through something else ends with 508, and no other worker is tried."""
    urls: list[str] = []
    script = leads_to(lambda: urls[0])
    async with fleet_of("--retries", "3", scripts=(script, script)) as fleet:
        urls.append(fleet.url)

        response = await fleet.ask(body)

        assert 508 == response.status
        assert "loop detected" in response.json["error"]["message"]
        assert 1 == len(fleet.requests)
        (line, *_) = fleet.logged("request.failed")
        assert (508, "warning") == (line["status"], line["log_level"])
        metrics = (await fleet.get("/metrics")).body.decode()
        assert 'code="508"' in metrics


async def test_hidden_peer(fleet_of: FleetOf) -> None:
    """A loop over a peer ends there: it knows who has had the request."""
    urls: list[str] = []
    async with fleet_of(scripts=(leads_to(lambda: urls[0]),), replicas=2) as fleet:
        await until(lambda: all(each.replica.peers for each in fleet.frontends), "they know each other")
        urls.append(fleet.frontends[1].url)

        assert 508 == (await fleet.ask()).status
        assert 1 == len(fleet.requests)


async def test_chained_fleets(fleet_of: FleetOf) -> None:
    """Routers of other fleets in front are no loop."""
    async with fleet_of() as fleet:
        assert 200 == (await fleet.ask(None, "x-kvrouter-hops: region-1")).status

        own = fleet.frontend.replica.router_id
        assert [f"region-1, {own}"] == fleet.workers[0].requests[0].headers("x-kvrouter-hops")


async def test_clients_header(fleet_of: FleetOf) -> None:
    """All that a client gets by it is a 508 in its API's form; no worker sees the request."""
    async with fleet_of() as fleet:
        own = RouterId(fleet.frontend.replica.router_id)
        for hops in (own, "no list", ", ".join("abcdefghi")):
            for path in ("/v1/completions", "/v1/embeddings", "/tokenize"):
                response = await fleet.ask(None, f"x-kvrouter-hops: {hops}", path=path)
                assert (508, "LoopDetectedError") == (response.status, response.json["error"]["type"])
        message = await fleet.ask(None, f"x-kvrouter-hops: {own}", path="/v1/messages")

        assert (508, "error") == (message.status, message.json["type"])
        assert [] == fleet.requests


async def test_508_of_a_worker(fleet_of: FleetOf) -> None:
    """It is passed on as it is, and opens no circuit."""
    flags = ("--retries", "2", "--circuit-breaker", "--circuit-breaker-failures", "1")
    async with fleet_of(*flags, scripts=(says(LOOP), says(LOOP))) as fleet:
        for _ in range(4):
            response = await fleet.ask()
            assert (508, "loop detected: elsewhere") == (response.status, response.json["error"]["message"])

        assert 4 == len(fleet.requests)
