"""Frames that C applies without decoding them: all is as if Python had decoded them (`KvSink.take`)."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.feeds.trust import FeedState
from kvrouter.core.native import versions
from kvrouter.core.wire.hashes import pack_hashes
from kvrouter.core.wire.heartbeats import RankBeat
from kvrouter.core.wire.heartbeats import encode as encode_beat
from kvrouter.core.wire.ids import WorkerId
from kvrouter.core.wire.ops import VERSION, Check, Cleared, Frame, Op, Removed, Stored, encode
from kvrouter.core.wire.senders import KvSource
from tests.core.links import TARGET, Link
from tests.core.replicas import new_replica
from tests.core.worlds import POOL, card, worker_beat
from tests.long import examples

INCARNATION = 1000
hashes = st.lists(st.integers(1, 12), max_size=5).map(pack_hashes)
ops = st.one_of(
    st.builds(Stored, st.sampled_from([0, 0, 0, 1]), st.none() | st.integers(1, 12), hashes),
    st.builds(Stored, st.just(0), st.none(), hashes),
    st.builds(Removed, st.sampled_from([0, 0, 2]), hashes),
    st.builds(Check, st.integers(0, 3), st.integers(0, 9)),
    st.just(Cleared()),
)
# an op of a newer version, with a field more, of an unknown code, with half a hash, with none
ODD = [[1, 0, None, bytes(8), 7], [99, 1], [1, 0, None, bytes(7)], [], [2, 3, bytes(8)], [1, 0, -1, b""], "x"]
changes = st.sampled_from(["", "", "", "", "cut", "longer", "repeated", "ahead", "newer", "odd", "byte"])


class Reader(Link):
    """A reader of a rank with room for ten blocks."""

    def __init__(self, *, takes: bool) -> None:
        super().__init__(capacity=10)
        if not takes:
            self.sink.plain = lambda: None  # type: ignore[method-assign]
        self.reader.heartbeat(INCARNATION, 0, self.now)

    @property
    def newest(self) -> int:
        """The greatest incarnation that it has heard of."""
        return self.reader._newest

    def state(self) -> tuple[object, ...]:
        """All that can be seen of it."""
        reader, index = self.reader, self.index
        index.check()
        held = [hash_ for hash_ in range(1, 13) if index.holds(TARGET, hash_)]
        seen = reader.state, reader.seq, reader.source_seq, reader.received_at, reader.flag, reader.lag
        return seen, asdict(reader.counters), asdict(index.counters), index.digest(TARGET), held


def _frame(seq: int, listed: list[Op], change: str, place: int) -> bytes:
    incarnation = INCARNATION + (change == "newer")
    seq += {"repeated": -1, "ahead": 2}.get(change, 0)
    data = encode(Frame(VERSION, incarnation, max(seq, 1), listed))
    match change:
        case "cut":
            return data[: place % len(data)]
        case "longer":
            return data + b"\xc0"
        case "odd":
            return encode([VERSION, incarnation, seq, [*listed, ODD[place % len(ODD)]]])
        case "byte":
            at = place % len(data)
            return data[:at] + bytes([place % 256]) + data[at + 1 :]
    return data


@examples(300)
@given(st.lists(st.tuples(st.lists(ops, max_size=4), changes, st.integers(0, 10_000)), max_size=12))
def test_same_as_decoded(frames: list[tuple[list[Op], str, int]]) -> None:
    """Any frames: both readers are alike after each, and return the same."""
    plain, spared = Reader(takes=False), Reader(takes=True)
    for listed, change, place in frames:
        data = _frame(plain.reader.seq + 1, listed, change, place)
        assert plain.reader.frame(data, plain.now) == spared.reader.frame(data, spared.now)
        assert plain.state() == spared.state()
        for link in (plain, spared):
            link.now += 0.01
            if place % 3 == 0:  # a heartbeat, of one frame fewer or more too
                link.reader.heartbeat(link.newest, max(0, link.reader.seq + place % 4 - 1), link.now)
            if link.reader.state is not FeedState.LIVE:  # it starts again
                link.reader.heartbeat(link.newest + 1, 0, link.now)


@pytest.mark.skipif(versions.chosen.table is None, reason="without C all frames are decoded")
def test_what_is_taken() -> None:
    """Blocks that are stored below held ones, and removed: no frame of these is decoded."""
    link = Reader(takes=True)
    chain = Stored(0, None, pack_hashes([1, 2])), Stored(0, 2, pack_hashes([3])), Removed(1, pack_hashes([3]))
    link.reader.frame(encode(Frame(VERSION, INCARNATION, 1, list(chain))), link.now)
    link.reader.frame(encode(Frame(VERSION, INCARNATION, 2, [Stored(0, 2, pack_hashes([4]))])), link.now)

    link.reader.frame(encode(Frame(VERSION, INCARNATION, 3, [Check(3, 7)])), link.now)

    assert (3, 3) == (link.reader.position.taken, link.reader.seq)
    assert (3, 7) == link.index.digest(TARGET)


@pytest.mark.parametrize("ranks", [[], [RankBeat(0, 99, 1)]], ids=["no rank", "an older rank"])
def test_smaller_card(ranks: list[RankBeat]) -> None:
    """A card with less room counts from its heartbeat on, whatever that says of the rank."""
    replica, source = new_replica(), KvSource(POOL, WorkerId("w1"), 0)

    def beat(room: int, ranks: list[RankBeat], version: int) -> None:
        about = worker_beat(card("w1", tiers={"device": room}), ranks=ranks, card_version=version)
        replica.worker_heartbeat(WorkerId("w1"), encode_beat(about), 0.0)

    def frame(seq: int, *listed: int) -> None:
        op = Stored(0, None, pack_hashes(listed))
        replica.feeds.kv_frame(source, encode(Frame(VERSION, 100, seq, [op])), 0.0)

    beat(100, [RankBeat(0, 100, 0)], 1)
    frame(1, 1, 2)
    beat(5, ranks, 2)
    frame(2, *range(3, 30))

    assert 1 == replica.feeds.readers[source].counters.contradictions


def test_late_failure() -> None:
    """A question that fails after the source has started again delays no later one."""
    link = Link()
    for frame in ((1000, 1), (1000, 3)):
        link.reader.frame(encode(Frame(VERSION, *frame, [])), link.now)
        link.reader.heartbeat(1000, frame[1], link.now)
    assert link.reader.due(link.now)
    link.reader.heartbeat(1001, 0, link.now)
    link.reader.failed(link.now)
    link.reader.frame(encode(Frame(VERSION, 1001, 1, [])), link.now)

    assert link.reader._backoff.is_reset


@pytest.mark.parametrize(
    "op",
    [
        *(
            Stored(0, 9, pack_hashes([4])),
            Stored(0, None, pack_hashes(list(range(1, 13)))),
            Stored(1, None, b""),
        ),
        *(Check(1, 0), Check(0, 0, 1)),
    ],
    ids=["no parent", "no room", "another tier", "it differs", "of another tier"],
)
def test_what_is_not(op: Op) -> None:
    """Whatever contradicts, or needs another table, is left to the reader."""
    link = Reader(takes=True)
    link.reader.frame(encode(Frame(VERSION, INCARNATION, 1, [op])), link.now)

    assert not link.reader.position.taken
