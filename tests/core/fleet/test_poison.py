"""Single odd messages in somebody's name: what they cost, and that they cost it for a moment only."""

from __future__ import annotations

import pytest

from kvrouter.core.feeds.trust import BROKEN_RETRY_S, LAST_RETRY_S, QUESTIONS_A_SECOND, FeedState
from kvrouter.core.fleet.pools import UNSERVED_MOST
from kvrouter.core.fleet.replica import Replica
from kvrouter.core.wire.hashes import pack_hashes
from kvrouter.core.wire.heartbeats import RouterBeat, encode
from kvrouter.core.wire.ids import PoolId
from kvrouter.core.wire.ops import VERSION, AddRequest, Frame, ReplayFrames, SnapshotChunk, Stored
from kvrouter.core.wire.ops import encode as encode_frame
from kvrouter.core.wire.senders import SyncSource
from kvrouter.core.wire.values import MOST_NUMBER
from tests.core.feeds.test_trouble import break_source
from tests.core.links import TARGET, Link, frame_of
from tests.core.replicas import ME, PEER, ROUNDS, new_replica, receive_worker, rounds
from tests.core.worlds import POOL, card, chain_from, prompt, request

FAR = 2**40
NEVER = 2**60


@pytest.fixture
def link() -> Link:
    """A feed that is live and has applied one frame."""
    link = Link()
    link.send(link.owner.store(20))
    return link


@pytest.fixture
def pair() -> tuple[Replica, Replica]:
    """Two synced replicas; the second has a booking of which the first has a copy."""
    first, second = new_replica(ME), new_replica(PEER)
    for replica in (first, second):
        receive_worker(replica, card("w1"))
    second.router(POOL).route(request(prompt(chain_from(1, 10))), 0.0)
    tell(second, first)
    rounds(first, 1, second)
    return first, second


def lose_a_frame(link: Link) -> None:
    """The source has sent a frame more than arrived, and its ring no longer has it."""
    link.write(*link.owner.store(40))
    link.heartbeat()


def tell(sender: Replica, receiver: Replica) -> None:
    """The sender's frames arrive."""
    for frame in sender.router(POOL).frames():
        receiver.sync_frame(SyncSource(POOL, sender.router_id), frame, 0.0)


def hear_peer(replica: Replica, feeds: dict[str, int], incarnation: int = 1000) -> None:
    """A heartbeat in the peer's name."""
    replica.router_heartbeat(PEER, encode(RouterBeat(VERSION, incarnation, "up", "", feeds, 0)), 0.0)


def repair(asking: Replica, owner: Replica) -> None:
    """What is asked of the owner is answered."""
    for feed, wanted in asking.due(0.0, 16):
        asking.answered(feed, owner.router(POOL).source.answer(wanted, 10**6, 0.0), 0.0)
    while asking.work(0.0):
        pass


# A number far ahead


def test_heartbeat_far_ahead(link: Link) -> None:
    """The source's own answer says how far it is: live again after one question."""
    link.reader.heartbeat(1000, FAR, link.now)
    assert FAR - 1 == link.reader.lag

    assert 1 == link.exchange_all()

    assert (FeedState.LIVE, 0) == (link.reader.state, link.reader.lag)


def test_heartbeat_far_ahead_is_taken_back_by_the_next(link: Link) -> None:
    """Also where no answer comes, the next heartbeat's number counts."""
    link.reader.heartbeat(1000, FAR, link.now)
    link.heartbeat()

    assert 0 == link.reader.lag


def test_frame_far_ahead(link: Link) -> None:
    """It is dropped when the source answers, and what came behind it in the meantime is applied."""
    link.deliver(frame_of(1000, FAR))
    answer = link.ask()
    link.send(link.owner.store(40))
    assert answer is not None
    link.reader.answer(answer, link.now)
    link.exchange_all()

    assert FeedState.LIVE is link.reader.state
    assert link.agrees()
    assert 1 == link.reader.counters.unsent
    assert not link.reader._held


