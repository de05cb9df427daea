"""The reader with bad sources and bad links: damage, contradictions, digests, backoff."""

from __future__ import annotations

import msgpack
import pytest

from kvrouter.core.feeds.buffers import HELD_BYTES
from kvrouter.core.feeds.receipt import OTHER_VERSION, STALE, TAKEN, FrameVerdict, Receipt
from kvrouter.core.feeds.trust import BROKEN_RETRY_S, LAST_RETRY_S, FeedState
from kvrouter.core.wire.hashes import pack_hashes
from kvrouter.core.wire.ops import VERSION, Check, ReplayFrames, ReplayRequest, SnapshotChunk, Stored, encode
from tests.core.links import TARGET, Link, frame_of, malformed


@pytest.fixture
def link() -> Link:
    """A feed that is live and has applied one frame."""
    link = Link()
    link.send(link.owner.store(20))
    return link


def facts(receipt: Receipt) -> tuple[FrameVerdict, str]:
    """Its verdict, and the beginning of its trouble."""
    return receipt.verdict, receipt.trouble.partition(":")[0]


def test_malformed_frame_is_repaired_like_a_gap(link: Link) -> None:
    """A damaged frame is asked for again, and the good copy is applied."""
    frame = link.write(*link.owner.store(40))

    link.deliver(malformed(frame))
    link.exchange_all()

    assert (1, 0) == (link.reader.counters.malformed, link.reader.counters.snapshots)
    assert [2] == [request.from_seq for request in link.requests]
    assert link.agrees()


def test_unreadable_frame_shows_as_a_gap(link: Link) -> None:
    """A frame without a readable number is missed when the next one, or a heartbeat, arrives."""
    frame = link.write(*link.owner.store(40))

    link.deliver(frame[:3])
    assert 1 == link.reader.counters.malformed
    link.heartbeat()
    link.exchange_all()

    assert link.agrees()


def test_receipts_of_frames(link: Link) -> None:
    """A frame that is known or has to wait is taken, too. Ops that cannot be read are reported once."""
    frames = [link.write(*link.owner.store(node)) for node in (40, 41, 42)]
    now = link.now

    assert (FrameVerdict.MALFORMED, "not a frame") == facts(link.reader.frame(frames[0][:3], now))
    assert (FrameVerdict.TAKEN, "an op is malformed") == facts(link.reader.frame(malformed(frames[0]), now))
    assert TAKEN is link.reader.frame(malformed(frames[1]), now), "held, and read when it is its turn"
    assert STALE is link.reader.frame(frame_of(999, 1), now)
    assert OTHER_VERSION is link.reader.frame(frame_of(1000, 2, version=VERSION + 1), now)

    answer = link.ask()
    assert answer is not None
    assert (FrameVerdict.TAKEN, "an op is malformed") == facts(
        link.reader.answer(encode(ReplayFrames([frames[0]], 4)), now)
    )
    assert TAKEN is link.reader.frame(frames[0], now), "known already"
    link.settle()
    assert STALE is link.reader.answer(answer, now), "it is live again and has asked nothing"
    assert link.agrees()


def test_receipts_of_answers(link: Link) -> None:
    """The trouble is that of a frame in it that cannot be read, or of all of it."""
    frames = [link.write(*link.owner.store(node)) for node in (40, 41, 42)]
    link.deliver(frames[2], malformed(frames[1]))

    link.ask()
    receipt = link.reader.answer(encode(ReplayFrames([frames[0], b"\xc1"], 4)), link.now)
    assert (FrameVerdict.TAKEN, "not a frame") == facts(receipt)
    link.ask()
    receipt = link.reader.answer(b"\xc1", link.now)
    assert (FrameVerdict.MALFORMED, "not a replay answer") == facts(receipt)

    link.settle()
    assert link.agrees()


@pytest.mark.parametrize("unreadable", [False, True])
def test_second_malformed_copy_asks_for_a_snapshot(link: Link, unreadable: bool) -> None:
    """If the source's own copy is damaged too, its changes arrive as a snapshot."""
    frame = link.write(*link.owner.store(40))
    link.ring[-1] = frame[:3] if unreadable else malformed(frame)
    if unreadable:
        link.heartbeat()
    else:
        link.deliver(malformed(frame))

    link.settle()

    assert 0 == link.requests[-1].from_seq
    assert (1, 2) == (link.reader.counters.snapshots, link.reader.counters.malformed)
    assert link.agrees()


