"""`kvrouter verify` with servers that give prepared answers, and with real frontends."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kvrouter.core.wire.heartbeats import RouterBeat, encode
from kvrouter.core.wire.ids import RouterId
from kvrouter.core.wire.ops import VERSION
from kvrouter.observe.document import Workers
from kvrouter.observe.verify import Comparison, Report, VerifyError, compare, main, read_view
from kvrouter.observe.verify.comparison import Copy, EngineCheck, FeedKey, OwnersView
from kvrouter.observe.verify.settings import VerifySettings
from tests.frontend.fleet import running_fleet

Json = dict[str, Any]

AGREED = f"{7:016x}"
PEERS = ("r0", "r1", "r2")
KV = "blocks of w1/0 in p"


def body(router_id: str, **more: Any) -> Json:
    """The /workers of a replica that holds 5 blocks of w1 as of frame 10, and no bookings."""
    facts = {"seq": 10, "incarnation": 1, "digest": AGREED, "state": "live", "lag": 0, "flag": "", **more}
    feed = {"kind": "kv", "pool": "p", "owner": "w1/0", "incarnation": facts["incarnation"]}
    feed |= {"last_seq": facts["seq"], "state": facts["state"], "lag": facts["lag"], "flag": facts["flag"]}
    target = {"pool": "p", "worker_id": "w1", "rank": 0}
    target["tiers"] = [{"tier": "device", "blocks": 5, "digest": facts["digest"]}]
    target["resume_points"] = more.get("resume_points")
    return {
        "router_id": router_id,
        "replica_sync": True,
        "namespace_peers": [peer for peer in PEERS if peer != router_id],
        "peers": [{"router_id": peer, "silent_rounds": 1} for peer in PEERS if peer != router_id],
        "pools": [{"pool": "p", "block_size": 16}],
        "targets": [target],
        "feeds": [feed, *(sync_feed(peer) for peer in PEERS if peer != router_id)],
        "bookings": [{"pool": "p", "own_feed": {"incarnation": 3, "seq": 4}, "owners": {}}],
    }


def sync_feed(owner: str, seq: int = 4) -> Json:
    """A peer's bookings, as this replica follows them."""
    feed = {"kind": "sync", "pool": "p", "owner": owner, "incarnation": 3, "last_seq": seq}
    return {**feed, "state": "live", "lag": 0, "flag": ""}


class Looks:
    """Looks at replicas r0, r1 …: each argument has the answers of all of them in one look."""

    def __init__(self, *looks: tuple[Json, ...]) -> None:
        self.comparison = Comparison()
        for bodies in looks:
            self.comparison.add(
                [read_view(f"u{n}", msgspec.convert(answer, Workers)) for n, answer in enumerate(bodies)]
            )

    @property
    def report(self) -> Report:
        """The report after the last look."""
        return self.comparison.report(1, 0.0)

    @property
    def differences(self) -> list[str]:
        """The differences after the last look."""
        return self.report.differences


# --- what is compared ---


def test_equal() -> None:
    """The same content at the same frames: no difference."""
    report = Looks((body("r0"), body("r1"))).report

    assert report.is_equal
    assert {"u0": "r0", "u1": "r1"} == report.replicas
    assert {KV, *(f"bookings of {peer} in p" for peer in PEERS)} == {row.feed for row in report.rows}
    assert [(10, (("device", 5, AGREED),))] == [
        (row.seq, row.content) for row in report.rows if row.feed == KV
    ]


def test_other_digest_at_the_same_frame() -> None:
    """Different digests at one frame are a difference, also if later frames are equal."""
    looks = Looks((body("r0"), body("r1", digest=f"{8:016x}")), (body("r0", seq=11), body("r1", seq=11)))

    assert not looks.report.is_equal
    assert [
        f"{KV}, as of frame 1:10: u0 holds device 5 ({AGREED}), u1 device 5 ({8:016x})"
    ] == looks.differences
    assert [KV] == [row.feed for row in looks.report.rows if not row.is_equal]