def test_frame_far_ahead_where_only_snapshots_help() -> None:
    """The ring is short, the source busy: real frames that were held are applied, whatever came before."""
    link = Link(ring_frames=2)
    link.heartbeat()
    link.deliver(frame_of(1000, FAR))
    for node in range(40, 44):
        link.write(*link.owner.store(node))
    answer = link.ask()
    for node in range(10, 20):
        link.send(link.owner.store(node) or link.owner.check())
    assert answer is not None
    link.reader.answer(answer, link.now)
    link.settle(seconds=5.0)

    assert 1 == link.reader.counters.snapshots
    assert link.agrees()


def test_frame_far_ahead_before_the_first_frame() -> None:
    """A source that has sent nothing says so, too."""
    link = Link()
    link.heartbeat()
    link.deliver(frame_of(1000, FAR))

    link.exchange_all()

    assert FeedState.LIVE is link.reader.state


def test_held_frames_behind_a_gap_are_kept(link: Link) -> None:
    """What comes after the question may count more than the answer: it is no damage."""
    link.write(*link.owner.store(40))
    link.heartbeat()
    answer = link.ask()
    link.write(*link.owner.store(41))
    link.send(link.owner.store(42))
    assert answer is not None
    link.reader.answer(answer, link.now)
    link.exchange_all()

    assert link.agrees()
    assert (0, 0) == (link.reader.counters.unsent, link.reader.counters.snapshots)


# A frame that the source has not sent


def test_forged_frame_of_a_quiet_source(link: Link) -> None:
    """The source's heartbeats keep counting less than was applied: snapshot, counter."""
    link.deliver(frame_of(1000, 2, Stored(0, None, pack_hashes([77]))))
    assert not link.agrees()

    link.heartbeat()
    link.heartbeat()
    link.exchange_all()

    assert link.agrees()
    assert (1, 1, 1) == (
        link.reader.seq, link.reader.counters.unsent, link.reader.counters.snapshots
    )  # fmt: skip


def test_replay_that_runs_ahead_of_queued_heartbeats(link: Link) -> None:
    """Heartbeats from before the answer are still in the queue when it is applied: no proof of anything."""
    queued = []
    for node in range(30, 36):
        link.write(*link.owner.store(node) or link.owner.check())
        queued.append(link.source.seq)
    link.reader.heartbeat(1000, queued[0], link.now)
    link.exchange_all()
    assert queued[-1] == link.reader.seq

    for seq in queued[1:-1]:
        link.reader.heartbeat(1000, seq, link.now)

    assert FeedState.LIVE is link.reader.state
    assert 0 == link.reader.counters.unsent


def test_copy_that_stays_doubtful_is_fetched_every_30_s(link: Link) -> None:
    """Also if the source is quiet: no Check has to come to try again, and the flag goes with the snapshot."""
    for forged in (77, 78):
        link.deliver(frame_of(1000, 2, Stored(0, None, pack_hashes([forged]))))
        for _ in range(2):
            link.now += 1.0
            link.heartbeat()
        link.exchange_all()
    assert link.reader.flag
    link.exchange_all()
    assert 1 == link.reader.counters.snapshots

    link.now += BROKEN_RETRY_S
    link.exchange_all()

    assert 2 == link.reader.counters.snapshots
    assert link.agrees()
    assert not link.reader.flag


# An answer that the source did not give


@pytest.mark.parametrize("as_of_seq", [3, 1000, 2**32, MOST_NUMBER])
def test_forged_snapshot_of_a_number_far_ahead(link: Link, as_of_seq: int) -> None:
    """Later heartbeats count less: the second of them has another snapshot asked for, and all is right."""
    forged = SnapshotChunk(9, as_of_seq, 0, 1, [Stored(0, None, pack_hashes(range(900)))], 1000)
    lose_a_frame(link)
    assert link.ask()
    link.reader.answer(encode_frame(forged), link.now)
    link.reader.work(10_000, link.now)
    assert (FeedState.LIVE, as_of_seq) == (link.reader.state, link.reader.seq)

    for _ in range(2):
        assert as_of_seq == link.reader.seq
        link.now += 1.0
        link.send([])
        link.heartbeat()
    link.exchange_all()

    assert link.agrees()
    assert (1, 2) == (link.reader.counters.unsent, link.reader.counters.snapshots)


