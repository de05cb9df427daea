"""The feed of one rank: its frames, their times, and its answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from kvrouter.core.wire.hashes import block_hashes, pack_hashes, pool_token, sequence_hashes
from kvrouter.core.wire.ops import (
    DEVICE,
    DISK,
    HOST,
    MAX_FRAME_HASHES,
    VERSION,
    Check,
    Cleared,
    Decoded,
    Op,
    Removed,
    ReplayFrames,
    ReplayRequest,
    SnapshotChunk,
    Stored,
    decode_answer,
    decode_frame,
)
from kvrouter.worker.blocks.engine_blocks import EngineBlocks
from kvrouter.worker.publisher import KvPublisher
from tests.worker.closed_sets import ClosedSets
from tests.worker.fakes import FakeBus

SIZE = 2
A, B = sequence_hashes(block_hashes([1, 2, 3, 4], SIZE))
STORED_A = Stored(DEVICE, None, pack_hashes([A]))


@pytest.fixture
def bus() -> FakeBus:
    """A bus that records messages."""
    return FakeBus()


@pytest.fixture
def publisher(bus: FakeBus) -> KvPublisher:
    """The feed of rank 1 of worker w."""
    return KvPublisher(bus, "w", SIZE, 1, model="m", namespace="ns", incarnation=5, flush_s=0.0)


def frames(bus: FakeBus) -> list[Decoded]:
    """The frames sent since the last call."""
    return [decode_frame(payload) for _, payload in bus.take()]


def ops(bus: FakeBus) -> Iterator[list[Op]]:
    """The ops of these frames without digests."""
    for frame in frames(bus):
        yield [op for op in frame.ops or () if not isinstance(op, Check)]


def ask(from_seq: int, incarnation: int = 5) -> ReplayRequest:
    """A reader's request."""
    return ReplayRequest(VERSION, 1, incarnation, from_seq)


def test_one_frame_per_flush(bus: FakeBus, publisher: KvPublisher) -> None:
    """Changes between two flushes travel in one frame, numbered from 1."""
    publisher.stored([10], [1, 2])
    publisher.removed([10])
    publisher.flush(0.0)
    publisher.flush(0.01)

    ((subject, payload),) = bus.take()
    frame = decode_frame(payload)
    assert f"kvrouter.ns.live.kv.{pool_token('m')}.w.1" == subject
    assert (5, 1) == (frame.incarnation, frame.seq)
    assert [STORED_A, Removed(DISK, pack_hashes([A])), Check(0, 0)] == frame.ops


def test_tiers_have_names(bus: FakeBus, publisher: KvPublisher) -> None:
    """A tier is given by its name."""
    publisher.stored([10], [1, 2], tier="device")
    publisher.stored([10], [], tier="host")
    publisher.removed([10], tier="device")
    publisher.cleared()
    publisher.flush(0.0)

    in_host = Stored(HOST, None, pack_hashes([A]))
    assert [[STORED_A, in_host, Removed(DEVICE, pack_hashes([A])), Cleared()]] == list(ops(bus))


def test_check_once_a_second(bus: FakeBus, publisher: KvPublisher) -> None:
    """A digest goes with the first frame, then at most once a second, and once after the last change."""
    publisher.stored([10], [1, 2])
    publisher.flush(0.0)
    publisher.stored([11], [3, 4], parent=10)
    publisher.flush(0.5)
    publisher.flush(0.9)
    publisher.flush(1.0)
    publisher.flush(2.5)

    first, second, last = frames(bus)
    assert [STORED_A, Check(1, A)] == first.ops
    assert [Stored(DEVICE, A, pack_hashes([B]))] == second.ops
    assert [Check(2, (A + B) % 2**64)] == last.ops


def test_bus_away(bus: FakeBus, publisher: KvPublisher) -> None:
    """While the bus is away frames are numbered and kept, not sent; a reader requests them later."""
    bus.connected = False
    publisher.stored([10], [1, 2])
    publisher.flush(0.0)
    bus.connected = True
    publisher.stored([11], [3, 4], parent=10)
    publisher.flush(0.01)

    assert [2] == [frame.seq for frame in frames(bus)]
    answer = decode_answer(publisher.answer(ask(1), 10_000, 0.02))
    assert isinstance(answer, ReplayFrames)
    assert [1, 2] == [decode_frame(data).seq for data in answer.frames]


