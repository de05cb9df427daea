"""A snapshot on its way in: ops that have arrived, and what it costs to load one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvrouter.core.wire.ops import AddRequest, ApproxEntry, Op, Removed, SentText, SnapshotChunk, Stored

BOOKED_HASH_COST = 5
"""Booking a hash costs as much as storing five, or seven if it was booked before (1.4 to 2.5 us, 0.35 us)."""
_CHARS_PER_HASH = 256
"""Remembering so much new text costs as much as storing a hash (36,000 characters: 28 us)."""
OP_HASHES = 1024
"""A Stored with more is loaded in parts of so many."""


@dataclass(slots=True)
class Loading:
    """The chunks that have come so far, as ops not yet loaded."""

    id: int
    as_of_seq: int
    incarnation: int
    chunks: int
    next_chunk: int = 0
    ops: deque[Op] = field(default_factory=deque)

    @classmethod
    def begin(cls, chunk: SnapshotChunk) -> Loading:
        """With its first chunk still to be taken."""
        return cls(chunk.snapshot_id, chunk.as_of_seq, chunk.incarnation, chunk.chunks)

    @property
    def is_complete(self) -> bool:
        """Whether all chunks have come."""
        return self.next_chunk == self.chunks

    @property
    def has_work(self) -> bool:
        """Whether there is something to load, or nothing left to come."""
        return bool(self.ops) or self.is_complete

    def is_next(self, chunk: SnapshotChunk) -> bool:
        """Whether this chunk follows on what has come."""
        arrived = (chunk.incarnation, chunk.snapshot_id, chunk.chunk)
        return arrived == (self.incarnation, self.id, self.next_chunk)

    def take(self, chunk: SnapshotChunk) -> None:
        """The next chunk has come."""
        for op in chunk.ops:
            self.ops.extend(_parts(op))
        self.next_chunk += 1


def _parts(op: Op) -> Iterator[Op]:
    """The op in parts that load in much less than 1 ms; a booking is one part whatever its length."""
    size = OP_HASHES * 8
    if not isinstance(op, Stored) or len(op.hashes) <= size:
        yield op
        return
    for start in range(0, len(op.hashes), size):
        parent = None if start else op.parent  # of the later parts' first the parent was in the part before
        yield Stored(op.tier, parent, op.hashes[start : start + size])


def cost(op: Op) -> int:
    """What loading an op costs, in hashes stored."""
    match op:
        case Stored() | Removed() | ApproxEntry():
            return 1 + len(op.hashes) // 8
        case SentText():
            return BOOKED_HASH_COST + len(op.text) // _CHARS_PER_HASH
        case AddRequest():
            return BOOKED_HASH_COST * (1 + len(op.hashes) // 8)
        case _:
            return BOOKED_HASH_COST
