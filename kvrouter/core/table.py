"""The flat table under the index and the active table: sequence hash → set of slots.

    rows[h & 255]:  { h: 0b01101, … }      bit s set  ⇔  slot s holds h

A sequence hash names its whole prefix, so no tree is needed: as long as each slot's set is
prefix-closed, the depth at which a slot stops holding a request's chain is found by bisection.
The rows are cut into shards so that sweeping a dead slot, and growing, happen in small steps.

Invariant: no row has an empty mask.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

SHARDS = 256
_ROW_BYTES = sys.getsizeof(1 << 63) + sys.getsizeof(1)
_SHARD_MASK = SHARDS - 1
_MASK64 = (1 << 64) - 1


class FlatTable:
    """Sets of slots by hash. Slots are small numbers that the caller hands out."""

    def __init__(self) -> None:
        self._shards: list[dict[int, int]] = [{} for _ in range(SHARDS)]

    def __len__(self) -> int:
        """Distinct hashes held by any slot, dead ones not yet swept included."""
        return sum(map(len, self._shards))

    def add(self, slot: int, hashes: Iterable[int]) -> tuple[int, int]:
        """Let `slot` hold the hashes; returns how many were new to it, and their sum mod 2^64."""
        shards, bit = self._shards, 1 << slot
        added = total = 0
        for hash_ in hashes:
            shard = shards[hash_ & _SHARD_MASK]
            mask = shard.get(hash_, 0)
            if not mask & bit:
                shard[hash_] = mask | bit
                added += 1
                total += hash_
        return added, total & _MASK64

    def discard(self, slot: int, hashes: Iterable[int]) -> tuple[int, int]:
        """Let `slot` no longer hold the hashes; returns how many it held, and their sum mod 2^64."""
        shards, bit = self._shards, 1 << slot
        removed = total = 0
        for hash_ in hashes:
            shard = shards[hash_ & _SHARD_MASK]
            mask = shard.get(hash_, 0)
            if mask & bit:
                if mask == bit:
                    del shard[hash_]
                else:
                    shard[hash_] = mask ^ bit
                removed += 1
                total += hash_
        return removed, total & _MASK64

    def accepted(self, slot: int, hashes: Sequence[int], room: int, others: int, max_holders: int) -> int:
        """How many of the hashes, from the first on, there is room for in `slot`.

        `room`: rows that may be added; no hash may be taken that `max_holders` (0: no bound) of the
        slots in `others` (a mask) hold already.
        """
        shards, bit = self._shards, 1 << slot
        for place, hash_ in enumerate(hashes):
            mask = shards[hash_ & _SHARD_MASK].get(hash_, 0)
            if mask & bit:
                continue
            if not mask:
                if room <= 0:
                    return place
                room -= 1
            elif max_holders and (mask & others).bit_count() >= max_holders:
                return place
        return len(hashes)

    def size_bytes(self) -> int:
        """What the rows take, about: the dicts, and a hash and a mask as Python numbers for each."""
        return sum(map(sys.getsizeof, self._shards)) + _ROW_BYTES * len(self)

    def holds(self, slot: int, hash_: int) -> bool:
        """Whether `slot` holds the hash."""
        return bool(self._shards[hash_ & _SHARD_MASK].get(hash_, 0) >> slot & 1)

    def depths(self, hashes: Sequence[int], slots: int) -> list[tuple[int, int]]:
        """How deep each of `slots` (a mask) holds the chain: pairs of (mask of slots, depth > 0).

        Exact if every slot's set is prefix-closed. Costs a bisection for each distinct depth.
        """
        found: list[tuple[int, int]] = []
        if not hashes:
            return found
        shards, last = self._shards, len(hashes) - 1
        alive = shards[hashes[0] & _SHARD_MASK].get(hashes[0], 0) & slots
        low = 0  # every slot in `alive` holds hashes[low]
        while alive:
            hash_ = hashes[last]
            survivors = shards[hash_ & _SHARD_MASK].get(hash_, 0) & alive
            if survivors == alive:
                found.append((alive, last + 1))
                break
            high = last  # not all of `alive` hold hashes[high]
            while high - low > 1:
                middle = (low + high) >> 1
                hash_ = hashes[middle]
                held = shards[hash_ & _SHARD_MASK].get(hash_, 0) & alive
                if held == alive:
                    low = middle
                else:
                    high, survivors = middle, held
            found.append((alive ^ survivors, high))
            alive, low = survivors, high
        return found

    def copy_slot(self, source: int, copy: int) -> None:
        """Let `copy` hold exactly what `source` holds; walks the whole table."""
        source_bit, copy_bit = 1 << source, 1 << copy
        for shard in self._shards:
            for hash_, mask in shard.items():
                if mask & source_bit:
                    shard[hash_] = mask | copy_bit

    def sweep(self, slots: int, shard_number: int) -> None:
        """Take `slots` (a mask) out of one shard."""
        shard, kept = self._shards[shard_number], ~slots
        for hash_ in [hash_ for hash_, mask in shard.items() if mask & slots]:
            mask = shard[hash_] & kept
            if mask:
                shard[hash_] = mask
            else:
                del shard[hash_]

    def check(self) -> None:
        """Raise if the invariant is broken. Tests call this after every step."""
        for number, shard in enumerate(self._shards):
            for hash_, mask in shard.items():
                if mask <= 0 or hash_ & _SHARD_MASK != number:
                    raise AssertionError(f"row {hash_} in shard {number} has mask {mask}")


class Slots:
    """Hands out slot numbers; a dead slot is swept out of the table before it is handed out again.

    Invariant: a slot is live, dying or free, never two of them.
    """

    def __init__(self, table: FlatTable) -> None:
        self._table = table
        self._free: list[int] = []
        self._count = 0
        self.live = 0
        """Mask of the slots in use."""
        self._dying = 0
        self._waiting = 0
        self._next_shard = 0

    def take(self) -> int:
        """A slot that holds nothing; it counts as live from now on."""
        slot = self._free.pop() if self._free else self._count
        if slot == self._count:
            self._count += 1
        self.live |= 1 << slot
        return slot

    def retire(self, slot: int) -> None:
        """The slot no longer counts; what it holds is swept by and by."""
        self.live &= ~(1 << slot)
        self._waiting |= 1 << slot

    def give_back(self, slot: int) -> None:
        """Return a slot that is known to hold nothing."""
        self.live &= ~(1 << slot)
        self._free.append(slot)

    def sweep(self) -> bool:
        """Sweep one shard; returns whether there is more to do."""
        if not self._dying:
            self._dying, self._waiting, self._next_shard = self._waiting, 0, 0
            if not self._dying:
                return False
        self._table.sweep(self._dying, self._next_shard)
        self._next_shard += 1
        if self._next_shard == SHARDS:
            self._free.extend(bits(self._dying))
            self._dying = 0
        return bool(self._dying or self._waiting)


def bits(mask: int) -> list[int]:
    """The numbers of the bits set in `mask`, lowest first."""
    numbers = []
    while mask:
        low = mask & -mask
        numbers.append(low.bit_length() - 1)
        mask ^= low
    return numbers
