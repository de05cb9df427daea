"""A replica: its members, the feeds it follows, when it is ready."""

from __future__ import annotations

import msgspec
import pytest

from kvrouter.core.feeds.receipt import REFUSED, STALE, TAKEN, UNKNOWN, FrameVerdict
from kvrouter.core.feeds.source import FeedSource
from kvrouter.core.feeds.trust import FeedState
from kvrouter.core.fleet.pool import PoolSettings
from kvrouter.core.fleet.pools import POOLS_MOST
from kvrouter.core.fleet.replica import Replica
from kvrouter.core.wire.hashes import pack_hashes
from kvrouter.core.wire.heartbeats import RankBeat, WorkerBeat, encode
from kvrouter.core.wire.ids import PoolId, Target, WorkerId
from kvrouter.core.wire.ops import VERSION, Frame, Stored
from kvrouter.core.wire.senders import KvSource
from kvrouter.policies.baseline import Random
from tests.core.replicas import ME, PEER, ROUNDS, new_replica, receive_worker, rounds
from tests.core.worlds import POOL, T1, W1, W2, card, chain_from, prompt, request, worker_beat

CHAIN = chain_from(1000, 10)
OTHER_POOL = PoolId("qwen-0a1b2c3d")


@pytest.fixture
def replica() -> Replica:
    """A synced replica without workers and peers."""
    return new_replica()


def targets(replica: Replica, pool: PoolId = POOL) -> list[Target]:
    """The targets that may be chosen."""
    return list(replica.router(pool).pool.targets)


def test_join_by_hello(replica: Replica) -> None:
    """A worker's heartbeat with its card makes it a target, and its empty feed is live at once."""
    receive_worker(replica, card())

    assert [T1] == targets(replica)
    assert FeedState.LIVE is replica.readers[KvSource(POOL, W1, 0)].state
    assert [] == replica.feeds.due(0.0, 16)


def test_join_with_history(replica: Replica) -> None:
    """A worker that has published frames is asked for them; one answer brings its blocks."""
    source = FeedSource(100, lambda _now: [Stored(0, None, pack_hashes(CHAIN))])
    source.append([Stored(0, None, pack_hashes(CHAIN))])
    receive_worker(replica, card(), seq=1)

    [(feed, wanted)] = replica.feeds.due(0.0, 16)
    replica.feeds.answered(feed, source.answer(wanted, 10**6, 0.0), 0.0)
    while replica.work(0.0):
        pass

    assert {T1: 10} == replica.router(POOL).pool.index.overlap(CHAIN)


def test_frames_before_the_card_are_ignored(replica: Replica) -> None:
    """Without the card no feed is followed; the heartbeat with the card starts the recovery."""
    frame = encode(Frame(VERSION, 100, 1, [Stored(0, None, pack_hashes(CHAIN))]))

    assert UNKNOWN is replica.feeds.kv_frame(KvSource(POOL, W1, 0), frame, 0.0)
    receive_worker(replica, "w1", seq=1)

    assert {} == replica.readers


def test_leave(replica: Replica) -> None:
    """A worker that leaves is removed at once, with its blocks and its feeds."""
    receive_worker(replica, card())
    replica.router(POOL).pool.index.store(T1, CHAIN)

    receive_worker(replica, state="leave")

    assert [] == targets(replica)
    assert {} == replica.readers
    assert {} == replica.router(POOL).pool.index.overlap(CHAIN)


def test_leave_in_the_middle_of_a_snapshot(replica: Replica) -> None:
    """A snapshot half loaded when its worker leaves takes no memory."""
    source = FeedSource(100, lambda _now: [Stored(0, None, pack_hashes([n])) for n in range(9000)])
    source.append([Stored(0, None, b"")])
    receive_worker(replica, card(), seq=1)
    [(feed, wanted)] = replica.feeds.due(0.0, 16)
    replica.feeds.answered(feed, source.answer(wanted, 10**6, 0.0), 0.0)
    assert replica.work(0.0)
    assert FeedState.RECOVERING is replica.readers[feed].state

    receive_worker(replica, state="leave")
    while replica.work(0.0):
        pass

    assert 0 == len(replica.router(POOL).pool.index)


def test_lease_is_counted_in_own_rounds(replica: Replica) -> None:
    """A silent worker is dropped after its lease, a worker with heartbeats stays."""
    receive_worker(replica, card("w1"))
    receive_worker(replica, card("w2"))

    for _ in range(ROUNDS + 1):
        rounds(replica, 1)
        receive_worker(replica, "w2")

    assert [Target(W2)] == targets(replica)
    assert 1 == replica.counters.workers_lost


def test_paused_replica_drops_no_worker(replica: Replica) -> None:
    """Rounds count when they come back, not when they begin."""
    receive_worker(replica, card("w1"))
    receive_worker(replica, card("w2"))

    for _ in range(100):
        replica.next_round(0.0)
    replica.router_heartbeat(ME, encode(replica.heartbeat("up", "")), 0.0)

    assert 2 == len(targets(replica))