@pytest.mark.parametrize(
    "answer",
    [
        b"\xff\xff",
        encode(SnapshotChunk(1, 9, 0, 1, [Stored(0, 12345, pack_hashes([1]))], 2000)),
    ],
)
def test_second_malformed_snapshot_breaks_the_source(link: Link, answer: bytes) -> None:
    """After a damaged or contradictory snapshot the reader pauses; the second breaks the source.

    Its blocks are then dropped, the flag is set, and it is asked again after 30 s.
    """
    link.new_source(2000)
    link.write(*link.owner.store(40))
    link.heartbeat()
    assert link.ask()
    link.reader.answer(answer, link.now)
    link.reader.work(100, link.now)
    assert "recovering" == link.reader.state.value
    assert link.ask() is None

    link.now += LAST_RETRY_S
    assert link.ask()
    link.reader.answer(answer, link.now)
    link.reader.work(100, link.now)
    assert ("broken", True) == (link.reader.state.value, "sent a" in link.reader.flag)
    assert 0 == link.index.blocks(TARGET)

    link.now += BROKEN_RETRY_S - 0.1
    assert link.ask() is None
    link.now += 0.2
    link.exchange_all()

    assert link.reader.state is FeedState.LIVE
    assert link.agrees()


def test_frames_in_answer_to_a_snapshot_question() -> None:
    """Frames do not answer it: the reader asks again after a pause; the second time breaks the source."""
    link = Link()
    link.write(*link.owner.store(3))
    link.heartbeat()
    for _ in range(2):
        assert link.ask()
        assert 0 == link.requests[-1].from_seq
        link.reader.answer(encode(ReplayFrames([])), link.now)
        assert link.ask() is None
        link.now += LAST_RETRY_S

    assert "broken" == link.reader.state.value
    assert "sent frames where a snapshot was asked for" in link.reader.flag


def test_snapshot_of_a_newer_source(link: Link) -> None:
    """Ops with unknown codes are skipped and counted, in a snapshot as in a frame.

    If the snapshot were rejected as a whole, the feed would be broken for 30 s at a time.
    """
    held = link.owner.store(40) + link.owner.store(41)
    ops = [msgpack.unpackb(encode(op)) for op in link.owner.state_ops()]
    link.new_source(2000)
    link.write(*held)
    link.heartbeat()
    assert link.ask()

    link.reader.answer(encode([1, 7, 1, 0, 1, [[99, "new"], *ops, [77]], 2000, "new"]), link.now)
    link.reader.work(1000, link.now)

    assert link.reader.state is FeedState.LIVE
    assert link.agrees()
    assert (2, 0) == (link.reader.counters.unknown_ops, link.reader.counters.malformed)


def test_step_that_raises_breaks_its_feed_alone(link: Link) -> None:
    """A bug that the feed's data triggers drops its blocks for 30 s; then they are loaded again."""
    link.reader.break_down(link.now)

    assert (FeedState.BROKEN, 1) == (link.reader.state, link.reader.counters.errors)
    assert 0 == link.index.blocks(TARGET)
    link.send(link.owner.store(30))
    link.now += BROKEN_RETRY_S
    link.exchange_all()
    assert link.agrees()
    assert "" == link.reader.flag


def test_broken_source_that_restarts_is_read_at_once(link: Link) -> None:
    """A new incarnation does not wait for the old one's 30 s."""
    link.write(*link.owner.store(30))
    link.heartbeat()
    break_source(link)
    link.new_source(2000)
    link.write(*link.owner.store(40))

    link.heartbeat()
    link.exchange_all()

    assert link.agrees()


def test_good_snapshot_clears_the_flag(link: Link) -> None:
    """Also that of a broken source."""
    link.write(*link.owner.store(30))
    link.heartbeat()
    break_source(link)
    link.now += BROKEN_RETRY_S + 1

    link.exchange_all()
    link.send(link.owner.check())

    assert not link.reader.flag


def test_missing_parent_asks_for_a_snapshot(link: Link) -> None:
    """A Stored whose parent is not held is a contradiction: counted, and repaired by snapshot."""
    wrong = frame_of(1000, 2, Stored(0, 12345, pack_hashes([1])))
    link.write(*link.owner.store(40))

    link.deliver(wrong)
    link.exchange_all()

    assert (1, 1) == (link.reader.counters.contradictions, link.reader.counters.snapshots)
    assert link.agrees()


def test_more_than_the_cards_capacity_breaks_the_source() -> None:
    """A target with more than 1.1 × its capacity gets a snapshot, and is then broken."""
    link = Link(capacity=10)
    link.send([Stored(0, None, pack_hashes(range(11)))])
    assert 0 == link.reader.counters.contradictions

    link.send([Stored(0, None, pack_hashes([11]))])

    assert 1 == link.reader.counters.contradictions
    assert 0 == getattr(link.reader.due(link.now), "from_seq", None)


