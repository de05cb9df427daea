"""Which block to evict: orders of the cached blocks that no request holds.

Both orders evict leaves first, so that the parent of a cached block is always cached, too:
  * a request releases its blocks tail first, so a child enters the order before its parent;
  * a request that uses a child also uses its parent, so a parent is used at least as often as its child.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable
from typing import TypeAlias


class LruOrder:
    """The cached blocks that no request holds, the one released longest ago first: vLLM's free queue."""

    def __init__(self) -> None:
        # an OrderedDict, because taking the first key of a dict walks over all deleted ones
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def used(self, engine_hashes: Iterable[int]) -> None:
        """Nothing is counted: the order of release is enough."""

    def forget(self, engine_hash: int) -> None:
        """Nothing is stored per hash."""

    def push(self, block: int, engine_hash: int) -> None:
        """The last holder has released `block`."""
        self._blocks[block] = None

    def discard(self, block: int) -> None:
        """`block` is held again."""
        del self._blocks[block]

    def pop(self) -> int:
        """The block to evict now."""
        return self._blocks.popitem(last=False)[0]

    def __len__(self) -> int:
        return len(self._blocks)


class LfuOrder:
    """The least frequently used hash first; among equals the block released longest ago.

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
        """A hash that returns later starts at no uses."""
        self._uses.pop(engine_hash, None)

    def push(self, block: int, engine_hash: int) -> None:
        """Insert `block` by the uses of its hash so far."""
        self._ticks += 1
        self._tick[block] = self._ticks
        heapq.heappush(self._heap, (self._uses.get(engine_hash, 0), self._ticks, block))

    def discard(self, block: int) -> None:
        """Make the block's entry stale; compact when most are."""
        del self._tick[block]
        # a heap cannot remove an entry in the middle; compacting at twice the size costs O(1) per entry
        if len(self._heap) > 64 + 2 * len(self._tick):
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)

    def pop(self) -> int:
        while not self._is_live(entry := heapq.heappop(self._heap)):
            pass
        del self._tick[entry[2]]
        return entry[2]

    def _is_live(self, entry: tuple[int, int, int]) -> bool:
        return self._tick.get(entry[2]) == entry[1]

    def __len__(self) -> int:
        return len(self._tick)


EvictionOrder: TypeAlias = LruOrder | LfuOrder
ORDERS: dict[str, type[EvictionOrder]] = {"lru": LruOrder, "lfu": LfuOrder}
