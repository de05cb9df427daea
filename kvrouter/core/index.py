"""The block index: which target holds which sequence hash, in which tier (design §5).

    target A ── slots [device: 0]                     one slot of the flat table per tier set
    target B ── slots [device: 1, device∪host: 2]     the sets are nested: a wider one holds more

Overlap is exact because publishers keep every tier set prefix-closed after every single hash.

Invariants: a slot belongs to one target and tier set; a tier set's count and digest are those of
the hashes its slot holds; a narrower set is contained in every wider one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvrouter.core.blocks import unpack_hashes
from kvrouter.core.events import TIERS
from kvrouter.core.ids import Target
from kvrouter.core.table import FlatTable, Slots, bits

_MASK64 = (1 << 64) - 1

Hashes = Sequence[int] | bytes
"""Sequence hashes, as a list of int or as packed little-endian u64."""


@dataclass(slots=True)
class _TierSet:
    slot: int
    count: int = 0
    digest: int = 0


@dataclass(slots=True)
class Holding:
    """What one target holds: a tier set for the device and for each wider tier it has."""

    sets: list[_TierSet] = field(default_factory=list)


class BlockIndex:
    """`sequence hash -> targets`, for one pool.

    `tier` is "device", "host" or "disk". Hashes that are stored come parent first.
    """

    def __init__(self) -> None:
        self._table = FlatTable()
        self._slots = Slots(self._table)
        self._holdings: dict[Target, Holding] = {}
        self._owners: dict[int, tuple[Target, int]] = {}

    def __len__(self) -> int:
        """Distinct blocks held by any target."""
        return len(self._table)

    def targets(self) -> list[Target]:
        """Every target that has been stored to and not dropped."""
        return list(self._holdings)

    def store(self, target: Target, hashes: Hashes, tier: str = "device") -> None:
        """The target now holds the blocks in `tier`, and so in all wider tier sets."""
        holding = self._holdings.get(target)
        if holding is None:
            holding = self.begin_load(TIERS.index(tier) + 1)
            self.finish_load(target, holding)
        if len(holding.sets) <= TIERS.index(tier):
            self.widen_load(holding, TIERS.index(tier) + 1)
            self._own(target, holding)
        self.load(holding, hashes, tier)

    def remove(self, target: Target, hashes: Hashes, tier: str = "device") -> None:
        """The blocks left `tier` and all narrower ones; unknown ones are passed over."""
        holding = self._holdings.get(target)
        if holding is None:
            return
        listed = _listed(hashes)
        for tier_set in holding.sets[: TIERS.index(tier) + 1]:
            removed, total = self._table.discard(tier_set.slot, listed)
            tier_set.count -= removed
            tier_set.digest = (tier_set.digest - total) & _MASK64

    def clear(self, target: Target) -> None:
        """The target holds nothing any more."""
        holding = self._holdings.get(target)
        if holding is not None and any(tier_set.count for tier_set in holding.sets):
            self.finish_load(target, self.begin_load(len(holding.sets)))

    def drop(self, target: Target) -> None:
        """The target is gone; its slots are swept by and by."""
        holding = self._holdings.pop(target, None)
        for tier_set in holding.sets if holding else ():
            del self._owners[tier_set.slot]
            self._slots.retire(tier_set.slot)

    def overlap(self, hashes: Hashes) -> dict[Target, int]:
        """Leading blocks that each target holds on its device without a gap; targets with none are absent."""
        return {target: depths[0] for target, depths in self.overlap_by_tier(hashes).items() if depths[0]}

    def overlap_by_tier(self, hashes: Hashes) -> dict[Target, list[int]]:
        """The same per tier set, narrowest first: `{target: [device, device∪host, …]}`."""
        found: dict[Target, list[int]] = {}
        for mask, depth in self._table.depths(_listed(hashes), self._slots.live):
            for slot in bits(mask):
                owner = self._owners.get(slot)
                if owner is None:
                    continue  # a slot still being loaded
                target, tier = owner
                depths = found.get(target)
                if depths is None:
                    depths = found[target] = [0] * len(self._holdings[target].sets)
                depths[tier] = depth
        return found

    def holds(self, target: Target, hash_: int, tier: str = "device") -> bool:
        """Whether the target holds one block in that tier or a narrower one."""
        holding = self._holdings.get(target)
        if holding is None:
            return False
        sets = holding.sets
        return self._table.holds(sets[min(TIERS.index(tier), len(sets) - 1)].slot, hash_)

    def digest(self, target: Target, tier: str = "device") -> tuple[int, int]:
        """`(count, sum of hashes mod 2^64)` of one tier set; (0, 0) for a target or tier unknown here."""
        holding = self._holdings.get(target)
        tier_number = TIERS.index(tier)
        if holding is None or tier_number >= len(holding.sets):
            return 0, 0
        return holding.sets[tier_number].count, holding.sets[tier_number].digest

    def blocks(self, target: Target) -> int:
        """Blocks the target holds in any tier."""
        holding = self._holdings.get(target)
        return holding.sets[-1].count if holding else 0

    # A snapshot is loaded into fresh slots, in slices, while look-ups still see the old ones.

    def begin_load(self, tier_sets: int = 1) -> Holding:
        """Fresh, empty sets that no look-up sees yet."""
        return Holding([_TierSet(self._slots.take()) for _ in range(tier_sets)])

    def load(self, holding: Holding, hashes: Hashes, tier: str = "device") -> None:
        """Store into a holding; it must have the tier."""
        listed = _listed(hashes)
        for tier_set in holding.sets[TIERS.index(tier) :]:
            added, total = self._table.add(tier_set.slot, listed)
            tier_set.count += added
            tier_set.digest = (tier_set.digest + total) & _MASK64

    def widen_load(self, holding: Holding, tier_sets: int) -> None:
        """There turns out to be a wider tier: that set starts as a copy of the widest so far."""
        while len(holding.sets) < tier_sets:
            widest = holding.sets[-1]
            wider = _TierSet(self._slots.take(), widest.count, widest.digest)
            self._table.copy_slot(widest.slot, wider.slot)
            holding.sets.append(wider)

    def loaded_holds(self, holding: Holding, hash_: int, tier: str) -> bool:
        """`holds` for a holding that is being loaded."""
        sets = holding.sets
        return self._table.holds(sets[min(TIERS.index(tier), len(sets) - 1)].slot, hash_)

    def finish_load(self, target: Target, holding: Holding) -> None:
        """From now on look-ups see this holding as the target's."""
        self.drop(target)
        self._holdings[target] = holding
        self._own(target, holding)

    def abandon_load(self, holding: Holding) -> None:
        """Give up fresh sets that were not finished."""
        for tier_set in holding.sets:
            self._slots.retire(tier_set.slot)

    def sweep(self) -> bool:
        """Do one small step of tidying after drop or clear; returns whether there is more to do."""
        return self._slots.sweep()

    def check(self) -> None:
        """Raise if an invariant is broken. Tests call this after every step."""
        self._table.check()
        for target, holding in self._holdings.items():
            for tier, tier_set in enumerate(holding.sets):
                if self._owners.get(tier_set.slot) != (target, tier):
                    raise AssertionError(f"slot {tier_set.slot} is not {target}'s")
            counts = [tier_set.count for tier_set in holding.sets]
            if counts != sorted(counts):
                raise AssertionError(f"{target}: a wider tier set holds fewer blocks: {counts}")

    def _own(self, target: Target, holding: Holding) -> None:
        for tier, tier_set in enumerate(holding.sets):
            self._owners[tier_set.slot] = (target, tier)


def _listed(hashes: Hashes) -> Sequence[int]:
    return unpack_hashes(hashes) if isinstance(hashes, bytes) else hashes
