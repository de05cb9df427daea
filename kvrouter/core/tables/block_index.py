"""The block index: which target holds which sequence hash, in which tier (docs/concepts/design.md#tiers).

    target A ── slots [device: 0]                     one slot of the flat table per tier set
    target B ── slots [device: 1, device∪host: 2]     the sets are nested: a wider one holds more

Overlap is exact because publishers keep every tier set prefix-closed after every single hash.

An engine with several KV groups may hold a block and yet be unable to resume behind it. Its agent publishes
the blocks behind which it can (docs/concepts/design.md); this set is not prefix-closed. It limits the slot of
the device, so the overlap is the deepest resume point among the blocks held.

With bounds, a chain is refused from the first block without room, never in the middle, so a truncated target
undercounts and is exact in what it counts. Refused blocks are not remembered, since memory is what the bound
limits. So a truncated target's digest differs from its source's for a good reason, until it is equal again.
The first refused block of each chain is kept, up to 64 of them, to notice when there is room again.

With `--index-full lru` blocks are stored first, and then those that were not used for longest are evicted,
from all their holders, which are truncated like targets whose blocks were refused.

Invariants: a slot belongs to one target and tier set, or is the limit of one device; a tier set's count and
digest are those of the hashes in its slot; every wider set contains the narrower ones; `_widest` has the slot
of the widest set of each holding, including one that is being loaded.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, cast

from kvrouter.core.tables.leaf_lru import SHARDS, LeafLru
from kvrouter.core.tables.table import Slots, SlotSet, bits, new_table
from kvrouter.core.wire.hashes import Hashes, hashes_of
from kvrouter.core.wire.ids import Target
from kvrouter.core.wire.ops import TIERS
from kvrouter.settings.declare import Settings, setting

_MAX_REFUSED = 64  # samples: each is looked up when room is checked


class Wider(NamedTuple):
    """The label of a slot for a wider tier set; the label of a device's slot is the plain Target."""

    target: Target
    tier: int


@dataclass(frozen=True, slots=True)
class IndexBounds(Settings):
    """Distinct blocks in one pool's index, and targets that are kept for one block; 0: no bound."""

    heading = "Block index"

    max_blocks: int = setting(
        0, "most distinct blocks in the index of a model; 0: no limit", name="index-max-blocks", least=0
    )
    max_holders: int = setting(
        0, "most workers in the index per block; 0: no limit", name="index-max-holders", least=0
    )
    full: Literal["refuse", "lru"] = setting(
        "refuse",
        "at --index-max-blocks: refuse new blocks, or evict the least recently used ones",
        name="index-full",
    )


@dataclass(slots=True)
class IndexCounters:
    stored_blocks: int = 0
    removed_blocks: int = 0
    refused_blocks: int = 0
    evicted_blocks: int = 0
    lookups: int = 0


@dataclass(slots=True)
class Holding:
    """What one target holds: a tier set for the device and for each wider tier that it has."""

    sets: list[SlotSet] = field(default_factory=list)
    # the blocks behind which the engine can resume; None: behind each block on the device
    resumable: SlotSet | None = None
    # the target that this is loaded for: its present holding must not count as another holder of a block
    replaces: Target | None = None
    # blocks were refused, and the digest has not been equal to the source's since
    is_truncated: bool = False
    # the first refused block of each chain
    refused: dict[int, None] = field(default_factory=dict)
    # mask of the tier sets that were equal to the source's when they were last compared
    agreed_sets: int = 0

    def refuse(self, hash_: int) -> None:
        """Note that a chain was cut off before this block."""
        self.is_truncated = True
        self.agreed_sets = 0
        if len(self.refused) < _MAX_REFUSED:
            self.refused[hash_] = None

    def compare(self, tier: int, *, is_equal: bool) -> None:
        """Note a comparison with the source. All sets equal: the refused blocks have been removed there."""
        bit = 1 << tier
        self.agreed_sets = self.agreed_sets | bit if is_equal else self.agreed_sets & ~bit
        if self.agreed_sets == (1 << len(self.sets)) - 1:
            self.is_truncated = False
            self.refused.clear()


