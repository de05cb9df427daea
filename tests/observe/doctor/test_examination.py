"""`kvrouter doctor`: a healthy fleet, and processes with every fault that it knows."""

from __future__ import annotations

import contextlib
import itertools
import re
import time
import uuid
from typing import Any

import msgspec
import pytest

from kvrouter.core.wire.hashes import pack_hashes
from kvrouter.core.wire.heartbeats import RankBeat
from kvrouter.core.wire.ids import RouterId, WorkerId
from kvrouter.core.wire.ops import VERSION, Frame, Stored, encode
from kvrouter.observe.doctor import examination
from tests.e2e.fleet import running_fleet
from tests.observe.doctor.sick import CLOSED, POOL, answering, codes, engine, replica, seen, sick_namespace
from tests.observe.doctor.sick import examination as examined
from tests.observe.fleets import fleet


async def test_healthy(nats_url: str) -> None:
    """A fleet without a fault: no finding, exit code 0, and a sentence for each area."""
    namespace = uuid.uuid4().hex
    async with running_fleet(nats_url, namespace, mockers=2) as fleet:
        body = {"model": "tiny", "prompt": list(range(64)), "max_tokens": 2}
        async with fleet.http.post(f"{fleet.frontends[0].url}/v1/completions", json=body) as response:
            assert 200 == response.status

        report = await examined(nats_url, namespace, owners=True)

        assert [] == [(finding.code, finding.seen) for finding in report.findings]
        assert 0 == report.exit_code
        assert {"nats", "agent", "engine", "events", "replica", "clock", "machine"} == report.good.keys()
        assert "2 replicas, 2 workers" in report.fleet
        assert re.search(r"feeds equal in replicas and agents \(\d+ looks?\)$", report.good["replica"])
        quick = await examined(nats_url, namespace)
        assert quick.good["replica"].endswith("; engines not compared: --owners)")
        await _stranger(fleet.frontends[0].admin_url, fleet.frontends[1].url, nats_url)


async def _stranger(admin_url: str, clients_url: str, nats_url: str) -> None:
    """Replicas of another namespace, by the right URL and by that of the clients' port."""
    async with sick_namespace(nats_url) as namespace:
        namespace.replica("r9")
        report = await namespace.examine(replica=(admin_url, clients_url, CLOSED))

    found = codes(report)
    assert {admin_url, clients_url} == {*found.pop("replica.stranger")}
    assert {
        "fleet.no_workers": [namespace.name],
        "replica.not_operators": [clients_url],
        "replica.unreachable": [CLOSED],
    } == found
    assert 2 == report.exit_code


async def test_sick_workers(nats_url: str) -> None:
    """One namespace with a worker for each fault; the healthy one has no finding."""
    async with contextlib.AsyncExitStack() as stack:
        namespace = await stack.enter_async_context(sick_namespace(nats_url))
        well = await stack.enter_async_context(answering(engine()))
        other = await stack.enter_async_context(answering(engine("other")))
        ill = await stack.enter_async_context(answering(engine(health=(500, ""))))
        locked = await stack.enter_async_context(answering({"/v1/models": (401, {}), "/health": ""}))
        nonsense = await stack.enter_async_context(answering({"/v1/models": "<html>", "/health": ""}))
        namespace.worker("well", well)
        namespace.worker("dead", CLOSED)
        namespace.worker("reported", CLOSED + "/x", "down")
        namespace.worker("renamed", other)
        namespace.worker("ill", ill)
        namespace.worker("locked", locked)
        namespace.worker("nonsense", nonsense)
        namespace.worker(
            "partial", well + "/a", "up", RankBeat(0, 1, 0, partial=True), tiers={"device": 4096}
        )
        namespace.worker("draining", well + "/b", "draining", tiers={"device": 4096})
        namespace.worker("small", well + "/i", tiers={"device": 400})
        namespace.worker("no-events", well + "/c", publishes_events=False)
        namespace.worker("uncached", well + "/d", prefix_caching=False)
        namespace.worker("large", well + "/e", block_size=64)
        namespace.worker("copy", well)
        namespace.worker("early", well + "/f", started_at_us=round(1e6 * time.time() + 60e6))
        namespace.worker("old", well + "/g", engine="sglang", engine_version="0.5.10", agent_version="9.9.9")
        namespace.worker("blank")
        for incarnation in (2, 1, 2, 1):
            namespace.worker("twins", well + "/h", incarnation=incarnation)
        namespace.raw(namespace.subjects.live_worker(WorkerId("torn")), b"\xc1")
        namespace.raw(f"kvrouter.{namespace.name}.live.nonsense", b"")
        report = await namespace.examine()

    assert {
        "agent.draining": ["draining"],
        "agent.no_card": ["blank"],
        "agent.no_events": ["no-events"],
        "agent.no_prefix_caching": ["uncached"],
        "agent.partial": ["partial"],
        "agent.shared_engine": [well],
        "agent.twice": ["twins"],
        "clock.skew": ["early"],
        "engine.capacity": ["small"],
        "engine.down": ["reported"],
        "engine.not_asked": ["locked"],
        "engine.old": ["old"],
        "engine.other_model": ["renamed", "nonsense"],
        "engine.unhealthy": ["ill"],
        "engine.unreachable": ["dead"],
        "engine.versions": ["m"],
        "fleet.block_sizes": ["m"],
        "fleet.no_replicas": [namespace.name],
        "fleet.unreadable": [str(subject) for subject, _ in namespace.messages[-2:]],
        "fleet.versions": ["kvrouter"],
    } == codes(report)
    assert 2 == report.exit_code
    assert "connection refused" in seen(report, "engine.unreachable")


