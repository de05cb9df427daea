"""Thousands of well-formed messages in the names of members that do not exist, among honest traffic."""

from __future__ import annotations

import random

import pytest

from kvrouter.core.fleet.pools import POOLS_MOST
from kvrouter.core.fleet.refusals import NAMED_MOST, PEERS_BYTES, WORKERS_BYTES
from kvrouter.core.fleet.replica import Replica
from kvrouter.core.tables import bookings
from kvrouter.core.tables.bookings import BookedBudget, Booking, BookingTable
from kvrouter.core.tables.early_ops import MOST_BYTES, MOST_BYTES_OF_ALL
from kvrouter.core.wire.hashes import pack_hashes
from kvrouter.core.wire.heartbeats import RouterBeat, encode
from kvrouter.core.wire.ids import BookingKey, PoolId, RouterId, Target, WorkerId
from kvrouter.core.wire.ops import VERSION, AddRequest, ApproxEntry, Bind, Check
from kvrouter.core.wire.senders import KvSource, RouterSource, Source, SyncSource, WorkerSource
from tests.core.replicas import ME, PEER, ROUNDS, new_replica, receive_worker
from tests.core.worlds import POOL, T1, W1, W2, card, chain_from, prompt, request
from tests.fuzz.forged import Forger, Real
from tests.fuzz.mutate import Mutator
from tests.long import IS_LONG

MESSAGES = 10_000 if IS_LONG else 3000  # by each seed
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
        if url := one.peers.next_question(now):
            one.answered(url, ADDRESSES.get(url, ""), now)
    for pool, worker in one.silent_workers():  # nobody answers there
        pool.unreachable(WorkerId(worker.card.worker_id))


def bookings_of(replica: Replica, router_id: RouterId) -> tuple[int, int]:
    """The copy of a replica's bookings, as count and digest."""
    return replica.router(POOL).pool.active.digest(router_id)


@pytest.mark.parametrize("seed", range(1, 6 if IS_LONG else 2))
def test_forged_members(seed: int) -> None:
    """Replicas stay ready and bounded, and afterwards hold what the real members hold, and nothing else."""
    rng, named = random.Random(seed), {W1, W2}
    forger = Forger(rng, Real([POOL], [W1, W2], list(ADDRESSES)))
    mutator = Mutator(rng)
    replicas = [new_replica(ME), new_replica(PEER, incarnation=2000)]
    now = 0.0
    for _ in range(2 * ROUNDS):
        now += 1
        honest_round(replicas, now)
    for one in replicas:
        one.router(POOL).route(request(prompt(chain_from(1, 10))), now)
        assert [] == one.readiness.not_ready(now)

    for number in range(MESSAGES):
        source, data = forger.message()
        if isinstance(source, WorkerSource):
            named.add(source.worker_id)
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
        assert {W1, W2} == {worker for worker in named if one.pool_of(worker) is not None}


def check_while_attacked(one: Replica) -> None:
    """It serves, it is ready, and what it keeps is bounded."""
    assert {W1, W2} <= {target.worker_id for target in one.router(POOL).pool.targets}
    assert [] == one.readiness.unserved()
    assert len(one.routers) <= POOLS_MOST
    assert one.worker_bytes.used <= WORKERS_BYTES
    assert one.peers.budget.used <= PEERS_BYTES
    assert len(one.refusals.named()) <= NAMED_MOST
    assert len("".join(one.readiness.doubts())) < 10_000
    assert one.routing is None


def check_afterwards(one: Replica, other: Replica) -> None:
    """Nothing of the invented members is left."""
    assert {other.router_id} == one.peers.keys()
    assert [POOL] == list(one.routers)
    assert bookings_of(one, other.router_id) == bookings_of(other, other.router_id)
    assert {W1, W2, other.router_id} == {_owner(source) for source in one.readers}
    assert [] == one.readiness.doubts() == one.readiness.degraded()
    assert {} == one.refusals.named()
    assert {W1, W2} == one.worker_bytes.taken.keys()
    assert {other.router_id} == one.peers.budget.taken.keys()


def _owner(source: Source) -> str:
    assert isinstance(source, KvSource | SyncSource)
    return source.router_id if isinstance(source, SyncSource) else source.worker_id


def heard_peer(replica: Replica, name: str, feeds: int) -> None:
    """A heartbeat of a peer with so many feeds of bookings."""
    named = {POOL if number == 0 else f"pool-{number}": 3 for number in range(feeds)}
    beat = RouterBeat(VERSION, 5, "up", "", named, 1, 1000, [])
    replica.router_heartbeat(RouterId(name), encode(beat), 0.0)