def test_last_worker_is_kept_with_overlap_0(replica: Replica) -> None:
    """The lease of the only worker ends: requests still go there, with overlap 0."""
    receive_worker(replica, card())
    replica.router(POOL).pool.index.store(T1, CHAIN)

    rounds(replica, 3 * (ROUNDS + 1))

    placed = replica.router(POOL).route(request(prompt(CHAIN)), 0.0)
    assert (T1, 0) == (placed.target, placed.choice.overlap_blocks)
    assert 0 == replica.counters.workers_lost


def test_silent_worker_comes_back(replica: Replica) -> None:
    """A silent worker that was kept is followed again after its next heartbeat."""
    receive_worker(replica, card())
    rounds(replica, ROUNDS + 1)
    assert {} == replica.readers

    receive_worker(replica, "w1")

    assert not replica.router(POOL).pool.workers[W1].silent
    assert [KvSource(POOL, W1, 0)] == list(replica.readers)


def test_silent_worker_that_is_unreachable(replica: Replica) -> None:
    """A silent worker that is then found unreachable is removed, and the end of its lease changes nothing."""
    receive_worker(replica, card())
    rounds(replica, ROUNDS + 1)

    replica.router(POOL).pool.unreachable(W1)
    rounds(replica, 2 * (ROUNDS + 1))

    assert [] == targets(replica)
    receive_worker(replica, card())
    assert [T1] == targets(replica)


def test_workers_of_two_pools_are_lost_at_once(replica: Replica) -> None:
    """A host with workers of several pools dies: all of them are dropped in the same round."""
    for name, pool in (("w1", POOL), ("w2", POOL), ("w3", OTHER_POOL), ("w4", OTHER_POOL)):
        receive_worker(replica, card(name), pool=pool)

    for _ in range(ROUNDS + 1):
        receive_worker(replica, "w2")
        receive_worker(replica, "w4", pool=OTHER_POOL)
        rounds(replica, 1)

    assert [Target(W2)] == targets(replica)
    assert [Target(WorkerId("w4"))] == targets(replica, OTHER_POOL)


def test_worker_that_changes_pools(replica: Replica) -> None:
    """A worker that now serves another model is a target of that pool only."""
    receive_worker(replica, card())

    receive_worker(replica, card(model="qwen"), pool=OTHER_POOL, incarnation=200)

    assert [] == targets(replica)
    assert [T1] == targets(replica, OTHER_POOL)


def test_greater_incarnation_of_a_worker_wins(replica: Replica) -> None:
    """A restarted agent is followed; heartbeats of its former life are stale."""
    receive_worker(replica, card(url="http://old"))
    receive_worker(replica, card(url="http://new"), incarnation=200, rank_incarnation=200)

    receive_worker(replica, card(url="http://old"))

    assert "http://new" == replica.router(POOL).pool.workers[W1].card.url
    assert 200 == replica.readers[KvSource(POOL, W1, 0)].incarnation
    assert 1 == replica.counters.stale_heartbeats


def test_lower_incarnation_counts_after_the_lease(replica: Replica) -> None:
    """A worker with a lower incarnation is accepted after the lease, also if it is the only worker."""
    receive_worker(replica, card(), incarnation=200, rank_incarnation=200)
    rounds(replica, ROUNDS + 1)

    receive_worker(replica, card(), incarnation=100)

    assert 100 == replica.router(POOL).pool.workers[W1].incarnation
    assert FeedState.LIVE is replica.readers[KvSource(POOL, W1, 0)].state


def test_damaged_heartbeats_are_counted(replica: Replica) -> None:
    """Malformed heartbeats change nothing, and their receipts say what is wrong."""
    receipts = [
        replica.worker_heartbeat(W1, b"\xff", 0.0),
        replica.router_heartbeat(PEER, b"\x96\x01\x01\xa2up\xa1\xff\x80\x01", 0.0),
    ]

    assert [FrameVerdict.MALFORMED] * 2 == [receipt.verdict for receipt in receipts]
    assert ["not a worker heartbeat", "not a router heartbeat"] == [
        receipt.trouble.partition(":")[0] for receipt in receipts
    ]
    assert 2 == replica.counters.malformed_heartbeats
    assert {} == replica.peers


def test_receipts_of_heartbeats(replica: Replica) -> None:
    """What can be read is taken, stale, or refused: without a card, or with one that is not allowed."""
    late, early = worker_beat(card()), worker_beat(card(), incarnation=1)
    elsewhere = worker_beat(card(W2, url="http://169.254.169.254:80"))
    own = replica.heartbeat("up", "")

    assert REFUSED is replica.worker_heartbeat(W2, encode(worker_beat(W2)), 0.0)
    assert TAKEN is replica.worker_heartbeat(W1, encode(late), 0.0)
    assert STALE is replica.worker_heartbeat(W1, encode(early), 0.0)
    assert FrameVerdict.MALFORMED is replica.worker_heartbeat(W2, encode(elsewhere), 0.0).verdict
    assert TAKEN is replica.router_heartbeat(ME, encode(own), 0.0)
    assert STALE is replica.router_heartbeat(ME, encode(msgspec.structs.replace(own, round=9)), 0.0)
    assert TAKEN is replica.worker_heartbeat(W1, encode(worker_beat(state="leave")), 0.0)