def _frame(seq: int, *hashes: int, incarnation: int = 5) -> bytes:
    return encode(Frame(VERSION, incarnation, seq, [Stored(0, None, pack_hashes([*hashes]))]))


async def test_frames(nats_url: str) -> None:
    """Frames that are missing, come twice, cannot be read, or that a heartbeat counts and that never came."""
    async with sick_namespace(nats_url) as namespace, answering(engine()) as url:

        def live(worker: str) -> str:
            return namespace.subjects.live_kv(POOL, WorkerId(worker), 0)

        for worker in ("well", "gap", "twice", "torn", "tail"):
            namespace.worker(worker, f"{url}/{worker}", "up", RankBeat(0, 5, 3))
            namespace.raw(live(worker), _frame(4, 1))
        namespace.raw(live("gap"), _frame(9, 2))
        namespace.raw(live("twice"), _frame(4, 1))
        namespace.raw(live("torn"), b"\xc1")
        namespace.worker("tail", f"{url}/tail", "up", RankBeat(0, 5, 6))
        namespace.worker("well", f"{url}/well", "up", RankBeat(0, 5, 4))
        namespace.raw(namespace.subjects.live_sync(POOL, RouterId("r")), _frame(7))
        namespace.raw(namespace.subjects.live_sync(POOL, RouterId("r")), _frame(8))
        report = await namespace.examine()

    found = codes(report)
    assert {"kv gap/0", "kv tail/0"} == {*found["events.gaps"]}
    assert ["kv twice/0"] == found["events.order"]
    assert ["kv torn/0"] == found["events.unreadable"]
    assert ["4 of 6 frames did not arrive", "2 of 3 frames did not arrive"] == [
        finding.seen for finding in report.findings if finding.code == "events.gaps"
    ]


def target(worker_id: str, digest: str = "00") -> dict[str, Any]:
    """A row of /workers."""
    tiers = [{"tier": "device", "blocks": 1, "digest": digest}]
    return {"pool": "p", "worker_id": worker_id, "rank": 0, "tiers": tiers, "resume_points": None}


def feed(**more: Any) -> list[dict[str, Any]]:
    """The feed of worker w, as a replica follows it."""
    row = {"feed": "kv w/0", "kind": "kv", "pool": "p", "owner": "w/0", "incarnation": 1, "last_seq": 1}
    return [row | {"state": "live", "lag": 0, "flag": "", "counters": {}} | more]


