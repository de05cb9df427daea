"""The log has one line for each member that joins, leaves or is lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from kvrouter.core.fleet.replica import Replica, ReplicaSettings
from kvrouter.core.fleet.router import RouterRules
from kvrouter.core.wire.heartbeats import Card, RankBeat, RouterBeat, State, WorkerBeat, encode
from kvrouter.core.wire.ids import PoolId, RouterId, WorkerId
from kvrouter.core.wire.ops import VERSION
from kvrouter.policies.kv import Kv
from kvrouter.replica.members import MOST_LINES, Members
from tests.frontend.fleet import POOL, FleetOf
from tests.frontend.workers import OK, FakeWorker, until

ME = RouterId("me")


class Namespace:
    """A replica, its Members, and the heartbeats that both receive."""

    def __init__(self) -> None:
        self.replica = Replica(ReplicaSettings(lease_rounds=2), ME, 1, self._rules, chance=lambda: 0.5)
        self.members = Members(self.replica)

    def _rules(self, _pool: PoolId) -> RouterRules:
        return RouterRules(Kv(), lambda: 0.5)

    def worker(
        self,
        worker_id: str,
        state: State = "up",
        incarnation: int = 1,
        block_size: int = 16,
        blocks: int = 0,
        **part: Any,
    ) -> None:
        """A heartbeat."""
        card = Card(
            worker_id=worker_id,
            url=f"http://{worker_id}",
            model="m",
            block_size=block_size,
            tiers={"device": blocks},
            **part,
        )
        beat = WorkerBeat(VERSION, incarnation, state, POOL, [], 1, card)
        self.replica.worker_heartbeat(WorkerId(worker_id), encode(beat), 0.0)
        self.members.worker_heartbeat(WorkerId(worker_id))

    def peer(self, router_id: str, state: State = "up") -> None:
        """A heartbeat."""
        self.replica.router_heartbeat(
            RouterId(router_id), encode(RouterBeat(VERSION, 1, state, "http://p", {}, 1)), 0
        )
        self.members.replica_heartbeat(RouterId(router_id))

    def rounds(self, count: int) -> None:
        """The replica's own heartbeats come back."""
        for _ in range(count):
            self.replica.next_round(0.0)
            self.replica.router_heartbeat(ME, encode(self.replica.heartbeat("up", "")), 0.0)
            self.members.round_ended()


@pytest.fixture
def logs() -> Iterator[list[dict[str, Any]]]:
    """Entries of the log."""
    with capture_logs() as logs:
        yield logs  # type: ignore[misc]  # structlog says MutableMapping


