"""The source: numbers, ring, shared snapshots, and no message above the limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvrouter.core.feeds.source import SNAPSHOT_KEPT_S, FeedSource
from kvrouter.core.wire.hashes import pack_hashes
from kvrouter.core.wire.ops import (
    MAX_FRAME_BYTES,
    VERSION,
    Frame,
    Free,
    Op,
    ReplayFrames,
    ReplayRequest,
    SnapshotChunk,
    Stored,
    decode_answer,
    decode_frame,
    encode,
)

MAX_BYTES = 1024 * 1024
State = list[Op]


@pytest.fixture
def state() -> State:
    """The ops of which a snapshot of the source is made."""
    return [Free(1)]


@pytest.fixture
def new_source(state: State) -> Callable[..., FeedSource]:
    """Makes sources with that state."""

    def make(**limits: Any) -> FeedSource:  # FeedSource's own arguments
        return FeedSource(1000, lambda _now: list(state), **limits)

    return make


@pytest.fixture
def source(new_source: Callable[..., FeedSource]) -> FeedSource:
    """A source with the default limits."""
    return new_source()


def ask(from_seq: int, *, incarnation: int = 1000, snapshot_id: int = 0, chunk: int = 0) -> ReplayRequest:
    """A reader's request."""
    return ReplayRequest(VERSION, 0, incarnation, from_seq, snapshot_id, chunk)


def frames(data: bytes) -> list[int]:
    """The numbers of the frames in an answer."""
    answer = decode_answer(data)
    assert isinstance(answer, ReplayFrames)
    return [decode_frame(frame).seq for frame in answer.frames]


def chunk_of(data: bytes) -> SnapshotChunk:
    """The chunk in an answer."""
    answer = decode_answer(data)
    assert isinstance(answer, SnapshotChunk)
    return answer


def test_frames_are_numbered_from_one(source: FeedSource) -> None:
    """1, 2, 3…; an empty list of ops makes no frame."""
    sent = [decode_frame(frame) for _ in range(3) for frame in source.append([Free(1)])]

    assert [] == source.append([])
    assert [(1000, 1), (1000, 2), (1000, 3)] == [(frame.incarnation, frame.seq) for frame in sent]


def test_large_lists_of_ops_are_cut(source: FeedSource) -> None:
    """Ops that exceed a frame are sent as several, each below 512 KiB, in order."""
    ops: list[Op] = [Stored(0, None, pack_hashes(range(n, n + 4096))) for n in range(0, 4096 * 40, 4096)]

    sent = source.append(ops)

    assert len(sent) > 2
    assert max(map(len, sent)) < MAX_FRAME_BYTES
    assert ops == [op for frame in sent for op in decode_frame(frame).ops or []]


@pytest.mark.parametrize("spare_bytes", [-1, 0, 1, 2])
def test_ops_that_just_fit_are_one_frame(source: FeedSource, spare_bytes: int) -> None:
    """The limit counts the whole frame, its envelope included."""
    room = MAX_FRAME_BYTES // 2
    around = len(encode(Frame(VERSION, 1000, 1, [Free(1), Stored(0, None, bytes(room))]))) - room

    sent = source.append([Free(1), Stored(0, None, bytes(MAX_FRAME_BYTES - around - spare_bytes))])

    assert (2 if spare_bytes < 0 else 1) == len(sent)
    assert max(map(len, sent)) <= MAX_FRAME_BYTES


def test_replay_from_the_ring(source: FeedSource) -> None:
    """A reader gets the missing frames that the ring has; a reader that misses none gets none."""
    for _ in range(5):
        source.append([Free(1)])

    assert [3, 4, 5] == frames(source.answer(ask(3), MAX_BYTES, 0.0))
    assert [1, 2, 3, 4, 5] == frames(source.answer(ask(1), MAX_BYTES, 0.0))
    assert [] == frames(source.answer(ask(6), MAX_BYTES, 0.0))


@pytest.mark.parametrize("request_", [ask(0), ask(2), ask(9), ask(-1), ask(4, incarnation=999)])
def test_snapshot_where_the_ring_does_not_help(
    new_source: Callable[..., FeedSource], request_: ReplayRequest
) -> None:
    """A question for a snapshot, too far back, ahead of the source, or of another incarnation."""
    source = new_source(ring_frames=2)
    for _ in range(5):
        source.append([Free(1)])

    chunk = chunk_of(source.answer(request_, MAX_BYTES, 0.0))

    assert (5, 0, 1, [Free(1)], 1000) == (
        chunk.as_of_seq, chunk.chunk, chunk.chunks, chunk.ops, chunk.incarnation
    )  # fmt: skip


