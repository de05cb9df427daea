"""The flat table under the block index and the bookings: sequence hash → set of slots.

    rows[h & 1023]: { h: 0b01101, … }      bit s set  ⇔  slot s holds h
    labels:         [owner of slot 0, …]   look-ups return owners; they ignore a slot without one

A sequence hash names its whole prefix, so no tree is needed: as long as each slot's set is prefix-closed, the
depth at which a slot stops holding a request's chain is found by bisection. The rows are in 1,024 shards, so
that growing, and sweeping a dead slot, are small steps.

This file is the specification; native/table.pyx is the same in C, with the same few calls, each for a whole
event or request. Hashes come as array("Q"), packed little-endian u64, or any sequence of numbers.

A slot may have a limit: another slot, without an owner, whose set need not be prefix-closed. The depth of the
limited slot is then that of the deepest hash, among those above its end, that its limit holds.

Invariants: no row has an empty mask; no two slots have the same limit.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Any

from kvrouter.core.native import versions
from kvrouter.core.wire.hashes import Hashes, hashes_of

_SHARDS = 1024
_SHARD_MASK = _SHARDS - 1
_ROW_BYTES = sys.getsizeof(1 << 63) + sys.getsizeof(1)  # a hash and a mask; the dict adds its entry
_MASK64 = (1 << 64) - 1
_MAX_SHARED_MASKS = 4096  # when the cache is full it is emptied; rows keep the objects they have


def new_table(placement_secret: int = 0) -> FlatTable:
    """A table of the version in use.

    `placement_secret` (64 bits) decides where the native version places hashes. Clients choose prompts and so
    hashes; without a secret they could crowd them into a few places and slow it down. It changes no answer.
    """
    native = versions.chosen.table
    return FlatTable(placement_secret) if native is None else native.FlatTable(placement_secret)


class FlatTable:
    """Sets of slots by hash. Slots are small numbers that the caller assigns (`Slots`).

    `placement_secret` is unused here, where dicts place hashes.
    """

    shards = _SHARDS

    def __init__(self, placement_secret: int = 0) -> None:
        self._shards: list[dict[int, int]] = [{} for _ in range(_SHARDS)]
        self._labels: list[Any] = []
        self._visible = 0
        self._limits: dict[int, int] = {}  # slot → its limit
        self._limited: dict[int, int] = {}  # the same from the other side
        self._limited_mask = 0
        # Masks of slots that ended together, with the mask of their limits.
        self._limit_masks: dict[int, int] = {}
        # Masks used last. A mask of 1,000 slots takes 160 bytes, so rows with equal masks share one object.
        self._masks: dict[int, int] = {}
        self.stored = self.removed = 0
        """Hashes that C has added, and discarded, for frames that it took (core/feeds/position.py)."""

    def __len__(self) -> int:
        """Distinct hashes held by any slot, including dead slots that are not yet swept."""
        return sum(map(len, self._shards))

    def slot_set(self, slot: int) -> SlotSet:
        """A counted view of the slot, which must be empty."""
        return SlotSet(self, slot)

    def counted_set(self, slot: int) -> CountedSet:
        """The same, for hashes that are added several times."""
        return CountedSet(self, slot)

    def label(self, slot: int, owner: Any) -> None:
        """Look-ups return `owner` for the slot. None: they ignore the slot."""
        self._labels.extend([None] * (slot + 1 - len(self._labels)))
        self._labels[slot] = owner
        self._visible = self._visible & ~(1 << slot) if owner is None else self._visible | 1 << slot

    def limit(self, slot: int, limit: int | None) -> None:
        """Look-ups go up from the end of `slot` to a hash that the slot `limit` holds; None: no limit."""
        self._limited.pop(self._limits.pop(slot, -1), None)
        self._limited_mask &= ~(1 << slot)
        self._limit_masks.clear()
        if limit is not None:
            self._limits[slot], self._limited[limit] = limit, slot
            self._limited_mask |= 1 << slot

    def add(self, slot: int, hashes: Hashes) -> tuple[int, int]:
        """Let `slot` hold the hashes; returns how many were new to it, and their sum mod 2^64."""
        shards, bit = self._shards, 1 << slot
        added = total = new = 0
        old = -1
        for hash_ in hashes_of(hashes):
            shard = shards[hash_ & _SHARD_MASK]
            mask = shard.get(hash_, 0)
            if mask is not old:  # neighbours on a chain mostly share one mask object: compute the next once
                if mask & bit:
                    continue
                old, new = mask, self._shared(mask | bit)
            shard[hash_] = new
            added += 1
            total += hash_
        return added, total & _MASK64

    def discard(self, slot: int, hashes: Hashes) -> tuple[int, int]:
        """Let `slot` no longer hold the hashes; returns how many it held, and their sum mod 2^64."""
        shards, bit = self._shards, 1 << slot
        removed = total = new = 0
        old = -1
        for hash_ in hashes_of(hashes):
            shard = shards[hash_ & _SHARD_MASK]
            mask = shard.get(hash_, 0)
            if mask is not old:
                if not mask & bit:
                    continue
                old, new = mask, self._shared(mask ^ bit)
            if new:
                shard[hash_] = new
            else:
                del shard[hash_]
            removed += 1
            total += hash_
        return removed, total & _MASK64

    def accepted(self, slot: int, hashes: Hashes, room: int, others: int, max_holders: int) -> int:
        """How many of the hashes, from the first on, have room in `slot`.

        `room`: rows that may be added. A hash has no room if `max_holders` (0: no bound) of the slots in
        `others` (a mask) hold it already.
        """
        shards, bit, listed = self._shards, 1 << slot, hashes_of(hashes)
        for place, hash_ in enumerate(listed):
            mask = shards[hash_ & _SHARD_MASK].get(hash_, 0)
            if mask & bit:
                continue
            if not mask:
                if room <= 0:
                    return place
                room -= 1
            elif max_holders and (mask & others).bit_count() >= max_holders:
                return place
        return len(listed)

    def size_bytes(self) -> int:
        """About the memory of the rows: the dicts, and a hash and a mask as Python numbers for each."""
        return sum(map(sys.getsizeof, self._shards)) + _ROW_BYTES * len(self)

    def holds(self, slot: int, hash_: int) -> bool:
        """Whether `slot` holds the hash."""
        return bool(self._shards[hash_ & _SHARD_MASK].get(hash_, 0) >> slot & 1)

    def depths(self, hashes: Hashes, most: int = sys.maxsize) -> dict[Any, int]:
        """How deep each owner's slot holds the chain; owners of depth 0 are absent.

        Exact if the set of each slot with an owner is prefix-closed. The next depth at which a set ends is
        found by galloping from the one before, and then by bisection. `most`: limited slots go up from this
        depth if they end deeper.
        """
        found: dict[Any, int] = {}
        ended: list[tuple[int, int]] = []  # depths, and the limited slots that end there
        listed = hashes  # a list is not converted: few of its hashes are looked at
        if type(hashes) is not list or not (hashes and isinstance(hashes[0], int)):
            listed = hashes_of(hashes)
        if not listed:
            return found
        shards, count = self._shards, len(listed)
        hash_, last = listed[0], listed[-1]
        alive = shards[hash_ & _SHARD_MASK].get(hash_, 0) & self._visible
        # the last hash first: often a target holds the whole prompt, and then this is the only look-up
        deepest = shards[last & _SHARD_MASK].get(last, 0) if alive else 0
        low = 0  # every slot in `alive` holds listed[low]
        while alive:
            survivors = deepest & alive
            if survivors == alive:
                self._end(found, ended, alive, count)
                break
            high = count - 1  # not all of `alive` hold listed[high]
            step = (high - low) // (4 * alive.bit_count()) or 1  # the more there are, the sooner one ends
            while low + step < high:
                hash_ = listed[low + step]
                held = shards[hash_ & _SHARD_MASK].get(hash_, 0) & alive
                if held != alive:
                    high, survivors = low + step, held
                    break
                low, step = low + step, step * 2
            while high - low > 1:
                middle = (low + high) >> 1
                hash_ = listed[middle]
                held = shards[hash_ & _SHARD_MASK].get(hash_, 0) & alive
                if held == alive:
                    low = middle
                else:
                    high, survivors = middle, held
            self._end(found, ended, alive ^ survivors, high)
            alive, low = survivors, high
        if ended:
            self._go_up(found, listed, ended, most)
        return found

    def depths_of(self, hashes: Hashes, slots: array[int], most: int = sys.maxsize) -> array[int]:
        """The depth of each of these slots, in their order; 0 where there is no owner."""
        found, owners = self.depths(hashes, most), dict(enumerate(self._labels))
        return array("q", [found.get(owners.get(slot), 0) for slot in slots])

    def _end(self, found: dict[Any, int], ended: list[tuple[int, int]], slots: int, depth: int) -> None:
        labels = self._labels
        limited = slots & self._limited_mask
        if limited:
            ended.append((depth, limited))
            slots ^= limited
        for slot in bits(slots):
            found[labels[slot]] = depth

    def _go_up(
        self, found: dict[Any, int], listed: Sequence[int], ended: list[tuple[int, int]], most: int
    ) -> None:
        """Let every limited slot go up from its end, until its limit holds the hash there.

        All together, so that a row is looked at once. `ended` is in the order of the depths.
        """
        shards, labels, limited = self._shards, self._labels, self._limited
        waiting = depth = 0  # limits of the slots that have ended at this depth or below it
        end, slots = ended.pop()
        while slots or waiting:
            if not waiting:
                depth = min(end, most)
            while slots and end >= depth:
                waiting |= self._limit_masks.get(slots) or self._limits_of(slots)
                end, slots = ended.pop() if ended else (0, 0)
            if depth <= 0:
                return
            hash_ = listed[depth - 1]
            held = shards[hash_ & _SHARD_MASK].get(hash_, 0) & waiting
            if held:
                waiting ^= held
                if held & held - 1:
                    found.update(dict.fromkeys([labels[limited[limit]] for limit in bits(held)], depth))
                else:
                    found[labels[limited[held.bit_length() - 1]]] = depth
            depth -= 1

    def _limits_of(self, slots: int) -> int:
        """The limits of these slots. Kept: slots that end together often do so again."""
        if len(self._limit_masks) >= _MAX_SHARED_MASKS:
            self._limit_masks.clear()
        limits = self._limit_masks[slots] = sum(1 << self._limits[slot] for slot in bits(slots))
        return limits

    def copy_slot(self, source: int, copy: int) -> None:
        """Let `copy`, which is empty, hold exactly what `source` holds. Walks the whole table."""
        source_bit, copy_bit = 1 << source, 1 << copy
        for shard in self._shards:
            for hash_, mask in shard.items():
                if mask & source_bit:
                    shard[hash_] = self._shared(mask | copy_bit)

    def sweep(self, slots: Sequence[int], shard_number: int) -> None:
        """Remove `slots` from one shard."""
        # set(): a slot that is named twice must not carry into the next bit
        shard, gone = self._shards[shard_number], sum(1 << slot for slot in set(slots))
        for hash_ in [hash_ for hash_, mask in shard.items() if mask & gone]:
            mask = shard[hash_] & ~gone
            if mask:
                shard[hash_] = self._shared(mask)
            else:
                del shard[hash_]

    def held(self, slot: int, shard_number: int) -> list[int]:
        """The hashes in one shard that `slot` holds, in no order."""
        return [hash_ for hash_, mask in self._shards[shard_number].items() if mask >> slot & 1]

    def check(self) -> None:
        """Raise if the invariant is broken. Tests call this after every step."""
        if {limit: slot for slot, limit in self._limits.items()} != self._limited:
            raise AssertionError(f"two slots have the same limit: {self._limits}")
        for number, shard in enumerate(self._shards):
            for hash_, mask in shard.items():
                if mask <= 0 or hash_ & _SHARD_MASK != number:
                    raise AssertionError(f"row {hash_} in shard {number} has mask {mask}")

    def _shared(self, mask: int) -> int:
        """The equal object that other rows have, if there is one."""
        if len(self._masks) >= _MAX_SHARED_MASKS:
            self._masks.clear()
        return self._masks.setdefault(mask, mask)


class SlotSet:
    """One slot's hashes, with their number and their sum mod 2^64."""

    def __init__(self, table: FlatTable, slot: int) -> None:
        self._table = table
        self.slot = slot
        self.count = 0
        self.digest = 0
        self.is_plain = False
        """Whether it is all that its target holds, in an index without bounds."""

    def add(self, hashes: Hashes) -> int:
        """Returns how many hashes were new."""
        added, total = self._table.add(self.slot, hashes)
        self.count += added
        self.digest = (self.digest + total) & _MASK64
        return added

    def discard(self, hashes: Hashes) -> int:
        """Returns how many of the hashes were held."""
        removed, total = self._table.discard(self.slot, hashes)
        self.count -= removed
        self.digest = (self.digest - total) & _MASK64
        return removed


