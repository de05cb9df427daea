"""What a replica assumes of workers: until their cards arrive, for joiners, and when an engine is lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvrouter.core.fleet.pool import PoolSettings
from kvrouter.core.fleet.replica import Replica
from kvrouter.core.wire.heartbeats import Card, encode
from kvrouter.core.wire.ids import RouterId
from kvrouter.core.wire.ops import (
    VERSION,
    ApproxEntry,
    Frame,
    Op,
    ReplayRequest,
    SentText,
    SnapshotChunk,
    decode_answer,
)
from kvrouter.core.wire.senders import SyncSource
from kvrouter.policies.prefix_affinity import PrefixAffinity
from tests.core.replicas import ME, PEER, ROUNDS, new_replica, receive_worker, rounds
from tests.core.worlds import POOL, T1, card, chain_from, prompt, request

CHAIN = chain_from(1000, 10)
TEXT = "once upon a time"
SETTINGS = PoolSettings(use_kv_events=False, ttl_s=60.0)
SILENT = card(publishes_events=False)


def replica_of(name: str, *, incarnation: int = 1000, knows: Card | None = SILENT) -> Replica:
    """A replica without KV events in mode prefix-affinity; it knows w1, unless `knows` is None."""
    replica = new_replica(RouterId(name), incarnation=incarnation, settings=SETTINGS, policy=PrefixAffinity)
    if knows is not None:
        receive_worker(replica, knows)
    return replica


def serve(replica: Replica, now: float = 0.0) -> None:
    """A prompt is served by w1, and its answer has begun."""
    router = replica.router(POOL)
    placed = router.route(request(prompt(CHAIN), text=TEXT), now)
    router.bookings.first_byte(placed.key, now)
    router.bookings.free(placed.key)


def carry(sender: Replica, *receivers: Replica, now: float = 0.0) -> None:
    """The sender's frames arrive."""
    for frame in sender.router(POOL).feed.frames():
        for receiver in receivers:
            receiver.sync_frame(SyncSource(POOL, sender.router_id), frame, now)


def join(joiner: Replica, *owners: Replica, now: float = 0.0) -> None:
    """The owners' heartbeats arrive; the joiner asks each of them for a snapshot, and loads it."""
    for owner in owners:
        joiner.router_heartbeat(owner.router_id, encode(owner.heartbeat("up", "")), now)
    named = {owner.router_id: owner for owner in owners}
    while wanted := joiner.feeds.due(now, 16):
        for feed, what in wanted:
            assert isinstance(feed, SyncSource)
            answer = named[feed.router_id].router(POOL).feed.source.answer(what, 10**6, now)
            joiner.feeds.answered(feed, answer, now)
        while joiner.work(now):
            pass


def kept(replica: Replica) -> tuple[int, int]:
    """The characters and blocks that w1 is assumed to hold."""
    router = replica.router(POOL)
    router.pool.approx.check()
    router.tables.texts.check()
    return router.tables.texts.chars(T1), router.pool.index.overlap(CHAIN).get(T1, 0)


EVERYTHING = (len(TEXT), len(CHAIN))


def test_snapshot_before_the_card() -> None:
    """What a peer's snapshot says of a worker counts as soon as the worker's card arrives."""
    owner, joiner = replica_of(ME), replica_of(PEER, incarnation=2000, knows=None)
    serve(owner)
    owner.router(POOL).feed.frames()

    join(joiner, owner)
    assert (0, 0) == kept(joiner)
    receive_worker(joiner, SILENT)

    assert EVERYTHING == kept(joiner)


def test_frames_before_the_card() -> None:
    """The same for live frames, and for the blocks that a booking leaves."""
    owner, joiner = replica_of(ME), replica_of(PEER, incarnation=2000, knows=None)
    serve(owner)
    carry(owner, joiner)

    receive_worker(joiner, SILENT)

    assert EVERYTHING == kept(joiner)


def test_card_after_the_lease() -> None:
    """A worker whose card arrives later than a lease holds nothing, and nothing is held for it."""
    owner, joiner = replica_of(ME), replica_of(PEER, incarnation=2000, knows=None)
    serve(owner)
    owner.router(POOL).feed.frames()
    join(joiner, owner)

    rounds(joiner, ROUNDS + 1)
    assert 0 == joiner.router(POOL).feed.early.held_bytes
    receive_worker(joiner, SILENT)

    assert (0, 0) == kept(joiner)


def test_held_time_counts() -> None:
    """Time in which an entry is held is part of its time to live."""
    owner, joiner = replica_of(ME), replica_of(PEER, incarnation=2000, knows=None)
    serve(owner)
    owner.router(POOL).feed.frames()
    join(joiner, owner, now=10.0)

    receive_worker(joiner, SILENT)
    joiner.router(POOL).pool.approx.expire(59.0)
    assert EVERYTHING == kept(joiner)
    joiner.router(POOL).pool.approx.expire(61.0)

    assert (len(TEXT), 0) == kept(joiner)


def test_what_is_late_for_a_worker_that_left() -> None:
    """A frame after the worker has left is not held for the next one with its name."""
    owner, peer = replica_of(ME), replica_of(PEER)
    serve(owner)
    receive_worker(peer, "w1", state="leave")
    carry(owner, peer)

    receive_worker(peer, SILENT)

    assert (0, 0) == kept(peer)


