"""The reader: frames in order, gaps, lost last frames, new incarnations, snapshots."""

from __future__ import annotations

import pytest

from kvrouter.core.feeds.trust import FeedState
from kvrouter.core.wire.hashes import pack_hashes
from kvrouter.core.wire.ops import Free, Stored
from tests.core.links import TARGET, Link, frame_of


@pytest.fixture
def link() -> Link:
    """A feed whose source has sent a heartbeat and no frame."""
    link = Link()
    link.heartbeat()
    return link


def test_fresh_source(link: Link) -> None:
    """A source that has sent nothing is live at once, without a question, and is then followed."""
    assert FeedState.LIVE is link.reader.state

    for node in range(10):
        link.send(link.owner.store(node) or link.owner.check())

    assert link.agrees()
    assert [] == link.requests
    assert (10, 0) == (link.reader.counters.applied, link.reader.lag)


def test_reader_waits_for_the_first_message() -> None:
    """Before the first message the reader waits and asks nothing."""
    link = Link()

    assert FeedState.WAITING is link.reader.state
    assert link.ask() is None


def test_joiner_asks_for_a_snapshot() -> None:
    """A source with history, first met by heartbeat or by frame, is read by snapshot."""
    for by_heartbeat in (True, False):
        link = Link()
        frames = [link.write(*link.owner.store(node)) for node in (5, 30)]
        if by_heartbeat:
            link.heartbeat()
        else:
            link.deliver(frames[-1])
        assert 2 == link.reader.lag

        link.exchange_all()

        assert FeedState.LIVE is link.reader.state
        assert link.agrees()
        assert [0] == [request.from_seq for request in link.requests]
        assert 1 == link.reader.counters.snapshots


def test_first_frame_needs_no_heartbeat() -> None:
    """Frame 1 of an unknown incarnation is its whole history: it is applied."""
    link = Link()

    link.send(link.owner.store(3))

    assert FeedState.LIVE is link.reader.state
    assert link.agrees()


def test_gap_is_repaired_from_the_ring(link: Link) -> None:
    """A lost frame is asked for; later frames are held and then applied."""
    link.send(link.owner.store(1))
    link.write(*link.owner.store(20))
    link.send(link.owner.store(40))
    link.send(link.owner.remove(40))
    assert (1, 3) == (link.reader.counters.gaps, link.reader.lag)

    assert 1 == link.exchange_all()

    assert 2 == link.requests[0].from_seq
    assert link.agrees()
    assert (0, 0) == (link.reader.lag, link.reader.counters.snapshots)


def test_repeated_and_old_frames_are_dropped(link: Link) -> None:
    """A frame that arrives twice, or late, is not applied again."""
    first, second = link.write(*link.owner.store(5)), link.write(*link.owner.remove(5))

    link.deliver(first, first, second, first, second)

    assert (2, 3) == (link.reader.counters.applied, link.reader.counters.repeated)
    assert link.agrees()


def test_order_across_a_reconnect(link: Link) -> None:
    """Frames that arrive in the wrong order are applied in the right order."""
    frames = [link.write(*ops) for ops in (link.owner.store(5), link.owner.remove(5), link.owner.store(7))]

    link.deliver(frames[2], frames[0], frames[1])
    link.exchange_all()

    assert link.agrees()
    assert FeedState.LIVE is link.reader.state


def test_heartbeat_shows_that_last_frames_were_lost(link: Link) -> None:
    """The last frames before a silence were lost: the heartbeat counts them, and the reader asks for them."""
    link.write(*link.owner.store(5))
    link.write(*link.owner.store(9))
    assert 0 == link.reader.lag

    link.heartbeat()
    link.exchange_all()

    assert 1 == link.requests[0].from_seq
    assert link.agrees()


def test_old_heartbeat_changes_nothing(link: Link) -> None:
    """A heartbeat that counts fewer frames than were applied is old."""
    link.send(link.owner.store(5))

    link.reader.heartbeat(1000, 0, link.now)

    assert FeedState.LIVE is link.reader.state
    assert link.ask() is None


def test_new_incarnation_with_history() -> None:
    """A source that has restarted and sent frames is read by snapshot; no old block is left."""
    link = Link()
    link.send(link.owner.store(30))
    link.owner.lose()
    link.new_source(2000)
    link.write(*link.owner.store(3))

    link.heartbeat()
    link.exchange_all()

    assert link.agrees()
    assert (2000, 1) == (link.reader.incarnation, link.reader.seq)


def test_new_incarnation_without_history() -> None:
    """A source that has restarted and sent nothing holds nothing: the reader need not ask."""
    link = Link()
    link.send(link.owner.store(30))
    link.owner.lose()
    link.new_source(2000)

    link.heartbeat()

    assert link.agrees()
    assert [] == link.requests


def test_lower_incarnation_is_stale() -> None:
    """Frames and heartbeats of an older incarnation are dropped."""
    link = Link()
    link.send(link.owner.store(5))

    link.deliver(frame_of(999, 1, Stored(0, None, pack_hashes([1]))))
    link.reader.heartbeat(999, 50, link.now)

    assert 1 == link.reader.counters.stale
    assert FeedState.LIVE is link.reader.state
    assert link.agrees()


