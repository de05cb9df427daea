"""The blocks behind which an engine with several KV groups can resume a prompt (docs/concepts/design.md).

    full attention (published)   A─B─C─D─E─F        the engine holds the whole chain,
    sliding window, 2 blocks     · B C · E F        but needs the last two blocks before the place where it
    resume points                    C     F        resumes: so it can resume behind C and behind F

A group that is not the published one is a set of engine hashes, with references as in EngineBlocks, and a
number of blocks, `needed`: the engine resumes behind a block only if the group holds so many blocks up to it.
At the beginning of a prompt fewer are enough, as there are no more.

    run = 0                               the group does not hold the block
    run = min(needed, run of parent + 1)  it does; above a root the run counts as `needed`

A block is a resume point if its run equals `needed` in every group. An engine that looks at one group after
another, and begins again when one of them allows less, ends at the same block: the deepest resume point.

Only blocks that the published group has named by a sequence hash count: no engine resumes behind others.

Invariants: `_parents` and `_children` have exactly the blocks that some group holds; runs are as above;
`_points` are the blocks that were resume points when the last ops were taken, `_changed` those that may
differ since.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from kvrouter.core.wire.hashes import pack_hashes
from kvrouter.core.wire.ops import MAX_FRAME_HASHES, CheckResumable, NotResumable, Op, Resumable

EngineHash: TypeAlias = int | bytes  # as in engine_blocks.py, which imports this module
# `needed` of a second group with full attention: all blocks from the root on.
ALL = 0
_MASK64 = (1 << 64) - 1


class Named(Protocol):
    """A block that the published group knows."""

    @property
    def sequence(self) -> int | None:
        """Its sequence hash; None if it can never have one."""

    @property
    def parent(self) -> int | None:
        """Its parent's."""


@dataclass(frozen=True, slots=True)
class GroupImage:
    """One group at one moment: the blocks that it needs, and the references of each engine hash."""

    needed: int
    refs: dict[EngineHash, int]


@dataclass(slots=True)
class _Group:
    """`held`: per sequence hash, the engine hashes of it that have references."""

    needed: int
    refs: dict[EngineHash, int] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)
    runs: dict[int, int] = field(default_factory=dict)

    @property
    def enough(self) -> int:
        """The run of a resume point."""
        return self.needed or 1

    def due_run(self, sequence: int, parent: int | None) -> int:
        if sequence not in self.held:
            return 0
        above = self.enough if parent is None else self.runs.get(parent, 0)
        # all blocks from the root on: a run that does not begin at a root counts nothing
        return min(above, 1) if self.needed == ALL else min(above + 1, self.needed)


