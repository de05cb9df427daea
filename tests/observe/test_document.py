"""GET /fleet: the fleet as one replica knows it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvrouter.core.feeds.trust import FeedState
from kvrouter.core.fleet.replica import Replica
from kvrouter.core.wire.heartbeats import RankBeat, WorkerBeat, encode
from kvrouter.core.wire.ids import RouterId, WorkerId
from kvrouter.core.wire.ops import VERSION
from kvrouter.core.wire.senders import SyncSource
from kvrouter.observe import document
from kvrouter.observe.dashboard.traffic import FleetTraffic, served
from kvrouter.version import __version__
from tests.frontend.clients import get
from tests.frontend.fleet import BODY, POOL, STREAM, Fleet, FleetOf
from tests.frontend.workers import OK, SSE_HEAD, answer, chunk, says, says_and_stalls, stream, until

STALLS = says_and_stalls(SSE_HEAD, chunk(b": wait\n\n"))
# What a row of /fleet names otherwise than /workers.
NAMES = {"worker_id": "worker", "requests_in_flight": "requests", "lag": "lag_frames", "last_seq": "seq"}

SHARED = (
    "pool worker_id rank url engine state eligible problems blocks requests_in_flight running waiting "
    "kv_usage active_blocks digest charged_prefill_tokens"
)


def is_in_step(replica: Replica, router_id: RouterId) -> bool:
    """Whether the replica has all bookings of another one."""
    reader = replica.readers.get(SyncSource(POOL, router_id))
    return reader is not None and reader.state is FeedState.LIVE and not reader.lag


async def rows_of(fleet: Fleet) -> tuple[Any, Any]:
    """Two views of the fleet, which is at rest meanwhile: /fleet and /workers."""
    return (await fleet.get("/fleet")).json, (await fleet.get("/workers")).json


async def test_targets_equal_workers(fleet_of: FleetOf) -> None:
    """The load, the blocks and the feed of each target equal /workers."""
    async with (
        fleet_of("--router-mode", "kv", scripts=(STALLS, STALLS), ranks=2, publishes_events=True) as fleet,
        fleet.connected() as client,
    ):
        beat = WorkerBeat(
            VERSION, 1, "up", POOL, [RankBeat(0, 1, 3, False, 4, 5, 0.25), RankBeat(1, 1, 0)], 1
        )
        fleet.bus.publish(fleet.subjects.live_worker(WorkerId("w0")), encode(beat))
        await until(lambda: len(fleet.frontend.replica.readers) == 2, "its feeds are followed")
        client.send(STREAM)
        await client.read_until(b"wait")
        seen, workers = await rows_of(fleet)
        client.leave()

        shared = SHARED.split()
        assert [[row[name] for name in shared] for row in workers["targets"]] == [
            [row[NAMES.get(name, name)] for name in shared] for row in seen["targets"]
        ]
        followed = [row for row in seen["targets"] if row["live"] is not None]
        assert [(row["lag"], row["last_seq"], row["events"] == "live") for row in workers["targets"][:2]] == [
            (row["lag_frames"], row["seq"], row["live"]) for row in followed
        ]
        assert [(3, False), (0, True)] == [(row["lag_frames"], row["live"]) for row in followed]
        assert all(0 <= row["stale_s"] < 60 for row in followed)
        assert [1] == [row["requests"] for row in seen["targets"] if row["requests"]]


async def test_unknown_is_null(fleet_of: FleetOf) -> None:
    """What no agent and no engine has reported is null, not 0."""
    async with fleet_of() as fleet:
        (row,) = (await fleet.get("/fleet")).json["targets"]

        unknown = {"running", "waiting", "kv_usage", "total_blocks", "lag_frames", "stale_s", "live", "seq"}
        unknown |= {"digest_mismatches", "predicted_tokens", "reported_tokens"}
        assert unknown <= {name for name, value in row.items() if value is None}
        assert (0, True, []) == (row["requests"], row["eligible"], row["problems"])


async def test_pools(fleet_of: FleetOf) -> None:
    """A pool has its size, queue, mode and weight, and the tokens of the caches that /workers compares."""
    async with fleet_of("--router-mode", "kv", "--kv-overlap-score-weight", "2", scripts=(OK, OK)) as fleet:
        await fleet.ask()
        await fleet.ask()
        seen, workers = await rows_of(fleet)
        (pool,), (known,) = seen["pools"], workers["pools"]

        assert (POOL, "m", 2, 2, 2, 16, 0) == tuple(
            pool[name] for name in ("pool", "model", "workers", "targets", "eligible", "block_size", "queue")
        )
        assert ("kv", "2", "kv", "2") == (pool["mode"], pool["weight"], seen["mode"], seen["weight"])
        assert known["cached"]["prompt_tokens"] == pool["reusable_tokens"] == 128
        shares = {name: 1 - tokens / 128 for name, tokens in pool["uncached_tokens"].items()}
        assert {name: known["cached"][name] for name in shares} == pytest.approx(shares, abs=1e-4)


async def test_traffic(fleet_of: FleetOf) -> None:
    """Requests, failures, tokens, and first bytes by time, since the start."""
    async with fleet_of("--router-mode", "kv", scripts=(says(stream("a", "b", "c")),)) as fleet:
        await fleet.ask(STREAM)
        await fleet.ask({**BODY, "model": "other"})
        traffic = (await fleet.get("/fleet")).json["traffic"]

        assert (2, 0, 64, 0) == tuple(
            traffic[name] for name in ("requests", "failed", "prompt_tokens", "overlap_tokens")
        )
        for name in ("ttft", "inter_token"):
            assert len(traffic[name]["counts"]) == len(traffic[name]["bounds_s"]) + 1
            assert 1 == sum(traffic[name]["counts"])


async def test_failures_count(fleet_of: FleetOf) -> None:
    """An answer of status 500 and above is a failure, one of 400 is not."""
    async with fleet_of("--retries", "0", scripts=(says(answer(b"{}", 500)),)) as fleet:
        await fleet.ask()
        await fleet.ask(b"{")
        seen = (await fleet.get("/fleet")).json
        traffic, (row,) = seen["traffic"], seen["targets"]

        assert (1, 1, 0) == (row["answers"], row["errors"], row["ttft_count"])
        assert (2, 1) == (traffic["requests"], traffic["failed"])


async def test_replicas(fleet_of: FleetOf) -> None:
    """Every replica with its bookings, its feed and the revision of its routing; this one is marked."""
    async with (
        fleet_of("--router-replica-sync", scripts=(STALLS,), replicas=2) as fleet,
        fleet.connected() as client,
    ):
        me, peer = (each.replica for each in fleet.frontends)
        client.send(STREAM)
        await client.read_until(b"wait")
        await until(lambda: peer.routers[POOL].pool.active.owners().get(me.router_id), "the peer knows of it")
        await until(lambda: peer.router_id in me.peers and me.router_id in peer.peers, "both have joined")
        await until(lambda: is_in_step(peer, me.router_id), "its feed is live")
        seen = [(await get(each.admin_url, "/fleet")).json for each in fleet.frontends]
        client.leave()

        rows = [{row["router_id"]: row for row in one["replicas"]} for one in seen]
        assert [{me.router_id, peer.router_id}] * 2 == [set(row) for row in rows]
        assert [(1, True), (0, False)] == [
            (row["bookings"], row["is_me"]) for row in (rows[0][me.router_id], rows[0][peer.router_id])
        ]
        assert (1, False, 0, True, 0, 0) == tuple(
            rows[1][me.router_id][name]
            for name in ("bookings", "is_me", "lag_frames", "live", "digest_mismatches", "revision")
        )
        assert fleet.frontends[0].admin_url == rows[0][me.router_id]["url"]


async def test_which_replica(fleet_of: FleetOf) -> None:
    """Its id, its version, its start, its readiness with the reasons."""
    async with fleet_of() as fleet:
        fleet.announce(fleet.workers[0], state="down")
        await until(lambda: not fleet.targets(fleet.frontend), "the worker is down")
        seen, ready = (await fleet.get("/fleet")).json, (await fleet.get("/ready")).json

        assert (fleet.frontend.replica.router_id, __version__) == (seen["router_id"], seen["version"])
        assert (ready["status"], ready["reasons"]) == (seen["status"], seen["reasons"])
        assert seen["started_s"] <= seen["time"]
        assert [("down", False)] == [(row["state"], row["eligible"]) for row in seen["targets"]]
        counters = fleet.frontend.replica.counters
        counters.replicas_lost, counters.workers_lost = 2, 3
        seen = (await fleet.get("/fleet")).json
        assert (2, 3) == (seen["replicas_lost"], seen["workers_lost"])


async def test_other_work_in_between(fleet_of: FleetOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large fleet the rows are made in slices, and other tasks run in between."""
    monkeypatch.setattr(document, "SLICE", 1)
    async with fleet_of(ranks=8) as fleet:
        turns = 0

        async def count_turns() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        counting = asyncio.create_task(count_turns())
        seen = await view_of(fleet).snapshot()
        counting.cancel()

        assert (8, True) == (len(seen.targets), turns >= 7)


def view_of(fleet: Fleet) -> document.FleetView:
    """A view of the first frontend, apart from its own."""
    one = fleet.frontend
    return document.FleetView(
        one.replica,
        one.replica_loop,
        one.audit,
        one.completions.readers.metrics,
        FleetTraffic(one.replica, lambda: served(one.replica, one.completions.readers.metrics, 0)),
        address=one.admin_url,
        readiness=one.admin.readiness,
        queue=one.waiting_room.view,
    )
