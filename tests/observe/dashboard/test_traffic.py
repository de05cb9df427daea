"""What all replicas serve together, added up from their heartbeats."""

from __future__ import annotations

import json
from functools import partial

import pytest
from msgspec.structs import replace

from kvrouter.core.wire.heartbeats import RouterBeat, State, Times, Traffic, encode
from kvrouter.core.wire.ids import RouterId
from kvrouter.core.wire.ops import VERSION
from kvrouter.observe.dashboard import traffic as module
from kvrouter.observe.dashboard.traffic import FleetTraffic
from tests.core.replicas import new_replica
from tests.frontend.clients import ask, get
from tests.frontend.fleet import STREAM, FleetOf
from tests.frontend.workers import says, stream, until, until_found

PEER, OTHER = RouterId("peer"), RouterId("other")
BOUNDS = (0.1, 1.0)
MOST = 1 << 53  # of a total
LATER = 1 << 61  # an incarnation
NOTHING = Traffic(
    0, 0, 0, 0, 0, Times(BOUNDS, [0, 0, 0]), Times(BOUNDS, [0, 0, 0]), uncached_tokens={"chosen": 0}
)


class _Fleet:
    """A replica that hears what a test says."""

    def __init__(self) -> None:
        self.replica = new_replica()
        self.served = NOTHING
        self.traffic = FleetTraffic(self.replica, lambda: self.served)
        self._round = 0

    def hear(
        self, router_id: RouterId, traffic: Traffic | None, state: State = "up", incarnation: int = 1
    ) -> None:
        self._round += 1
        beat = RouterBeat(VERSION, incarnation, state, "", {}, self._round, traffic=traffic)
        self.replica.router_heartbeat(router_id, encode(beat), 0.0)

    def requests(self) -> int:
        return self.traffic.total().requests


@pytest.fixture
def fleet() -> _Fleet:
    return _Fleet()


def test_own_and_those_of_peers(fleet: _Fleet) -> None:
    """An older peer counts from the first look on: what it served before is not of this replica's time."""
    fleet.hear(PEER, replace(NOTHING, requests=100))
    assert 0 == fleet.requests()
    fleet.hear(PEER, replace(NOTHING, requests=103, queued=2))
    fleet.served = replace(NOTHING, requests=4, queued=1)

    assert (7, 3) == (fleet.requests(), fleet.traffic.total().queued)
    assert 7 == fleet.requests()  # another look counts nothing again


def test_a_peer_that_started_later(fleet: _Fleet) -> None:
    """All that it has served is of this replica's time, also what came before the first look."""
    fleet.hear(PEER, replace(NOTHING, requests=9, failed=7), incarnation=LATER)
    total = fleet.traffic.total()

    assert (9, 7) == (total.requests, total.failed)


def test_a_later_peer_that_was_silent(fleet: _Fleet) -> None:
    """When it is heard again its whole life does not count a second time."""
    states: tuple[State, ...] = ("up", "leave", "up")
    for state in states:
        fleet.hear(PEER, replace(NOTHING, requests=9), state, LATER)
        fleet.requests()

    assert 9 == fleet.requests()


def test_growth_that_no_replica_serves(fleet: _Fleet) -> None:
    """It is not counted, and what follows is."""
    for requests in (0, 1 << 52, (1 << 52) + 3):
        fleet.hear(PEER, replace(NOTHING, requests=requests))
        total = fleet.requests()

    assert 3 == total


def test_a_peer_that_leaves(fleet: _Fleet) -> None:
    """What it has served stays counted, also when it comes back with the same totals."""
    for requests in (0, 5):
        fleet.hear(PEER, replace(NOTHING, requests=requests))
        fleet.requests()
    fleet.hear(PEER, None, "leave")
    assert 5 == fleet.requests()
    fleet.hear(PEER, replace(NOTHING, requests=5))

    assert 5 == fleet.requests()


