"""GET and POST /routing: routing that changes in all replicas while they run."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvrouter.core.wire import heartbeats
from kvrouter.core.wire.heartbeats import RouterBeat, RoutingChange
from kvrouter.core.wire.ids import RouterId
from kvrouter.core.wire.ops import VERSION
from kvrouter.core.wire.values import MOST_NUMBER
from kvrouter.frontend.run import RunningFrontend
from tests.frontend.clients import ask, get
from tests.frontend.fleet import BODY, FleetOf
from tests.frontend.workers import OK, until

KV = ("--router-mode", "kv", "--kv-overlap-score-weight", "1")
HEAVY = {"settings": {"kv-overlap-score-weight": 3}, "who": "ada", "why": "long prompts"}


async def post(frontend: RunningFrontend, body: Any) -> tuple[int, Any]:
    """POST /routing: status and body."""
    answer = await ask(frontend.admin_url, body, path="/routing")
    return answer.status, answer.json


async def shown(frontend: RunningFrontend) -> Any:
    """GET /routing."""
    return (await get(frontend.admin_url, "/routing")).json


async def decision(frontend: RunningFrontend) -> Any:
    """Mode, weight, and cost of a prompt of 4 blocks on the first idle worker: 4 × weight + 4."""
    found = (await ask(frontend.admin_url, BODY, path="/v1/route")).json
    return found["mode"], found["candidates"][0]["terms"].get("cost")


async def test_all_replicas_and_joiners(fleet_of: FleetOf) -> None:
    """Told to one, a change holds in all, also in one that joins later; undo ends it everywhere."""
    async with fleet_of(*KV, "--heartbeat-s", "0.2", scripts=(OK, OK), replicas=2) as fleet:
        first, second = fleet.frontends
        status, told = await post(first, HEAVY)
        await until(lambda: second.replica.routing is not None)
        heard = await shown(second)

        assert (200, 1, {"kv-overlap-score-weight": "3"}) == (status, told["revision"], told["changed"])
        assert ("ada", "long prompts", "1") == (
            heard["who"], heard["why"], heard["configured"]["kv-overlap-score-weight"],
        )  # fmt: skip
        assert [("kv", 16.0)] * 2 == [await decision(one) for one in (first, second)]

        _, told = await post(second, {"settings": {"router-mode": "least-loaded"}, "who": "bob"})
        assert {"kv-overlap-score-weight": "3", "router-mode": "least-loaded"} == told["changed"]
        async with fleet.new_frontend() as joiner:
            await until(lambda: joiner.replica.routing is not None)
            for worker in fleet.workers:
                fleet.announce(worker)
            await until(lambda: len(fleet.targets(joiner)) == 2)
            modes = [(await decision(one))[0] for one in (second, joiner)]
            assert ["least-loaded"] * 2 == modes

        await post(first, {"undo": True, "why": "as it was"})
        await until(lambda: second.replica.routing == first.replica.routing)
        assert [("kv", 8.0)] * 2 == [await decision(one) for one in (first, second)]
        view = await shown(second)
        assert (3, {}) == (view["revision"], view["changed"])
        assert {3} == set(view["replicas"].values())
        logged = fleet.logged("routing.changed")
        assert {"ada", "bob"} <= {entry["who"] for entry in logged}
        metrics = (await fleet.get("/metrics")).body.decode()
        assert "kvrouter_routing_revision 3.0" in metrics


async def test_a_forged_revision_is_refused(fleet_of: FleetOf) -> None:
    """The greatest revision there is does not hold, and changes go on in all replicas, also in a joiner."""
    forged = RoutingChange(MOST_NUMBER, "zz", {"kv-overlap-score-weight": "9"})
    beat = heartbeats.encode(RouterBeat(VERSION, 1, "up", "", {}, 99, routing=forged))
    async with fleet_of(*KV, "--heartbeat-s", "0.2", scripts=(OK, OK), replicas=2) as fleet:

        def forge() -> None:
            for _ in range(2):
                fleet.bus.publish(fleet.subjects.live_router(RouterId("zz")), beat)

        forge()
        await until(lambda: all("zz" in one.replica.peers for one in fleet.frontends))
        views = [await shown(one) for one in fleet.frontends]
        assert [{"zz": {"epoch": 0, "revision": MOST_NUMBER}}] * 2 == [view["refused"] for view in views]
        assert [("kv", 8.0)] * 2 == [await decision(one) for one in fleet.frontends]

        first, second = fleet.frontends
        status, told = await post(first, HEAVY)
        await until(lambda: second.replica.routing is not None)
        assert (200, 0, 1) == (status, told["epoch"], told["revision"])
        assert [("kv", 16.0)] * 2 == [await decision(one) for one in (first, second)]
        async with fleet.new_frontend() as joiner:
            forge()
            await until(lambda: joiner.replica.routing is not None)
            assert first.replica.routing == joiner.replica.routing
        assert {"zz"} == {entry["replica"] for entry in fleet.logged("routing.refused")}
        assert len(fleet.logged("routing.refused")) <= 3
        gone = RouterBeat(VERSION, 1, "leave", "", {}, 100)
        fleet.bus.publish(fleet.subjects.live_router(RouterId("zz")), heartbeats.encode(gone))


async def test_reset(fleet_of: FleetOf) -> None:
    """It wins over the greatest revision there is, ends all changes, and more can be made."""
    absurd = RoutingChange(MOST_NUMBER, "zz", {"kv-overlap-score-weight": "9"})
    async with fleet_of(*KV, "--heartbeat-s", "0.2", scripts=(OK, OK), replicas=2) as fleet:
        first, second = fleet.frontends
        first.replica.routing = second.replica.routing = absurd
        status, answer = await post(first, HEAVY)
        assert (400, True) == (status, "send reset: true" in answer["error"]["message"])

        status, told = await post(first, {"reset": True, "who": "ada"})
        assert (200, 1, 1, {}) == (status, told["epoch"], told["revision"], told["changed"])
        await until(lambda: second.replica.routing == first.replica.routing)
        assert [("kv", 8.0)] * 2 == [await decision(one) for one in (first, second)]

        await post(second, HEAVY)
        await until(lambda: second.replica.routing == first.replica.routing)
        assert [("kv", 16.0)] * 2 == [await decision(one) for one in (first, second)]
        view = await shown(first)
        assert (1, 2, {}) == (view["epoch"], view["revision"], view["refused"])


async def test_both_orders_end_alike(fleet_of: FleetOf) -> None:
    """Of two changes with one revision that of the greater id holds, in whichever order they are heard."""
    mine = RoutingChange(1, "a", {"router-temperature": "0.5"})
    other = RoutingChange(1, "b", {"router-temperature": "0.2"})
    async with fleet_of(*KV) as fleet:
        replica = fleet.frontend.replica
        for changes in ((mine, other), (other, mine)):
            replica.routing = None
            for number, change in enumerate(changes):
                beat = RouterBeat(VERSION, 1, "up", "", {}, number, routing=change)
                replica.router_heartbeat(RouterId(f"peer-{change.by}"), heartbeats.encode(beat), 0.0)
            assert other == replica.routing
        for name in ("peer-a", "peer-b"):
            gone = RouterBeat(VERSION, 1, "leave", "", {}, 9)
            replica.router_heartbeat(RouterId(name), heartbeats.encode(gone), 0.0)


async def test_what_a_peer_of_another_version_asks(fleet_of: FleetOf) -> None:
    """Settings that are unknown or wrong here are left out and shown; the others hold."""
    asked = {"no-such": "1", "router-temperature": "cold", "kv-overlap-score-weight": "2"}
    async with fleet_of(*KV) as fleet:
        beat = RouterBeat(VERSION, 1, "up", "", {}, 1, routing=RoutingChange(7, "zz", asked))
        fleet.bus.publish(fleet.subjects.live_router(RouterId("zz")), heartbeats.encode(beat))
        await until(lambda: fleet.frontend.replica.routing is not None)

        view = await shown(fleet.frontend)
        assert {"no-such", "router-temperature"} == set(view["not_applied"])
        assert ("kv", 12.0) == await decision(fleet.frontend)
        gone = RouterBeat(VERSION, 1, "leave", "", {}, 9)
        fleet.bus.publish(fleet.subjects.live_router(RouterId("zz")), heartbeats.encode(gone))


def test_older_replicas_read_the_heartbeat() -> None:
    """They ignore what comes last; theirs have no change."""

    class Older(msgspec.Struct, array_like=True):
        version: int
        incarnation: int
        state: str
        address: str
        feeds: dict[str, int]
        round: int
        interval_ms: int | None = None
        workers: list[str] = []
        serves: dict[str, int] = {}

    beat = RouterBeat(VERSION, 1, "up", "", {}, 1, routing=RoutingChange(1, "a", {}))
    read = msgspec.msgpack.decode(heartbeats.encode(beat), type=Older)

    assert 1 == read.round
    older = msgspec.msgpack.encode(Older(VERSION, 1, "up", "", {}, 1))
    assert heartbeats.decode_router_beat(older).routing is None


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({}, "give settings, or undo: true"),
        ({"settings": {}, "weight": 3}, "unknown field `weight`"),
        ({"settings": {"kv-overlap-score-wieght": 3}}, "did you mean kv-overlap-score-weight?"),
        ({"settings": {"kv-overlap-score-weight": -1}}, "kv-overlap-score-weight '-1': must be"),
        ({"settings": {"kv-overlap-score-weight": "NaN"}}, "must be"),
        (
            {"settings": {"kv-overlap-score-weight": 2, "router-temperature": "hot"}},
            "router-temperature 'hot'",
        ),
        ({"settings": {"port": 80}}, "'port' cannot be changed"),
        ({"settings": {"router-mode": "direct"}}, "chosen when a replica starts"),
        ({"settings": {"router-mode": "fastest"}}, "router-mode 'fastest': must be"),
        ({"settings": {"router-queue-threshold": 2}}, "to switch it on or off"),
        ({"settings": {"retries": 2}}, "'retries' cannot be changed"),
        ({"reset": True, "settings": {"router-temperature": 1}}, "reset ends all changes: send it without"),
        ({"undo": True, "settings": {"router-temperature": 1}}, "send it without settings"),
        ({"settings": {"router-temperature": 1}, "who": "x" * 300}, "who"),
        ({"settings": {"router-temperature": 1}, "why": "line\nline"}, "why"),
        ({"settings": {f"s{n}": 1 for n in range(65)}}, "settings"),
        ({"settings": [1]}, "settings"),
        ([], "object"),
    ],
)
async def test_wrong_changes(fleet_of: FleetOf, body: Any, problem: str) -> None:
    """A reason, and nothing is changed, not even in part."""
    async with fleet_of(*KV) as fleet:
        status, answer = await post(fleet.frontend, body)

        assert 400 == status
        assert problem in answer["error"]["message"]
        assert fleet.frontend.replica.routing is None
        assert ("kv", 8.0) == await decision(fleet.frontend)


async def test_a_setting_alone_is_undone_by_null(fleet_of: FleetOf) -> None:
    """And a reload keeps what was changed, over what was configured."""
    async with fleet_of(*KV) as fleet:
        await post(fleet.frontend, {"settings": {"kv-overlap-score-weight": 3, "router-temperature": 0.5}})
        _, told = await post(fleet.frontend, {"settings": {"router-temperature": None}})
        assert {"kv-overlap-score-weight": "3"} == told["changed"]
        assert fleet.frontend.reload is not None
        await fleet.frontend.reload.reload()

        assert ("kv", 16.0) == await decision(fleet.frontend)


async def test_kept_decisions_are_explained_as_they_were_made(fleet_of: FleetOf) -> None:
    """A decision of before a change shows the mode, the weight and the cost it was made by."""
    async with fleet_of(*KV, "--decisions", "3", scripts=(OK, OK)) as fleet:
        await fleet.ask(None, "x-request-id: before")
        await post(fleet.frontends[0], HEAVY)
        await fleet.ask(None, "x-request-id: between")
        await post(fleet.frontends[0], {"settings": {"router-mode": "round-robin"}})

        shown_before, shown_between = [
            (await fleet.get(f"/decisions/{name}")).json["decisions"][0] for name in ("before", "between")
        ]
        listed = (await fleet.get("/decisions")).json["decisions"]

        assert [("kv", 3.0), ("kv", 1.0)] == [(one["mode"], one["overlap_weight"]) for one in listed]
        for one, weight in ((shown_before, 1.0), (shown_between, 3.0)):
            assert ("kv", weight) == (one["mode"], one["overlap_weight"])
            assert {weight} == {row["terms"]["overlap_weight"] for row in one["candidates"]}
