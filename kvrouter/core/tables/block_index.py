"""The block index: which target holds which sequence hash, in which tier (docs/concepts/design.md#tiers).

    target A ── slots [device: 0]                     one slot of the flat table per tier set
    target B ── slots [device: 1, device∪host: 2]     the sets are nested: a wider one holds more

Overlap is exact because publishers keep every tier set prefix-closed after every single hash.

With bounds a chain is refused from the first block on for which there is no room, never in the
middle, so a truncated target undercounts and is still exact in what it counts. A refused block is
not remembered: that is what the bound is for. A truncated target's digest therefore says nothing,
until it is equal to its source's again; and the first refused block of each chain is kept, up to
64 of them, to see when there is room again for what was refused.

Invariants: a slot belongs to one target and tier set; a tier set's count and digest are those of
the hashes its slot holds; a narrower set is contained in every wider one; `_widest` has the slot
of the widest set of every holding, one being loaded included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from kvrouter.core.tables.table import Slots, SlotSet, bits, new_table
from kvrouter.core.wire.hashes import Hashes, hashes_of
from kvrouter.core.wire.ids import Target
from kvrouter.core.wire.ops import TIERS

_MAX_REFUSED = 64


class Wider(NamedTuple):
    """The owner of a slot that holds more than the device's blocks."""

    target: Target
    tier: int


@dataclass(frozen=True, slots=True)
class IndexBounds:
    """Distinct blocks in one pool's index, and targets that one block is remembered of; 0: no bound."""

    max_blocks: int = 0
    max_holders: int = 0


@dataclass(slots=True)
class IndexCounters:
    """What happened to an index, in blocks and look-ups."""

    stored_blocks: int = 0
    removed_blocks: int = 0
    refused_blocks: int = 0
    lookups: int = 0


@dataclass(slots=True)
class Holding:
    """What one target holds: a tier set for the device and for each wider tier it has."""

    sets: list[SlotSet] = field(default_factory=list)
    replaces: Target | None = None
    """The target it is being loaded for, whose present holding does not count as another's."""
    is_truncated: bool = False
    """Whether blocks were refused, and its digest has not been its source's since."""
    refused: dict[int, None] = field(default_factory=dict)
    """Where chains were refused: the first block of each."""
    agreed_sets: int = 0
    """Mask of the tier sets that were equal to the source's when last compared."""

    def refuse(self, hash_: int) -> None:
        """The chain ends before this block."""
        self.is_truncated = True
        self.agreed_sets = 0
        if len(self.refused) < _MAX_REFUSED:
            self.refused[hash_] = None

    def compare(self, tier: int, *, is_equal: bool) -> None:
        """Truncated no more when every set is equal again: what was refused has been removed since."""
        bit = 1 << tier
        self.agreed_sets = self.agreed_sets | bit if is_equal else self.agreed_sets & ~bit
        if self.agreed_sets == (1 << len(self.sets)) - 1:
            self.is_truncated = False
            self.refused.clear()