def test_every_counter_grows(fleet: _Fleet) -> None:
    """Times, tokens by cache and the predicted delay are added, too."""
    fleet.hear(PEER, NOTHING)
    fleet.requests()
    grown = Traffic(
        3, 1, 90, 60, 12, Times(BOUNDS, [1, 2, 0]), Times(BOUNDS, [9, 0, 0]), 0, 90, {"chosen": 30}, 3, 0.5
    )
    fleet.hear(PEER, grown)
    fleet.served = grown

    assert fleet.traffic.total() == Traffic(
        6,
        2,
        180,
        120,
        24,
        Times(BOUNDS, [2, 4, 0]),
        Times(BOUNDS, [18, 0, 0]),
        0,
        180,
        {"chosen": 60},
        6,
        1.0,
    )


def test_a_version_without_totals_or_with_other_bounds(fleet: _Fleet) -> None:
    """The first one is not counted; of the second one the times are left out."""
    other = replace(NOTHING, ttft=Times((0.2,), [0, 0]))
    for requests in (0, 5):
        fleet.hear(PEER, None)
        fleet.hear(OTHER, replace(other, requests=requests, ttft=Times((0.2,), [requests, 0])))
        total = fleet.traffic.total()

    assert (5, [0, 0, 0]) == (total.requests, total.ttft.counts)


def test_hostile_totals(fleet: _Fleet) -> None:
    """Totals that go up and down, unknown caches and uneven counts: the sum stays bounded, and is JSON."""
    for number in range(64):
        most = MOST * (number % 2)
        uneven = Times(BOUNDS, [most] * (number % 5))
        forged = Traffic(
            most,
            most,
            most,
            most,
            most,
            uneven,
            uneven,
            most,
            most,
            {f"cache{number}": most},
            most,
            1e300 * (number % 2),
        )
        fleet.hear(PEER, forged)
        fleet.traffic.keep()
    last = json.loads(fleet.traffic.history())[-1]["fleet_traffic"]

    assert (0, {"chosen": 0}, 0.0) == (last["requests"], last["uncached_tokens"], last["later_s"])


@pytest.mark.parametrize(
    "broken", [{"requests": -1}, {"requests": MOST + 1}, {"later_s": float("nan")}, {"ttft": None}]
)
def test_malformed_totals(fleet: _Fleet, broken: dict[str, object]) -> None:
    """The heartbeat is ignored as any malformed one; what was counted stays."""
    fleet.hear(PEER, NOTHING)
    fleet.hear(PEER, replace(NOTHING, **broken))

    assert 0 == fleet.requests()
    assert fleet.replica.peers[PEER].round == 1


def test_the_last_hour(fleet: _Fleet) -> None:
    """The oldest samples are dropped."""
    for requests in range(module.MOST_KEPT + 5):
        fleet.served = replace(NOTHING, requests=requests)
        fleet.traffic.keep()
    kept = json.loads(fleet.traffic.history())

    assert [5, module.MOST_KEPT + 4] == [kept[at]["fleet_traffic"]["requests"] for at in (0, -1)]
    assert module.MOST_KEPT == len(kept)
    assert kept[0]["started_s"] <= kept[0]["time"]


async def test_one_replica_has_the_requests_of_all(fleet_of: FleetOf) -> None:
    """Two replicas, over NATS: each counts the other's requests, tokens and first bytes."""
    flags = ("--router-mode", "kv", "--heartbeat-s", "0.05")
    async with fleet_of(*flags, scripts=(says(stream("a", "b")),), replicas=2) as fleet:
        one, other = fleet.frontends
        await until(lambda: one.replica.peers and other.replica.peers, "they know each other")
        for frontend in fleet.frontends:
            await get(frontend.admin_url, "/fleet")  # a look at the first heartbeat
        for frontend in (one, one, other):
            await ask(frontend.url, STREAM)

        for frontend in fleet.frontends:
            found = await until_found(
                partial(get, frontend.admin_url, "/fleet"),
                lambda one: one.json["fleet_traffic"]["requests"] == 3,
            )
            seen = found.json
            counted, rows = seen["fleet_traffic"], seen["replicas"]
            assert (3, 192, 3) == (
                counted["requests"], counted["prompt_tokens"], sum(counted["ttft"]["counts"])
            )  # fmt: skip
            assert {"chosen": 192, "best": 192} == {
                cache: counted["uncached_tokens"][cache] for cache in ("chosen", "best")
            }
            assert [1, 2] == sorted(row["requests"] for row in rows)
            assert seen["traffic"]["requests"] in {1, 2}
