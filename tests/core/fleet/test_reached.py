"""Which addresses of peers are asked, when, and what their answers count for."""

from __future__ import annotations

import itertools

from kvrouter.core.fleet.reached import AGAIN_S, FIRST_PAUSE_S, LONGEST_PAUSE_S, ReachedPeers
from kvrouter.core.wire.heartbeats import RouterBeat
from kvrouter.core.wire.ids import RouterId
from kvrouter.core.wire.ops import VERSION

A, B = RouterId("a"), RouterId("b")
ADMIN, CLIENTS, OTHER = "http://10.0.0.1:8100", "http://10.0.0.1:8000", "http://10.0.0.2:8100"


def beat(address: str, clients_url: str = "") -> RouterBeat:
    """A peer's heartbeat."""
    return RouterBeat(VERSION, 1, "up", address, {}, 1, clients_url=clients_url)


def test_each_address_is_asked_once() -> None:
    """Both listeners, and each once, however many peers name it; again after AGAIN_S."""
    reached, peers = ReachedPeers(), {A: beat(ADMIN, CLIENTS), B: beat(ADMIN)}
    asked = []
    while url := reached.next(peers, 0.0):
        asked.append(url)
        reached.answered(url, A, 0.0)

    assert [CLIENTS, ADMIN] == asked
    assert "" == reached.next(peers, AGAIN_S - 1)
    assert reached.next(peers, AGAIN_S)


def test_peer_is_reached_by_its_own_id_only() -> None:
    """An address counts for the replica that answers there."""
    reached, peers = ReachedPeers(), {A: beat(ADMIN), B: beat(ADMIN)}
    reached.answered(reached.next(peers, 0.0), A, 0.0)

    assert reached.is_reached(A, peers[A])
    assert not reached.is_reached(B, peers[B])
    assert (False, True) == (reached.has_failed(A, peers[A]), reached.has_failed(B, peers[B]))
    assert not reached.is_reached(A, beat(""))


def test_silent_addresses_wait_behind_others() -> None:
    """Pauses double up to a minute, and an address that has not failed is asked first."""
    reached, peers = ReachedPeers(), {A: beat(ADMIN)}
    now, pauses = 0.0, []
    for _ in range(9):
        while not reached.next(peers, now):
            now += FIRST_PAUSE_S
        pauses.append(now)
        reached.answered(ADMIN, "", now)

    assert [1, 2, 4, 8, 16, 32, 60, 60] == [late - early for early, late in itertools.pairwise(pauses)]
    now += LONGEST_PAUSE_S
    assert OTHER == reached.next({**peers, B: beat(OTHER)}, now)


def test_nothing_is_kept_of_a_peer_that_is_gone() -> None:
    """Its address is forgotten, and an answer that comes late changes nothing."""
    reached = ReachedPeers()
    assert ADMIN == reached.next({A: beat(ADMIN)}, 0.0)
    assert "" == reached.next({}, 0.0)

    assert not reached.answered(ADMIN, A, 0.0)
    assert "" == reached.at(ADMIN)