def test_forged_snapshot_of_a_busy_source(link: Link) -> None:
    """Where the owner soon counts as much, its digest tells."""
    forged = SnapshotChunk(9, link.source.seq + 3, 0, 1, [Stored(0, None, pack_hashes(range(900)))], 1000)
    lose_a_frame(link)
    assert link.ask()
    link.reader.answer(encode_frame(forged), link.now)
    link.reader.work(10_000, link.now)

    for node in range(30, 36):
        link.send(link.owner.store(node) or link.owner.check())
    link.send(link.owner.check())
    link.exchange_all()

    assert link.agrees()


def test_forged_snapshot_while_another_version_is_met(link: Link) -> None:
    """The question for what follows an impossible number is answered by a snapshot."""
    lose_a_frame(link)
    assert link.ask()
    link.reader.answer(encode_frame(SnapshotChunk(9, MOST_NUMBER, 0, 1, [], 1000)), link.now)
    link.reader.work(10_000, link.now)
    link.deliver(frame_of(1000, 2, version=2))

    link.exchange_all()

    assert link.agrees()


def test_heartbeats_that_waited_prove_nothing(link: Link) -> None:
    """They arrived before the snapshot, and are applied after it: however many, the snapshot stands."""
    arrived = link.now
    link.source._ring.clear()
    for node in range(30, 36):
        link.write(*link.owner.store(node) or link.owner.check())
    link.source._ring.clear()
    link.heartbeat()
    link.now += 1.0
    link.exchange_all()
    assert 6 <= link.reader.seq

    for seq in range(1, 5):
        link.reader.heartbeat(1000, seq, arrived)

    assert FeedState.LIVE is link.reader.state
    assert 0 == link.reader.counters.unsent


def test_frames_in_answer_to_a_snapshot_question(link: Link) -> None:
    """No honest source does so: asked again after a pause, and the second time the source is broken."""
    link.reader.heartbeat(2000, 5, link.now)
    for _ in range(2):
        assert link.ask()
        link.reader.answer(encode_frame(ReplayFrames([], 5)), link.now)
        assert link.ask() is None
        link.now += LAST_RETRY_S

    assert FeedState.BROKEN is link.reader.state
    assert "frames" in link.reader.flag


def test_flood_of_damaged_frames_is_no_flood_of_questions(link: Link) -> None:
    """However many arrive in a second, the source is asked a few times."""
    for _ in range(1000):
        link.deliver(frame_of(1000, 2, version=2))
        link.exchange_all()
        link.now += 0.0009

    assert len(link.requests) <= QUESTIONS_A_SECOND


# Another version


def test_one_frame_of_another_version(link: Link) -> None:
    """The source is asked at once; its answer is of this version, so nothing is said to be wrong."""
    link.deliver(frame_of(1000, 2, version=2))
    assert "version 2" in link.reader.flag

    assert 1 == link.exchange_all()

    assert (FeedState.LIVE, "") == (link.reader.state, link.reader.flag)
    assert 1 == link.reader.counters.other_versions


def test_source_of_another_version(link: Link) -> None:
    """If its own copies are of the other version it stays flagged, is not applied, and asked in pauses."""
    frame = frame_of(1000, 2, Stored(0, None, pack_hashes([77])), version=2)
    link.write(*link.owner.check())
    link.source._ring[-1] = frame

    link.deliver(frame)
    asked = link.exchange_all()

    assert 1 == asked
    assert FeedState.RECOVERING is link.reader.state
    assert "version 2" in link.reader.flag
    assert not link.index.holds(TARGET, 77)


def test_flag_of_a_malformed_snapshot_goes_while_the_source_is_quiet(link: Link) -> None:
    """The good snapshot after 30 s is enough."""
    link.write(*link.owner.store(30))
    link.heartbeat()
    break_source(link)
    assert link.reader.flag

    link.now += BROKEN_RETRY_S
    link.exchange_all()

    assert "" == link.reader.flag