def test_other_digest_at_other_frames() -> None:
    """Two moments of one feed cannot be compared."""
    looks = Looks((body("r0"), body("r1", seq=11, digest=f"{8:016x}")))

    assert [] == looks.comparison.differences
    assert [f"{KV}: u0 and u1 were never at the same frame (now 1:10 and 1:11)"] == looks.differences


def test_met_at_different_looks() -> None:
    """Under traffic one replica reaches a frame a moment after the other."""
    assert Looks((body("r0", seq=11), body("r1")), (body("r0", seq=12), body("r1", seq=11))).report.is_equal


def test_met_through_others() -> None:
    """A equals B at one frame, and B equals C at another."""
    first = (body("r0", seq=10), body("r1", seq=10), body("r2", seq=9))
    then = (body("r0", seq=13), body("r1", seq=12), body("r2", seq=12))

    assert Looks(first).differences
    assert Looks(first, then).report.is_equal


def test_owner_is_a_party() -> None:
    """A booking that its owner has freed and a peer still holds is an error."""
    peer = body("r1")
    peer["bookings"][0]["owners"] = {"r0": {"count": 1, "digest": AGREED}}
    looks = Looks((body("r0"), peer))

    (text,) = looks.differences
    assert text.startswith("bookings of r0 in p, as of frame 3:4: u0 holds bookings 0 ")
    assert text.endswith(f"u1 bookings 1 ({AGREED})")


def test_dead_owner() -> None:
    """A replica that has dropped a dead peer's bookings differs from one that has not yet."""
    late = body("r1")
    late["feeds"].append(sync_feed("dead"))
    late["bookings"][0]["owners"] = {"dead": {"count": 2, "digest": AGREED}}

    assert ["bookings of dead in p: u0 does not follow them"] == Looks((body("r0"), late)).differences


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"lag": 3}, f"{KV}: u1 stays behind, by 3 frames now"),
        ({"state": "recovering", "lag": 2}, f"{KV}: at u1: recovering, 2 frames behind"),
        ({"state": "broken"}, f"{KV}: at u1: broken, 0 frames behind"),
        ({"flag": "its digest keeps differing"}, f"{KV}: at u1: its digest keeps differing, 0 frames behind"),
        ({"incarnation": 2}, f"{KV}: u0 stays behind, by 0 frames now"),
    ],
)
def test_not_in_step(facts: Json, text: str) -> None:
    """A replica that is behind may catch up; at the timeout it is reported."""
    looks = Looks((body("r0"), body("r1", **facts)))

    assert [] == looks.comparison.differences
    assert text in looks.differences


def test_caught_up() -> None:
    """Lag at one look, and none at the next."""
    assert Looks((body("r0"), body("r1", lag=3)), (body("r0"), body("r1"))).report.is_equal


def test_new_incarnation() -> None:
    """Equality in a former incarnation proves nothing about the new one."""
    before, after = (body("r0"), body("r1")), (body("r0", incarnation=2, seq=1), body("r1"))

    assert Looks(before).report.is_equal
    assert not Looks(before, after).report.is_equal


def test_strangers() -> None:
    """Replicas that do not see each other, or have different settings."""
    other = body("r1")
    other |= {"namespace_peers": [], "replica_sync": False, "pools": [{"pool": "p", "block_size": 32}]}
    differences = Looks((body("r0"), other)).differences

    assert "u1 does not see the replica r0 (u0)" in differences
    assert "u0 and u1: only one of them has --router-replica-sync" in differences
    assert "block sizes: {'p': 16} at u0, {'p': 32} at u1" in differences


def test_replica_without_sync() -> None:
    """A replica without --router-replica-sync follows no bookings, which the report states."""
    alone = body("r1") | {"replica_sync": False}
    alone["feeds"] = alone["feeds"][:1]
    differences = Looks((body("r0"), alone)).differences

    assert "u0 and u1: only one of them has --router-replica-sync" in differences
    assert (
        "bookings of r0 in p: u1 runs without --router-replica-sync, so it does not follow them"
        in differences
    )


