"""Replicas that publish their bookings to each other."""

from __future__ import annotations

import itertools

import pytest

from kvrouter.core.fleet.replica import Replica
from kvrouter.core.fleet.router import Placement
from kvrouter.core.routing.filters import Session
from kvrouter.core.routing.policy import RouteRequest
from kvrouter.core.wire.heartbeats import encode
from kvrouter.core.wire.ids import RouterId, Target
from kvrouter.core.wire.ops import MAX_SENT_CHARS, VERSION, AddRequest, Frame
from kvrouter.core.wire.senders import SyncSource
from kvrouter.policies.prefix_affinity import PrefixAffinity
from tests.core.replicas import ME, PEER, ROUNDS, new_replica, receive_worker, rounds
from tests.core.worlds import POOL, T1, card, chain_from, prompt, request

CHAIN = chain_from(1000, 10)


def pair() -> tuple[Replica, Replica]:
    """Two synced replicas that know the same two workers and each other."""
    first, second = new_replica(ME), new_replica(PEER)
    for replica in (first, second):
        receive_worker(replica, card("w1"))
        receive_worker(replica, card("w2"))
    rounds(first, 1, second)
    return first, second


def place(replica: Replica, start: int = 1000, now: float = 0.0) -> Placement:
    """A request arrives at this replica."""
    return replica.router(POOL).route(request(prompt(chain_from(start, 10))), now)


def carry(sender: Replica, *receivers: Replica, lost: bool = False, now: float = 0.0) -> None:
    """The sender's frames arrive at all replicas, also at the sender."""
    frames = sender.router(POOL).feed.frames()
    for receiver in () if lost else (sender, *receivers):
        for frame in frames:
            receiver.sync_frame(SyncSource(POOL, sender.router_id), frame, now)


def recover(asking: Replica, owner: Replica) -> int:
    """The owner answers all replay requests; returns their number."""
    asked = 0
    while wanted := asking.feeds.due(0.0, 16):
        for feed, what in wanted:
            answer = owner.router(POOL).feed.source.answer(what, 10**6, 0.0)
            asking.feeds.answered(feed, answer, 0.0)
            asked += 1
        while asking.work(0.0):
            pass
    return asked


def same(owner: Replica, other: Replica) -> bool:
    """Whether the other replica's copies equal the owner's bookings."""
    tables = [replica.router(POOL).pool.active for replica in (owner, other)]
    for table in tables:
        table.check()
    first, second = (table.digest(owner.router_id) for table in tables)
    return first == second


def test_peers_see_each_others_bookings() -> None:
    """All three moments of a booking reach the peer, and the digests agree after each."""
    first, second = pair()
    router = first.router(POOL)

    placed = place(first)
    carry(first, second)
    assert same(first, second)
    assert 10 == second.router(POOL).pool.active.blocks(placed.target)

    router.bookings.first_byte(placed.key, 1.0)
    router.bookings.progress(placed.key, 40)
    carry(first, second)
    assert same(first, second)

    router.bookings.free(placed.key)
    carry(first, second)
    assert same(first, second)
    assert 0 == second.router(POOL).pool.active.requests(placed.target)


def test_peers_decide_as_if_they_had_seen_all_traffic() -> None:
    """The second replica sends its request to the worker that the first has left idle."""
    first, second = pair()

    placed = place(first)
    carry(first, second)

    assert placed.target != place(second, 5000).target


def test_own_frames_are_ignored() -> None:
    """A replica's own frames, returned by the bus, change nothing and begin no feed."""
    first, second = pair()
    placed = place(first)

    carry(first, second)

    assert SyncSource(POOL, ME) not in first.readers
    assert 1 == first.router(POOL).pool.active.requests(placed.target)


def test_unsynced_replica_ignores_its_peers() -> None:
    """Without sync, frames and feeds of peers are ignored, but not their heartbeats."""
    alone, peer = new_replica(ME, synced=False), new_replica(PEER)
    for replica in (alone, peer):
        receive_worker(replica, card("w1"))
    place(peer)

    carry(peer, alone)
    rounds(alone, 1, peer)

    assert {} == alone.router(POOL).pool.active.owners()
    assert not any(isinstance(source, SyncSource) for source in alone.readers)
    assert [PEER] == list(alone.peers)


def test_joiner_gets_a_snapshot_of_bookings() -> None:
    """A replica that starts later has all bookings after one exchange."""
    first, _ = pair()
    placed = [place(first, start) for start in (1000, 2000, 3000)]
    first.router(POOL).bookings.first_byte(placed[0].key, 1.0)
    first.router(POOL).bookings.free(placed[1].key)
    carry(first)
    joiner = new_replica(RouterId("joiner"))
    receive_worker(joiner, card("w1"))

    rounds(joiner, 1, first)
    asked = recover(joiner, first)

    assert asked
    assert same(first, joiner)
    assert 2 == joiner.router(POOL).pool.active.owners()[ME]


