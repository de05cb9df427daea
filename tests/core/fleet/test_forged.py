"""Thousands of well-formed messages in the names of members that do not exist, among honest traffic."""

from __future__ import annotations

import random

import pytest

from kvrouter.core.fleet.pools import POOLS_MOST
from kvrouter.core.fleet.refusals import NAMED_MOST, PEERS_BYTES, WORKERS_BYTES
from kvrouter.core.fleet.replica import Replica
from kvrouter.core.wire.heartbeats import encode
from kvrouter.core.wire.ids import RouterId, WorkerId
from kvrouter.core.wire.senders import KvSource, RouterSource, Source, SyncSource, WorkerSource
from scripts.kit.fuzz.forged import Forger, Real
from scripts.kit.fuzz.mutate import Mutator
from tests.core.replicas import ME, PEER, ROUNDS, new_replica, receive_worker
from tests.core.worlds import POOL, W1, W2, card, chain_from, prompt, request

MESSAGES = 10_000  # by two seeds
SLICES_A_SECOND = 100
# A forged heartbeat states the longest interval: its lease is 50 rounds of one second.
LONGEST_LEASE = 10 * ROUNDS
ADDRESSES = {"http://10.0.0.1:8100": ME, "http://10.0.0.2:8100": PEER}


def apply(replica: Replica, source: Source, data: bytes, now: float) -> None:
    """As the inbox does it."""
    match source:
        case KvSource():
            replica.feeds.kv_frame(source, data, now)
        case SyncSource():
            replica.sync_frame(source, data, now)
        case WorkerSource(worker_id):
            replica.worker_heartbeat(worker_id, data, now, settles=False)
        case RouterSource(router_id):
            replica.router_heartbeat(router_id, data, now, settles=False)


def honest_round(replicas: list[Replica], now: float) -> None:
    """One second: heartbeats of the workers and the replicas, what is published, asked and answered."""
    for one in replicas:
        for worker in ("w1", "w2"):
            receive_worker(one, card(worker) if now % 10 == 0 else worker)
        one.next_round(now)
    for one, address in zip(replicas, ADDRESSES, strict=True):
        frames = [*one.router(POOL).feed.frames(), *one.router(POOL).feed.check_frames(now)]
        beat = encode(one.heartbeat("up", address))
        for listener in replicas:
            for frame in frames:
                listener.sync_frame(SyncSource(POOL, one.router_id), frame, now)
            listener.router_heartbeat(one.router_id, beat, now)
    for one in replicas:
        repair(one, replicas, now)
        one.settle()


def repair(one: Replica, replicas: list[Replica], now: float) -> None:
    """Real owners answer its questions, and nobody those to forged ones; ten addresses a second are asked."""
    owners = {each.router_id: each for each in replicas}
    for source, wanted in one.feeds.due(now, 16):
        if isinstance(source, SyncSource) and source.router_id in owners and source.pool == POOL:
            answer = owners[source.router_id].router(POOL).feed.source.answer(wanted, 10**6, now)
            one.feeds.answered(source, answer, now)
        else:
            one.feeds.failed(source, now)
    for _ in range(SLICES_A_SECOND):
        if not one.work(now):
            break
    for _ in range(10):
        if url := one.next_question(now):
            one.answered(url, ADDRESSES.get(url, ""), now)
    for pool, worker in one.silent_workers():  # nobody answers there
        pool.unreachable(WorkerId(worker.card.worker_id))


def bookings_of(replica: Replica, router_id: RouterId) -> tuple[int, int]:
    """The copy of a replica's bookings, as count and digest."""
    return replica.router(POOL).pool.active.digest(router_id)


@pytest.mark.parametrize("seed", [1, 2])
def test_forged_members(seed: int) -> None:
    """Replicas stay ready and bounded, and afterwards hold what the real members hold, and nothing else."""
    rng = random.Random(seed)
    forger = Forger(rng, Real([POOL], [W1, W2], list(ADDRESSES)))
    mutator = Mutator(rng)
    replicas = [new_replica(ME), new_replica(PEER, incarnation=2000)]
    now = 0.0
    for _ in range(2 * ROUNDS):
        now += 1
        honest_round(replicas, now)
    for one in replicas:
        one.router(POOL).route(request(prompt(chain_from(1, 10))), now)
        assert [] == one.not_ready(now)

    for number in range(MESSAGES):
        source, data = forger.message()
        if rng.random() < 0.1:
            data = mutator.mutate(data)
        for one in replicas:
            apply(one, source, data, now)
        if number % 1000 == 0:
            now += 1
            honest_round(replicas, now)
            for one in replicas:
                check_while_attacked(one)

    for _ in range(LONGEST_LEASE + 5 * ROUNDS):
        now += 1
        honest_round(replicas, now)
        for one in replicas:
            while one.work(now):
                pass
    for one, other in (replicas, replicas[::-1]):
        check_afterwards(one, other)


def check_while_attacked(one: Replica) -> None:
    """It serves, it is ready, and what it keeps is bounded."""
    assert {W1, W2} <= {target.worker_id for target in one.router(POOL).pool.targets}
    assert [] == one.unserved()
    assert len(one.routers) <= POOLS_MOST
    assert one._worker_budget.used <= WORKERS_BYTES
    assert one._peer_budget.used <= PEERS_BYTES
    assert len(one.refusals.named()) <= NAMED_MOST
    assert len("".join(one.doubts())) < 10_000
    assert one.routing is None


def check_afterwards(one: Replica, other: Replica) -> None:
    """Nothing of the invented members is left."""
    assert {other.router_id} == one.peers.keys()
    assert {W1, W2} == one._worker_pools.keys()
    assert [POOL] == list(one.routers)
    assert bookings_of(one, other.router_id) == bookings_of(other, other.router_id)
    assert {W1, W2, other.router_id} == {_owner(source) for source in one.readers}
    assert [] == one.doubts() == one.degraded()
    assert {} == one.refusals.named()
    assert 2 == len(one._worker_budget._taken)
    assert 1 == len(one._peer_budget._taken)


def _owner(source: Source) -> str:
    assert isinstance(source, KvSource | SyncSource)
    return source.router_id if isinstance(source, SyncSource) else source.worker_id
