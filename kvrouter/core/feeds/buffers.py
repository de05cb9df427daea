"""What a recovering reader keeps until it may apply it: live frames, and the ops of a snapshot."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from kvrouter.core.wire.ops import (
    AddRequest,
    ApproxEntry,
    Decoded,
    NotResumable,
    Op,
    Removed,
    Resumable,
    SentText,
    SnapshotChunk,
    Stored,
)

# Four times what a source keeps in its ring (source.RING_BYTES). The second bound is for many feeds that
# recover at the same time, as after a lost connection.
HELD_BYTES = 32 * 1024 * 1024
HELD_BYTES_OF_ALL = 256 * 1024 * 1024

# Costs are in hashes stored (0.35 us each). A booked hash costs as much as five of them, or seven if it was
# booked before (1.4 to 2.5 us); 256 characters of new text as much as one (36,000 characters: 28 us).
BOOKED_HASH_COST = 5
_CHARS_PER_HASH = 256

# `FeedReader.work` stops between two ops, so one long Stored must not take longer than a slice may.
OP_HASHES = 1024


class _HeldFrame(NamedTuple):
    """Ordered field by field; `arrival` is unique, so the heap never compares two frames."""

    incarnation: int
    seq: int
    arrival: int
    frame: Decoded
    question: int
    size: int


@dataclass(slots=True)
class HeldBudget:
    """What all feeds of a replica hold together."""

    used_bytes: int = 0
    most_bytes: int = HELD_BYTES_OF_ALL


class HeldFrames:
    """Live frames of one feed, as a bounded heap: the lowest number of the oldest incarnation comes first.

    Ordered by number and not by arrival, because a damaged frame with a number far ahead must not block the
    frames that follow. `question` is the number of questions asked when a frame arrived.

    Invariant: `_bytes` is the sum of the held frames' sizes, and a part of the budget's `used_bytes`.
    """

    def __init__(self, budget: HeldBudget) -> None:
        self._budget = budget
        self._frames: list[_HeldFrame] = []
        self._arrivals = 0
        self._bytes = 0

    def __bool__(self) -> bool:
        return bool(self._frames)

    @property
    def first(self) -> Decoded:
        return self._frames[0].frame

    def hold(self, frame: Decoded, size: int, question: int) -> bool:
        """Keep a frame of `size` bytes. False: there was no room, and it is not kept."""
        if self._bytes + size > HELD_BYTES or self._budget.used_bytes + size > self._budget.most_bytes:
            return False
        self._arrivals += 1
        held = _HeldFrame(frame.incarnation, frame.seq, self._arrivals, frame, question, size)
        heapq.heappush(self._frames, held)
        self._take_bytes(size)
        return True

    def pop(self) -> Decoded:
        held = heapq.heappop(self._frames)
        self._take_bytes(-held.size)
        return held.frame

    def drop_unsent(self, seq: int, question: int) -> int:
        """Drop frames above `seq`, the last that the source has sent; returns how many were dropped.

        A frame that arrived after this question may be newer than the source's statement, so it stays.
        """
        kept = [held for held in self._frames if held.seq <= seq or held.question >= question]
        dropped = len(self._frames) - len(kept)
        if dropped:
            heapq.heapify(kept)
            self._frames = kept
            self._take_bytes(sum(held.size for held in kept) - self._bytes)
        return dropped

    def clear(self) -> None:
        self._frames.clear()
        self._take_bytes(-self._bytes)

    def _take_bytes(self, size: int) -> None:
        self._bytes += size
        self._budget.used_bytes += size


@dataclass(slots=True)
class Loading:
    """A snapshot that arrives in chunks, as ops that are not loaded yet."""

    id: int
    as_of_seq: int
    incarnation: int
    chunks: int
    next_chunk: int = 0
    ops: deque[Op] = field(default_factory=deque)

    @classmethod
    def begin(cls, chunk: SnapshotChunk) -> Loading:
        """For the snapshot of this first chunk, which `take` has yet to take."""
        return cls(
            id=chunk.snapshot_id,
            as_of_seq=chunk.as_of_seq,
            incarnation=chunk.incarnation,
            chunks=chunk.chunks,
        )

    @property
    def is_complete(self) -> bool:
        """Whether all chunks have arrived."""
        return self.next_chunk == self.chunks

    @property
    def has_work(self) -> bool:
        """Whether there are ops to load, or the last of them is loaded."""
        return bool(self.ops) or self.is_complete

    def is_next(self, chunk: SnapshotChunk) -> bool:
        arrived = (chunk.incarnation, chunk.snapshot_id, chunk.chunk)
        return arrived == (self.incarnation, self.id, self.next_chunk)

    def take(self, chunk: SnapshotChunk) -> None:
        for op in chunk.ops:
            self.ops.extend(_parts(op))
        self.next_chunk += 1


def _parts(op: Op) -> Iterator[Op]:
    """The op in parts that load in much less than 1 ms. A booking stays whole: half of one means nothing."""
    size = OP_HASHES * 8
    if not isinstance(op, Stored | Resumable) or len(op.hashes) <= size:
        yield op
        return
    for start in range(0, len(op.hashes), size):
        if isinstance(op, Resumable):
            yield Resumable(op.hashes[start : start + size])
            continue
        # the parent of a later part is the last hash of the part before it, so it need not be checked again
        parent = None if start else op.parent
        yield Stored(op.tier, parent, op.hashes[start : start + size])


def cost(op: Op) -> int:
    """What loading an op costs, in hashes stored."""
    match op:
        case Stored() | Removed() | Resumable() | NotResumable() | ApproxEntry():
            return 1 + len(op.hashes) // 8
        case SentText():
            return BOOKED_HASH_COST + len(op.text) // _CHARS_PER_HASH
        case AddRequest():
            return BOOKED_HASH_COST * (1 + len(op.hashes) // 8)
        case _:
            return BOOKED_HASH_COST