def test_ring_is_bounded_by_bytes(new_source: Callable[..., FeedSource]) -> None:
    """Big frames leave the ring early; the last one always stays."""
    source = new_source(ring_bytes=1000)
    for _ in range(10):
        source.append([Stored(0, None, bytes(400))])
    assert [9, 10] == frames(source.answer(ask(9), MAX_BYTES, 0.0))
    chunk_of(source.answer(ask(8), MAX_BYTES, 0.0))

    source.append([Stored(0, None, bytes(4000))])
    assert [11] == frames(source.answer(ask(11), MAX_BYTES, 0.0))
    for _ in range(2):
        source.append([Free(1)])
    assert [12, 13] == frames(source.answer(ask(12), MAX_BYTES, 0.0))


def test_replay_stays_below_a_message(source: FeedSource) -> None:
    """As many frames as fit, and at least one: else the reader would ask without end."""
    for _ in range(50):
        source.append([Stored(0, None, bytes(800))])

    answer = source.answer(ask(1), 5000, 0.0)

    assert len(answer) <= 5000
    assert [1, 2, 3, 4, 5, 6] == frames(answer)
    assert [7] == frames(source.answer(ask(7), 100, 0.0))


def test_snapshot_comes_in_chunks(source: FeedSource, state: State) -> None:
    """Each chunk is below the limit; together they are the state as of one frame."""
    state[:] = [Stored(0, None, pack_hashes([n, n + 1])) for n in range(200)]
    source.append([Free(1)])
    first = chunk_of(source.answer(ask(0), 1000, 0.0))
    state.clear()
    source.append([Free(2)])

    data = [
        source.answer(ask(0, snapshot_id=first.snapshot_id, chunk=n), 1000, 1.0) for n in range(first.chunks)
    ]

    assert max(map(len, data)) <= 1000
    chunks = [chunk_of(chunk) for chunk in data]
    assert list(range(first.chunks)) == [chunk.chunk for chunk in chunks]
    assert {1} == {chunk.as_of_seq for chunk in chunks}
    assert 200 == sum(len(chunk.ops) for chunk in chunks)


def test_snapshot_of_nothing(source: FeedSource, state: State) -> None:
    """A source that holds nothing has a snapshot of one empty chunk."""
    state.clear()

    chunk = chunk_of(source.answer(ask(0), MAX_BYTES, 0.0))

    assert (0, 1, []) == (chunk.as_of_seq, chunk.chunks, chunk.ops)


def test_snapshot_is_shared_and_forgotten(source: FeedSource) -> None:
    """Questions within 10 s get the same snapshot, later ones a new one."""
    first = chunk_of(source.answer(ask(0), MAX_BYTES, 0.0))
    again = chunk_of(source.answer(ask(0), MAX_BYTES, SNAPSHOT_KEPT_S))
    later = chunk_of(source.answer(ask(0), MAX_BYTES, SNAPSHOT_KEPT_S + 0.1))

    assert first.snapshot_id == again.snapshot_id != later.snapshot_id


def test_snapshot_is_shared_only_while_the_ring_leads_on(new_source: Callable[..., FeedSource]) -> None:
    """A snapshot is not shared when the frame after it has left the ring."""
    source = new_source(ring_frames=2)
    first = chunk_of(source.answer(ask(0), MAX_BYTES, 0.0))
    source.append([Free(1)])
    source.append([Free(1)])
    assert first.snapshot_id == chunk_of(source.answer(ask(0), MAX_BYTES, 0.0)).snapshot_id

    source.append([Free(1)])

    assert 3 == chunk_of(source.answer(ask(0), MAX_BYTES, 0.0)).as_of_seq


def test_chunk_of_a_forgotten_snapshot(source: FeedSource) -> None:
    """A question for a chunk of a dropped snapshot gets the first chunk of a new one."""
    for snapshot_id, chunk in ((99, 3), (1, 7), (1, -1)):
        found = chunk_of(source.answer(ask(0, snapshot_id=snapshot_id, chunk=chunk), MAX_BYTES, 0.0))
        assert 0 == found.chunk


def test_snapshots_are_shared_for_a_time(new_source: Callable[..., FeedSource], state: State) -> None:
    """`shared_s` after it was taken a snapshot is for its own readers only, who ask for further chunks."""
    source = new_source(shared_s=1.0)
    first = chunk_of(source.answer(ask(0), MAX_BYTES, 10.0))
    state.append(Free(2))

    again = [chunk_of(source.answer(ask(0), MAX_BYTES, now)) for now in (11.0, 11.1)]
    asked = source.answer(ask(0, snapshot_id=first.snapshot_id), MAX_BYTES, 12.0)

    assert [1, 2] == [len(chunk.ops) for chunk in again]
    assert first == chunk_of(asked)
