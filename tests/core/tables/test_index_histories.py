"""After any history the index equals a dict of sets, in look-ups and digests."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvrouter.core.tables.block_index import BlockIndex, Holding
from kvrouter.core.wire.hashes import pack_hashes
from kvrouter.core.wire.ids import Target, WorkerId
from kvrouter.core.wire.ops import TIERS
from tests.core.forest import Forest, NaiveIndex, add_to, digest_of
from tests.long import examples

pytestmark = pytest.mark.usefixtures("core")

TARGETS = [Target(WorkerId("a"), 0), Target(WorkerId("a"), 1), Target(WorkerId("b"), 0)]
SIZE = 48

targets = st.sampled_from(TARGETS)
tiers = st.sampled_from(TIERS)
nodes = st.integers(0, SIZE - 1)
Load = tuple[Holding, list[set[int]], list[set[int]]]
"""Tier sets, and the resume points if there are any, as a set in a list."""


class IndexHistory(RuleBasedStateMachine):
    """Stores come parent first and removals deepest first, as publishers send them."""

    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex()
        self.model = NaiveIndex()
        self.loads: list[Load] = []

    @initialize(seed=st.integers(0, 2**32))
    def grow(self, seed: int) -> None:
        """Another forest."""
        self.forest = Forest(seed, SIZE)

    @rule(on=targets, node=nodes, tier=tiers, packed=st.booleans())
    def store(self, on: Target, node: int, tier: str, packed: bool) -> None:
        """A chain is computed, or returns from a wider tier."""
        chain = self.forest.chain(node)
        self.index.store(on, pack_hashes(chain) if packed else chain, tier)
        self.model.store(on, chain, tier)

    @rule(on=targets, node=nodes, tier=tiers, packed=st.booleans())
    def remove(self, on: Target, node: int, tier: str, packed: bool) -> None:
        """A block is evicted with all blocks below it."""
        subtree = self.forest.subtree(node)
        self.index.remove(on, pack_hashes(subtree) if packed else subtree, tier)
        self.model.remove(on, subtree, tier)

    @rule(on=targets)
    def clear(self, on: Target) -> None:
        """An engine restarts."""
        self.index.clear(on)
        self.model.clear(on)

    @rule(on=targets)
    def drop(self, on: Target) -> None:
        """A worker leaves."""
        self.index.drop(on)
        self.model.drop(on)

    @rule(on=targets, some=st.sets(nodes))
    def resume(self, on: Target, some: set[int]) -> None:
        """An engine of several KV groups can resume behind some blocks, held or not, in any order."""
        hashes = [self.forest.hashes[node] for node in some]
        self.index.resume(on, pack_hashes(hashes))
        self.model.sets.setdefault(on, [set()])
        self.model.resumable.setdefault(on, set()).update(hashes)

    @rule(on=targets, some=st.sets(nodes))
    def stop_resuming(self, on: Target, some: set[int]) -> None:
        """It can no longer resume there."""
        hashes = [self.forest.hashes[node] for node in some]
        self.index.stop_resuming(on, pack_hashes(hashes))
        self.model.resumable.get(on, set()).difference_update(hashes)

    @rule(tier_sets=st.integers(1, 3))
    def begin_load(self, tier_sets: int) -> None:
        """A snapshot begins."""
        self.loads.append((self.index.begin_load(tier_sets), [set() for _ in range(tier_sets)], []))

    @precondition(lambda self: self.loads)
    @rule(data=st.data(), node=nodes)
    def load(self, data: st.DataObject, node: int) -> None:
        """A slice of the snapshot is loaded."""
        holding, sets, _ = self.loads[-1]
        tier = data.draw(st.sampled_from(TIERS[: len(sets)]))
        chain = self.forest.chain(node)
        self.index.load(holding, chain, tier)
        add_to(sets, chain, tier)
        assert self.index.loaded_holds(holding, chain[-1], tier)

    @precondition(lambda self: self.loads)
    @rule(some=st.sets(nodes))
    def load_resumable(self, some: set[int]) -> None:
        """The snapshot names resume points."""
        holding, _, points = self.loads[-1]
        hashes = [self.forest.hashes[node] for node in some]
        self.index.load_resumable(holding, hashes)
        points[:] = [set(hashes).union(*points)]

    @precondition(lambda self: self.loads)
    @rule(on=targets)
    def finish_load(self, on: Target) -> None:
        """The snapshot is complete."""
        holding, sets, points = self.loads.pop(0)
        self.index.finish_load(on, holding)
        self.model.drop(on)
        self.model.sets[on] = sets
        self.model.resumable.update({on: points[0]} if points else {})

    @precondition(lambda self: self.loads)
    @rule()
    def abandon_load(self) -> None:
        """The snapshot is dropped halfway."""
        self.index.abandon_load(self.loads.pop()[0])

    @rule(steps=st.sampled_from([1, 100, 256, 2500]))
    def sweep(self, steps: int) -> None:
        """Sweep some shards between two messages; 2,500 steps end any sweep, so slots are used again."""
        for _ in range(steps):
            self.index.sweep()

    @invariant()
    def agrees(self) -> None:
        """Overlaps, digests, membership and the index's own invariants."""
        self.index.check()
        assert set(self.model.sets) == set(self.index.targets())
        for node in range(0, SIZE, 5):
            chain = self.forest.chain(node)
            for most in (len(chain), len(chain) - 1):
                assert self.model.overlap_by_tier(chain, most) == self.index.overlap_by_tier(chain, most)
        for target in TARGETS:
            self._agrees_on(target)

    def _agrees_on(self, target: Target) -> None:
        for tier in TIERS:
            assert self.model.digest(target, tier) == self.index.digest(target, tier)
        points = self.model.resumable.get(target)
        assert (None if points is None else digest_of(points)) == self.index.resumable_digest(target)
        sets = self.model.sets.get(target, [])
        assert all(self.forest.is_closed(held) for held in sets), "the test's own history is wrong"
        assert (len(sets[-1]) if sets else 0) == self.index.blocks(target)
        for hash_ in self.forest.hashes[:6]:
            assert (bool(sets) and hash_ in sets[0]) == self.index.holds(target, hash_)

    def teardown(self) -> None:
        """When all targets are dropped and swept, no row is left."""
        for holding, *_ in self.loads:
            self.index.abandon_load(holding)
        for target in TARGETS:
            self.index.drop(target)
        while self.index.sweep():
            pass
        assert digest_of([])[0] == len(self.index)


def test_any_history() -> None:
    """After any ops in any order the index equals a dict of sets."""
    run_state_machine_as_test(IndexHistory, settings=examples(60, stateful_step_count=30))