def test_old_heartbeat_does_not_hold_up_a_new_incarnation() -> None:
    """With two agents of one id, the old one's heartbeat does not make the new one's feed look behind."""
    link = Link()
    for node in range(20):
        link.send(link.owner.check() + link.owner.store(node))
    link.new_source(2000)
    link.write(*link.owner.check())
    link.heartbeat()

    link.reader.heartbeat(1000, 20, link.now)
    link.exchange_all()

    assert FeedState.LIVE is link.reader.state
    assert 0 == link.reader.lag


def test_source_restarts_while_it_is_asked() -> None:
    """The answer is of a newer incarnation than the question: its numbers count from now on."""
    link = Link()
    for node in range(20):
        link.send(link.owner.check() + link.owner.store(node))
    link.write(*link.owner.store(40))
    link.heartbeat()
    assert FeedState.RECOVERING is link.reader.state
    link.new_source(2000)
    link.write(*link.owner.check())

    link.exchange_all()

    assert (FeedState.LIVE, 2000, 1, 0) == (
        link.reader.state, link.reader.incarnation, link.reader.seq, link.reader.lag
    )  # fmt: skip
    assert link.agrees()


def test_snapshots_of_two_incarnations_are_not_mixed() -> None:
    """Chunk 2 of the old snapshot 1 does not follow chunk 1 of the new snapshot 1."""
    link = Link(ring_frames=1)
    link.max_bytes = 200
    for node in range(12):
        link.write(*link.owner.check(), *link.owner.store(node))
    link.heartbeat()
    while not link.requests or link.reader.is_loading:  # until chunk 1 is loaded
        assert link.exchange()
    link.owner.lose()
    link.new_source(2000)
    for node in range(12, 48):
        link.write(*link.owner.check(), *link.owner.store(node))
    other = Link(ring_frames=1)
    other.source, other.max_bytes = link.source, 200
    other.heartbeat()
    other.exchange()

    link.exchange_all()
    assert 0 == link.reader.counters.malformed, "two halves that do not fit look like damage"
    link.settle()

    assert link.agrees()


def test_ring_too_short(link: Link) -> None:
    """Frames that the ring no longer has arrive as a snapshot in chunks; live frames are held meanwhile."""
    link.source = Link(ring_frames=2).source
    link.ring_frames, link.max_bytes = 2, 300
    link.new_source(1000)
    for node in range(0, 48, 2):
        link.write(*link.owner.check(), *link.owner.store(node))
    link.heartbeat()

    asked = 0
    while link.reader.state is not FeedState.LIVE:
        assert link.exchange()
        asked += 1
        if asked % 5 == 0 and asked < 30:
            link.send([*link.owner.check(), *link.owner.store(asked), *link.owner.remove(asked + 4)])

    assert len({request.chunk for request in link.requests}) > 2
    assert 1 == link.reader.counters.snapshots
    assert link.agrees()


def test_look_ups_see_the_old_blocks_while_a_snapshot_loads(link: Link) -> None:
    """The table switches to a snapshot in one step."""
    link.send(link.owner.store(5))
    before = link.index.digest(TARGET)
    link.owner.lose()
    link.new_source(2000)
    link.write(*link.owner.store(40), *link.owner.store(47), *link.owner.store(30))
    link.heartbeat()
    assert link.exchange()
    link.reader.work(1, link.now)

    assert before == link.index.digest(TARGET)
    link.exchange_all()
    assert link.agrees()


def test_source_that_leaves_in_the_middle_leaves_no_row(link: Link) -> None:
    """A snapshot whose source left halfway takes no room."""
    link.send(link.owner.store(47))
    link.reader.frame(frame_of(1000, 9), link.now)
    link.source.incarnation = 1001
    link.reader.heartbeat(1001, 9, link.now)
    assert link.exchange()
    link.reader.work(1, link.now)

    link.reader.close()
    link.index.drop(TARGET)
    while link.index.sweep():
        pass

    assert 0 == len(link.index)


def test_snapshot_expires_between_two_chunks(link: Link) -> None:
    """If the source has dropped the snapshot, a new one is read from its first chunk."""
    link.max_bytes = 300
    for node in range(48):
        link.write(*link.owner.check(), *link.owner.store(node))
    link.ring_frames = 1
    source = link.source
    link.new_source(2000)
    link.source.seq = source.seq
    link.heartbeat()
    assert link.exchange()
    while link.reader.is_loading:
        link.exchange()

    link.now += 11.0
    link.exchange_all()

    assert FeedState.LIVE is link.reader.state
    assert link.agrees()
    assert 2 in {request.snapshot_id for request in link.requests}


def test_recovery_is_timed(link: Link) -> None:
    """The duration of the last recovery is known."""
    link.write(*link.owner.store(5))
    link.heartbeat()
    link.now += 2.5

    link.exchange_all()

    assert 2.5 == link.reader.counters.recovery_s


def test_unknown_ops_are_counted(link: Link) -> None:
    """Unknown ops are skipped and counted."""
    link.deliver(b"\x94\x01\xcd\x03\xe8\x01\x92\x92\x63\x01\x92\x12\x01")

    assert (1, 1) == (link.reader.counters.unknown_ops, link.reader.seq)


def test_unknown_version_is_flagged(link: Link) -> None:
    """Frames of another version are not applied, and the source is flagged."""
    link.deliver(frame_of(1000, 1, Free(1), version=2))

    assert 0 == link.reader.seq
    assert "version 2" in link.reader.flag
