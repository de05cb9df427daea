"""A peer's sync feed recovers from damaged and forged frames, answers and heartbeats."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.feeds.reader import FeedReader
from kvrouter.core.feeds.sinks import SyncSink
from kvrouter.core.feeds.source import FeedSource
from kvrouter.core.feeds.trust import FeedState
from kvrouter.core.tables.bookings import BookingTable
from kvrouter.core.wire.hashes import pack_hashes
from kvrouter.core.wire.ids import RouterId
from kvrouter.core.wire.ops import AddRequest, Check, Free, Op, SnapshotChunk, decode_request, encode
from kvrouter.core.wire.values import MOST_NUMBER
from tests.core.links import frame_of
from tests.fuzz.mutate import Mutator
from tests.long import examples

pytestmark = pytest.mark.usefixtures("core")

PEER = RouterId("peer")
STEP_S = 0.5
LEASE_BEATS = 6  # stale heartbeats after which the lease of a forged incarnation ends
# Seconds of honest traffic within which a copy must be right: a broken feed alone pauses for 30.
HEAL_S = 60
FORGED = AddRequest(2**40, "forged", "w1", 0, pack_hashes([1, 2]), 32, 0, 32)


def sink_of(table: BookingTable) -> SyncSink:
    """A sink that writes the peer's feed to the table."""
    return SyncSink(
        table, PEER, booked=lambda *_: None, prefill_completed=lambda *_: None, assume=lambda *_: None
    )


class PeerFeed:
    """The peer's bookings and their feed, and a replica that keeps a copy of them."""

    def __init__(self, seed: int = 1) -> None:
        self.now = 0.0
        self.rng = random.Random(seed)
        self.mutator = Mutator(self.rng)
        self.live: dict[int, AddRequest] = {}
        self.owned, self.copy = BookingTable(), BookingTable()
        self.source = FeedSource(1000, lambda _now: list(self.live.values()))
        self.sent: list[bytes] = []
        self._written = sink_of(self.owned)
        self._booked = 0
        self.follow()

    def follow(self) -> None:
        """Begin to follow the peer without a copy of its bookings."""
        self.reader = FeedReader("pool", sink_of(self.copy), self.rng.random)
        self._stale = 0

    def write(self) -> list[bytes]:
        """Begin or end a booking; returns the frames, not delivered."""
        op: Op
        if not self.live or self.rng.random() < 0.6:
            self._booked += 1
            hashes = pack_hashes(self.rng.getrandbits(64) for _ in range(4))
            op = self.live[self._booked] = AddRequest(self._booked, "r", "w1", 0, hashes, 64, 0, 64)
        else:
            number = self.rng.choice(list(self.live))
            del self.live[number]
            op = Free(number)
        self._written.apply(op, self.now)
        frames = self.source.append([op])
        self.sent += frames
        return frames

    def deliver(self, *frames: bytes) -> None:
        for frame in frames:
            self.reader.frame(frame, self.now)

    def heartbeat(self) -> None:
        """Deliver the peer's heartbeat. After some stale ones the lease of a forged incarnation ends."""
        is_current = self.reader.heartbeat(self.source.incarnation, self.source.seq, self.now)
        self._stale = 0 if is_current else self._stale + 1
        if self._stale == LEASE_BEATS:
            self.reader.close()
            self.copy.drop_owner(PEER)
            self.follow()

    def ask(self) -> bytes | None:
        """The peer's answer to the reader's next question, not delivered."""
        request = self.reader.due(self.now)
        if request is None:
            return None
        return self.source.answer(decode_request(encode(request)), 1 << 20, self.now)

    def load(self, answer: bytes) -> None:
        """Deliver an answer and load it to its end."""
        self.reader.answer(answer, self.now)
        while self.reader.is_loading:
            self.reader.work(10_000, self.now)

    def run(self, seconds: float) -> None:
        """Bookings begin and end, with a heartbeat and a Check each second. Nothing is lost or forged."""
        for step in range(int(seconds / STEP_S)):
            self.now += STEP_S
            self.deliver(*self.write())
            if step % 2:
                self.deliver(*self.source.append([Check(*self.owned.digest(PEER))]))
                self.heartbeat()
            if answer := self.ask():
                self.load(answer)

    def heal(self) -> float:
        """Seconds of honest traffic until the copy is right. Raises AssertionError."""
        began = self.now
        while not self.agrees():
            assert self.now < began + HEAL_S, f"{self.reader.state} {self.reader.flag!r} {self.reader.lag}"
            self.run(1.0)
        return self.now - began

    def agrees(self) -> bool:
        """Whether the feed is live and unflagged, and the copy equals the peer's bookings."""
        self.copy.check()
        copies, held = self.copy.bookings(PEER), self.owned.bookings(PEER)
        return (
            (FeedState.LIVE, "", self.source.seq) == (self.reader.state, self.reader.flag, self.reader.seq)
            and {booking.key for booking in held} == {booking.key for booking in copies}
            and self.owned.digest(PEER) == self.copy.digest(PEER)
        )


@pytest.fixture
def feed() -> PeerFeed:
    """A live feed that has lost a frame and has asked for it."""
    feed = PeerFeed()
    feed.heartbeat()
    for _ in range(5):
        feed.deliver(*feed.write())
    assert feed.agrees()
    feed.write()
    feed.heartbeat()
    assert feed.ask()
    return feed


NUMBERS = pytest.mark.parametrize("as_of_seq", [20, 10_000, 2**32, MOST_NUMBER, 2**64 - 1])


@NUMBERS
def test_forged_snapshot(feed: PeerFeed, as_of_seq: int) -> None:
    """A forged snapshot with a number far ahead and an invented booking is replaced within seconds."""
    feed.load(encode(SnapshotChunk(1, as_of_seq, 0, 1, [FORGED], 1000)))
    assert not feed.agrees()

    assert feed.heal() <= 10.0


@NUMBERS
def test_forged_snapshot_then_another_version(feed: PeerFeed, as_of_seq: int) -> None:
    """A frame of another version makes the reader ask for the next number, which must fit the wire."""
    feed.load(encode(SnapshotChunk(1, as_of_seq, 0, 1, [FORGED], 1000)))
    feed.deliver(frame_of(1000, 7, version=2))
    assert not feed.agrees()

    assert feed.heal() <= 10.0


@examples(25)
@given(st.integers(0, 2**32))
def test_mutants_then_honest_traffic(core: str, seed: int) -> None:
    """Mutated frames, answers and heartbeats raise nothing; honest traffic afterwards repairs the copy."""
    feed = PeerFeed(seed)
    feed.heartbeat()
    for step in range(100):
        feed.now += 0.1
        (frame,) = feed.write()
        mutant = feed.mutator.mutate(feed.rng.choice([frame, *feed.sent]))
        feed.deliver(
            *feed.rng.choice([(frame, mutant), (mutant, frame), (frame,), (feed.mutator.mutate(frame),)])
        )
        if not step % 10:
            feed.heartbeat()
        if not step % 20:
            feed.reader.heartbeat(1000, feed.rng.choice([0, feed.source.seq + 5, MOST_NUMBER]), feed.now)
        if answer := feed.ask():
            feed.load(feed.mutator.mutate(answer) if step % 2 else answer)

    feed.heal()
    feed.run(5.0)

    assert feed.agrees()