def test_silent_owner() -> None:
    """Replicas agree on a dead replica's bookings until its lease ends: equal, with a note."""
    survivor = body("r1")
    survivor["peers"][1]["silent_rounds"] = 3
    report = Looks((body("r0"), survivor)).report

    assert report.is_equal
    (note,) = report.notes
    assert "u1 has not received a heartbeat of the replica r2 for 3 rounds" in note


def test_restart_while_looking() -> None:
    """Another replica that answers at the same URL is noticed."""
    with pytest.raises(VerifyError, match="u1 answers as r1 and as r2"):
        Looks((body("r0"), body("r1")), (body("r0"), body("r2")))


def test_one_replica_twice() -> None:
    """One replica under two URLs is rejected: it would agree with itself."""
    with pytest.raises(VerifyError, match="two URLs lead to the same replica"):
        Looks((body("r0"), body("r0")))


# --- the owners of blocks ---


def owned(
    *frames: tuple[int, str], engine: EngineCheck | None = None, errors: tuple[str, ...] = ()
) -> OwnersView:
    """The content of w1's agent at these frames of incarnation 1: 5 blocks each, with this digest."""
    key = FeedKey("kv", "p", "w1/0")
    copies = [(key, Copy(1, seq, (("device", 5, digest),))) for seq, digest in frames]
    return OwnersView(copies, {key: engine} if engine else {}, errors)


def with_owners(view: OwnersView, *bodies: Json) -> Report:
    """One look at replicas, then at owners."""
    looks = Looks(bodies)
    looks.comparison.add_owners(view)
    return looks.report


def test_equal_to_its_agent() -> None:
    """The agent's content is known at every frame of a replica, so one replica is enough."""
    view = owned((9, "a"), (10, AGREED), (11, "b"), engine=EngineCheck("equal"))
    report = with_owners(view, body("r0"))

    assert report.is_equal
    (row,) = [row for row in report.rows if row.feed == KV]
    assert (10, 2, "equal", "equal") == (row.seq, row.parties, row.agent, row.engine)
    assert 2 == len([note for note in report.notes if "their owner was not compared" in note])


def test_wrong_alike() -> None:
    """Replicas that agree with each other and not with their agent."""
    report = with_owners(owned((10, "a")), body("r0"), body("r1"))

    assert (
        f"{KV}, as of frame 1:10: u0 holds device 5 ({AGREED}), its agent device 5 (a)" in report.differences
    )
    (row,) = [row for row in report.rows if row.feed == KV]
    assert (False, "different", None) == (row.is_equal, row.agent, row.engine)


def test_frames_that_were_never_published() -> None:
    """After a forged snapshot both replicas are at a frame that the agent never had."""
    report = with_owners(owned((10, AGREED)), body("r0", seq=1000), body("r1", seq=1000))

    at = "is at frame 1:1000, which its agent has not published: that is at 1:10"
    assert [f"{KV}: u0 {at}", f"{KV}: u1 {at}"] == report.differences


def test_wider_tier_that_adds_nothing() -> None:
    """A wider tier set without further blocks makes no difference."""
    host = body("r0")
    host["targets"][0]["tiers"].append({"tier": "host", "blocks": 5, "digest": AGREED})

    assert with_owners(owned((10, AGREED)), host, body("r1")).is_equal


