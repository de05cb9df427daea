"""Which block to evict: small strategy objects over the blocks that nobody holds.

Both orders are leaf first, so that a cached block's parent is always cached too:
  * a request gives its blocks back tail first, so a child enters before its parent;
  * whoever uses a child has used its parent as well, so a parent is never rarer than its child.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable
from typing import Protocol


class EvictionOrder(Protocol):
    """The cached blocks that nobody holds, in the order in which to evict them."""

    def used(self, engine_hashes: Iterable[int]) -> None:
        """These hashes were hit or stored once more."""

    def forget(self, engine_hash: int) -> None:
        """No block holds this hash any longer."""

    def push(self, block: int, engine_hash: int) -> None:
        """The last holder gave `block` back."""

    def discard(self, block: int) -> None:
        """`block` is held again."""

    def pop(self) -> int:
        """The block to evict now."""

    def __len__(self) -> int: ...


class LruOrder:
    """Least recently given back first: vLLM's free queue."""

    def __init__(self) -> None:
        # an OrderedDict, because taking the first key of a dict walks over all deleted ones
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def used(self, engine_hashes: Iterable[int]) -> None:
        """Use is not counted, the order of return is enough."""

    def forget(self, engine_hash: int) -> None:
        """Nothing is kept per hash."""

    def push(self, block: int, engine_hash: int) -> None:
        """Last in, last out."""
        self._blocks[block] = None

    def discard(self, block: int) -> None:
        """Take `block` out, wherever it stands."""
        del self._blocks[block]

    def pop(self) -> int:
        """The block that has lain unused for longest."""
        return self._blocks.popitem(last=False)[0]

    def __len__(self) -> int:
        return len(self._blocks)


class LfuOrder:
    """Least frequently used hash first, the least recently given back among equals.

    Invariant: `_tick[block]` is the tick of the block's one live entry in the heap; entries with any
    other tick are stale and skipped.
    """

    def __init__(self) -> None:
        self._uses: dict[int, int] = {}
        self._tick: dict[int, int] = {}
        self._heap: list[tuple[int, int, int]] = []  # (uses, tick, block)
        self._ticks = 0

    def used(self, engine_hashes: Iterable[int]) -> None:
        """Count one use of each."""
        uses = self._uses
        for engine_hash in engine_hashes:
            uses[engine_hash] = uses.get(engine_hash, 0) + 1

    def forget(self, engine_hash: int) -> None:
        """A hash that returns starts from nothing."""
        self._uses.pop(engine_hash, None)

    def push(self, block: int, engine_hash: int) -> None:
        """Rank `block` by the uses of its hash so far."""
        self._ticks += 1
        self._tick[block] = self._ticks
        heapq.heappush(self._heap, (self._uses.get(engine_hash, 0), self._ticks, block))

    def discard(self, block: int) -> None:
        """Make the block's entry stale; compact when most are."""
        del self._tick[block]
        if len(self._heap) > 64 + 2 * len(self._tick):
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)

    def pop(self) -> int:
        """The rarest block."""
        while not self._is_live(entry := heapq.heappop(self._heap)):
            pass
        del self._tick[entry[2]]
        return entry[2]

    def _is_live(self, entry: tuple[int, int, int]) -> bool:
        return self._tick.get(entry[2]) == entry[1]

    def __len__(self) -> int:
        return len(self._tick)


ORDERS: dict[str, type[LruOrder] | type[LfuOrder]] = {"lru": LruOrder, "lfu": LfuOrder}