def test_lost_frames_are_repaired_after_a_heartbeat() -> None:
    """The last frames were lost: the owner's heartbeat shows it, the owner's ring repairs it."""
    first, second = pair()
    placed = place(first)
    carry(first, second)
    first.router(POOL).bookings.free(placed.key)
    carry(first, second, lost=True)
    assert not same(first, second)

    rounds(second, 1, first)
    recover(second, first)

    assert same(first, second)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_free_cannot_overtake_add_request_by_construction(order: tuple[int, ...]) -> None:
    """Two requests begin and end, a frame each: in any order of arrival the peer has a state the owner had.

    The owner numbers its ops in the order in which they happened, and a reader applies frame n + 1 after
    frame n only. So after every frame the peer's copy is what the owner's table once was.
    """
    first, second = pair()
    source = SyncSource(POOL, first.router_id)
    was, frames = [bookings(first)], []
    for start in (1000, 2000):
        placed = place(first, start)
        was.append(bookings(first))
        frames += first.router(POOL).feed.frames()
        first.router(POOL).bookings.free(placed.key)
        was.append(bookings(first))
        frames += first.router(POOL).feed.frames()

    for number in order:
        second.sync_frame(source, frames[number], 0.0)
        assert bookings(second) == was[second.readers[source].seq]
    recover(second, first)

    assert (4, set()) == (second.readers[source].seq, bookings(second))


def bookings(replica: Replica) -> set[int]:
    """The numbers of this replica's copies of the first replica's bookings."""
    return {booking.key.number for booking in replica.router(POOL).pool.active.bookings(ME)}


def test_retry_of_a_peer_moves_its_booking() -> None:
    """Free and AddRequest travel in one frame: the peer never counts the request twice."""
    first, second = pair()
    placed = place(first)
    carry(first, second)

    first.router(POOL).bookings.free(placed.key)
    again = first.router(POOL).route(request(prompt(CHAIN)), 0.0, exclude=frozenset({placed.target}))
    frames = first.router(POOL).feed.frames()
    assert 1 == len(frames)
    second.sync_frame(SyncSource(POOL, ME), frames[0], 0.0)

    active = second.router(POOL).pool.active
    assert (0, 1) == (active.requests(placed.target), active.requests(again.target))
    assert same(first, second)


def test_bookings_on_unknown_targets_are_kept() -> None:
    """A peer may know a worker that this replica does not: its booking counts when the worker appears."""
    replica = new_replica()
    frame = encode(Frame(VERSION, 1000, 1, [AddRequest(1, "req", "w1", 0, b"", 160, 0, 160)]))

    replica.sync_frame(SyncSource(POOL, PEER), frame, 0.0)
    receive_worker(replica, card("w1"))
    receive_worker(replica, state="leave")
    receive_worker(replica, card("w1"))

    assert 160 == replica.router(POOL).pool.active.charged_tokens(T1)
    (found,) = replica.router(POOL).pool.candidates(request(prompt(CHAIN)))
    assert 320 == found.prefill_tokens


def test_lease_of_a_peer_ends_its_bookings() -> None:
    """The bookings of a replica that died end with its lease."""
    first, second = pair()
    place(first)
    carry(first, second)

    rounds(second, ROUNDS + 1)

    active = second.router(POOL).pool.active
    assert {} == active.owners()
    assert {} == second.peers
    assert 1 == second.counters.replicas_lost
    active.check()


def test_peer_that_leaves() -> None:
    """`leave` ends its bookings and its feeds at once."""
    first, second = pair()
    place(first)
    carry(first, second)

    second.router_heartbeat(ME, encode(first.heartbeat("leave", "")), 0.0)

    assert {} == second.router(POOL).pool.active.owners()
    assert not any(isinstance(source, SyncSource) for source in second.readers)


def test_peer_comes_back_after_its_lease() -> None:
    """A replica that was only cut off returns, and its bookings are fetched again."""
    first, second = pair()
    place(first)
    carry(first, second)
    rounds(second, ROUNDS + 1)

    rounds(second, 1, first)
    recover(second, first)

    assert same(first, second)
    assert {ME: 1} == second.router(POOL).pool.active.owners()


def test_replicas_have_different_parts_of_the_cheapest_targets() -> None:
    """Of two replicas, each has a half; the one that remains has all."""
    first, second = pair()
    place(first)
    carry(first, second)
    rounds(second, 1, first)
    place(second)
    carry(second, first)
    assert {0.0, 0.5} == {replica.router(POOL).feed.part for replica in (first, second)}

    for stays, leaves in ((first, second), (second, first)):
        stays.router_heartbeat(leaves.router_id, encode(leaves.heartbeat("leave", "")), 0.0)
        assert 0.0 == stays.router(POOL).feed.part


def test_check_finds_a_wrong_copy() -> None:
    """The owner's Check shows that a copy differs, and a snapshot replaces it."""
    first, second = pair()
    placed = place(first)
    carry(first, second)
    second.router(POOL).pool.active.free(placed.key)

    for frame in first.router(POOL).feed.check_frames(0.0):
        second.sync_frame(SyncSource(POOL, ME), frame, 0.0)
    recover(second, first)

    assert same(first, second)
    assert 1 == second.readers[SyncSource(POOL, ME)].counters.digest_mismatches


