"""The copy of a KV feed that a reader holds, checked after every single hash."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvrouter.core.wire.hashes import hashes_of
from kvrouter.core.wire.ops import (
    TIERS,
    Check,
    CheckResumable,
    Cleared,
    NotResumable,
    Op,
    Removed,
    Resumable,
    Stored,
)

_MASK64 = (1 << 64) - 1


class ClosedSets:
    """The nested tier sets of one rank. `apply` fails as soon as one of them has a hole.

    Like the router's index it has only the device set, until an op names a wider tier; and resume points only
    from the first op on that states some.
    """

    def __init__(self) -> None:
        self._sets: list[set[int]] = [set()]
        self.parents: dict[int, int | None] = {}
        self.points: set[int] | None = None

    @property
    def tiers(self) -> list[set[int]]:
        """All three sets. A set that does not exist equals the widest one that does."""
        return [self._sets[min(tier, len(self._sets) - 1)] for tier in range(len(TIERS))]

    def apply(self, ops: Iterable[Op]) -> ClosedSets:
        """Apply ops hash by hash."""
        for op in ops:
            match op:
                case Stored():
                    self._store(op)
                case Removed():
                    self._remove(op)
                case Cleared():
                    self._sets = [set() for _ in self._sets]
                    self.points = None
                case Resumable():
                    self.points = {*hashes_of(op.hashes)}.union(self.points or ())
                case NotResumable():
                    assert self.points is not None, "resume points that were never stated"
                    self.points -= {*hashes_of(op.hashes)}
                case CheckResumable():
                    assert self.points is not None, "a digest of resume points that were never stated"
                    assert (op.count, op.digest) == (len(self.points), sum(self.points) & _MASK64)
                case Check():
                    assert op.tier < len(self._sets), "a digest of a set that is not known"
                    held = self._sets[op.tier]
                    assert (op.count, op.digest) == (len(held), sum(held) & _MASK64)
                case _:
                    raise AssertionError(f"{op} in a KV feed")
        return self

    def overlap(self, chain: Sequence[int]) -> int:
        """How many leading blocks of the chain the engine can reuse from its device."""
        depth = next((n for n, one in enumerate(chain) if one not in self._sets[0]), len(chain))
        while depth and self.points is not None and chain[depth - 1] not in self.points:
            depth -= 1
        return depth

    def _store(self, op: Stored) -> None:
        parent = op.parent
        while len(self._sets) <= op.tier:
            self._sets.append(set(self._sets[-1]))
        for sequence in hashes_of(op.hashes):
            assert self.parents.setdefault(sequence, parent) == parent, "another parent than before"
            for held in self._sets[op.tier :]:
                assert parent is None or parent in held, "stored below a block that is not there"
                held.add(sequence)
            parent = sequence

    def _remove(self, op: Removed) -> None:
        for sequence in hashes_of(op.hashes):
            for held in self._sets[: op.tier + 1]:
                held.discard(sequence)
            for held in self._sets:
                assert sequence in held or not any(self.parents[child] == sequence for child in held), (
                    "removed before its children"
                )