def test_two_restarts_in_turn() -> None:
    """Two replicas restarted in turn keep what both have sent, with the time to live that is left."""
    first, second = replica_of("a", incarnation=1000), replica_of("b", incarnation=2000)
    serve(first, now=0.0)
    carry(first, second)

    first_again = replica_of("c", incarnation=3000)
    join(first_again, second, now=10.0)
    assert EVERYTHING == kept(first_again)
    second_again = replica_of("d", incarnation=4000)
    join(second_again, first_again, now=20.0)

    assert EVERYTHING == kept(second_again)
    second_again.router(POOL).pool.approx.expire(61.0)
    assert (len(TEXT), 0) == kept(second_again)


def test_joiner_that_knows_a_replica_before_it_learns() -> None:
    """A reader of a feed without a frame asks for a snapshot once its replica has learnt something."""
    first, second = replica_of("a", incarnation=1000), replica_of("b", incarnation=2000)
    reader = replica_of("c", incarnation=3000)
    join(reader, second)
    serve(first)
    carry(first, second)

    join(reader, second)

    assert EVERYTHING == kept(reader)


def snapshot_of(replica: Replica) -> Sequence[Op]:
    """What a joiner is sent."""
    wanted = ReplayRequest(VERSION, POOL, 0, 0)
    chunk = decode_answer(replica.router(POOL).feed.source.answer(wanted, 1 << 20, 0.0))
    assert isinstance(chunk, SnapshotChunk)
    return chunk.ops


def test_only_the_eldest_pass_on_what_others_sent() -> None:
    """Else the snapshots of a large fleet would contain everything once for each replica."""
    owner, *others = [replica_of(name, incarnation=1000 + n) for n, name in enumerate("abcde")]
    serve(owner)
    carry(owner, *others)
    rounds(owner, 1, *others)

    def snapshot(replica: Replica) -> set[type]:
        return {type(op) for op in snapshot_of(replica)} & {ApproxEntry, SentText}

    assert [{ApproxEntry, SentText}] * 3 + [set()] * 2 == [snapshot(one) for one in (owner, *others)]


def test_engine_that_goes_down() -> None:
    """With `down` its texts and blocks go, at every replica; a joiner does not get them either."""
    owner, peer = replica_of(ME), replica_of(PEER, incarnation=2000)
    serve(owner)
    carry(owner, peer)

    for replica in (owner, peer):
        receive_worker(replica, "w1", state="down")
        receive_worker(replica, SILENT)

    assert [(0, 0)] * 2 == [kept(owner), kept(peer)]
    joiner = replica_of("joiner", incarnation=3000)
    join(joiner, owner, peer)
    assert (0, 0) == kept(joiner)


@pytest.mark.parametrize(
    ("before", "after", "incarnation", "stays"),
    [
        (1, 2, 100, False),  # the engine restarted between two probes
        (1, 2, 200, False),  # and its agent, too
        (1, 1, 200, True),  # only the agent
        (0, 0, 200, False),  # nothing proves that the engine is the same
        (0, 0, 100, True),
        (0, 1, 100, True),  # the first scrape that worked
    ],
)
def test_engine_that_starts_anew(before: int, after: int, incarnation: int, stays: bool) -> None:
    """A card with another start of the engine ends what was assumed."""
    facts: dict[str, Any] = {"publishes_events": False}
    replica = replica_of(ME, knows=card(**facts, engine_started_at_us=before))
    serve(replica)

    receive_worker(replica, card(**facts, engine_started_at_us=after, max_loras=1), incarnation=incarnation)

    assert (EVERYTHING if stays else (0, 0)) == kept(replica)


def test_kv_events_are_not_dropped_by_the_card() -> None:
    """With KV events the agent's feed reports what the engine holds."""
    replica = new_replica()
    receive_worker(replica, card(engine_started_at_us=1))
    pool = replica.router(POOL).pool
    pool.index.store(T1, CHAIN)

    receive_worker(replica, card(engine_started_at_us=2))

    assert {T1: 10} == pool.index.overlap(CHAIN)


def test_late_text_for_an_engine_that_is_down() -> None:
    """The answer of a request that the engine began before it died leaves nothing."""
    owner, peer = replica_of(ME), replica_of(PEER, incarnation=2000)
    router = owner.router(POOL)
    placed = router.route(request(prompt(CHAIN), text=TEXT), 0.0)
    for replica in (owner, peer):
        receive_worker(replica, "w1", state="down")
    router.bookings.first_byte(placed.key, 0.0)
    carry(owner, peer)

    assert [(0, 0)] * 2 == [kept(owner), kept(peer)]


def test_hold_is_bounded() -> None:
    """Ops beyond the bound are dropped and counted."""
    joiner = replica_of(ME, knows=None)
    early = joiner.router(POOL).feed.early
    text = SentText("w1", 0, "x" * 90_000)
    ops = [text] * 200
    for number, part in enumerate([ops[start : start + 5] for start in range(0, 200, 5)], 1):
        frame = encode(Frame(VERSION, 1, number, list(part)))
        joiner.sync_frame(SyncSource(POOL, PEER), frame, 0.0)

    assert 0 < early.held_bytes <= 8 * 1024 * 1024
    assert early.dropped > 0


def test_texts_of_a_target_are_not_kept_for_joiners() -> None:
    """Also the list of texts for joiners forgets a worker that is gone."""
    owner = replica_of(ME)
    serve(owner)
    receive_worker(owner, "w1", state="leave")

    assert [] == [op for op in snapshot_of(owner) if isinstance(op, SentText)]
