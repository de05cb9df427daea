"""Following: many feeds, of which few need attention."""

from __future__ import annotations

import pytest

from kvrouter.core.feeds.lease import Leases
from kvrouter.core.feeds.reader import FeedReader
from kvrouter.core.feeds.receipt import FAILED, REFUSED, TAKEN, UNKNOWN, Receipt
from kvrouter.core.feeds.trust import BROKEN_RETRY_S, FeedState
from kvrouter.core.fleet.following import _VISITED_MOST, MOST_LOADING, Following
from kvrouter.core.wire.ids import RouterId, WorkerId
from kvrouter.core.wire.ops import (
    VERSION,
    Check,
    CheckResumable,
    Cleared,
    Frame,
    Op,
    ReplayRequest,
    SnapshotChunk,
    Stored,
    encode,
)
from kvrouter.core.wire.senders import Feed, KvSource, SyncSource
from tests.core.worlds import POOL

W1 = WorkerId("w1")
FEED = KvSource(POOL, W1, 0)
MOST = 16


class Sink:
    """A sink whose digest never agrees."""

    def plain(self) -> None:
        """Each frame is decoded."""

    def apply(self, op: Op, now: float) -> str:
        """Taken."""
        return ""

    def agrees(self, _check: Check | CheckResumable) -> bool:
        """Never."""
        return False

    def has_room_again(self) -> bool:
        """Nothing was refused."""
        return False

    def reset(self) -> None:
        """Nothing to do."""

    begin_load = finish_load = abandon_load = reset

    def load(self, op: Op, now: float) -> str:
        """Taken."""
        return ""


@pytest.fixture
def following() -> Following:
    """Follows one feed without frames."""

    def new_reader(_feed: Feed) -> FeedReader:
        return FeedReader(0, Sink(), lambda: 0.0)

    following = Following(Leases(), new_reader)
    following.heartbeat(FEED, 1, 0, None, 0.0)
    return following


def check(following: Following, seq: int, now: float) -> None:
    """A frame with a Check."""
    following.kv_frame(FEED, encode(Frame(VERSION, 1, seq, [Check(1, 1)])), now)


def load_snapshot(following: Following, seq: int, now: float) -> None:
    """Request a snapshot and load it."""
    assert [FEED] == [source for source, _ in following.due(now, MOST)]
    following.answered(FEED, encode(SnapshotChunk(1, seq, 0, 1, [], 1)), now)
    while following.load(100, now):
        pass


def test_digest_that_differs_after_a_snapshot(following: Following) -> None:
    """A feed whose digest differs again after a snapshot is asked again later, without further messages."""
    check(following, 1, 1.0)
    load_snapshot(following, 1, 1.0)
    check(following, 2, 2.0)
    assert FeedState.LIVE is following.readers[FEED].state

    assert [] == following.due(3.0, MOST)
    assert [FEED] == [source for source, _ in following.due(2.0 + BROKEN_RETRY_S, MOST)]


def test_feed_at_rest() -> None:
    """A live feed needs no attention before its next message; a feed that has ended never."""
    following = Following(Leases(), lambda _feed: Counted(0, Sink(), lambda: 0.0))

    def visits(now: float) -> int:
        Counted.visits = 0
        following.due(now, MOST)
        return Counted.visits

    following.heartbeat(FEED, 1, 0, None, 0.0)
    assert 0 == visits(1.0)
    assert [] == following.due(1.0, MOST)

    check(following, 1, 1.0)
    assert 1 == visits(1.0)
    check(following, 2, 1.0)
    following.end(FEED)

    assert 0 == visits(1.0)
    assert [] == following.due(1.0, MOST)


def test_ranks_that_are_gone() -> None:
    """The feeds of ranks that a worker no longer has end; then all feeds of the worker."""
    following = Following(Leases(), lambda _feed: FeedReader(0, Sink(), lambda: 0.0))
    feeds = [KvSource(POOL, WorkerId(name), rank) for name in ("w1", "w2") for rank in range(3)]
    for feed in feeds:
        following.heartbeat(feed, 1, 0, None, 0.0)

    following.end_ranks(POOL, W1, 1)
    assert {feeds[0], *feeds[3:]} == set(following.readers)

    following.end_worker(W1)
    assert set(feeds[3:]) == set(following.readers)
    assert [WorkerId("w2")] == list(following._ranks)


class BadSink(Sink):
    """A sink with a bug."""

    def apply(self, op: Op, now: float) -> str:
        """Raise."""
        raise OverflowError("as native code would")


