"""The host tier: blocks evicted from the device, kept in CPU memory.

Invariant: the parent of a block kept here is here or on the device. A block comes (again) when its last
copy leaves the device, so leaves come first, and the oldest are the first to go.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from kvrouter.mocker.events import CPU, BlockStored, KvEvent, removed


class HostTier:
    """At most `capacity_blocks` distinct hashes; 0 keeps none."""

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self._kept: OrderedDict[int, None] = OrderedDict()

    def keep(self, stored: BlockStored) -> Iterator[KvEvent]:
        """Take in one block leaving the device; yields what happened here."""
        (engine_hash,) = stored.block_hashes
        if engine_hash in self._kept:
            self._kept.move_to_end(engine_hash)  # a copy stayed here when it was last brought back
            return
        if len(self._kept) == self.capacity_blocks:
            yield removed(self._kept.popitem(last=False)[0], CPU)
        self._kept[engine_hash] = None
        yield stored

    def touch(self, engine_hashes: Iterable[int]) -> None:
        """Blocks hit again, deepest first, become the youngest."""
        for engine_hash in engine_hashes:
            self._kept.move_to_end(engine_hash)

    def clear(self) -> None:
        """Forget everything; the caller says so in an event."""
        self._kept.clear()

    def __contains__(self, engine_hash: int) -> bool:
        return engine_hash in self._kept

    def __iter__(self) -> Iterator[int]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)
