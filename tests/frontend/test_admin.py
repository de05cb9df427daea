"""What operators and load balancers see."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from kvrouter.core.fleet.replica import ReplicaCounters
from kvrouter.core.native import versions
from kvrouter.core.routing.policy import RouteRequest
from kvrouter.core.wire.heartbeats import RankBeat, RouterBeat, WorkerBeat, encode
from kvrouter.core.wire.ids import RouterId, WorkerId
from kvrouter.core.wire.ops import VERSION
from kvrouter.frontend.operators import admin
from kvrouter.frontend.run import running_frontend
from kvrouter.frontend.settings import parse_options
from kvrouter.version import __version__
from tests.conftest import NatsServer
from tests.frontend.clients import Response, get
from tests.frontend.fleet import BODY, POOL, STREAM, Fleet, FleetOf, no_trouble, running_fleet
from tests.frontend.workers import (
    LAST_CHUNK,
    OK,
    SSE_HEAD,
    FakeWorker,
    Script,
    answer,
    chunk,
    event,
    says,
    says_and_stalls,
    until,
)


async def until_ready(url: str, status: int = 200) -> Response:
    """The first answer of /ready with this status."""
    while True:
        response = await get(url, "/ready")
        if response.status == status:
            return response


async def test_live(fleet_of: FleetOf) -> None:
    """/live is 200, workers or not."""
    async with fleet_of(scripts=()) as fleet:
        assert (200, b"ok\n") == ((await fleet.get("/live")).status, (await fleet.get("/live")).body)


async def test_ready(fleet_of: FleetOf) -> None:
    """/ready is 200 as soon as a worker is known and the time for answers to the hello is over."""
    async with fleet_of() as fleet:
        router_id = fleet.frontend.replica.router_id
        expected = {"status": "ready", "reasons": [], "router_id": router_id, "feeds": []}
        assert expected == (await until_ready(fleet.url)).json


async def test_not_ready_without_workers(fleet_of: FleetOf) -> None:
    """Before a worker is known, /ready is 503 and contains the reason."""
    async with fleet_of(scripts=()) as fleet:
        response = await fleet.get("/ready")

        assert (503, "starting") == (response.status, response.json["status"])
        assert "no worker has been seen" in response.json["reasons"]


async def test_not_ready_while_a_feed_recovers(fleet_of: FleetOf) -> None:
    """A feed that is behind keeps a starting replica from being ready."""
    async with fleet_of() as fleet:
        fleet.announce(fleet.workers[0], publishes_events=True)
        beat = WorkerBeat(VERSION, 1, "up", POOL, [RankBeat(0, 1, 7)], 1)
        fleet.bus.publish(fleet.subjects.live_worker(WorkerId("w0")), encode(beat))
        await until(lambda: fleet.frontend.replica.readers, "the feed is followed")
        response = await fleet.get("/ready")
        health = await fleet.get("/health")

        assert 503 == response.status
        assert "kv w0/0: recovering, 7 frames behind" in response.json["reasons"]
        assert (200, "degraded") == (health.status, health.json["status"])


async def test_ready_timeout(fleet_of: FleetOf) -> None:
    """After --ready-timeout-s it is ready although a feed is missing, and reports that until it is not."""
    async with fleet_of("--ready-timeout-s", "0", publishes_events=True) as fleet:
        replica = fleet.frontend.replica
        late = WorkerBeat(VERSION, 1, "up", POOL, [RankBeat(0, 1, 7)], 1)
        fleet.bus.publish(fleet.subjects.live_worker(WorkerId("w0")), encode(late))
        await until(lambda: [each.lag for each in replica.readers.values()] == [7], "a feed is behind")
        responses = [await fleet.get("/ready") for _ in range(2)]
        fleet.announce(fleet.workers[0], state="leave")
        fleet.announce(FakeWorker("late", OK, "http://127.0.0.1:1"))
        await until(
            lambda: not replica.readers and fleet.targets(fleet.frontend), "only another worker is left"
        )
        later = await fleet.get("/ready")

        assert [(200, "degraded")] * 2 == [(each.status, each.json["status"]) for each in responses]
        assert all("--ready-timeout-s 0 s passed" in each.json["reasons"][0] for each in responses)
        assert ("ready", []) == (later.json["status"], later.json["reasons"])


async def test_never_ready_without_a_worker(fleet_of: FleetOf) -> None:
    """--ready-timeout-s does not make a replica ready that has seen no worker; the body says what to do."""
    async with fleet_of("--ready-timeout-s", "0", scripts=()) as fleet:
        await until(
            lambda: fleet.frontend.admin.readiness()["reasons"][1:] == ["no worker has been seen"], "hello"
        )
        response = await fleet.get("/ready")

        assert (503, "starting") == (response.status, response.json["status"])
        (remedy, _) = response.json["reasons"]
        assert remedy.startswith(f"nobody is heard in namespace {fleet.subjects.namespace!r}: start an agent")
        assert 503 == (await fleet.ask()).status


async def test_wait_for_workers(fleet_of: FleetOf) -> None:
    """With --wait-for-workers-s it is ready without a worker, and requests wait for the first one."""
    async with fleet_of("--wait-for-workers-s", "30", scripts=()) as fleet:
        ready = await until_ready(fleet.url)
        (known, remedy) = ready.json["reasons"]
        assert ("degraded", "no worker is known") == (ready.json["status"], known)
        assert remedy.startswith(f"nobody is heard in namespace {fleet.subjects.namespace!r}: start an agent")
        asked = asyncio.create_task(fleet.ask())
        also = asyncio.create_task(fleet.ask())
        await until(
            lambda: "first worker" in {task.get_name() for task in asyncio.all_tasks()}, "they wait for one"
        )
        async with FakeWorker("late", OK).serving() as late:
            fleet.announce(late)
            assert [200, 200] == [(await asked).status, (await also).status]


async def test_waits_for_workers_no_longer(fleet_of: FleetOf) -> None:
    """After --wait-for-workers-s a request is refused."""
    async with fleet_of("--wait-for-workers-s", "0.05", scripts=()) as fleet:
        response = await fleet.ask()

        assert (503, "no worker has been seen yet") == (response.status, response.json["error"]["message"])


async def test_once_ready_always_ready(fleet_of: FleetOf) -> None:
    """When all workers go down, /ready stays 200: else balancers would drop every replica at once."""
    async with fleet_of() as fleet:
        await until_ready(fleet.url)
        fleet.announce(fleet.workers[0], state="down")
        await until(lambda: not fleet.targets(fleet.frontend), "the worker is down")
        response = await fleet.get("/ready")

        assert (200, "degraded") == (response.status, response.json["status"])
        assert [f"pool {POOL}: no live worker"] == response.json["reasons"]


async def test_draining(fleet_of: FleetOf) -> None:
    """While draining /ready is 503, and answers close their connections."""
    async with fleet_of() as fleet, fleet.connected() as client:
        await until_ready(fleet.url)
        fleet.frontend.drain()
        ready, answered = await fleet.get("/ready"), await client.ask(BODY)

        assert (503, "draining") == (ready.status, ready.json["status"])
        assert (200, "close") == (answered.status, answered.header("connection"))
        assert await client.is_closed()
        assert "close" == (await fleet.ask(b"{")).header("connection")


async def test_nats_comes_late(new_nats_server: Callable[[], NatsServer]) -> None:
    """Without NATS a replica starts, and /ready contains the reason; when NATS appears it recovers."""
    server = new_nats_server()
    options = parse_options(["--host", "127.0.0.1", "--port", "0", "--nats", server.url])
    with no_trouble():
        async with running_frontend(options) as frontend:
            live, ready = await get(frontend.url, "/live"), await get(frontend.url, "/ready")
            assert (200, 503) == (live.status, ready.status)
            assert "not connected to NATS yet" in ready.json["reasons"]
            health = (await get(frontend.url, "/health")).json
            assert (False, os.getpid()) == (health["nats_connected"], health["pid"])
            await until(lambda: bool(frontend.admin.bus.outage_reason), "an attempt to connect has failed")
            reasons = frontend.admin.readiness()["reasons"]
            assert any(reason.startswith("NATS: ") and "kvrouter nats" in reason for reason in reasons)
            server.start()
            await until(lambda: frontend.replica.readiness.has_greeted, "NATS is found")

            assert (await get(frontend.url, "/health")).json["nats_connected"]


async def test_nats_goes_away(new_nats_server: Callable[[], NatsServer]) -> None:
    """When NATS goes away, requests are still served, and /ready is degraded."""
    server = new_nats_server()
    server.start()
    async with running_fleet(server.url) as fleet:
        await until_ready(fleet.url)
        server.stop()
        while not (reasons := (await fleet.get("/ready")).json["reasons"]) or "(" not in reasons[0]:
            pass  # the first answer may come before the first attempt to connect again

        assert reasons[0].startswith("NATS is away (")
        assert reasons[0].endswith("): routing with the last known state")
        assert 200 == (await fleet.get("/ready")).status
        assert 200 == (await fleet.ask()).status


async def test_ready_names_every_feed(fleet_of: FleetOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """State and lag of every feed; in a large fleet only feeds that are behind, unless `verbose`."""
    async with fleet_of("--ready-timeout-s", "0", publishes_events=True, ranks=3) as fleet:
        ranks = [RankBeat(0, 1, 0), RankBeat(1, 1, 7), RankBeat(2, 1, 0)]
        beat = WorkerBeat(VERSION, 1, "up", POOL, ranks, 1)
        fleet.bus.publish(fleet.subjects.live_worker(WorkerId("w0")), encode(beat))
        await until(lambda: len(fleet.frontend.replica.readers) == 3, "the feeds are followed")
        whole = (await fleet.get("/ready")).json
        monkeypatch.setattr(admin, "MOST_FEEDS", 2)
        short, long = (await fleet.get("/ready")).json, (await fleet.get("/ready?verbose=1")).json

        assert [("kv w0/0", "live", 0), ("kv w0/1", "recovering", 7), ("kv w0/2", "live", 0)] == [
            (each["feed"], each["state"], each["lag"]) for each in whole["feeds"]
        ]
        assert whole["feeds"] == long["feeds"]
        assert ([whole["feeds"][1]], 2) == (short["feeds"], short["feeds_omitted"])


async def test_workers(fleet_of: FleetOf) -> None:
    """/workers lists every target with its load, every feed, and the bookings of each replica."""
    script = says_and_stalls(SSE_HEAD, chunk(b": wait\n\n"))
    async with (
        fleet_of("--router-mode", "kv", scripts=(script,), ranks=2) as fleet,
        fleet.connected() as client,
    ):
        client.send(STREAM)
        await client.read_until(b"wait")
        body = (await fleet.get("/workers")).json
        client.leave()

        assert [("w0", 0), ("w0", 1)] == [(each["worker_id"], each["rank"]) for each in body["targets"]]
        assert 64 == sum(each["charged_prefill_tokens"] for each in body["targets"])
        assert 1 == sum(each["requests_in_flight"] for each in body["targets"])
        assert [(POOL, "m", 16, ["m"])] == [
            (each["pool"], each["model"], each["block_size"], each["names"]) for each in body["pools"]
        ]
        assert {fleet.frontend.replica.router_id: 1} == {
            owner: each["count"] for owner, each in body["bookings"][0]["owners"].items()
        }


async def test_worker_of_another_block_size(fleet_of: FleetOf) -> None:
    """It takes requests; /workers, /ready and /health report that no overlap is predicted there."""
    async with fleet_of("--router-mode", "kv") as fleet:
        fleet.announce(FakeWorker("odd", OK, "http://127.0.0.1:1"), block_size=32, started_at_us=2)
        pool = fleet.frontend.replica.routers[POOL].pool
        await until(lambda: "odd" in pool.workers, "it is seen")
        rows = {each["worker_id"]: each for each in (await fleet.get("/workers")).json["targets"]}
        reasons = (await fleet.get("/health")).json["reasons"]

        facts = {
            name: [row[key] for key in ("eligible", "refused", "block_size")] for name, row in rows.items()
        }
        assert {"odd": [True, "", 32], "w0": [True, "", 16]} == facts
        note = "block size 32, pool has 16: no overlap is predicted"
        assert {"odd": [note], "w0": []} == {name: row["notes"] for name, row in rows.items()}
        sentence = "1 of 2 workers have another block size than 16: no overlap is predicted there (odd: 32)"
        assert [f"pool {POOL}: {sentence}"] == reasons
        ready = (await until_ready(fleet.url)).json
        assert ("degraded", reasons) == (ready["status"], ready["reasons"])


async def beating(fleet: Fleet, address: str) -> None:
    """Publish heartbeats of a forged peer that serves one more pool."""
    peer = RouterBeat(VERSION, 1, "up", address, {}, 1, 50, [], {POOL: 16, "qwen-12345678": 16})
    while True:
        fleet.bus.publish(fleet.subjects.live_router(RouterId("peer")), encode(peer))
        await asyncio.sleep(0.05)


async def test_ghost(fleet_of: FleetOf) -> None:
    """A peer whose address does not answer as that peer makes no replica unready, and is named."""
    async with fleet_of("--heartbeat-s", "0.05", "--lease-s", "0.25") as fleet:
        await until_ready(fleet.url)
        slow = WorkerBeat(VERSION, 1, "up", POOL, [], 1, None, 60_000)  # a lease that lasts
        fleet.bus.publish(fleet.subjects.live_worker(WorkerId("w0")), encode(slow))
        beats = asyncio.create_task(beating(fleet, fleet.workers[0].url))

        await until(fleet.frontend.audit.strangers, "the claim is found")
        response, workers = await fleet.get("/ready"), await fleet.get("/workers")
        beats.cancel()

        assert (200, "degraded") == (response.status, response.json["status"])
        (reason,) = response.json["reasons"]
        assert f"its address {fleet.workers[0].url} does not answer as that replica" in reason
        assert "pool qwen-12345678: a replica says that it serves it" in reason
        assert [reason] == workers.json["problems"]
        assert (200, ["w0"]) == ((await fleet.ask()).status, fleet.requests[-1:])


async def test_pool_that_only_a_peer_serves(fleet_of: FleetOf) -> None:
    """A replica that serves nothing sends clients to a peer that does, until it has a target again."""
    flags = ("--heartbeat-s", "0.05", "--lease-s", "0.25")
    async with fleet_of(*flags, replicas=2) as fleet:
        first, other = fleet.frontends
        for each in fleet.frontends:
            await until_ready(each.url)
        load = [RankBeat(0, 1, 0, running=7)]
        slow = WorkerBeat(VERSION, 1, "up", POOL, load, 1, None, 60_000)  # a lease that lasts
        fleet.bus.publish(fleet.subjects.live_worker(WorkerId("w0")), encode(slow))
        pools = [each.replica.routers[POOL].pool for each in fleet.frontends]
        await until(lambda: all(one.workers[WorkerId("w0")].ranks for one in pools), "both have heard it")
        forged = WorkerBeat(VERSION, 1, "down", POOL, [], 1, None, 60_000)
        first.replica.worker_heartbeat(WorkerId("w0"), encode(forged), 0.0)  # it alone believes it
        response = await until_ready(first.url, 503)

        peers = f"peers serve it ({other.replica.router_id}), no target here: w0 down"
        assert ("unserved", [f"pool {POOL}: {peers}"]) == (response.json["status"], response.json["reasons"])
        assert 200 == (await get(other.url, "/ready")).status
        fleet.announce(fleet.workers[0])
        assert "ready" == (await until_ready(first.url)).json["status"]


async def test_peers_know_of_draining(fleet_of: FleetOf) -> None:
    """To its peers, a draining replica serves no pool."""
    async with fleet_of() as fleet:
        await until_ready(fleet.url)
        replica, publishing = fleet.frontend.replica, fleet.frontend.replica_loop.publishing
        before = replica.heartbeat(publishing.state, "").serves

        fleet.frontend.drain()

        assert ({POOL: 16}, {}) == (before, replica.heartbeat(publishing.state, "").serves)


async def test_own_statistics(fleet_of: FleetOf) -> None:
    """Metrics that an agent reports in addition to the load are in /workers and in every candidate."""
    async with fleet_of() as fleet:
        beat = RankBeat(0, 1, 0, waiting_loras=("b",), running_loras=("a",), metrics={"preempted": 7.0})
        fleet.announce(fleet.workers[0], ranks_heard=[beat], max_loras=2)
        pool = fleet.frontend.replica.routers[POOL].pool
        await until(lambda: pool.candidates(RouteRequest("r"))[0].metrics, "the heartbeat has come")
        (row,) = (await fleet.get("/workers")).json["targets"]
        (candidate,) = pool.candidates(RouteRequest("r"))

        assert ({"preempted": 7.0}, ["a"], ["b"], 2) == (
            row["metrics"],
            row["running_loras"],
            row["waiting_loras"],
            row["max_loras"],
        )
        assert ({"preempted": 7.0}, ("a",)) == (candidate.metrics, candidate.loaded_loras)


async def test_roles(fleet_of: FleetOf) -> None:
    """/workers, /fleet and /metrics have the role and the connector, and who gets requests."""
    half: dict[str, Any] = {"role": "prefill", "kv_connector": "nixl"}
    async with fleet_of(scripts=(OK, OK)) as fleet:
        fleet.announce(fleet.workers[1], **half, started_at_us=2)
        await until(lambda: fleet.frontend.replica.routers[POOL].pool.split.whole is not None)
        rows = [(await fleet.get(path)).json["targets"] for path in ("/workers", "/fleet")]
        for names in ("worker_id", "worker"):
            found = {row[names]: row for row in rows.pop(0)}
            assert half | {"eligible": False} == {name: found["w1"][name] for name in (*half, "eligible")}
            assert ("both", True) == (found["w0"]["role"], found["w0"]["eligible"])
        metrics = (await fleet.get("/metrics")).body.decode()

    labels = f'kv_connector="nixl",pool="{POOL}",rank="0",role="prefill",worker="w1"'
    assert f"kvrouter_target_eligible{{{labels}}} 0.0" in metrics.splitlines()


async def test_models(fleet_of: FleetOf) -> None:
    """/v1/models lists every name once, adapters with their parent."""
    async with fleet_of(
        scripts=(says_and_stalls(),) * 2, lora_names=("a",), served_names=("m", "alias")
    ) as fleet:
        entries = (await fleet.get("/v1/models")).json["data"]

        assert [("m", None), ("alias", None), ("a", "m")] == [
            (each["id"], each["parent"]) for each in entries
        ]


@pytest.mark.parametrize("path", ["org/m", "org%2Fm"])
async def test_one_model(fleet_of: FleetOf, path: str) -> None:
    """/v1/models/NAME describes one model or adapter; an unknown name gets the list of names."""
    async with fleet_of(lora_names=("a",), served_names=("org/m",)) as fleet:
        base, adapter = await fleet.get(f"/v1/models/{path}"), await fleet.get("/v1/models/a")
        other = await fleet.get("/v1/models/other")

        assert ("org/m", None) == (base.json["id"], base.json["parent"])
        assert ("a", "org/m") == (adapter.json["id"], adapter.json["parent"])
        assert (404, "model") == (other.status, other.json["error"]["param"])
        assert "served: a, org/m" in other.json["error"]["message"]


async def test_health(fleet_of: FleetOf) -> None:
    """/health is always 200, with details."""
    async with fleet_of(replicas=2) as fleet:
        await until(lambda: fleet.frontend.replica.peers, "the peer is seen")
        body = (await fleet.get("/health")).json

        assert ("ok", __version__, True, 1) == (
            body["status"],
            body["version"],
            body["nats_connected"],
            body["workers"],
        )
        assert [fleet.frontends[1].replica.router_id] == body["peers"]


async def test_metrics(fleet_of: FleetOf) -> None:
    """/metrics is in Prometheus' format. All names begin with kvrouter_, or are the library's process_*."""
    async with fleet_of() as fleet:
        await fleet.ask()
        await fleet.ask(b"{")
        await fleet.get("/not/a/route")
        response = await fleet.get("/metrics")
        lines = response.body.decode().splitlines()

        assert response.header("content-type").startswith("text/plain")
        for line in (
            'kvrouter_requests_total{code="200",mode="round-robin",model="m",outcome="ok",'
            'route="/v1/completions"} 1.0',
            'kvrouter_requests_total{code="400",mode="",model="",outcome="refused",'
            'route="/v1/completions"} 1.0',
            'kvrouter_requests_total{code="404",mode="",model="",outcome="refused",route="other"} 1.0',
            f'kvrouter_target_answers_total{{outcome="ok",pool="{POOL}",rank="0",worker="w0"}} 1.0',
            f'kvrouter_target_requests{{pool="{POOL}",rank="0",worker="w0"}} 0.0',
            'kvrouter_step_seconds_count{step="decide"} 1.0',
            "kvrouter_requests_in_flight 0.0",
            "kvrouter_nats_connected 1.0",
            f'kvrouter_target_eligible{{pool="{POOL}",rank="0",worker="w0"}} 1.0',
            f'kvrouter_workers{{pool="{POOL}"}} 1.0',
            "kvrouter_replicas 1.0",
            *(
                f'kvrouter_replica_events_total{{event="{counter.name}"}} 0.0'
                for counter in fields(ReplicaCounters)
            ),
            f'kvrouter_bookings{{pool="{POOL}",router="{fleet.frontend.replica.router_id}"}} 0.0',
        ):
            assert line in lines
        assert all(line.startswith(("kvrouter_", "process_", "#")) for line in lines)
        assert len([line for line in lines if line.startswith("# TYPE")]) == len(
            {line.split()[2] for line in lines if line.startswith("# TYPE")}
        )


async def test_inter_token_time(fleet_of: FleetOf) -> None:
    """One count for each streamed answer of two events or more; none for one in a piece."""
    streamed = says(SSE_HEAD, chunk(event("a")), chunk(event("b")), chunk(event("c", "stop")), LAST_CHUNK)
    async with fleet_of(scripts=(streamed,)) as fleet:
        await fleet.ask(STREAM)
        metrics = (await fleet.get("/metrics")).body.decode()
    async with fleet_of(scripts=(OK,)) as fleet:
        await fleet.ask()
        whole = (await fleet.get("/metrics")).body.decode()

    target = f'{{pool="{POOL}",rank="0",worker="w0"}}'
    assert 'kvrouter_inter_token_seconds_count{model="m"} 1.0' in metrics
    assert 'kvrouter_tokens_total{kind="output",model="m"} 3.0' in metrics
    assert f"kvrouter_target_first_byte_seconds_count{target} 1.0" in metrics
    assert "kvrouter_inter_token_seconds_count" not in whole


@pytest.mark.parametrize("path", ["/live", "/ready", "/health", "/metrics", "/workers", "/v1/models"])
async def test_while_a_stream_runs(fleet_of: FleetOf, path: str) -> None:
    """Every view works while a request runs."""
    script = says_and_stalls(SSE_HEAD, chunk(event("a")))
    async with fleet_of(scripts=(script,)) as fleet, fleet.connected() as client:
        client.send(STREAM)
        await client.read_until(event("a"))

        assert (await fleet.get(path)).status in {200, 503}
        client.leave()


async def test_workers_contains_the_core_in_use(fleet_of: FleetOf) -> None:
    """The core is python or native; if native is not built, the reason is there, too."""
    async with fleet_of() as fleet:
        told = (await fleet.get("/workers")).json["core"]

        assert {"in_use": versions.in_use(), "native_not_built": versions.why_not_built} == told


DONE = b"data: [DONE]\n\n"
USED = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens": 7,"total_tokens":10}}\n\n'


@pytest.mark.parametrize(
    ("script", "tokens"),
    [
        (OK, None),
        (says(SSE_HEAD, chunk(event("a")), chunk(DONE), LAST_CHUNK), 1),
        (says(SSE_HEAD, chunk(event("a")), chunk(USED), chunk(DONE), LAST_CHUNK), 7),
        (says(answer(USED)), 7),
    ],
    ids=["none", "events", "usage of a stream", "usage"],
)
async def test_output_tokens(fleet_of: FleetOf, script: Script, tokens: int | None) -> None:
    """As the engine reports them, else one for each event; no series where neither is known."""
    async with fleet_of(scripts=(script,)) as fleet:
        await fleet.ask()
        metrics = (await fleet.get("/metrics")).body.decode()

    found = re.findall(r'^kvrouter_tokens_total\{kind="output",model="m"\} (\S+)$', metrics, re.MULTILINE)
    assert ([] if tokens is None else [str(float(tokens))]) == found