def test_worker_without_events_has_no_feed() -> None:
    """Without KV events, of the worker or of the replica, no KV feed is followed."""
    replica, without = new_replica(), new_replica(settings=PoolSettings(use_kv_events=False))
    receive_worker(replica, card(publishes_events=False))
    receive_worker(without, card())

    assert {} == replica.readers == without.readers
    assert [T1] == targets(replica) == targets(without)


def test_workers_of_another_block_size_serve() -> None:
    """They take requests, even if all of them differ from the operator's size; degraded() names them."""
    replica = new_replica(settings=PoolSettings(block_size=32))
    receive_worker(replica, card())

    assert [
        f"pool {POOL}: 1 of 1 workers have another block size than 32: no overlap is predicted there (w1: 16)"
    ] == replica.readiness.degraded()
    assert T1 == replica.router_for("llama").route(request(prompt(CHAIN)), 0.0).target


def test_block_sizes_do_not_matter_without_tokens() -> None:
    """A mode that predicts no overlap reports no block sizes."""
    replica = new_replica(settings=PoolSettings(block_size=32), policy=Random)
    receive_worker(replica, card())

    assert [] == replica.readiness.degraded()


def test_prefill_rates_of_lost_workers_are_dropped(replica: Replica) -> None:
    """Rates of workers that come and go do not accumulate."""
    receive_worker(replica, card("w1"))
    receive_worker(replica, card("w2"))
    replica.router(POOL).tables.rates.observe(T1, 100, 1.0)

    for _ in range(ROUNDS + 1):
        rounds(replica, 1)
        receive_worker(replica, "w2")

    rates = replica.router(POOL).tables.rates
    assert ([None], None) == (rates.peaks([T1]), rates.seconds(T1, 100))


def test_recovery_of_a_source_that_left_is_cancelled(replica: Replica) -> None:
    """`cancelled` names the feed once, so the shell stops waiting for its answer."""
    receive_worker(replica, card(), seq=1)
    [(feed, _)] = replica.feeds.due(0.0, 16)
    assert [] == replica.feeds.take_cancelled()

    receive_worker(replica, state="leave")

    assert [feed] == replica.feeds.take_cancelled()
    assert [] == replica.feeds.take_cancelled()


def test_lease_of_a_slow_worker() -> None:
    """A worker with a longer heartbeat interval has a longer lease."""
    replica = new_replica()
    for name, interval_ms in (("w1", 3000), ("w2", 1000)):
        beat = msgspec.structs.replace(worker_beat(card(name)), interval_ms=interval_ms)
        replica.worker_heartbeat(WorkerId(name), encode(beat), 0.0)

    rounds(replica, ROUNDS)

    assert [W1] == list(replica.router(POOL).pool.workers)


def test_degraded_lists_problems(replica: Replica) -> None:
    """A feed that is behind and a pool without a live worker are listed."""
    receive_worker(replica, card(), seq=3)
    assert ["kv w1/0: recovering, 3 frames behind"] == replica.readiness.degraded()

    receive_worker(replica, card(), state="down", rank_incarnation=101, incarnation=101)

    assert [f"pool {POOL}: no live worker"] == replica.readiness.degraded()


def test_worker_that_comes_back_with_fewer_ranks() -> None:
    """Blocks and feeds of the ranks that are gone are dropped."""
    replica = new_replica()
    ranks = [RankBeat(0, 5, 0), RankBeat(1, 5, 0)]
    for life, count in ((1, 2), (2, 1)):
        beat = WorkerBeat(VERSION, life, "up", POOL, ranks[:count], 1, card(ranks=count))
        replica.worker_heartbeat(W1, encode(beat), 0.0)
        pool = replica.router(POOL).pool
        assert count == len(replica.readers)
        pool.index.store(Target(W1, count - 1), CHAIN)
    pool.index.clear(T1)

    assert [T1] == list(pool.targets)
    while pool.index.sweep():
        pass
    assert 0 == len(pool.index)


def test_pools_of_silent_workers_make_room(replica: Replica) -> None:
    """At the limit of pools, those with silent workers only end when a new model appears."""
    for number in range(POOLS_MOST):
        receive_worker(replica, card(f"ghost{number}"), pool=PoolId(f"model{number}-0a1b2c3d"))
    rounds(replica, 2 * ROUNDS)
    assert POOLS_MOST == len(replica.silent_workers())

    for _ in range(3 * ROUNDS):
        receive_worker(replica, card("w1"))
        replica.work(0.0)
        rounds(replica, 1)

    assert [Target(W1)] == targets(replica)
    assert [] == replica.silent_workers()