class CountedSet:
    """One slot's hashes with reference counts. The table has each hash once."""

    def __init__(self, table: FlatTable, slot: int) -> None:
        self._table = table
        self.slot = slot
        self._counts: dict[int, int] = {}

    @property
    def count(self) -> int:
        """The number of different hashes."""
        return len(self._counts)

    def add(self, hashes: Hashes) -> None:
        """Add one reference to each."""
        counts, listed = self._counts, hashes_of(hashes)
        first = [hash_ for hash_ in listed if hash_ not in counts]
        for hash_ in listed:
            counts[hash_] = counts.get(hash_, 0) + 1
        self._table.add(self.slot, first)

    def discard(self, hashes: Hashes) -> None:
        """Remove one reference from each. Raises KeyError for a hash without one."""
        counts, last = self._counts, []
        for hash_ in hashes_of(hashes):
            count = counts[hash_]
            if count == 1:
                del counts[hash_]
                last.append(hash_)
            else:
                counts[hash_] = count - 1
        self._table.discard(self.slot, last)

    def counts(self) -> dict[int, int]:
        """The references of each hash. For checks."""
        return dict(self._counts)


class Slots:
    """Assigns slot numbers. A dead slot is swept out of the table before its number is used again.

    A number is used again because masks have as many bits as the highest slot.

    Invariant: a slot is either in use, or dying (`_waiting`, then `_dying`), or free.
    """

    def __init__(self, table: FlatTable) -> None:
        self._table = table
        self.in_use = 0
        self._free: list[int] = []
        self._count = 0
        self._dying: list[int] = []
        self._waiting: list[int] = []
        self._next_shard = 0

    def take(self) -> int:
        """A slot that is empty and has no label."""
        self.in_use += 1
        if self._free:
            return self._free.pop()
        self._count += 1
        return self._count - 1

    def retire(self, slot: int) -> None:
        """Hide the slot from look-ups now, and let `sweep` empty it."""
        self.in_use -= 1
        self._table.label(slot, None)
        self._waiting.append(slot)

    def give_back(self, slot: int) -> None:
        """Return a slot that the caller knows to be empty."""
        self.in_use -= 1
        self._table.label(slot, None)
        self._free.append(slot)

    def sweep(self) -> bool:
        """Sweep one shard; returns whether there is more to do.

        All dying slots are swept in the same pass; slots that are retired during it wait for the next one.
        """
        if not self._dying:
            self._dying, self._waiting, self._next_shard = self._waiting, [], 0
            if not self._dying:
                return False
        self._table.sweep(self._dying, self._next_shard)
        self._next_shard += 1
        if self._next_shard == self._table.shards:
            self._free.extend(self._dying)
            self._dying = []
        return bool(self._dying or self._waiting)


def bits(mask: int) -> list[int]:
    """The numbers of the bits that are set in `mask`, lowest first."""
    numbers = []
    while mask:
        low = mask & -mask
        numbers.append(low.bit_length() - 1)
        mask ^= low
    return numbers