# Another incarnation, another round


@pytest.mark.parametrize("seq", [0, 7])
def test_peer_of_the_future(pair: tuple[Replica, Replica], seq: int) -> None:
    """A greater incarnation out of nowhere is followed for a lease; then the peer's own counts again."""
    first, second = pair
    source = SyncSource(POOL, PEER)
    if seq:
        first.sync_frame(source, encode_frame(Frame(VERSION, NEVER, seq, [])), 0.0)
    else:
        hear_peer(first, {POOL: 0}, NEVER)
    rounds(first, 1, second)
    assert 1000 != max(first.readers[source].incarnation, first.readers[source]._wanted_incarnation)

    rounds(first, ROUNDS + 1, second)
    repair(first, second)

    assert (1000, FeedState.LIVE) == (first.readers[source].incarnation, first.readers[source].state)
    assert first.router(POOL).pool.active.digest(PEER) == second.router(POOL).pool.active.digest(PEER)
    assert 0 == first.counters.replicas_lost


@pytest.mark.parametrize(("incarnation", "number"), [(1000, 2**62), (7, 1)])
def test_round_that_was_never_sent(pair: tuple[Replica, Replica], incarnation: int, number: int) -> None:
    """A heartbeat in our own name that is not ours is no round; the leases go on."""
    first, _ = pair
    forged = RouterBeat(VERSION, incarnation, "up", "", {}, number)
    first.router_heartbeat(ME, encode(forged), 0.0)
    assert 1 == first.counters.stale_heartbeats

    rounds(first, ROUNDS + 1)

    assert {} == first.peers
    assert {} == first.router(POOL).pool.active.owners()


# Pools out of nowhere


def test_empty_feeds_begin_no_pools(pair: tuple[Replica, Replica]) -> None:
    """A name in a heartbeat is no reason to keep anything."""
    first, _ = pair
    hear_peer(first, {f"none-{n}": 0 for n in range(300)})

    assert [POOL] == list(first.routers)


def test_pools_by_a_peers_word_are_few_and_end(pair: tuple[Replica, Replica]) -> None:
    """So many at most; they go when the peer no longer says so, and are not passed on."""
    first, second = pair
    hear_peer(first, {f"none-{n}": 3 for n in range(300)})
    assert 1 + UNSERVED_MOST == len(first.routers)
    assert 300 - UNSERVED_MOST == first.counters.pools_refused
    assert not any(seq for pool, seq in first.heartbeat("up", "").feeds.items() if pool != POOL)

    for _ in range(2 * (ROUNDS + 2)):
        receive_worker(first, card("w1"))
        rounds(first, 1, second)

    assert [POOL] == list(first.routers)
    assert [SyncSource(POOL, PEER)] == [source for source in first.readers if isinstance(source, SyncSource)]


def test_frame_of_a_stranger_begins_a_pool_for_a_lease() -> None:
    """One frame in the name of nobody: what it booked counts for a lease, then all of it is gone."""
    replica = new_replica()
    add = AddRequest(1, "r", "w1", 0, pack_hashes([1, 2]), 32, 0, 32)
    replica.sync_frame(SyncSource(PoolId("none-0"), PEER), encode_frame(Frame(VERSION, 5, 1, [add])), 0.0)
    assert ["none-0"] == list(replica.routers)

    for _ in range(2 * (ROUNDS + 2)):
        rounds(replica, 1)
        while replica.work(0.0):
            pass

    assert {} == replica.routers
    assert {} == replica.readers


@pytest.mark.parametrize("noise", [b"\xff", encode_frame(Frame(2, 5, 1, []))])
def test_noise_of_a_stranger_is_not_followed(noise: bytes) -> None:
    """What cannot be read as a frame of this version opens no feed."""
    replica = new_replica()

    replica.sync_frame(SyncSource(POOL, PEER), noise, 0.0)

    assert {} == replica.readers
    assert ["no worker is known"] == replica.degraded()
