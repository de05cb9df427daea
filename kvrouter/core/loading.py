"""A snapshot on its way in: ops that have arrived, and what it costs to load one."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvrouter.core.events import AddRequest, ApproxEntry, Op, Removed, SnapshotChunk, Stored

BOOKED_HASH_COST = 4
"""Booking a hash costs about as much as storing four: it is counted as well as stored."""


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
        self.ops.extend(chunk.ops)
        self.next_chunk += 1


def cost(op: Op) -> int:
    """What loading an op costs, in hashes stored."""
    match op:
        case Stored() | Removed() | ApproxEntry():
            return 1 + len(op.hashes) // 8
        case AddRequest():
            return BOOKED_HASH_COST * (1 + len(op.hashes) // 8)
        case _:
            return BOOKED_HASH_COST