@pytest.mark.parametrize("peers", [(40, 40), (300, 1), (3, 60)])
def test_feeds_of_bookings_are_bounded(monkeypatch: pytest.MonkeyPatch, peers: tuple[int, int]) -> None:
    """Peers whose feeds find no room are refused by name; those that leave make room, in every table."""
    for module in ("following", "replica"):
        monkeypatch.setattr(f"kvrouter.core.fleet.{module}.MOST_SYNC_FEEDS", 50)
    count, feeds = peers
    replica = new_replica()
    receive_worker(replica, card("w1"))
    for number in range(count):
        heard_peer(replica, f"ghost-{number}", feeds)

    assert 50 == sum(isinstance(source, SyncSource) for source in replica.readers)
    assert min(count - 50 // feeds, NAMED_MOST) == len(replica.refusals.named())
    assert all("50 feeds of bookings" in reason for reason in replica.refusals.named().values())

    for number in range(count):
        gone = RouterBeat(VERSION, 5, "leave", "", {}, 2, 1000, [])
        replica.router_heartbeat(RouterId(f"ghost-{number}"), encode(gone), 0.0)
    assert {W1} == {_owner(source) for source in replica.readers}
    assert {} == replica.feeds._pools
    assert 0.0 == replica.router(POOL).feed.part
    for number in range(50):
        heard_peer(replica, f"real-{number}", 1)
        assert SyncSource(POOL, RouterId(f"real-{number}")) in replica.readers


def test_forged_frames_leave_nothing_behind() -> None:
    """Frames that cannot be read, in the names of a thousand replicas: no reader and no peer of the pool."""
    replica = new_replica()
    receive_worker(replica, card("w1"))
    for number in range(1000):
        replica.sync_frame(SyncSource(POOL, RouterId(f"ghost-{number}")), b"\x00", 0.0)

    assert not [source for source in replica.readers if isinstance(source, SyncSource)]
    assert 0.0 == replica.router(POOL).feed.part, "all of these come before it by name"


@pytest.mark.parametrize("is_snapshot", [False, True])
@pytest.mark.parametrize("pool", [POOL, PoolId("invented")])
def test_sessions_of_unknown_workers(pool: PoolId, is_snapshot: bool) -> None:
    """No table has them: they wait for the card, within a bound over all pools, for a lease."""
    replica = new_replica()
    receive_worker(replica, card("w2"))
    router = replica.router(pool)
    sink = router.feed.copy_sink(PEER)
    for number in range(20_000):
        bind = Bind(f"{'s' * 1000}{number}", "w1", 0, 5000)
        (sink.load if is_snapshot else sink.apply)(bind, 1.0)

    assert 0 == len(router.tables.sessions)
    assert 1_000_000 < router.feed.early.held_bytes <= MOST_BYTES
    assert router.feed.early.held_bytes == replica.early.used_bytes <= MOST_BYTES_OF_ALL

    receive_worker(replica, card("w1"), pool=pool)
    assert 0 == replica.early.used_bytes
    first = f"{'s' * 1000}0"
    assert Target(W1, 0) == router.tables.sessions.target_of(first, 4.0)
    assert None is router.tables.sessions.target_of(first, 6.1)


def test_invented_pools_share_what_waits() -> None:
    """The bound is over all pools; pools that end, and workers that never come, give it back."""
    replica = new_replica()
    for number in range(20):
        sink = replica.router(PoolId(f"invented-{number}")).feed.copy_sink(PEER)
        for session in range(2000):
            sink.apply(Bind(f"{'s' * 1000}{session}", "ghost", 0, 5000), 1.0)

    assert MOST_BYTES_OF_ALL - 10_000 < replica.early.used_bytes <= MOST_BYTES_OF_ALL
    for now in range(3 * ROUNDS):
        replica.next_round(float(now))
        replica.router_heartbeat(replica.router_id, encode(replica.heartbeat("up", "")), float(now))
    assert 0 == replica.early.used_bytes == len(replica.routers)


@pytest.mark.parametrize("is_snapshot", [False, True])
def test_bookings_without_end(monkeypatch: pytest.MonkeyPatch, is_snapshot: bool) -> None:
    """Names of blocks are kept up to a bound of each peer and of all; their load is known all the same."""
    monkeypatch.setattr(bookings, "MOST_OF_PEER", 1000)
    monkeypatch.setattr(bookings, "MOST_OF_ALL", 2500)
    replica = new_replica()
    receive_worker(replica, card("w1"))
    owners = BookingTable()  # as the peers have them
    for pool in (POOL, PoolId("invented")):
        for peer in range(3):
            name = RouterId(f"{pool}-{peer}")
            sink = replica.router(pool).feed.copy_sink(name)
            for number in range(100):
                hashes = list(range(number, number + number % 40))
                add = AddRequest(number, "r", "w1", 0, pack_hashes(hashes), 640, 0, 640)
                assert not (sink.load if is_snapshot else sink.apply)(add, 1.0)
                owners.book(Booking(BookingKey(name, number), "r", T1, hashes, 640, 0, 640))
            assert sink.agrees(Check(*owners.digest(name)))
        active = replica.routers[pool].pool.active
        assert 300 == active.requests(T1)
        assert sum(number % 40 for number in range(100)) <= active.blocks(T1)
        active.check()

    assert replica.booked.used_blocks < 2500 + 600 * 16
    own = replica.router(POOL).route(request(prompt(chain_from(1000, 10))), 1.0)
    assert 10 == len(replica.router(POOL).pool.active.bookings(ME)[0].hashes)  # own names are always kept
    replica.router(POOL).bookings.free(own.key)
    for pool in (POOL, PoolId("invented")):
        for peer in range(3):
            replica.routers[pool].feed.drop_peer(RouterId(f"{pool}-{peer}"))
        while replica.routers[pool].pool.active.sweep():
            pass
        replica.routers[pool].pool.active.check()
    assert BookedBudget() == replica.booked


def test_more_bookings_than_a_replica_can_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """They contradict their feed. Peers with few do not suffer from those that have many."""
    monkeypatch.setattr(bookings, "MOST_BOOKINGS_OF_PEER", 100)
    monkeypatch.setattr(bookings, "MOST_BOOKINGS", 150)
    monkeypatch.setattr(bookings, "FEW", 10)
    replica = new_replica()

    def kept(peer: str, count: int) -> int:
        sink = replica.router(POOL).feed.copy_sink(RouterId(peer))
        adds = [AddRequest(number, "r", "w1", 0, b"", 16, 0, 16) for number in range(count)]
        return sum(not sink.apply(add, 1.0) for add in adds)

    assert [100, 50, 10] == [kept("forger", 200), kept("other", 200), kept("honest", 10)]
    assert 10 == kept("honest again", 20)


@pytest.mark.parametrize("peers", [1, 8])
def test_sessions_leave_room_for_assumptions(peers: int) -> None:
    """Each peer's snapshot repeats the same sessions; they take their place once, and half of it at most."""
    replica = new_replica()
    replica.router(POOL)
    early = replica.router(POOL).feed.early
    for peer in range(peers):
        sink = replica.router(POOL).feed.copy_sink(RouterId(f"peer-{peer}"))
        for session in range(5000):
            sink.load(Bind(f"{'s' * 36}{session}", "w1", 0, 60_000), 1.0)
        before = early.held_bytes
        sink.load(
            ApproxEntry("w1", 0, pack_hashes(range(peer * 1000, peer * 1000 + 1000)), 60_000, is_text=True),
            1.0,
        )
        assert before < early.held_bytes

    assert 0 == early.dropped
    assert early.held_bytes < 5000 * 250 + peers * 9000


def test_a_snapshot_at_the_bounds_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It repeats bookings that are kept: none of them counts twice, neither with names nor without."""
    monkeypatch.setattr(bookings, "MOST_OF_PEER", 200)
    monkeypatch.setattr(bookings, "MOST_BOOKINGS_OF_PEER", 10)
    replica = new_replica()
    sink = replica.router(POOL).feed.copy_sink(PEER)
    adds = [AddRequest(number, "r", "w1", 0, pack_hashes(range(10)), 160, 0, 160) for number in range(10)]
    assert not any(sink.apply(add, 1.0) for add in adds)
    active = replica.router(POOL).pool.active
    before = [(one.key, len(one.hashes), one.left_out) for one in active.bookings(PEER)]
    sink.begin_load()
    assert not any(sink.load(add, 2.0) for add in adds)
    sink.finish_load()

    assert before == [(one.key, len(one.hashes), one.left_out) for one in active.bookings(PEER)]
    assert {0, 10} == {left_out for _, _, left_out in before}
    active.check()
