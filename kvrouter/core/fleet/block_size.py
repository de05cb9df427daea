"""The block size of a pool, whose engines may differ in theirs.

    targets' cards ──count──> wanted: the size of most targets ──for one lease──> size: of prompts' hashes

In a tie the present size stays. A replica that joins during a tie takes the size of the eldest replica that
serves the pool, so it agrees with the others. Without a present size, the target with the smallest
(started_at, worker_id) decides. Rounds are those of the leases (core/feeds/lease.py), so a replica that is
cut off changes nothing.

The cards of a fleet arrive one after another, so a new pool follows the wanted size at once, until one size
was wanted for a lease. Invariant: `size` is 0 only before the first target, and never changes if it is fixed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from kvrouter.core.wire.heartbeats import Card
from kvrouter.core.wire.ids import WorkerId

# Workers, feeds or states listed in one sentence.
NAMED_MOST = 5


class PoolBlockSize:
    """`fixed`: the operator's size (`--kv-cache-block-size`), which no card changes."""

    def __init__(self, fixed: int | None = None) -> None:
        self.size = fixed or 0
        self._is_fixed = fixed is not None
        self._is_settled = False
        self._targets: Counter[int] = Counter()
        self._eldest: dict[int, tuple[int, str]] = {}
        self._elder_size = 0
        self._wanted = 0
        self._rounds = 0  # for which `_wanted` has been the same

    def count(self, cards: Iterable[Card]) -> None:
        """Count the targets of the workers that take requests now."""
        self._targets.clear()
        self._eldest.clear()
        for card in cards:
            size, age = card.block_size, (card.started_at_us, card.worker_id)
            self._targets[size] += card.ranks
            self._eldest[size] = min(age, self._eldest.get(size, age))
        self._look()

    def next_round(self, lease_rounds: int, elder_size: int = 0) -> None:
        """A round has passed. `elder_size`: the size at the eldest replica; 0 at that replica itself."""
        self._elder_size = elder_size
        self._look()
        if not self._targets:
            return
        self._rounds += 1
        if self._rounds >= lease_rounds:
            self._is_settled = True
            self._change()

    def _look(self) -> None:
        wanted = self._most_wanted()
        if wanted != self._wanted:
            self._wanted, self._rounds = wanted, 0
        if not self._is_settled:
            self._change()

    def _change(self) -> None:
        if not self._is_fixed:
            self.size = self._wanted

    def _most_wanted(self) -> int:
        most = max(self._targets.values(), default=0)
        tied = [size for size, targets in self._targets.items() if targets == most]
        for present in (self._elder_size, self.size if self._is_settled else 0):
            if present in tied:
                return present
        return min(tied, key=lambda size: self._eldest[size], default=self.size)


def others_note(sizes: Mapping[WorkerId, int], size: int) -> str:
    """One sentence about all workers with another block size than the pool's; empty if there are none."""
    others = [f"{worker_id}: {other}" for worker_id, other in sizes.items() if other != size]
    if not others:
        return ""
    named = ", ".join([*others[:NAMED_MOST], *(["…"] if len(others) > NAMED_MOST else [])])
    return (
        f"{len(others)} of {len(sizes)} workers have another block size than {size}: "
        f"no overlap is predicted there ({named})"
    )
