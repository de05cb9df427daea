"""Readiness: what a joiner waits for, once and never again."""

from __future__ import annotations

import pytest

from kvrouter.core.beats import RouterBeat, encode
from kvrouter.core.events import VERSION
from kvrouter.core.readiness import HELLO_S
from kvrouter.core.replica import Replica
from tests.core.replicas import PEER, ROUNDS, hear_worker, new_replica, rounds
from tests.core.worlds import card


@pytest.fixture
def replica() -> Replica:
    """A synced replica that knows nobody yet."""
    return new_replica()


def test_ready_once_and_for_ever(replica: Replica) -> None:
    """Not before hello was answered, a worker seen and its feed live; afterwards always."""
    assert ["waiting for the answers to hello", "no worker has been seen"] == replica.not_ready(0.0)
    assert ["no worker has been seen"] == replica.not_ready(HELLO_S)
    hear_worker(replica, card(), seq=5)
    assert ["kv w1/0: recovering, 5 frames behind"] == replica.not_ready(HELLO_S)
    hear_worker(replica, card(), seq=0, rank_incarnation=101, incarnation=101)
    assert [] == replica.not_ready(HELLO_S)

    hear_worker(replica, state="leave", incarnation=101)

    assert [] == replica.not_ready(HELLO_S)
    assert ["no worker is known"] == replica.degraded()


def test_ready_is_latched_without_being_asked(replica: Replica) -> None:
    """A replica that was ready is ready, also if nobody asked before its only worker left."""
    hear_worker(replica, card())
    replica.latch_ready(HELLO_S)
    hear_worker(replica, state="leave")

    assert [] == replica.not_ready(10.0)


def test_joiner_waits_for_workers_that_others_hear(replica: Replica) -> None:
    """One that does not answer hello in time is named by a replica that hears it."""
    peer = new_replica(PEER)
    for name in ("w1", "w2"):
        hear_worker(peer, card(name))
    hear_worker(replica, card("w1"))
    replica.router_heard(PEER, encode(peer.heartbeat("up", "")), 0.0)
    assert [] == list(peer.heartbeat("up", "").workers)

    replica.router_heard(PEER, encode(peer.heartbeat("up", "", names_workers=True)), 0.0)
    assert ["worker w2, known to replica peer, has not been heard"] == replica.not_ready(HELLO_S)
    hear_worker(replica, "w2")  # without its card, which a hello asks for
    assert replica.not_ready(HELLO_S)

    hear_worker(replica, card("w2"))
    assert [] == replica.not_ready(HELLO_S)


def test_joiner_does_not_wait_for_the_dead(replica: Replica) -> None:
    """One that stays silent for as long as a lease lasts would have been dropped by now."""
    beat = RouterBeat(VERSION, 5, "up", "", {}, 1, 1000, [f"w{n}" for n in range(1, 9)])
    replica.router_heard(PEER, encode(beat), 0.0)
    hear_worker(replica, card("w1"))
    assert 6 == len(replica.not_ready(HELLO_S))
    assert "nor have 2 other workers" == replica.not_ready(HELLO_S)[-1]

    for _ in range(ROUNDS):
        hear_worker(replica, "w1")
        rounds(replica, 1)

    assert [] == replica.not_ready(HELLO_S)


def test_not_connected_is_not_ready() -> None:
    """Before hello has gone out nothing is known at all; --ready-timeout ends the waiting."""
    replica = new_replica()
    replica._readiness._hello_at = None

    assert "not connected to NATS yet" in replica.not_ready(100.0)
    replica.give_up_waiting()
    assert [] == replica.not_ready(100.0)