async def test_sick_replicas(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One namespace with a replica for each fault; the healthy one has no finding."""
    monkeypatch.setattr(examination, "MOST_COMPARE_S", 0.5)
    grows = itertools.count(1)
    known = ["grows", "taken", "away"]
    pools = [{"pool": "p", "model": "m", "block_size": 16}]
    here = {"namespace_peers": known, "targets": [target("w")], "feeds": feed(), "pools": pools}
    differs = {
        "state": "differs",
        "prompt": "chat",
        "engine": "e",
        "difference": {"position": 3, "remedy": "this"},
    }
    local = {"ways": {"p": {"chat": {"way": "model path"}}}}
    probe = {"/v1/route": {"isl": 100}, "tokens": local}
    faults: dict[str, dict[str, Any]] = {
        "well": probe,
        "late": {"/ready": {"status": "degraded", "reasons": ["NATS is away"]}},
        "not-ready": {"/ready": (503, {"status": "starting", "reasons": ["no worker"]})},
        "full": {"/metrics": "process_open_fds 9500.0\nprocess_max_fds 10000.0\n"},
        "small": {"/metrics": "process_open_fds 5.0\nprocess_max_fds 1000.0\n"},
        "loser": {"/fleet": msgspec.to_builtins(fleet(router_id="loser", workers_lost=2))},
        "stuck": {"feeds": feed(state="recovering", lag=7)},
        "tokens": {"tokens": {"compared": {"p": differs, "q": {"state": "unanswered", "reason": "404"}}}},
        "templates": probe | {"/v1/route": {"isl": 90}},
        "leaving": {"/ready": (503, {"status": "draining"})},
        "ways": {"tokens": {"ways": {"p": {"chat": {"way": "text"}}}}},
        "other-routing": {"/routing": {"revision": 4, "by": "x", "not_applied": {"router-mode": "unknown"}}},
        "refuses": {"/routing": {"revision": 0, "refused": {"odd": {"epoch": 0, "revision": 9000}}}},
        "alone": {"replica_sync": False},
        "torn": {"/workers": "{"},
        "odd": {"namespace_peers": ["well", "ghost-replica"], "targets": [target("ghost")]},
        "problem": {"pools": [{"pool": "p", "model": "m", "block_size": 16, "problems": ["no good"]}]},
        "not-found": {
            "targets": [target("w") | {"problems": ["answered 404 to all of its first 5 requests"]}]
        },
        "differs": {"targets": [target("w", "ff")]},
        "liar": {"/health": {"router_id": "someone"}},
    }
    known += faults
    async with contextlib.AsyncExitStack() as stack:
        namespace = await stack.enter_async_context(sick_namespace(nats_url))
        url_of = {}
        for router_id, fault in faults.items():
            answers = replica(router_id, **(here | fault))
            url_of[router_id] = await stack.enter_async_context(answering(answers))
        growing = replica("grows", **here)
        rows = lambda: growing["/workers"] | {"feeds": feed(counters={"digest_mismatches": next(grows)})}  # noqa: E731
        url_of["grows"] = await stack.enter_async_context(
            answering({**growing_answers(growing), "/workers": rows})
        )
        url_of["taken"] = await stack.enter_async_context(answering({"/health": "<html>"}))
        url_of["away"] = CLOSED
        well = await stack.enter_async_context(answering(engine()))
        for _ in range(2):
            namespace.worker("w", well)
        for router_id, url in url_of.items():
            namespace.replica(router_id, url)
        report = await namespace.examine()

    names = {f"{url} ({router_id})": router_id for router_id, url in url_of.items()}
    names |= {url: router_id for router_id, url in url_of.items()} | {f"{url_of['liar']} (someone)": "liar"}
    found = {code: [names.get(about, about) for about in each] for code, each in codes(report).items()}
    assert [] == [code for code, each in found.items() if "well" in each]
    more = {"replica.routing", "replica.different", "replica.not_compared"}
    assert {
        "agent.lost": ["ghost"],
        "events.contradictions": ["grows"],
        "events.feed_stuck": ["stuck"],
        "replica.alone": ["alone"],
        "replica.degraded": ["late"],
        "replica.descriptors": ["full", "small"],
        "replica.losses": ["loser"],
        "replica.lost": ["ghost-replica"],
        "replica.draining": ["leaving"],
        "replica.impostor": ["taken"],
        "replica.not_examined": ["away"],
        "replica.not_operators": ["torn"],
        "replica.not_ready": ["not-ready"],
        "replica.other_replicas": ["odd"],
        "replica.other_workers": ["odd"],
        "engine.not_found": ["w/0"],
        "replica.problem": ["p"],
        "replica.prompts": ["m"],
        "replica.shared_port": ["liar"],
        "replica.stranger": ["liar"],
        "replica.tokens": ["tokens"],
        "replica.tokens_unknown": ["tokens"],
        "replica.ways": ["p"],
    } == {code: each for code, each in found.items() if code not in more}
    assert {"other-routing", "refuses", "POST /routing"} == {*found["replica.routing"]}
    assert ["blocks of w/0 in p, as of frame 1:1"] == [*{*found["replica.different"]}]


def growing_answers(answers: dict[str, Any]) -> dict[str, Any]:
    """Without /workers."""
    return {path: answer for path, answer in answers.items() if path != "/workers"}
