"""The blocks of one rank as plain Python sets, changed by KV ops.

    sets[0]  device                narrower sets are contained in wider ones; a wider set exists
    sets[1]  device ∪ host         only once an op has named its tier
    sets[2]  device ∪ host ∪ disk

and the resume points of an engine with several KV groups (docs/concepts/design.md).

It shares no code with a replica's index, so that a bug there cannot hide itself here.
"""

from __future__ import annotations

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
from kvrouter.observe.verify.comparison import RESUME_POINTS, Content

_MASK64 = (1 << 64) - 1


class TierSets:
    """Sequence hashes per tier set. Invariant: `_sums` are those of the sets.

    `resumable`: the resume points; None: the engine resumes behind each block.
    """

    def __init__(self) -> None:
        self._sets: list[set[int]] = [set()]
        self._sums = [0]
        self.resumable: set[int] | None = None

    def of(self, tier: int) -> set[int]:
        """The blocks in a tier or a narrower one. Not a copy."""
        return self._sets[self._index(tier)]

    def copy(self) -> TierSets:
        """A copy that later ops do not change."""
        copied = TierSets()
        copied._sets, copied._sums = [set(each) for each in self._sets], list(self._sums)
        copied.resumable = None if self.resumable is None else set(self.resumable)
        return copied

    def apply(self, op: Op) -> bool:
        """Apply a KV op. Returns False for a check that contradicts the sets."""
        match op:
            case Stored():
                self._store(op)
            case Removed():
                self._remove(op)
            case Cleared():
                self._sets, self._sums = [set() for _ in self._sets], [0] * len(self._sums)
                self.resumable = None
            case Resumable():
                self.resumable = self.resumable or set()
                self.resumable.update(hashes_of(op.hashes))
            case NotResumable() if self.resumable is not None:
                self.resumable.difference_update(hashes_of(op.hashes))
            case CheckResumable():
                return self.resumable is not None and (op.count, op.digest) == _digest(self.resumable)
            case Check():
                return (op.count, op.digest) == (len(self.of(op.tier)), self._digest(op.tier))
        return True

    def content(self, tiers: int = 1) -> Content:
        """Count and digest of at least this many tier sets, and of resume points, in the form of /workers."""
        held = tuple(
            (TIERS[tier], len(self.of(tier)), f"{self._digest(tier):016x}")
            for tier in range(min(max(tiers, len(self._sets)), len(TIERS)))
        )
        if self.resumable is None:
            return held
        count, digest = _digest(self.resumable)
        return (*held, (RESUME_POINTS, count, f"{digest:016x}"))

    def _store(self, op: Stored) -> None:
        while len(self._sets) <= op.tier:
            self._sets.append(set(self._sets[-1]))
            self._sums.append(self._sums[-1])
        for tier, each in enumerate(self._sets[op.tier :], op.tier):
            self._sums[tier] += sum(set(hashes_of(op.hashes)) - each)  # an op may repeat blocks
            each.update(hashes_of(op.hashes))

    def _remove(self, op: Removed) -> None:
        for tier, each in enumerate(self._sets[: op.tier + 1]):
            self._sums[tier] -= sum(each.intersection(hashes_of(op.hashes)))
            each.difference_update(hashes_of(op.hashes))

    def _digest(self, tier: int) -> int:
        return self._sums[self._index(tier)] & _MASK64

    def _index(self, tier: int) -> int:
        return min(tier, len(self._sets) - 1)


def _digest(hashes: set[int]) -> tuple[int, int]:
    return len(hashes), sum(hashes) & _MASK64