def test_resume_points() -> None:
    """Replicas and agents with the same blocks, where the engine may resume behind others of them."""
    (one, other) = ({"blocks": 2, "digest": digest} for digest in (AGREED, f"{8:016x}"))
    assert Looks((body("r0", resume_points=one), body("r1", resume_points=one))).report.is_equal

    held = f"device 5 ({AGREED}), resume points 2 ("
    (text,) = Looks((body("r0", resume_points=one), body("r1", resume_points=other))).differences
    assert text.endswith(f"u0 holds {held}{AGREED}), u1 {held}{8:016x})")
    (text,) = Looks((body("r0", resume_points=one), body("r1"))).differences
    assert text.endswith(f"u0 holds {held}{AGREED}), u1 device 5 ({AGREED})")
    assert not with_owners(owned((10, AGREED)), body("r0", resume_points=one)).is_equal

    wide = body("r0", resume_points=one)
    wide["targets"][0]["tiers"].append({"tier": "host", "blocks": 5, "digest": AGREED})
    assert Looks((wide, body("r1", resume_points=one))).report.is_equal


def test_worker_without_agent() -> None:
    """A target without an announcement, an agent without an answer, one that no replica follows."""
    nobody = OwnersView([], {}, ())
    key = FeedKey("kv", "p", "w1/0")
    mute = OwnersView([(key, Copy(0, 0, (), problem="no answer"))], {}, ())
    other = OwnersView([*owned((10, AGREED)).copies, (FeedKey("kv", "p", "w2/0"), Copy(1, 1, ()))], {}, ())

    gone = OwnersView([(FeedKey("kv", "p", "w2/0"), Copy(0, 0, (), problem="not connected to NATS"))], {}, ())

    assert [f"{KV}: no agent announces them"] == with_owners(nobody, body("r0")).differences
    assert [f"{KV}: its agent: no answer"] == with_owners(mute, body("r0")).differences
    assert ["blocks of w2/0 in p: u0 does not follow them"] == with_owners(other, body("r0")).differences
    assert [f"{KV}: no agent announces them"] == with_owners(gone, body("r0")).differences


def test_engine_contradicts() -> None:
    """A difference is a difference; a part that was not compared is a note."""
    differs = EngineCheck("different", ("its agent publishes 1 block",))
    unchecked = EngineCheck("not checked", ("no replay",))

    assert [f"{KV}: its agent publishes 1 block"] == with_owners(
        owned((10, AGREED), engine=differs), body("r0")
    ).differences
    report = with_owners(owned((10, AGREED), engine=unchecked), body("r0"))
    assert report.is_equal
    assert f"{KV}: no replay" in report.notes


def test_error_of_an_agent() -> None:
    """An agent's error counts as certain, and is reported once."""
    looks = Looks((body("r0"),))
    for _ in range(2):
        looks.comparison.add_owners(owned((10, AGREED), errors=("two answers",)))

    assert ["two answers"] == looks.differences


# --- over HTTP ---


@contextlib.asynccontextmanager
async def serving(*answers: Json | int | str) -> AsyncIterator[str]:
    """A replica that gives these answers, one after the other, and then always the last one."""
    remaining = iter(answers)
    last: list[Json | int | str] = []

    async def workers(_: web.Request) -> web.Response:
        last[:] = [next(remaining, *last)] if last else [next(remaining)]
        match last[0]:
            case int(status):
                return web.Response(status=status)
            case str(text):
                return web.Response(text=text)
            case said_body:
                return web.json_response(said_body)

    app = web.Application()
    app.router.add_get("/workers", workers)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


async def verify(*flags: str) -> int:
    """Run the command in a thread: the servers use the event loop."""
    return await asyncio.to_thread(main, flags)


async def test_looks_until_equal() -> None:
    """A replica that is behind has time until the timeout."""
    async with serving(body("r0")) as one, serving(body("r1", lag=1), body("r1")) as two:
        report = await compare([one, two], timeout_s=20.0)

    assert (True, 2) == (report.is_equal, report.looks)