class BlockIndex:
    """`sequence hash -> targets`, for one pool.

    `tier` is "device", "host" or "disk". Hashes that are stored come parent first. `placement_secret` is a
    random 64-bit number that keeps clients from slowing the native version down with chosen prompts.
    """

    def __init__(self, bounds: IndexBounds | None = None, placement_secret: int = 0) -> None:
        self.bounds = bounds or IndexBounds()
        self.counters = IndexCounters()
        self._widest = 0
        self._table = new_table(placement_secret)
        self._slots = Slots(self._table)
        self._holdings: dict[Target, Holding] = {}
        self._owners: dict[int, Target | Wider] = {}
        self._wider_slots = 0
        """Slots that look-ups see and that hold more than the device's blocks."""
        self._is_bounded = bool(self.bounds.max_blocks or self.bounds.max_holders)
        self._plain: dict[Target, SlotSet] = {}
        """Of targets with nothing but their device, in an index without bounds: nearly all. A short way."""

    def __len__(self) -> int:
        """Distinct blocks held by any target."""
        return len(self._table)

    def targets(self) -> list[Target]:
        """Every target that has been stored to and not dropped."""
        return list(self._holdings)

    def store(self, target: Target, hashes: Hashes, tier: str = "device") -> None:
        """The target now holds the blocks in `tier`, and so in all wider tier sets."""
        plain = self._plain.get(target)
        if plain is not None and tier == "device":
            self.counters.stored_blocks += plain.add(hashes)
            return
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
        plain = self._plain.get(target)
        if plain is not None:  # whatever the tier: it has left the device, and there is nothing wider
            self.counters.removed_blocks += plain.discard(hashes)
            return
        holding = self._holdings.get(target)
        if holding is None:
            return
        before = holding.sets[-1].count
        for tier_set in holding.sets[: TIERS.index(tier) + 1]:
            tier_set.discard(hashes)
        self.counters.removed_blocks += before - holding.sets[-1].count
        for hash_ in hashes_of(hashes) if holding.refused else ():
            holding.refused.pop(hash_, None)

    def clear(self, target: Target) -> None:
        """The target holds nothing any more."""
        holding = self._holdings.get(target)
        if holding is not None and (holding.is_truncated or any(one.count for one in holding.sets)):
            self.counters.removed_blocks += holding.sets[-1].count
            self.finish_load(target, self.begin_load(len(holding.sets)))

    def drop(self, target: Target) -> None:
        """The target is gone; its slots are swept by and by."""
        holding = self._holdings.pop(target, None)
        self._plain.pop(target, None)
        if holding is not None:
            self._retire(holding)

    def overlap(self, hashes: Hashes) -> dict[Target, int]:
        """Leading blocks that each target holds on its device without a gap; targets with none are absent."""
        found = self.depths(hashes)
        if self._wider_slots:
            return {owner: depth for owner, depth in found.items() if isinstance(owner, Target)}
        return cast("dict[Target, int]", found)

    def overlap_by_tier(self, hashes: Hashes) -> dict[Target, list[int]]:
        """The same per tier set, narrowest first: `{target: [device, device∪host, …]}`."""
        found: dict[Target, list[int]] = {}
        for owner, depth in self.depths(hashes).items():
            target, tier = (owner, 0) if isinstance(owner, Target) else owner
            depths = found.get(target)
            if depths is None:
                depths = found[target] = [0] * len(self._holdings[target].sets)
            depths[tier] = depth
        return found

    def depths(self, hashes: Hashes) -> dict[Target | Wider, int]:
        """How deep each set holds the chain, by its owner: a target's device, or a wider set of its."""
        self.counters.lookups += 1
        return self._table.depths(hashes)

    @property
    def has_wider_tiers(self) -> bool:
        """Whether any target has more than its device."""
        return self._wider_slots > 0

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

    def agrees(self, target: Target, tier: str, count: int, digest: int) -> bool:
        """Whether a tier set is what its source says. A truncated one may have less, and never more."""
        is_equal = (count, digest) == self.digest(target, tier)
        holding = self._holdings.get(target)
        if holding is None or not holding.is_truncated:
            return is_equal
        holding.compare(TIERS.index(tier), is_equal=is_equal)
        return is_equal or self.digest(target, tier)[0] < count

    def is_truncated(self, target: Target) -> bool:
        """Whether some of the target's blocks were refused for want of room."""
        holding = self._holdings.get(target)
        return holding is not None and holding.is_truncated

    def has_room_again(self, target: Target) -> bool:
        """Whether a block that was refused would be taken now; with some room to spare."""
        holding = self._holdings.get(target)
        if holding is None or not holding.refused:
            return False
        spare = max(1, self.bounds.max_blocks // 20)
        return any(self._accepted(holding, (hash_,), spare) for hash_ in holding.refused)

    def blocks(self, target: Target) -> int:
        """Blocks the target holds in any tier."""
        holding = self._holdings.get(target)
        return holding.sets[-1].count if holding else 0

    def holders(self) -> int:
        """Pairs of a block and a target that holds it."""
        return sum(holding.sets[-1].count for holding in self._holdings.values())

    def size_bytes(self) -> int:
        """What the table takes, about."""
        return self._table.size_bytes()

    # A snapshot is loaded into fresh slots, in slices, while look-ups still see the old ones.

    def begin_load(self, tier_sets: int = 1, replaces: Target | None = None) -> Holding:
        """Fresh, empty sets that no look-up sees yet; `replaces`: the target they are for."""
        holding = Holding([self._table.slot_set(self._slots.take()) for _ in range(tier_sets)], replaces)
        self._widest |= 1 << holding.sets[-1].slot
        return holding

    def load(self, holding: Holding, hashes: Hashes, tier: str = "device") -> None:
        """Store into a holding; it must have the tier. What there is no room for is refused."""
        if self._is_bounded:
            hashes = self._with_room(holding, hashes_of(hashes))
        before = holding.sets[-1].count
        for tier_set in holding.sets[TIERS.index(tier) :]:
            tier_set.add(hashes)
        self.counters.stored_blocks += holding.sets[-1].count - before

    def refuse(self, holding: Holding, blocks: int) -> None:
        """Blocks below one that was refused: there is no place for them."""
        self.counters.refused_blocks += blocks
        holding.is_truncated, holding.agreed_sets = True, 0

    def holding(self, target: Target) -> Holding | None:
        """What the target holds; None if it is unknown."""
        return self._holdings.get(target)

    def widen_load(self, holding: Holding, tier_sets: int) -> None:
        """There turns out to be a wider tier: that set starts as a copy of the widest so far."""
        while len(holding.sets) < tier_sets:
            widest = holding.sets[-1]
            wider = self._table.slot_set(self._slots.take())
            self._table.copy_slot(widest.slot, wider.slot)
            wider.count, wider.digest = widest.count, widest.digest
            self._widest = self._widest & ~(1 << widest.slot) | 1 << wider.slot
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
        self._retire(holding)

    def sweep(self) -> bool:
        """Do one small step of tidying after drop or clear; returns whether there is more to do."""
        return self._slots.sweep()

    def check(self) -> None:
        """Raise if an invariant is broken. Tests call this after every step."""
        self._table.check()
        widest = [holding.sets[-1].slot for holding in self._holdings.values()]
        if not set(widest) <= set(bits(self._widest)):
            raise AssertionError(f"slots {widest} of the widest sets, noted are {bits(self._widest)}")
        if self._wider_slots != sum(isinstance(owner, Wider) for owner in self._owners.values()):
            raise AssertionError(f"{self._wider_slots} slots of wider sets are noted")
        plain = {target: one.sets[0] for target, one in self._holdings.items() if len(one.sets) == 1}
        if self._plain != ({} if self._is_bounded else plain):
            raise AssertionError(f"the short way leads elsewhere: {self._plain}")
        for target, holding in self._holdings.items():
            for tier, tier_set in enumerate(holding.sets):
                if self._owners.get(tier_set.slot) != _owner(target, tier):
                    raise AssertionError(f"slot {tier_set.slot} is not {target}'s")
            counts = [tier_set.count for tier_set in holding.sets]
            if counts != sorted(counts):
                raise AssertionError(f"{target}: a wider tier set holds fewer blocks: {counts}")

    def _own(self, target: Target, holding: Holding) -> None:
        self._plain.pop(target, None)
        if len(holding.sets) == 1 and not self._is_bounded:
            self._plain[target] = holding.sets[0]
        for tier, tier_set in enumerate(holding.sets):
            owner = _owner(target, tier)
            self._wider_slots += tier > 0 and tier_set.slot not in self._owners
            self._owners[tier_set.slot] = owner
            self._table.label(tier_set.slot, owner)

    def _retire(self, holding: Holding) -> None:
        self._widest &= ~(1 << holding.sets[-1].slot)
        for tier_set in holding.sets:
            self._wider_slots -= isinstance(self._owners.pop(tier_set.slot, None), Wider)
            self._slots.retire(tier_set.slot)

    def _with_room(self, holding: Holding, hashes: Sequence[int]) -> Sequence[int]:
        """As many of the hashes, from the first on, as there is room for."""
        accepted = self._accepted(holding, hashes)
        if accepted < len(hashes):
            self.counters.refused_blocks += len(hashes) - accepted
            holding.refuse(hashes[accepted])
        return hashes[:accepted]

    def _accepted(self, holding: Holding, hashes: Sequence[int], spare: int = 0) -> int:
        others = self._widest & ~(1 << holding.sets[-1].slot)
        replaced = self._holdings.get(holding.replaces) if holding.replaces else None
        if replaced is not None:
            others &= ~(1 << replaced.sets[-1].slot)
        max_blocks, max_holders = self.bounds.max_blocks, self.bounds.max_holders
        room = max_blocks - spare - len(self._table) if max_blocks else len(hashes)
        return self._table.accepted(holding.sets[-1].slot, hashes, room, others, max_holders)


def _owner(target: Target, tier: int) -> Target | Wider:
    return Wider(target, tier) if tier else target