class BlockIndex:
    """`sequence hash -> targets`, for one pool.

    `tier` is "device", "host" or "disk". Hashes to store come parent first. `placement_secret`: see
    `new_table`.
    """

    def __init__(self, bounds: IndexBounds | None = None, placement_secret: int = 0) -> None:
        self.bounds = bounds or IndexBounds()
        self._counters = IndexCounters()
        self._widest = 0
        self._table = new_table(placement_secret)
        self._slots = Slots(self._table)
        self._holdings: dict[Target, Holding] = {}
        self.owned = 0
        """How often a target got slots."""
        self._owners: dict[int, Target | Wider] = {}
        self._wider_slots = 0  # slots labelled Wider
        self._is_bounded = bool(self.bounds.max_blocks or self.bounds.max_holders)
        self._lru = LeafLru() if self.bounds.full == "lru" and self.bounds.max_blocks else None
        self._next_pruned = SHARDS
        # What is being loaded, by its narrowest slot: no label names it.
        self._loading: dict[int, Holding] = {}
        self._limited: set[Target] = set()  # targets with resume points
        # A short way for nearly all targets: those with only a device, in an index without bounds.
        self._plain: dict[Target, SlotSet] = {}

    def __len__(self) -> int:
        """Distinct blocks held by any target."""
        return len(self._table)

    @property
    def counters(self) -> IndexCounters:
        """What has happened."""
        counts, table = self._counters, self._table
        counts.stored_blocks += table.stored
        counts.removed_blocks += table.removed
        table.stored = table.removed = 0
        return counts

    def targets(self) -> list[Target]:
        """Every target that was stored to and has not been dropped."""
        return list(self._holdings)

    def store(self, target: Target, hashes: Hashes, tier: str = "device", parent: int | None = None) -> None:
        """The target now holds the blocks in `tier`, and so in all wider tier sets.

        `parent`: the block above the first one; None: the first one is a root. Only an index that evicts
        asks.
        """
        plain = self._plain.get(target)
        if plain is not None and tier == "device":
            self._counters.stored_blocks += plain.add(hashes)
            return
        holding = self._holdings.get(target)
        if holding is None:
            holding = self.begin_load(TIERS.index(tier) + 1)
            self.finish_load(target, holding)
        if len(holding.sets) <= TIERS.index(tier):
            self.widen_load(holding, TIERS.index(tier) + 1)
            self._own(target, holding)
        self.load(holding, hashes, tier, parent)

    def remove(self, target: Target, hashes: Hashes, tier: str = "device") -> None:
        """The blocks left `tier` and all narrower ones; unknown blocks are ignored."""
        plain = self._plain.get(target)
        if plain is not None:  # no need to look at the tier: every tier's removal includes the device
            self._counters.removed_blocks += plain.discard(hashes)
            return
        holding = self._holdings.get(target)
        if holding is None:
            return
        before = holding.sets[-1].count
        for tier_set in holding.sets[: TIERS.index(tier) + 1]:
            tier_set.discard(hashes)
        self._counters.removed_blocks += before - holding.sets[-1].count
        for hash_ in hashes_of(hashes) if holding.refused else ():
            holding.refused.pop(hash_, None)
        self._forget_unheld(hashes)

    def plain(self, target: Target) -> SlotSet | None:
        """What the target holds, if that is blocks on its device only, in an index without bounds."""
        return self._plain.get(target)

    def clear(self, target: Target) -> None:
        """The target has emptied its cache."""
        holding = self._holdings.get(target)
        if holding is not None and (
            holding.is_truncated or holding.resumable or any(one.count for one in holding.sets)
        ):
            self._counters.removed_blocks += holding.sets[-1].count
            # into fresh slots: `sweep` empties the old ones in slices, here it would be one long call
            self.finish_load(target, self.begin_load(len(holding.sets)))

    def resume(self, target: Target, hashes: Hashes) -> None:
        """The target can resume behind these blocks, and from now on only behind blocks named so."""
        holding = self._holdings.get(target)
        if holding is None:
            holding = self.begin_load()
            self.finish_load(target, holding)
        is_new = holding.resumable is None
        self.load_resumable(holding, hashes)
        if is_new:
            self._own(target, holding)

    def stop_resuming(self, target: Target, hashes: Hashes) -> None:
        """The target can no longer resume behind these blocks; unknown ones are ignored."""
        holding = self._holdings.get(target)
        if holding is not None and holding.resumable is not None:
            holding.resumable.discard(hashes)
            self._forget_unheld(hashes)

    def drop(self, target: Target) -> None:
        """Forget the target; `sweep` empties its slots in steps."""
        holding = self._holdings.pop(target, None)
        self._shorten(target, None)
        self._limited.discard(target)
        if holding is not None:
            self._retire(holding)

    def overlap(self, hashes: Hashes, most: int = sys.maxsize) -> dict[Target, int]:
        """Leading blocks that each target can reuse from its device. Targets with none are absent.

        `most`: how many the engine would reuse at most. Only targets with resume points depend on it.
        """
        found = self.depths(hashes, most)
        if self._wider_slots:
            return {owner: depth for owner, depth in found.items() if isinstance(owner, Target)}
        return cast("dict[Target, int]", found)

    def overlap_by_tier(self, hashes: Hashes, most: int = sys.maxsize) -> dict[Target, list[int]]:
        """The same per tier set, narrowest first: `{target: [device, device∪host, …]}`."""
        found: dict[Target, list[int]] = {}
        for owner, depth in self.depths(hashes, most).items():
            target, tier = (owner, 0) if isinstance(owner, Target) else owner
            depths = found.get(target)
            if depths is None:
                depths = found[target] = [0] * len(self._holdings[target].sets)
            depths[tier] = depth
        return found

    def depths(self, hashes: Hashes, most: int = sys.maxsize) -> dict[Target | Wider, int]:
        """How deep each tier set can be reused: a device's by its Target, a wider one's by its Wider."""
        self._counters.lookups += 1
        found = self._table.depths(hashes, most)
        if self._lru is not None and found:
            self._lru.use(hashes_of(hashes)[max(found.values()) - 1])
        return found

    def depths_of(self, hashes: Hashes, slots: array[int], most: int = sys.maxsize) -> array[int]:
        """The same for the slots that `slots` returned, in their order."""
        self._counters.lookups += 1
        found = self._table.depths_of(hashes, slots, most)
        if self._lru is not None and (deepest := max(found, default=0)):
            self._lru.use(hashes_of(hashes)[deepest - 1])
        return found

    def slots(self, targets: Sequence[Target]) -> array[int]:
        """The slot of each target's device, or -1; holds until `owned` changes."""
        holdings = map(self._holdings.get, targets)
        return array("q", [holding.sets[0].slot if holding is not None else -1 for holding in holdings])

    @property
    def limited(self) -> Collection[Target]:
        """The targets with resume points."""
        return self._limited

    @property
    def has_wider_tiers(self) -> bool:
        """Whether any target has another tier than its device."""
        return self._wider_slots > 0

    def holds(self, target: Target, hash_: int, tier: str = "device") -> bool:
        """Whether the target holds one block in that tier or a narrower one."""
        holding = self._holdings.get(target)
        if holding is None:
            return False
        sets = holding.sets  # without that tier, the widest set has all blocks that it could have
        return self._table.holds(sets[min(TIERS.index(tier), len(sets) - 1)].slot, hash_)

    def digest(self, target: Target, tier: str = "device") -> tuple[int, int]:
        """`(count, sum of hashes mod 2^64)` of one tier set; (0, 0) for an unknown target or tier."""
        holding = self._holdings.get(target)
        tier_number = TIERS.index(tier)
        if holding is None or tier_number >= len(holding.sets):
            return 0, 0
        return holding.sets[tier_number].count, holding.sets[tier_number].digest

    def resumable_digest(self, target: Target) -> tuple[int, int] | None:
        """Count and digest of the target's resume points; None if it resumes behind each block."""
        holding = self._holdings.get(target)
        if holding is None or holding.resumable is None:
            return None
        return holding.resumable.count, holding.resumable.digest

    def agrees_on_resumable(self, target: Target, count: int, digest: int) -> bool:
        """Whether the resume points equal the source's. With bounds there may be fewer, but not more."""
        held = self.resumable_digest(target)
        return held is not None and (held == (count, digest) or (self._is_bounded and held[0] <= count))

    def agrees(self, target: Target, tier: str, count: int, digest: int) -> bool:
        """Whether a tier set equals its source's. A truncated one may have fewer blocks, but not more."""
        is_equal = (count, digest) == self.digest(target, tier)
        holding = self._holdings.get(target)
        if holding is None or not holding.is_truncated:
            return is_equal
        holding.compare(TIERS.index(tier), is_equal=is_equal)
        return is_equal or self.digest(target, tier)[0] < count

    def is_truncated(self, target: Target) -> bool:
        """Whether some of the target's blocks were refused because there was no room."""
        holding = self._holdings.get(target)
        return holding is not None and holding.is_truncated

    def has_room_again(self, target: Target) -> bool:
        """Whether a refused block would be accepted now."""
        holding = self._holdings.get(target)
        if holding is None or not holding.refused:
            return False
        # 5 % to spare: else each removed block would start a recovery that is truncated again
        spare = max(1, self.bounds.max_blocks // 20)
        room = self.bounds.max_blocks - spare - len(self._table) if self.bounds.max_blocks else 1
        return any(self._accepted(holding, (hash_,), room) for hash_ in holding.refused)

    def blocks(self, target: Target) -> int:
        """Blocks the target holds in any tier."""
        holding = self._holdings.get(target)
        return holding.sets[-1].count if holding else 0

    @property
    def shards(self) -> int:
        """The parts in which `listed` gives the blocks of a target."""
        return self._table.shards

    def listed(self, target: Target, shard_number: int) -> list[list[int]]:
        """The blocks of one shard that the target holds, by the narrowest tier that has them, in no order.

        No lists if the target is unknown.
        """
        holding = self._holdings.get(target)
        rows: list[list[int]] = []
        narrower: set[int] = set()
        for tier_set in holding.sets if holding is not None else ():
            held = self._table.held(tier_set.slot, shard_number)
            rows.append([hash_ for hash_ in held if hash_ not in narrower] if narrower else held)
            narrower.update(held)
        return rows

    def holders(self) -> int:
        """The number of pairs (block, target that holds it)."""
        return sum(holding.sets[-1].count for holding in self._holdings.values())

    def size_bytes(self) -> int:
        """About the memory of the table."""
        return self._table.size_bytes()

    # A snapshot is loaded into fresh slots, in slices. Until it is complete, look-ups see the old ones.

    def begin_load(self, tier_sets: int = 1, replaces: Target | None = None) -> Holding:
        """Fresh, empty sets that no look-up sees yet. `replaces`: the target that they are for."""
        sets = [self._table.slot_set(self._slots.take()) for _ in range(tier_sets)]
        holding = Holding(sets, replaces=replaces)
        self._widest |= 1 << holding.sets[-1].slot
        self._loading[holding.sets[0].slot] = holding
        return holding

    def load(self, holding: Holding, hashes: Hashes, tier: str = "device", parent: int | None = None) -> None:
        """Store into a holding that has the tier. Blocks without room are refused, or others evicted."""
        if self._is_bounded:
            hashes = self._with_room(holding, hashes_of(hashes))
        before = holding.sets[-1].count
        for tier_set in holding.sets[TIERS.index(tier) :]:
            tier_set.add(hashes)
        self._counters.stored_blocks += holding.sets[-1].count - before
        if self._lru is not None:
            stored = hashes_of(hashes)
            self._lru.store(stored, parent)
            self._evict(self._lru, len(stored))

    def load_resumable(self, holding: Holding, hashes: Hashes) -> None:
        """Add resume points to a holding. With bounds only those whose blocks it holds: they take no row."""
        if holding.resumable is None:
            holding.resumable = self._table.slot_set(self._slots.take())
        if self._is_bounded:
            slot = holding.sets[0].slot
            hashes = [hash_ for hash_ in hashes_of(hashes) if self._table.holds(slot, hash_)]
        holding.resumable.add(hashes)

    def refuse(self, holding: Holding, blocks: int) -> None:
        """Count blocks below a refused one: without their parent they must not be stored."""
        self._counters.refused_blocks += blocks
        holding.is_truncated, holding.agreed_sets = True, 0

    def holding(self, target: Target) -> Holding | None:
        return self._holdings.get(target)

    def widen_load(self, holding: Holding, tier_sets: int) -> None:
        """Add wider tiers. Their sets start as copies of the widest so far, which they must contain."""
        while len(holding.sets) < tier_sets:
            widest = holding.sets[-1]
            wider = self._table.slot_set(self._slots.take())
            self._table.copy_slot(widest.slot, wider.slot)
            wider.count, wider.digest = widest.count, widest.digest  # copy_slot changes rows only
            self._widest = self._widest & ~(1 << widest.slot) | 1 << wider.slot
            holding.sets.append(wider)

    def loaded_holds(self, holding: Holding, hash_: int, tier: str) -> bool:
        """`holds` for a holding that is being loaded."""
        sets = holding.sets
        return self._table.holds(sets[min(TIERS.index(tier), len(sets) - 1)].slot, hash_)

    def finish_load(self, target: Target, holding: Holding) -> None:
        """Make this the target's holding: from now on look-ups see it."""
        self._loading.pop(holding.sets[0].slot, None)
        self.drop(target)  # no look-up comes between: these are plain calls
        self._holdings[target] = holding
        self._own(target, holding)

    def abandon_load(self, holding: Holding) -> None:
        self._loading.pop(holding.sets[0].slot, None)
        self._retire(holding)

    def sweep(self) -> bool:
        """Empty one shard of dropped slots; returns whether there is more to do."""
        if self._slots.sweep():
            return True
        if self._lru is not None and self._next_pruned < SHARDS:
            self._lru.prune(self._next_pruned, self._is_held)
            self._next_pruned += 1
            return True
        return False

    def check(self) -> None:
        """Raise if an invariant is broken. Tests call this after every step."""
        self._table.check()
        widest = [holding.sets[-1].slot for holding in self._holdings.values()]
        if not set(widest) <= set(bits(self._widest)):
            raise AssertionError(f"slots {widest} of the widest sets, noted are {bits(self._widest)}")
        limits = {target: one.resumable for target, one in self._holdings.items() if one.resumable}
        if limits.keys() != self._limited or any(limit.slot in self._owners for limit in limits.values()):
            raise AssertionError("a limit has an owner, or targets with limits are not noted")
        if self._wider_slots != sum(isinstance(owner, Wider) for owner in self._owners.values()):
            raise AssertionError(f"{self._wider_slots} slots of wider sets are noted")
        plain = {target: one.sets[0] for target, one in self._holdings.items() if len(one.sets) == 1}
        if self._plain != ({} if self._is_bounded else plain):
            raise AssertionError(f"the short way leads elsewhere: {self._plain}")
        for target, holding in self._holdings.items():
            if [one for one in holding.sets if one.is_plain] != (
                [self._plain[target]] if target in self._plain else []
            ):
                raise AssertionError(f"{target}: a slot that is not plain says that it is")
        if self._lru is not None:
            self._lru.check()
        for target, holding in self._holdings.items():
            for tier, tier_set in enumerate(holding.sets):
                if self._owners.get(tier_set.slot) != _owner(target, tier):
                    raise AssertionError(f"slot {tier_set.slot} is not {target}'s")
            counts = [tier_set.count for tier_set in holding.sets]
            if counts != sorted(counts):
                raise AssertionError(f"{target}: a wider tier set holds fewer blocks: {counts}")

    def _own(self, target: Target, holding: Holding) -> None:
        self.owned += 1
        self._shorten(target, holding.sets[0] if len(holding.sets) == 1 and not self._is_bounded else None)
        for tier, tier_set in enumerate(holding.sets):
            owner = _owner(target, tier)
            self._wider_slots += tier > 0 and tier_set.slot not in self._owners
            self._owners[tier_set.slot] = owner
            self._table.label(tier_set.slot, owner)
        if holding.resumable is not None:
            self._table.limit(holding.sets[0].slot, holding.resumable.slot)
            self._limited.add(target)

    def _shorten(self, target: Target, held: SlotSet | None) -> None:
        """`held`: where the short way of the target leads from now on."""
        before = self._plain.pop(target, None)
        if before is not None:
            before.is_plain = False
        if held is not None:
            held.is_plain = True
            self._plain[target] = held

    def _retire(self, holding: Holding) -> None:
        self._widest &= ~(1 << holding.sets[-1].slot)
        for tier_set in holding.sets:
            self._wider_slots -= isinstance(self._owners.pop(tier_set.slot, None), Wider)
            self._slots.retire(tier_set.slot)
        if holding.resumable is not None:
            self._table.limit(holding.sets[0].slot, None)
            self._slots.retire(holding.resumable.slot)
        self._next_pruned = 0  # blocks that only these slots hold are gone once they are swept

    def _forget_unheld(self, hashes: Hashes) -> None:
        for hash_ in hashes_of(hashes) if self._lru is not None else ():
            if self._lru is not None and not self._is_held(hash_):
                self._lru.forget(hash_)

    def _is_held(self, hash_: int) -> bool:
        """Whether the table has a row of the block."""
        return self._table.accepted(0, (hash_,), 0, 0, 0) == 1

    def _evict(self, lru: LeafLru, most: int) -> None:
        """Evict blocks beyond the bound, but no more than were just stored.

        More are beyond it while the rows of a dropped target are swept; these will be gone without eviction.
        """
        for _ in range(most):
            if len(self._table) <= self.bounds.max_blocks or (hash_ := lru.oldest()) is None:
                return
            owners = self._table.depths([hash_])
            # look-ups are silent about a target with resume points that cannot resume behind this block
            targets = self._limited | {one if isinstance(one, Target) else one.target for one in owners}
            for holding in (*map(self._holdings.__getitem__, targets), *self._loading.values()):
                if sum(tier_set.discard((hash_,)) for tier_set in holding.sets):
                    holding.refuse(hash_)
                if holding.resumable is not None:
                    holding.resumable.discard((hash_,))
            lru.forget(hash_)
            self._counters.evicted_blocks += 1

    def _with_room(self, holding: Holding, hashes: Sequence[int]) -> Sequence[int]:
        """The hashes before the first one without room. Notes the refusal."""
        max_blocks = self.bounds.max_blocks if self._lru is None else 0
        room = max_blocks - len(self._table) if max_blocks else len(hashes)
        accepted = self._accepted(holding, hashes, room)
        if accepted < len(hashes):
            self._counters.refused_blocks += len(hashes) - accepted
            holding.refuse(hashes[accepted])
        return hashes[:accepted]

    def _accepted(self, holding: Holding, hashes: Sequence[int], room: int) -> int:
        others = self._widest & ~(1 << holding.sets[-1].slot)
        replaced = self._holdings.get(holding.replaces) if holding.replaces else None
        if replaced is not None:
            others &= ~(1 << replaced.sets[-1].slot)
        return self._table.accepted(holding.sets[-1].slot, hashes, room, others, self.bounds.max_holders)


def _owner(target: Target, tier: int) -> Target | Wider:
    return Wider(target, tier) if tier else target