def test_digest_mismatch_asks_for_a_snapshot(link: Link) -> None:
    """A Check that differs is followed by a snapshot."""
    link.index.store(TARGET, [77])  # damage

    link.send(link.owner.check())
    link.exchange_all()

    assert (1, 1) == (link.reader.counters.digest_mismatches, link.reader.counters.snapshots)
    assert link.agrees()
    assert not link.reader.flag


def test_digest_that_keeps_differing(link: Link) -> None:
    """Two mismatches in a row set the flag, and allow a snapshot at most every 30 s."""
    for _ in range(29):
        link.send([Check(99, 99)])
        link.exchange_all()
        link.now += 1.0
    assert "digest" in link.reader.flag
    assert (29, 1) == (link.reader.counters.digest_mismatches, link.reader.counters.snapshots)

    link.now += 2.0
    link.send([Check(99, 99)])
    link.exchange_all()
    assert 2 == link.reader.counters.snapshots

    link.send(link.owner.check())
    assert not link.reader.flag


def test_flagged_feed_still_follows_its_source(link: Link) -> None:
    """Until the next snapshot is allowed, live frames are applied."""
    for _ in range(2):
        link.send([Check(99, 99)])
        link.exchange_all()

    link.send(link.owner.store(47))

    assert link.agrees()


def test_source_that_contradicts_itself_is_not_asked_in_a_loop(link: Link) -> None:
    """A frame that contradicts the source's own snapshot leads to a pause before the next question."""
    link.source.answer(link.reader.due(link.now) or _snapshot_request(), link.max_bytes, link.now)
    link.send([Stored(0, 12345, pack_hashes([1]))])

    for _ in range(50):
        link.exchange()

    assert len(link.requests) <= 12


def break_source(link: Link) -> None:
    """Deliver two unreadable answers in a row."""
    for _ in range(2):
        assert link.ask()
        link.reader.answer(b"\xff", link.now)
        link.now += LAST_RETRY_S
    assert FeedState.BROKEN is link.reader.state


def _snapshot_request() -> ReplayRequest:
    return ReplayRequest(VERSION, 0, 1000, 0)


def test_backoff_grows_and_is_capped(link: Link) -> None:
    """Without an answer the pauses double up to five seconds, and questions continue."""
    link.write(*link.owner.store(40))
    link.heartbeat()
    pauses = []
    for _ in range(12):
        began = link.now
        while link.reader.due(link.now) is None:
            link.now += 0.01
        pauses.append(link.now - began)
        link.reader.failed(link.now)

    assert 0.0 == pauses[0]
    assert sorted(pauses) == pytest.approx(pauses, abs=0.02)
    assert LAST_RETRY_S == pytest.approx(pauses[-1], abs=0.02)
    assert 12 == link.reader.counters.failures
    link.settle()
    assert link.agrees()


def test_backoff_is_reset_by_success(link: Link) -> None:
    """After a recovery the next pause is the shortest again."""
    for _ in range(2):
        link.write(*link.owner.check())
        link.heartbeat()
        assert link.reader.due(link.now) is not None
        for _ in range(8):
            link.reader.failed(link.now)
        link.now += 2 * LAST_RETRY_S
        link.exchange_all()

    link.write(*link.owner.check())
    link.heartbeat()
    link.reader.due(link.now)
    link.reader.failed(link.now)
    link.now += 0.2

    assert link.reader.due(link.now) is not None


def test_one_question_at_a_time(link: Link) -> None:
    """While an answer is awaited the reader asks nothing else."""
    link.write(*link.owner.store(40))
    link.heartbeat()

    assert link.reader.due(link.now) is not None
    assert link.reader.due(link.now + 100) is None


def test_late_answer_changes_nothing(link: Link) -> None:
    """An answer that arrives when the feed is live again is not applied."""
    late = link.write(*link.owner.store(40))
    link.heartbeat()
    answer = link.ask()
    link.deliver(late)
    link.exchange_all()
    assert answer is not None
    link.reader.answer(answer, link.now)
    link.reader.answer(answer, link.now)

    assert link.agrees()
    assert link.reader.state is FeedState.LIVE


def test_too_much_held(link: Link) -> None:
    """Live frames beyond the memory limit during a recovery are dropped, and the recovery continues."""
    link.write(*link.owner.store(40))
    big = b"\x00" * 8
    for _ in range(3):
        link.send([Stored(0, None, big)])
    link.reader._held._bytes = HELD_BYTES
    link.send([Stored(0, None, big)])

    assert 1 == link.reader.counters.held_overflows
    link.owner.published.store(TARGET, [0], "device")
    link.settle()
    assert link.index.digest(TARGET) == link.owner.published.digest(TARGET, "device")