def test_sessions_outlive_the_replica_that_bound_them() -> None:
    """A peer keeps sessions after the replica that bound them has left, and publishes them to a joiner."""
    first, second = pair()
    for replica in (first, second):
        replica.router(POOL).modes.use_filters((Session(),))
    placed = first.router(POOL).route(RouteRequest("req", session="chat"), 0.0)
    first.router(POOL).bookings.free(placed.key)
    carry(first, second)
    place(second)
    second.router(POOL).feed.frames()
    joiner = new_replica(RouterId("joiner"))
    receive_worker(joiner, card("w1"))
    joiner.sync_frame(SyncSource(POOL, PEER), encode(Frame(VERSION, second.incarnation, 9, [])), 0.0)

    recover(joiner, second)

    assert placed.target == joiner.router(POOL).tables.sessions.target_of("chat", 1.0)


def test_sessions_without_affinity_are_not_published() -> None:
    """A mode without affinity neither binds nor publishes sessions."""
    first, _ = pair()
    placed = first.router(POOL).route(RouteRequest("req", session="chat"), 0.0)

    assert 0 == len(first.router(POOL).tables.sessions)
    assert b"chat" not in b"".join(first.router(POOL).feed.frames())
    first.router(POOL).bookings.free(placed.key)


def text_pair(*names: RouterId) -> list[Replica]:
    """Replicas in mode prefix-affinity that know two workers and each other."""
    replicas = [new_replica(name, policy=PrefixAffinity) for name in names]
    for replica in replicas:
        receive_worker(replica, card("w1"))
        receive_worker(replica, card("w2"))
    rounds(replicas[0], 1, *replicas[1:])
    return replicas


def serve_text(replica: Replica, text: str) -> Target:
    """A prompt is served, and its answer has begun."""
    router = replica.router(POOL)
    placed = router.route(RouteRequest("req", text=text), 0.0)
    router.bookings.first_byte(placed.key, 0.0)
    router.bookings.free(placed.key)
    return placed.target


def chars(replica: Replica, target: Target) -> int:
    """Characters that a target is assumed to hold."""
    return replica.router(POOL).tables.texts.chars(target)


def test_texts_are_shared() -> None:
    """All replicas send a text where one of them has sent it before."""
    first, second = text_pair(ME, PEER)
    target = serve_text(first, "once upon a time")
    carry(first, second)

    assert 16 == chars(first, target) == chars(second, target)
    assert {target} == {serve_text(second, f"once upon a time {number}") for number in range(8)}


def test_joiner_gets_the_last_texts() -> None:
    """A snapshot ends with the texts that its source sent last; a long text is cut."""
    first, joiner = text_pair(ME, PEER)
    long_text = "x" * (MAX_SENT_CHARS + 50)
    target = serve_text(first, long_text)
    carry(first, joiner, lost=True)
    joiner.sync_frame(SyncSource(POOL, ME), encode(Frame(VERSION, first.incarnation, 9, [])), 0.0)

    recover(joiner, first)

    assert len(long_text) == chars(first, target)
    assert MAX_SENT_CHARS == chars(joiner, target)


def test_texts_of_unknown_targets_are_not_remembered() -> None:
    """Nothing would ever drop them again."""
    first, second = text_pair(ME, PEER)
    target = serve_text(first, "once upon a time")
    frames = first.router(POOL).feed.frames()
    receive_worker(second, str(target.worker_id), state="leave")

    for frame in frames:
        second.sync_frame(SyncSource(POOL, ME), frame, 0.0)

    assert 0 == chars(second, target)


def test_text_with_half_a_surrogate_pair() -> None:
    """It cannot be encoded as UTF-8, and does not stop the feed."""
    first, second = text_pair(ME, PEER)
    target = serve_text(first, "half \ud83d")

    carry(first, second)

    assert 6 == chars(second, target)


def test_peers_learn_from_each_others_first_bytes() -> None:
    """Also a joiner, which gets what was learnt with the snapshot. Clocks are not compared."""
    first, second = pair()
    for number in range(10):
        placed = place(first, 1000 * number, now=number)
        first.router(POOL).bookings.first_byte(placed.key, number + 0.5)
        first.router(POOL).bookings.free(placed.key, number + 0.5)
        carry(first, second, now=100.0 + number)

    learnt = [one.router(POOL).tables.speeds.speed for one in (first, second)]
    assert 10 == learnt[0].samples
    assert 10 == learnt[1].samples
    joiner = new_replica(RouterId("joiner"))
    receive_worker(joiner, card("w1"))
    rounds(joiner, 1, first)
    recover(joiner, first)
    assert learnt[0].samples == joiner.router(POOL).tables.speeds.speed.samples


def test_unsynced_replicas_doubt_each_other() -> None:
    """As long as there is another one."""
    replica = new_replica(ME, synced=False)
    receive_worker(replica, card("w1"))
    assert not replica.router(POOL).unheard

    rounds(replica, 1, new_replica(PEER))
    assert "--router-replica-sync is off" in replica.router(POOL).unheard

    rounds(replica, ROUNDS + 1)
    assert not replica.router(POOL).unheard