class ResumePoints:
    """Keeps the groups of one rank besides the published one. Without such groups it has no ops."""

    def __init__(self, known: Mapping[EngineHash, Named]) -> None:
        """`known`: the blocks that the published group knows, as they are at any moment."""
        self._known = known
        self._groups: dict[int, _Group] = {}
        self._parents: dict[int, int | None] = {}
        self._children: defaultdict[int | None, set[int]] = defaultdict(set)
        self._points: set[int] = set()
        self._sum = 0
        self._changed: set[int] = set()
        self._is_announced = False

    @property
    def stored_hashes(self) -> int:
        """Engine hashes with references, in all groups."""
        return sum(len(group.refs) for group in self._groups.values())

    def stored(self, number: int, needed: int, engine_hashes: Sequence[EngineHash], *, again: bool) -> None:
        """Count one reference to each block of a group. `again`: only to blocks without one."""
        group = self._groups.get(number)
        if group is None or group.needed != needed:
            group = self._groups[number] = _Group(needed, group.refs if group else {})
            self._begin(group)
        for engine_hash in engine_hashes:
            count = group.refs.get(engine_hash, 0)
            if not (again and count):
                group.refs[engine_hash] = count + 1
            if not count:
                self._enter(group, engine_hash)

    def removed(self, number: int, engine_hashes: Sequence[EngineHash]) -> int:
        """Remove one reference from each; returns how many had none."""
        group, unknown = self._groups.get(number), 0
        for engine_hash in engine_hashes:
            count = group.refs.get(engine_hash, 0) if group else 0
            if group is None or not count:
                unknown += 1
            elif count > 1:
                group.refs[engine_hash] = count - 1
            else:
                del group.refs[engine_hash]
                self._leave(group, engine_hash)
        return unknown

    def learned(self, engine_hash: EngineHash) -> None:
        """The published group knows the block now."""
        for group in self._groups.values():
            if engine_hash in group.refs:
                self._enter(group, engine_hash)

    def forgotten(self, engine_hash: EngineHash) -> None:
        """The published group is about to forget the block."""
        for group in self._groups.values():
            if engine_hash in group.refs:
                self._leave(group, engine_hash)

    def clear(self) -> None:
        """Forget all groups: the next life of the engine may have none."""
        self._groups.clear()
        self._parents.clear()
        self._children.clear()
        self._points.clear()
        self._sum = 0
        self._changed.clear()
        self._is_announced = False

    def take_ops(self) -> list[Op]:
        """The ops that lead from the resume points of the last call to the present ones."""
        if self._is_announced and not self._changed:
            return []
        changed = self._changed - self._points, self._changed & self._points
        gained = [one for one in changed[0] if self._is_point(one)]
        lost = [one for one in changed[1] if not self._is_point(one)]
        self._changed.clear()
        self._points.update(gained)
        self._points.difference_update(lost)
        self._sum += sum(gained) - sum(lost)
        ops: list[Op] = [NotResumable(hashes) for hashes in _packed(lost)]
        if self._groups and not self._is_announced:
            self._is_announced = True
            return [*ops, *(self.state_ops())]
        return [*ops, *(Resumable(hashes) for hashes in _packed(gained))]

    def state_ops(self) -> list[Op]:
        """Ops that build the resume points from nothing, as of the last `take_ops`."""
        if not self._is_announced:
            return []
        # also an empty op: before the first one replicas think that it resumes behind every block
        return [Resumable(hashes) for hashes in _packed(list(self._points)) or [b""]]

    def check_ops(self) -> list[Op]:
        """Count and digest, as of the last `take_ops`."""
        return [CheckResumable(len(self._points), self._sum & _MASK64)] if self._is_announced else []

    def image(self) -> dict[int, GroupImage]:
        """The present groups; later changes do not alter it."""
        return {number: GroupImage(group.needed, group.refs.copy()) for number, group in self._groups.items()}

    def restore(self, image: Mapping[int, GroupImage]) -> None:
        """Take over saved groups, after the published group; there must be none yet."""
        for number, saved in image.items():
            group = self._groups[number] = _Group(saved.needed, dict(saved.refs))
            self._begin(group)
        self.take_ops()  # dropped: `state_ops` has them

    def _begin(self, group: _Group) -> None:
        """A group appears, or needs another number of blocks: every block may have changed."""
        for engine_hash in group.refs:
            self._enter(group, engine_hash)
        self._changed.update(self._points, self._parents)

    def _enter(self, group: _Group, engine_hash: EngineHash) -> None:
        known = self._known.get(engine_hash)
        if known is None or known.sequence is None:
            return
        sequence = known.sequence
        count = group.held[sequence] = group.held.get(sequence, 0) + 1
        if sequence not in self._parents:
            self._parents[sequence] = known.parent
            self._children[known.parent].add(sequence)
        if count == 1:
            self._settle(group, sequence)

    def _leave(self, group: _Group, engine_hash: EngineHash) -> None:
        known = self._known.get(engine_hash)
        if known is None or known.sequence is None:
            return
        sequence = known.sequence
        group.held[sequence] -= 1
        if group.held[sequence]:
            return
        del group.held[sequence]
        self._settle(group, sequence)
        if not any(sequence in one.held for one in self._groups.values()):
            self._forget(sequence)

    def _settle(self, group: _Group, sequence: int) -> None:
        """Correct the run of a block, and the runs below it as far as they change."""
        pending = [sequence]
        while pending:
            current = pending.pop()
            run = group.due_run(current, self._parents[current])
            if run == group.runs.get(current, 0):
                continue
            if run:
                group.runs[current] = run
            else:
                del group.runs[current]
            self._changed.add(current)
            pending.extend(self._children.get(current, ()))

    def _forget(self, sequence: int) -> None:
        parent = self._parents.pop(sequence)
        siblings = self._children[parent]
        siblings.discard(sequence)
        if not siblings:
            del self._children[parent]  # else an empty set would stay for each block that ever was

    def _is_point(self, sequence: int) -> bool:
        return all(group.runs.get(sequence, 0) == group.enough for group in self._groups.values())

    def check(self) -> None:
        """Raise if an invariant is broken. Tests call this after every step."""
        held = {sequence for group in self._groups.values() for sequence in group.held}
        assert held == self._parents.keys(), "blocks that no group holds, or unknown ones"
        assert held == {child for children in self._children.values() for child in children}, "children"
        assert all(self._children.values()), "a parent without children is remembered"
        for group in self._groups.values():
            named = [self._known[one].sequence for one in group.refs if one in self._known]
            counts = {one: named.count(one) for one in named if one is not None}
            assert counts == group.held, "held blocks"
            for sequence, parent in self._parents.items():
                assert group.runs.get(sequence, 0) == group.due_run(sequence, parent), f"run of {sequence}"
        points = {sequence for sequence in held if self._is_point(sequence)}
        assert points ^ self._points <= self._changed, "a change that no op will state"
        assert self._sum == sum(self._points), "digest"


def _packed(hashes: Sequence[int]) -> list[bytes]:
    """Packed in parts that fit an op."""
    starts = range(0, len(hashes), MAX_FRAME_HASHES)
    return [pack_hashes(hashes[start : start + MAX_FRAME_HASHES]) for start in starts]