def members_of(logs: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Each event with its worker or replica."""
    return [(entry["event"], entry.get("worker", entry.get("replica", ""))) for entry in logs]


def test_capacity_that_fell(logs: list[dict[str, Any]]) -> None:
    """A warning when an engine comes back with fewer blocks; none when it has more, or says nothing."""
    space = Namespace()
    for incarnation, blocks in enumerate((0, 400, 4096, 4096, 400, 0), 1):
        space.worker("a", incarnation=incarnation, blocks=blocks)

    (line,) = [entry for entry in logs if entry["event"] == "worker.capacity_fell"]
    assert ("a", 4096, 400, "warning") == (line["worker"], line["before"], line["now"], line["log_level"])


def test_block_size_changes(logs: list[dict[str, Any]]) -> None:
    """One line when a pool's size changes; none for its first."""
    space = Namespace()
    for size in (16, 32):
        for _ in range(5):
            space.worker("a", block_size=size)
            space.rounds(1)

    (line,) = [entry for entry in logs if entry["event"] == "pool.block_size"]
    assert (POOL, 16, 32) == (line["pool"], line["before"], line["now"])


def test_workers_come_and_go(logs: list[dict[str, Any]]) -> None:
    """One line for each worker that joins, leaves or is lost, however many heartbeats it sends."""
    space = Namespace()
    for _ in range(3):
        for worker in ("a", "b", "c"):
            space.worker(worker)
    space.worker("b", "leave")
    space.rounds(1)
    space.worker("a")
    space.rounds(1)

    joined = [("worker.joined", worker) for worker in ("a", "b", "c")]
    assert [*joined, ("worker.left", "b"), ("worker.lost", "c")] == members_of(logs)
    assert all(entry["pool"] == POOL for entry in logs if entry["event"] != "worker.left")


def test_half_of_a_pair_joins(logs: list[dict[str, Any]]) -> None:
    """The line of a prefill or decode worker has its role and connector."""
    space = Namespace()
    space.worker("a")
    space.worker("p", role="prefill", kv_connector="nixl")

    assert [(None, None), ("prefill", "nixl")] == [(e.get("role"), e.get("kv_connector")) for e in logs]


def test_worker_that_comes_back(logs: list[dict[str, Any]]) -> None:
    """The line has the reason: new, heartbeats are back, agent restarted."""
    space = Namespace()
    space.worker("a")
    space.rounds(2)
    space.worker("a")
    space.worker("a", incarnation=2)

    assert ["worker.joined", "worker.lost", "worker.joined", "worker.joined"] == [e["event"] for e in logs]
    assert "its pool has no other" in logs[1]["reason"]
    assert ["new", "its heartbeats are back", "its agent was restarted"] == [
        entry["reason"] for entry in logs if entry["event"] == "worker.joined"
    ]


def test_replicas_come_and_go(logs: list[dict[str, Any]]) -> None:
    """One line for each replica that joins, leaves or is lost; the replica itself has no line."""
    space = Namespace()
    for peer in ("p", "p", "q"):
        space.peer(peer)
    space.peer("p", "leave")
    space.rounds(2)
    space.peer("q")

    assert [
        ("replica.joined", "p"),
        ("replica.joined", "q"),
        ("replica.left", "p"),
        ("replica.lost", "q"),
        ("replica.joined", "q"),
    ] == members_of(logs)


def test_lines_are_bounded(logs: list[dict[str, Any]]) -> None:
    """Of two hundred joins in one round a few are logged and the rest counted; the next round logs again."""
    space = Namespace()
    for number in range(200):
        space.worker(f"w{number}")
    space.rounds(1)
    space.worker("late")

    events = [entry["event"] for entry in logs]
    assert ["worker.joined"] * MOST_LINES + ["members.more", "worker.joined"] == events
    assert 200 - MOST_LINES == logs[MOST_LINES]["came_or_went"]


async def test_lost_worker_of_a_fleet(fleet_of: FleetOf) -> None:
    """One of two agents is lost: requests still succeed, but the log and the metrics report it."""
    flags = ("--lease-s", "1", "--heartbeat-s", "0.2")
    async with fleet_of(*flags, scripts=()) as fleet:
        fleet.announce(FakeWorker("b", OK, "http://127.0.0.1:1"))

        def is_lost_while_the_other_is_up() -> bool:
            fleet.announce(FakeWorker("a", OK, "http://127.0.0.1:1"))
            return bool(fleet.logged("worker.lost"))

        await until(is_lost_while_the_other_is_up, "the loss is logged")
        lines = (await fleet.get("/metrics")).body.decode().splitlines()

        assert ["b"] == [entry["worker"] for entry in fleet.logged("worker.lost")]
        assert 'kvrouter_replica_events_total{event="workers_lost"} 1.0' in lines
        assert f'kvrouter_workers{{pool="{POOL}"}} 1.0' in lines


async def test_malformed_message_is_logged_once(fleet_of: FleetOf) -> None:
    """A malformed message is logged once for each source, with the reason, and counted every time."""
    async with fleet_of(publishes_events=True) as fleet:
        replica, subjects = fleet.frontend.replica, fleet.subjects
        fleet.announce(fleet.workers[0], ranks_heard=[RankBeat(0, 1, 0)], publishes_events=True)
        fleet.bus.publish(subjects.live_worker(WorkerId("w0")), b"\xff")
        for _ in range(3):
            fleet.bus.publish(subjects.live_router(RouterId("r1")), b"\xc1")
            fleet.bus.publish(subjects.live_worker(WorkerId("w0")), b"\x00garbage")
            fleet.bus.publish(subjects.live_worker(WorkerId("w0")).replace("worker", "nothing"), b"")
            fleet.bus.publish(subjects.live_kv(POOL, WorkerId("w0"), 0), b"\xc1")
        fleet.bus.publish(subjects.live_worker(WorkerId("w0")), b"\xff")
        await until(lambda: replica.counters.malformed_heartbeats == 8, "all have arrived")
        lines = (await fleet.get("/metrics")).body.decode().splitlines()

        named = [entry["subject"].split(".")[3] for entry in fleet.logged("feed.malformed")]
        assert ["worker", "router", "nothing", "kv"] == named
        assert 1 <= next(iter(replica.readers.values())).counters.malformed <= 3
        assert all(entry["error"] for entry in fleet.logged("feed.malformed"))
        assert 'kvrouter_replica_events_total{event="malformed_heartbeats"} 8.0' in lines
        assert 'kvrouter_replica_events_total{event="unknown_messages"} 3.0' in lines