async def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0 equal, 1 different; the file has the same result as the terminal."""
    file = tmp_path / "verify.json"
    async with serving(body("r0")) as one, serving(body("r1")) as two, serving(body("r2", lag=1)) as late:
        assert 0 == await verify("--replica", one, "--replica", f"{two}/", "--json", str(file))
        assert json.loads(file.read_text())["equal"]
        assert "equal: 2 replicas, 1 look in" in capsys.readouterr().out
        assert 1 == await verify("--replica", one, "--replica", late, "--timeout", "0", "--json", str(file))

    written = json.loads(file.read_text())
    assert not written["equal"]
    assert f"{KV}: {late} stays behind, by 1 frames now" in written["differences"]
    assert f"different: {KV}: {late} stays behind" in capsys.readouterr().out


_TOO_FEW = (
    "give at least two different replicas: --replica URL --replica URL; or one with --owners, which compares "
    "it with the agents over --nats"
)


async def test_unreachable(free_port: Callable[[], int], capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, the replica, and why: in words without TLS, which plain HTTP does not use."""
    gone = f"127.0.0.1:{free_port()}"
    async with serving(body("r0")) as one:
        assert 2 == await verify("--replica", one, "--replica", gone)

    assert (
        f"kvrouter verify: http://{gone} cannot be reached: connection refused\n" == capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (503, "answers 503"),
        (404, "by default its --port + 100"),
        (401, "--admin-key-file"),
        ("<html>", "is not JSON"),
        ({"router_id": "r0"}, "/workers is not in this version's format: Object missing required field"),
    ],
)
async def test_something_else_answers(
    answer: Json | int | str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and the answer."""
    async with serving(body("r0")) as one, serving(answer) as two:
        assert 2 == await verify("--replica", one, "--replica", two)

    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ([], _TOO_FEW),
        (["--replica", "u"], _TOO_FEW),
        (["--replica", "u", "--nats", "nats://n:4222"], _TOO_FEW),
        (["--owners"], "give a replica: --replica URL"),
        (["--replica", "u", "--replica", "http://u/"], "a replica's URL is given twice"),
        (["--owners", "--replica", "u", "--replica", "http://u/"], "a replica's URL is given twice"),
    ],
)
def test_needs_two(flags: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One replica cannot differ from itself; with its agents it can, and the message says so."""
    assert 2 == main(flags)
    assert text in capsys.readouterr().err


def test_one_is_enough_with_owners() -> None:
    """The settings are accepted; `test_equal_to_its_agent` compares them."""
    assert ("u",) == VerifySettings(replica=("u",), owners=True).checked().replica


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1", "1e9", "soon"])
def test_timeout_must_end(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An infinite time is rejected."""
    assert 2 == main(["--replica", "a", "--replica", "b", "--timeout", seconds])
    assert f"--timeout-s {seconds!r}: must be a number from 0 to 86400" in capsys.readouterr().err


async def test_silence_is_counted(nats_url: str) -> None:
    """/workers has the rounds since a peer's last heartbeat; 0 or 1 for a live one."""
    flags = ("--router-replica-sync", "--heartbeat-s", "0.05", "--lease-s", "60")
    async with running_fleet(nats_url, *flags) as fleet:
        beat = encode(RouterBeat(VERSION, 1, "up", "http://gone", {}, 1))
        fleet.bus.publish(fleet.subjects.live_router(RouterId("gone")), beat)
        peers: list[Json] = []
        while not peers or peers[0]["silent_rounds"] < 3:
            peers = (await fleet.get("/workers")).json["peers"]
        fleet.bus.publish(fleet.subjects.live_router(RouterId("gone")), beat)
        while peers[0]["silent_rounds"] > 1:
            peers = (await fleet.get("/workers")).json["peers"]

        assert ("gone", "http://gone") == (peers[0]["router_id"], peers[0]["url"])


async def test_real_replicas(nats_url: str) -> None:
    """Two frontends: their answers can be read, and they agree."""
    async with running_fleet(nats_url, "--router-replica-sync", replicas=2) as fleet:
        urls = [frontend.admin_url for frontend in fleet.frontends]
        await fleet.ask()
        report = await compare(urls, timeout_s=20.0)

        assert report.is_equal, report.differences
        assert {frontend.replica.router_id for frontend in fleet.frontends} == set(report.replicas.values())
        assert 2 == len([row for row in report.rows if row.feed.startswith("bookings of ")])