def test_step_that_raises_breaks_one_feed() -> None:
    """The failure is kept for the log. Other feeds go on, and the broken one is asked again after 30 s."""
    bad: Feed = FEED
    good: Feed = KvSource(FEED.pool, WorkerId("other"), 0)

    def new_reader(feed: Feed) -> FeedReader:
        return FeedReader(0, BadSink() if feed == bad else Sink(), lambda: 0.0)

    following = Following(Leases(), new_reader)
    receipts: list[Receipt] = []
    for feed in (bad, good):
        following.heartbeat(feed, 1, 0, None, 0.0)
        assert isinstance(feed, KvSource)
        receipts.append(following.kv_frame(feed, encode(Frame(VERSION, 1, 1, [Cleared()])), 1.0))

    assert [FAILED, TAKEN] == receipts
    ((failed, error),) = following.take_failures()
    assert (bad, OverflowError) == (failed, type(error))
    assert [] == following.take_failures()
    assert [FeedState.BROKEN, FeedState.LIVE] == [following.readers[feed].state for feed in (bad, good)]
    assert [] == following.due(2.0, 16)
    ((asked, _),) = following.due(1.0 + BROKEN_RETRY_S, 16)
    assert bad == asked


def test_snapshots_in_memory_are_bounded() -> None:
    """While MOST_LOADING chunks wait to be loaded, no more are requested."""
    feeds = [KvSource(FEED.pool, WorkerId(f"w{n}"), 0) for n in range(MOST_LOADING + 5)]
    following = Following(Leases(), lambda _feed: FeedReader(0, Sink(), lambda: 0.0))
    for feed in feeds:
        following.heartbeat(feed, 1, 9, None, 0.0)
    chunk = encode(SnapshotChunk(1, 9, 0, 2, [Stored(0, None, bytes(80))], 1))
    for asked, _ in following.due(0.0, 1000):
        following.answered(asked, chunk, 0.0)

    assert MOST_LOADING == sum(reader.is_loading for reader in following.readers.values())
    assert [] == following.due(0.1, 1000)
    assert following.load(1000, 0.2)
    assert 1 == len(following.due(0.3, 1000))


def test_silent_feeds_come_last(following: Following) -> None:
    """Feeds that were asked in vain do not delay those that were not asked yet."""
    silent = [KvSource(POOL, WorkerId(f"ghost-{number}"), 0) for number in range(100)]
    for source in silent:
        following.heartbeat(source, 1, 5, 1000, 0.0)
        following.due(0.0, MOST)
        following.failed(source, 0.0)
    late = KvSource(POOL, WorkerId("late"), 0)
    following.heartbeat(late, 1, 5, 1000, 10.0)

    assert late == following.due(10.0, 1)[0][0]
    assert MOST == len(following.due(10.0, MOST))


class Counted(FeedReader):
    """Counts how often any reader is asked for its next question."""

    visits = 0

    def due(self, now: float) -> ReplayRequest | None:
        """As ever."""
        Counted.visits += 1
        return super().due(now)


def test_claims_of_peers_come_last() -> None:
    """A peer's feed that has answered nothing delays no worker's."""
    following = Following(Leases(), lambda _feed: FeedReader(0, Sink(), lambda: 0.0))
    for number in range(1000):
        following.heartbeat(SyncSource(POOL, RouterId(f"ghost-{number}")), 1, 5, 1000, 0.0)
    following.heartbeat(FEED, 1, 5, 1000, 0.0)

    assert [FEED, MOST] == [following.due(0.0, 1)[0][0], len(following.due(0.0, MOST))]


@pytest.mark.parametrize("feeds", [10, 1000, 5000])
def test_look_for_questions_takes_bounded_time(feeds: int) -> None:
    """However many feeds are behind, a look visits some hundred of them; in time each is asked."""
    following = Following(Leases(), lambda _feed: Counted(0, Sink(), lambda: 0.0))
    sources: list[Feed] = [KvSource(POOL, WorkerId(f"w{number}"), 0) for number in range(feeds)]
    for source in sources:
        following.heartbeat(source, 1, 5, 1000, 0.0)

    asked: list[Feed] = []
    while len(asked) < feeds:
        Counted.visits = 0
        found = following.due(0.0, MOST)
        assert found
        assert Counted.visits <= 2 * _VISITED_MOST
        for source, _ in found:
            following.failed(source, 0.0)
        asked += [source for source, _ in found]

    assert sorted(sources) == sorted(asked)
    assert feeds == len(following._silent)
    following.answered(sources[-1], encode(SnapshotChunk(1, 5, 0, 1, [], 1)), 1.0)
    assert following.load(100, 1.0)
    assert FeedState.LIVE is following.readers[sources[-1]].state


def test_answer_to_a_feed_that_has_ended(following: Following) -> None:
    """It is of no feed that is followed."""
    following.end(FEED)

    assert UNKNOWN is following.answered(FEED, encode(SnapshotChunk(1, 1, 0, 1, [], 1)), 1.0)


@pytest.mark.parametrize("noise", [b"\xff", encode(Frame(VERSION + 1, 1, 1, []))])
def test_noise_that_would_begin_a_feed(following: Following, noise: bytes) -> None:
    """It is refused without a reason for the log, where each invented name would take a line."""
    source = SyncSource(POOL, RouterId("r9"))

    assert REFUSED is following.sync_frame(source, noise, 0.0)
    assert TAKEN is following.sync_frame(source, encode(Frame(VERSION, 1, 1, [])), 0.0)
    assert REFUSED is not following.sync_frame(source, noise, 0.0)
