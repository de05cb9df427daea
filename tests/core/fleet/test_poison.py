"""Single forged messages: what they cost, and that their effect soon ends."""

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
    """The source has published one more frame than arrived, and its ring no longer has it."""
    link.write(*link.owner.store(40))
    link.heartbeat()


def tell(sender: Replica, receiver: Replica) -> None:
    """The sender's frames arrive."""
    for frame in sender.router(POOL).feed.frames():
        receiver.sync_frame(SyncSource(POOL, sender.router_id), frame, 0.0)


def hear_peer(replica: Replica, feeds: dict[str, int], incarnation: int = 1000) -> None:
    """A heartbeat in the peer's name."""
    replica.router_heartbeat(PEER, encode(RouterBeat(VERSION, incarnation, "up", "", feeds, 0)), 0.0)


def repair(asking: Replica, owner: Replica) -> None:
    """The owner answers all replay requests."""
    for feed, wanted in asking.feeds.due(0.0, 16):
        asking.feeds.answered(feed, owner.router(POOL).feed.source.answer(wanted, 10**6, 0.0), 0.0)
    while asking.work(0.0):
        pass


# A number far ahead


def test_heartbeat_far_ahead(link: Link) -> None:
    """The source's answer has its real seq: the feed is live again after one request."""
    link.reader.heartbeat(1000, FAR, link.now)
    assert FAR - 1 == link.reader.lag

    assert 1 == link.exchange_all()

    assert (FeedState.LIVE, 0) == (link.reader.state, link.reader.lag)


def test_heartbeat_far_ahead_is_taken_back_by_the_next(link: Link) -> None:
    """Without an answer, the seq of the next heartbeat counts."""
    link.reader.heartbeat(1000, FAR, link.now)
    link.heartbeat()

    assert 0 == link.reader.lag


def test_frame_far_ahead(link: Link) -> None:
    """It is dropped when the source answers, and frames that arrived after it are applied."""
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
    """Short ring, busy source: the real frames that were held are applied after the snapshot."""
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
    """A source that has published nothing answers so, and the frame is dropped."""
    link = Link()
    link.heartbeat()
    link.deliver(frame_of(1000, FAR))

    link.exchange_all()

    assert FeedState.LIVE is link.reader.state


def test_held_frames_behind_a_gap_are_kept(link: Link) -> None:
    """Frames that arrive after the request may have greater numbers than the answer: they are real."""
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
    """The source's heartbeats stay below the applied seq: a snapshot is fetched and the event counted."""
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
    """Heartbeats that waited in the queue since before the answer prove nothing."""
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
    """Without any Check, too: a quiet source sends none. The flag ends with the snapshot."""
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
    """Later heartbeats are below the forged seq: the second one causes a new snapshot, which repairs."""
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
    """If the owner's seq soon reaches the forged one, its digest shows the difference."""
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
    """The request for frames after an impossible seq is answered with a snapshot."""
    lose_a_frame(link)
    assert link.ask()
    link.reader.answer(encode_frame(SnapshotChunk(9, MOST_NUMBER, 0, 1, [], 1000)), link.now)
    link.reader.work(10_000, link.now)
    link.deliver(frame_of(1000, 2, version=2))

    link.exchange_all()

    assert link.agrees()


def test_heartbeats_that_waited_prove_nothing(link: Link) -> None:
    """Heartbeats that arrived before the snapshot and are applied after it do not discard it."""
    arrived = link.now
    link.ring.clear()
    for node in range(30, 36):
        link.write(*link.owner.store(node) or link.owner.check())
    link.ring.clear()
    link.heartbeat()
    link.now += 1.0
    link.exchange_all()
    assert 6 <= link.reader.seq

    for seq in range(1, 5):
        link.reader.heartbeat(1000, seq, arrived)

    assert FeedState.LIVE is link.reader.state
    assert 0 == link.reader.counters.unsent


def test_frames_in_answer_to_a_snapshot_question(link: Link) -> None:
    """No real source answers so: it is asked again after a pause; the second time breaks the feed."""
    link.reader.heartbeat(2000, 5, link.now)
    for _ in range(2):
        assert link.ask()
        link.reader.answer(encode_frame(ReplayFrames([], 5)), link.now)
        assert link.ask() is None
        link.now += LAST_RETRY_S

    assert FeedState.BROKEN is link.reader.state
    assert "frames" in link.reader.flag


def test_flood_of_malformed_frames(link: Link) -> None:
    """It causes only a few replay requests a second."""
    for _ in range(1000):
        link.deliver(frame_of(1000, 2, version=2))
        link.exchange_all()
        link.now += 0.0009

    assert len(link.requests) <= QUESTIONS_A_SECOND


# Another version


def test_one_frame_of_another_version(link: Link) -> None:
    """The source is asked at once; its answer has this version, so the feed has no flag."""
    link.deliver(frame_of(1000, 2, version=2))
    assert "version 2" in link.reader.flag

    assert 1 == link.exchange_all()

    assert (FeedState.LIVE, "") == (link.reader.state, link.reader.flag)
    assert 1 == link.reader.counters.other_versions


def test_source_of_another_version(link: Link) -> None:
    """If its answers have the other version, too, the feed keeps its flag and is asked in pauses."""
    frame = frame_of(1000, 2, Stored(0, None, pack_hashes([77])), version=2)
    link.write(*link.owner.check())
    link.ring[-1] = frame

    link.deliver(frame)
    asked = link.exchange_all()

    assert 1 == asked
    assert FeedState.RECOVERING is link.reader.state
    assert "version 2" in link.reader.flag
    assert not link.index.holds(TARGET, 77)


def test_flag_of_a_malformed_snapshot_of_a_quiet_source(link: Link) -> None:
    """The good snapshot after 30 s ends the flag."""
    link.write(*link.owner.store(30))
    link.heartbeat()
    break_source(link)
    assert link.reader.flag

    link.now += BROKEN_RETRY_S
    link.exchange_all()

    assert "" == link.reader.flag


# Another incarnation, another round


@pytest.mark.parametrize("seq", [0, 7])
def test_peer_with_a_forged_incarnation(pair: tuple[Replica, Replica], seq: int) -> None:
    """A forged greater incarnation is followed for a lease; then the peer's real one counts again."""
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
    """A forged heartbeat in the name of the replica itself does not count as a round."""
    first, _ = pair
    forged = RouterBeat(VERSION, incarnation, "up", "", {}, number)
    first.router_heartbeat(ME, encode(forged), 0.0)
    assert 1 == first.counters.stale_heartbeats

    rounds(first, ROUNDS + 1)

    assert {} == first.peers
    assert {} == first.router(POOL).pool.active.owners()


# Pools out of nowhere


def test_empty_feeds_begin_no_pools(pair: tuple[Replica, Replica]) -> None:
    """Pool names in heartbeats alone take no memory."""
    first, _ = pair
    hear_peer(first, {f"none-{n}": 0 for n in range(300)})

    assert [POOL] == list(first.routers)


def test_pools_that_only_a_peer_names(pair: tuple[Replica, Replica]) -> None:
    """They are bounded, end when the peer no longer names them, and are not in own heartbeats."""
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


def test_frame_of_an_unknown_replica() -> None:
    """Its booking and its pool last for a lease, then all of it is dropped."""
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
def test_malformed_frame_of_an_unknown_replica(noise: bytes) -> None:
    """A message that is not a frame of this version begins no feed."""
    replica = new_replica()

    replica.sync_frame(SyncSource(POOL, PEER), noise, 0.0)

    assert {} == replica.readers
    assert ["no worker is known"] == replica.readiness.degraded()
