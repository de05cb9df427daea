"""The published blocks of one rank: sequence hashes, prefix-closed in every tier set.

See docs/concepts/design.md#tiers.

A block's level is the narrowest tier set it is in: device 0, device∪host 1, device∪host∪disk 2, none 3. Its
references alone give it the level of the narrowest tier that has one. Its published level is never narrower
than its parent's:

    published = max(referenced, published of the parent)        a root's parent counts as 0

    A  referenced 0  published 0      in all three sets
    ├─ B  referenced 1  published 1   removed from the device, still in host
    │  └─ C  referenced 0  published 1   on the device, but below a hole there
    └─ (D has no references: it is not in the table)
       └─ E  referenced 0  published 3   withheld until D returns

Invariants, after every single hash that is written: published(child) >= published(parent), so each set is
prefix-closed; counts and digests are those of the sets as written. Therefore a block that leaves a set takes
its descendants with it, deepest first, and a block that enters a set is written before the waiting blocks
below it.

A reader keeps a wider set only after an op has named its tier; otherwise `Removed(device)` would also remove
blocks that are still in host. So the first reference in a wider tier is written even if it changes no set.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from kvrouter.core.wire.hashes import pack_hashes
from kvrouter.core.wire.ops import DEVICE, DISK, MAX_FRAME_HASHES, TIERS, Check, Cleared, Op, Removed, Stored


class OpWriter:
    """Collects single steps as ops: consecutive blocks of a chain share a Stored, of a tier a Removed."""

    def __init__(self) -> None:
        self._ops: list[Op] = []
        self._run: list[int] = []
        self._tier = 0
        self._parent: int | None = None
        self._is_storing = False

    def store(self, tier: int, parent: int | None, sequence: int) -> None:
        """Add a block below `parent`."""
        run = self._run
        goes_on = run and run[-1] == parent and self._is_storing and self._tier == tier
        if not goes_on or len(run) >= MAX_FRAME_HASHES:
            self._end_run()
            self._is_storing, self._tier, self._parent = True, tier, parent
        self._run.append(sequence)

    def remove(self, tier: int, sequence: int) -> None:
        """Remove a block from `tier` and all narrower tiers."""
        goes_on = not self._is_storing and self._tier == tier
        if not goes_on or len(self._run) >= MAX_FRAME_HASHES:
            self._end_run()
            self._is_storing, self._tier = False, tier
        self._run.append(sequence)

    def clear(self) -> None:
        """Remove all blocks. Ops written before no longer matter, so they are dropped."""
        self._run = []
        self._ops = [Cleared()]

    def take(self) -> list[Op]:
        """The ops written since the last call."""
        self._end_run()
        ops, self._ops = self._ops, []
        return ops

    def _end_run(self) -> None:
        run, self._run = self._run, []
        if not run:
            return
        hashes = pack_hashes(run)
        self._ops.append(
            Stored(self._tier, self._parent, hashes) if self._is_storing else Removed(self._tier, hashes)
        )


# The level of a block that is in no set.
GONE = len(TIERS)
_MASK64 = (1 << 64) - 1


class _PublishedBlock:
    """A sequence hash with at least one reference; `refs` counts them per tier."""

    __slots__ = ("parent", "published", "refs")

    def __init__(self, parent: int | None) -> None:
        self.parent = parent
        self.published = GONE
        self.refs = [0] * GONE

    def referenced(self) -> int:
        """The narrowest tier that has a reference; GONE without references."""
        for tier, count in enumerate(self.refs):
            if count:
                return tier
        return GONE


class PublishedBlocks:
    """Turns references into ops, which `take_ops` returns."""

    def __init__(self) -> None:
        self.widest = DEVICE  # the widest tier in which a block has had a reference
        self._known_tier = DEVICE  # the widest tier that the ops so far have named
        self._blocks: dict[int, _PublishedBlock] = {}
        self._children: defaultdict[int | None, set[int]] = defaultdict(set)
        # Per level, so that a digest needs three additions and no pass over the blocks. Python's integers do
        # not overflow, so the sums are masked only when they are read.
        self._counts = [0] * (GONE + 1)
        self._sums = [0] * (GONE + 1)
        self._writer = OpWriter()

    def count(self, tier: int) -> int:
        """Distinct blocks published in a tier set."""
        return sum(self._counts[: tier + 1])

    def is_on_device(self, sequence: int) -> bool:
        """Whether a block is published in the device set."""
        block = self._blocks.get(sequence)
        return block is not None and block.published == DEVICE

    def digest(self, tier: int) -> int:
        """The sum mod 2^64 of the sequence hashes published in a tier set."""
        return sum(self._sums[: tier + 1]) & _MASK64

    def add(self, sequence: int, parent: int | None, tier: int) -> None:
        """Count one reference to a block in `tier`. A root has the parent None."""
        block = self._blocks.get(sequence)
        if block is None:
            block = self._blocks[sequence] = _PublishedBlock(parent)
            self._children[parent].add(sequence)
        self.widest = max(self.widest, tier)
        block.refs[tier] += 1
        if block.refs[tier] == 1:
            self._settle(sequence, block)
            if self._known_tier < tier and block.published < GONE:
                self._write_widest(sequence, block)

    def drop(self, sequence: int, tier: int) -> None:
        """Count one reference less; it must have been added."""
        block = self._blocks[sequence]
        block.refs[tier] -= 1
        if block.refs[tier]:
            return
        self._settle(sequence, block)
        if not any(block.refs):
            self._forget(sequence, block)

    def clear(self) -> None:
        """Drop every reference at once."""
        if self._blocks:
            self._writer.clear()
        self._blocks.clear()
        self._children.clear()
        self._known_tier = DEVICE
        self._counts = [0] * (GONE + 1)
        self._sums = [0] * (GONE + 1)

    def take_ops(self) -> list[Op]:
        """The ops that lead from the state of the last call to the present one."""
        return self._writer.take()

    def state_ops(self) -> list[Op]:
        """Ops that build the present state from nothing, parents first."""
        writer = OpWriter()
        pending = list(self._children.get(None, ()))
        if pending and self._known_tier > DEVICE:
            writer.store(self._known_tier, None, pending[0])
        while pending:
            sequence = pending.pop()
            block = self._blocks[sequence]
            if block.published < GONE:
                writer.store(block.published, block.parent, sequence)
                pending.extend(self._children.get(sequence, ()))
        return writer.take()

    def check_ops(self) -> list[Op]:
        """Count and digest of each tier set that readers keep."""
        return [Check(self.count(tier), self.digest(tier), tier) for tier in range(self._known_tier + 1)]

    def _settle(self, sequence: int, block: _PublishedBlock) -> None:
        level = self._due_level(block)
        if level < block.published:
            self._publish(sequence)
        elif level > block.published:
            self._withdraw(sequence, level)

    def _due_level(self, block: _PublishedBlock) -> int:
        if block.parent is None:
            return block.referenced()
        parent = self._blocks.get(block.parent)
        return GONE if parent is None else max(block.referenced(), parent.published)

    def _publish(self, sequence: int) -> None:
        """Add a block to narrower sets, then the blocks below it that waited for it."""
        pending = [sequence]
        while pending:
            current = pending.pop()
            block = self._blocks[current]
            level = self._due_level(block)
            if level < block.published:
                self._writer.store(level, block.parent, current)
                self._move(current, block, level)
                if self._known_tier < self.widest:
                    self._write_widest(current, block)
                pending.extend(self._children.get(current, ()))

    def _write_widest(self, sequence: int, block: _PublishedBlock) -> None:
        """Write a block once more in its widest tier, so that readers keep the set of that tier."""
        widest = max(tier for tier, count in enumerate(block.refs) if count)
        if widest > self._known_tier:
            self._known_tier = widest
            self._writer.store(widest, block.parent, sequence)

    def _withdraw(self, sequence: int, level: int) -> None:
        """Remove a block and all its descendants from the sets narrower than `level`, deepest first."""
        leaving = [sequence]
        for current in leaving:  # grows during the loop: every parent comes before its children
            leaving.extend(
                child for child in self._children.get(current, ()) if self._blocks[child].published < level
            )
        for current in reversed(leaving):
            self._writer.remove(level - 1, current)  # from `level - 1`, the widest set that it leaves
            self._move(current, self._blocks[current], level)
        if not self.count(DISK):
            self._known_tier = DEVICE  # an empty snapshot names no tier either

    def _move(self, sequence: int, block: _PublishedBlock, level: int) -> None:
        self._counts[block.published] -= 1
        self._sums[block.published] -= sequence
        self._counts[level] += 1
        self._sums[level] += sequence
        block.published = level

    def _forget(self, sequence: int, block: _PublishedBlock) -> None:
        del self._blocks[sequence]
        siblings = self._children[block.parent]
        siblings.discard(sequence)
        if not siblings:
            del self._children[block.parent]

    def check(self, references: Iterable[tuple[int, int]]) -> None:
        """Raise if an invariant is broken; `references` are all (sequence, tier) that count."""
        counted: defaultdict[int, list[int]] = defaultdict(lambda: [0] * GONE)
        for sequence, tier in references:
            counted[sequence][tier] += 1
        assert counted == {sequence: block.refs for sequence, block in self._blocks.items()}, "references"
        for sequence, block in self._blocks.items():
            assert block.published == self._due_level(block), f"{sequence} is at the wrong level"
            assert sequence in self._children[block.parent], f"{sequence} is unknown to its parent"
        assert sum(map(len, self._children.values())) == len(self._blocks), "children that are no blocks"
        for tier in range(GONE):
            held = [sequence for sequence, block in self._blocks.items() if block.published <= tier]
            assert (len(held), sum(held) & _MASK64) == (self.count(tier), self.digest(tier)), "digest"
