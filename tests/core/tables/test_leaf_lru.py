"""The order in which a full index loses blocks."""

from __future__ import annotations

import random

import pytest

from kvrouter.core.tables.block_index import BlockIndex, IndexBounds
from kvrouter.core.tables.leaf_lru import SHARDS, LeafLru
from kvrouter.core.wire.ids import Target, WorkerId

T1, T2 = (Target(WorkerId(name)) for name in ("w1", "w2"))
LONG, SHORT = [11, 12, 13], [11, 22]


def lost(lru: LeafLru) -> list[int]:
    """All blocks in the order in which they go."""
    order = []
    while (hash_ := lru.oldest()) is not None:
        order.append(hash_)
        lru.forget(hash_)
        lru.check()
    return order


@pytest.mark.parametrize(("used", "order"), [((), [13, 12, 22, 11]), ((13,), [22, 13, 12, 11])])
def test_leaves_first(used: tuple[int, ...], order: list[int]) -> None:
    """A chain goes from its end, the older one first; a block that both chains share goes last."""
    lru = LeafLru()
    lru.store(LONG, None)
    lru.store(SHORT[1:], 11)
    for hash_ in used:
        lru.use(hash_)

    assert order == lost(lru)


def test_use_of_an_inner_block() -> None:
    """It keeps its parents, not what is below it."""
    lru = LeafLru()
    lru.store(LONG, None)
    lru.store([33], None)
    lru.use(12)

    assert [13, 33, 12, 11] == lost(lru)


def test_chains_that_contradict() -> None:
    """A wrong feed names another parent: the first one counts, and all blocks can still go."""
    lru = LeafLru()
    lru.store(LONG, None)
    lru.store([22, 13, 12], None)
    lru.check()

    assert {11, 12, 13, 22} == set(lost(lru))


def test_blocks_that_nothing_holds() -> None:
    """They are forgotten shard by shard, and free their parents."""
    lru = LeafLru()
    lru.store(LONG, None)
    for shard in range(SHARDS):
        lru.prune(shard, lambda hash_: hash_ == 11)
    lru.check()

    assert 1 == len(lru)
    assert [11] == lost(lru)


@pytest.mark.usefixtures("core")
def test_index_evicts() -> None:
    """New blocks are stored, the oldest are evicted from all holders, which are truncated."""
    index = BlockIndex(IndexBounds(max_blocks=4, full="lru"))
    for target in (T1, T2):
        index.store(target, LONG)
    index.store(T2, [44], parent=None)
    index.overlap(LONG)
    index.store(T2, [55], parent=44)

    assert {T1: 2, T2: 2} == index.overlap(LONG), "the chain's end was older than the new block"
    assert {T2: 2} == index.overlap([44, 55])
    assert (4, 1, 0) == (len(index), index.counters.evicted_blocks, index.counters.refused_blocks)
    assert index.is_truncated(T1)
    assert index.is_truncated(T2)
    assert index.agrees(T1, "device", 3, sum(LONG)), "blocks evicted here are not a mismatch"


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("seed", range(2))
def test_memory_is_bounded(seed: int) -> None:
    """However blocks and targets come and go, as many are known for eviction as are in the index."""
    rng, index = random.Random(seed), BlockIndex(IndexBounds(max_blocks=30, full="lru"))
    for _ in range(400):
        target, root = rng.choice((T1, T2)), 100 * rng.randrange(9)
        chain = list(range(root, root + 8))
        match rng.randrange(10):
            case 0:
                index.drop(target)
            case 1 | 2:
                index.remove(target, chain[: rng.randrange(1, 8) : -1])
            case 3:
                fresh = index.begin_load(1, target)
                index.load(fresh, chain)
                index.finish_load(target, fresh)
            case _:
                index.store(target, chain[: rng.randrange(1, 9)])
        while index.sweep():
            pass
        index.check()

        assert 30 >= len(index)
        lru = index._lru
        assert lru is not None
        assert len(index) == len(lru)