def test_snapshot(bus: FakeBus, publisher: KvPublisher) -> None:
    """A snapshot has all blocks as of a sent frame: pending changes are sent first."""
    publisher.stored([10], [1, 2])
    publisher.flush(0.0)
    publisher.stored([11], [3, 4], parent=10)

    answer = decode_answer(publisher.answer(ask(0, incarnation=4), 10_000, 0.02))

    assert isinstance(answer, SnapshotChunk)
    assert (5, 2) == (answer.incarnation, answer.as_of_seq)
    assert [{A, B}] * 3 == ClosedSets().apply(answer.ops).tiers
    assert [1, 2] == [frame.seq for frame in frames(bus)]


def test_lost_history(bus: FakeBus, publisher: KvPublisher) -> None:
    """Lost history begins a new life: a greater incarnation, frames from 1, no blocks."""
    publisher.stored([10], [1, 2])
    publisher.flush(0.0)
    publisher.stored([11], [3, 4], parent=10)
    publisher.lose_history(3)
    bus.take()

    publisher.stored([12], [1, 2])
    publisher.flush(1.0)

    (frame,) = frames(bus)
    assert (6, 1, [STORED_A, Check(1, A)]) == (frame.incarnation, frame.seq, frame.ops)


def test_lost_before_the_first_frame(publisher: KvPublisher) -> None:
    """Before the first frame there is no life to end."""
    publisher.lose_history(99)

    assert (5, 0) == (publisher.incarnation, publisher.seq)


def test_restore(bus: FakeBus, publisher: KvPublisher) -> None:
    """A restored table is available as a snapshot only; later changes come in frames, with a digest."""
    former = EngineBlocks()
    former.stored([10], [1, 2], block_size=SIZE)
    publisher.restore(former.image(), SIZE)
    assert (5, 1, 1) == (publisher.incarnation, publisher.seq, publisher.blocks.count())
    assert isinstance(decode_answer(publisher.answer(ask(1), 10_000, 0.0)), SnapshotChunk)

    publisher.stored([11], [3, 4], parent=10)
    publisher.flush(2.0)

    checked, stored = frames(bus)
    assert (2, [Check(1, A)]) == (checked.seq, checked.ops)
    assert (3, Stored(DEVICE, A, pack_hashes([B]))) == (stored.seq, (stored.ops or [Cleared()])[0])
    answer = decode_answer(publisher.answer(ask(0), 10_000, 2.0))
    assert isinstance(answer, SnapshotChunk)
    assert {A, B} >= ClosedSets().apply(answer.ops).tiers[0] >= {A}


def test_block_size_of_events(bus: FakeBus, publisher: KvPublisher) -> None:
    """Stores have their own block size; the largest on the device counts for one life."""
    publisher.stored([10], [1, 2, 3, 4], block_size=4)
    publisher.stored([11], [5, 6])
    publisher.stored([12, 13], [1, 2, 3, 4, 5, 6, 7, 8], tier="host", block_size=4)
    publisher.stored([14], [1, 2, 3, 4, 5, 6, 7, 8], tier="host", block_size=8)
    with pytest.raises(ValueError, match="1 blocks of 16"):
        publisher.stored([15], [1], block_size=16)
    assert (4, 2) == (publisher.event_block_size, publisher.block_size)
    assert 2 == publisher.blocks.count()

    publisher.cleared()
    assert 4 == publisher.event_block_size, "the same life of the engine"
    publisher.begin_life()
    assert 0 == publisher.event_block_size


def test_frames_are_bounded(bus: FakeBus, publisher: KvPublisher) -> None:
    """One frame names at most 4,096 hashes."""
    for number in range(3):
        start = number * 2000
        publisher.stored(range(start, start + 2000), range(start, start + 4000))
    publisher.flush(0.0)

    counts = [
        sum(len(op.hashes) // 8 for op in frame.ops or () if isinstance(op, Stored)) for frame in frames(bus)
    ]
    assert [4000, 2000] == counts
    assert max(counts) <= MAX_FRAME_HASHES


async def test_run(bus: FakeBus, publisher: KvPublisher) -> None:
    """While the publisher runs, stored blocks are sent without a request."""
    task = asyncio.create_task(publisher.run())
    publisher.stored([10], [1, 2])
    await bus.until_sent(1)
    task.cancel()

    assert [[STORED_A]] == list(ops(bus))
