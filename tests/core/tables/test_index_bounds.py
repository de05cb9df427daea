"""An index with bounds: which blocks it refuses, and that the blocks it keeps are exact."""

from __future__ import annotations

import random
from typing import Literal

import pytest

from kvrouter.core.feeds.trust import FeedState
from kvrouter.core.tables.block_index import BlockIndex, IndexBounds
from kvrouter.core.wire.ids import Target, WorkerId
from tests.core.links import Link
from tests.long import IS_LONG

pytestmark = pytest.mark.usefixtures("core")

T1, T2, T3 = (Target(WorkerId(name)) for name in ("w1", "w2", "w3"))
CHAIN = [11, 22, 33, 44]


def sweep_all(index: BlockIndex) -> None:
    """Sweep until nothing is left to do."""
    while index.sweep():
        pass


def test_blocks_are_refused_from_the_bound_on() -> None:
    """Three blocks fit: the chain is cut after the third, and the target is truncated."""
    index = BlockIndex(IndexBounds(max_blocks=3))
    index.store(T1, CHAIN)

    assert {T1: 3} == index.overlap(CHAIN)
    assert (True, False) == (index.is_truncated(T1), index.is_truncated(T2))
    assert (3, 1) == (index.counters.stored_blocks, index.counters.refused_blocks)


def test_blocks_that_are_known_need_no_room() -> None:
    """Another holder of the same blocks adds none."""
    index = BlockIndex(IndexBounds(max_blocks=3))
    index.store(T1, CHAIN[:3])
    index.store(T2, CHAIN)

    assert {T1: 3, T2: 3} == index.overlap(CHAIN)
    assert (False, True) == (index.is_truncated(T1), index.is_truncated(T2))


def test_holders_are_refused_from_the_bound_on() -> None:
    """Two holders of a block are kept; a third is cut off before that block."""
    index = BlockIndex(IndexBounds(max_holders=2))
    for target in (T1, T2):
        index.store(target, CHAIN[:2])
    index.store(T3, CHAIN)
    assert {T1: 2, T2: 2} == index.overlap(CHAIN)

    index.remove(T1, CHAIN[1::-1])
    index.store(T3, CHAIN)
    assert {T2: 2, T3: 4} == index.overlap(CHAIN)


def test_holders_are_counted_once_over_tiers() -> None:
    """Device and host of one target are one holder."""
    index = BlockIndex(IndexBounds(max_holders=2))
    index.store(T1, CHAIN, "host")
    index.store(T1, CHAIN)
    index.store(T2, CHAIN, "disk")
    index.store(T3, CHAIN)

    assert {T1, T2} == set(index.overlap_by_tier(CHAIN))


def test_reloading_does_not_count_twice() -> None:
    """A snapshot of the same blocks fits in their place, at either bound."""
    index = BlockIndex(IndexBounds(max_blocks=4, max_holders=1))
    index.store(T1, CHAIN)
    fresh = index.begin_load(1, T1)
    index.load(fresh, CHAIN)
    index.finish_load(T1, fresh)
    sweep_all(index)

    assert {T1: 4} == index.overlap(CHAIN)
    assert not index.is_truncated(T1)


def test_targets_that_load_at_once_see_each_other() -> None:
    """Both bounds hold for snapshots that load at the same time."""
    index = BlockIndex(IndexBounds(max_holders=1))
    holdings = [index.begin_load(1, target) for target in (T1, T2)]
    for holding in holdings:
        index.load(holding, CHAIN)
    for target, holding in zip((T1, T2), holdings, strict=True):
        index.finish_load(target, holding)

    assert {T1: 4} == index.overlap(CHAIN)


def test_truncated_until_it_is_equal_again() -> None:
    """When the source evicts the refused blocks, its digest equals ours, and nothing is missing."""
    index = BlockIndex(IndexBounds(max_blocks=3))
    index.store(T1, CHAIN)

    assert index.agrees(T1, "device", 4, sum(CHAIN)), "blocks refused here are not a mismatch"
    assert index.is_truncated(T1)
    assert index.agrees(T1, "device", 3, sum(CHAIN[:3]))
    assert not index.is_truncated(T1)
    assert not index.agrees(T1, "device", 4, sum(CHAIN)), "from now on fewer blocks are a mismatch"


def test_truncated_and_wrong() -> None:
    """More blocks than the source has, or as many others, are a mismatch."""
    index = BlockIndex(IndexBounds(max_blocks=3))
    index.store(T1, CHAIN)

    assert not index.agrees(T1, "device", 2, sum(CHAIN[:2]))
    assert not index.agrees(T1, "device", 3, 5)


def test_every_tier_has_to_agree() -> None:
    """One equal tier set does not end the truncation."""
    index = BlockIndex(IndexBounds(max_blocks=3))
    index.store(T1, CHAIN[:2])
    index.store(T1, CHAIN, "host")

    assert index.agrees(T1, "device", 2, sum(CHAIN[:2]))
    assert index.is_truncated(T1)
    assert index.agrees(T1, "host", 3, sum(CHAIN[:3]))
    assert not index.is_truncated(T1)


def test_room_again() -> None:
    """A twentieth of the bound has to be free: else every eviction would start a snapshot."""
    index = BlockIndex(IndexBounds(max_blocks=100))
    index.store(T1, range(1, 98))
    index.store(T2, range(1000, 1010))
    assert not index.has_room_again(T2)

    index.remove(T1, range(97, 93, -1))
    assert not index.has_room_again(T2), "four blocks of room"
    index.remove(T1, range(93, 91, -1))
    assert index.has_room_again(T2)


def test_refused_blocks_that_were_evicted() -> None:
    """With room there is nothing to bring back."""
    index = BlockIndex(IndexBounds(max_blocks=3))
    index.store(T1, CHAIN)
    index.remove(T1, CHAIN[3:])
    index.remove(T1, CHAIN[2:0:-1])

    assert not index.has_room_again(T1)


def test_cleared_target_is_not_truncated() -> None:
    """It holds nothing, and so does its source."""
    index = BlockIndex(IndexBounds(max_blocks=3))
    index.store(T1, CHAIN)
    index.clear(T1)

    assert not index.is_truncated(T1)
    assert not index.agrees(T1, "device", 1, 11)


def test_counters() -> None:
    """Blocks, holders, look-ups, bytes; repeated blocks are not counted again."""
    index = BlockIndex()
    for target in (T1, T2, T2):
        index.store(target, CHAIN)
    index.remove(T1, CHAIN[3:])
    index.remove(T1, CHAIN[3:])
    empty = BlockIndex().size_bytes()
    index.overlap(CHAIN)

    assert (4, 7) == (len(index), index.holders())
    assert (8, 1, 0, 1) == (
        index.counters.stored_blocks,
        index.counters.removed_blocks,
        index.counters.refused_blocks,
        index.counters.lookups,
    )
    assert 0 < index.size_bytes() - empty < 4000


@pytest.mark.parametrize("tier_sets", [1, 2])
@pytest.mark.parametrize(
    ("seed", "full"), [(seed, full) for full in ("refuse", "lru") for seed in range(6 if IS_LONG else 1)]
)
def test_bounded_feeds(seed: int, tier_sets: int, full: Literal["refuse", "lru"]) -> None:
    """Three targets and a bounded index: its blocks are theirs and prefix-closed, and no feed is flagged.

    Without the bounds all blocks return, with one snapshot for each target.
    """
    rng = random.Random(seed)
    index = BlockIndex(IndexBounds(20, 2, full))
    links = [Link(seed, tier_sets=tier_sets, index=index, target=target) for target in (T1, T2, T3)]
    for link in links:
        link.heartbeat()
    for _ in range(300):
        _step(rng, rng.choice(links))
        sweep_all(index)
        _check(links)
    assert any(index.is_truncated(link.target) for link in links)

    index.bounds = IndexBounds(1_000, 0, full)
    for link in links:
        link.now += 60.0
        link.send(link.owner.check())
        link.settle()
        link.send(link.owner.check())

        assert link.agrees()
        assert not index.is_truncated(link.target)
        counters = link.reader.counters
        assert (0, 0, "") == (counters.digest_mismatches, counters.contradictions, link.reader.flag)


def _step(rng: random.Random, link: Link) -> None:
    """A second in the life of an engine; sometimes a frame is lost and repaired."""
    owner, node, tier = link.owner, rng.randrange(48), rng.randrange(len(link.owner.sets))
    ops = owner.store(node, tier) if rng.random() < 0.75 else owner.remove(node, tier)
    frames = link.source.append([*ops, *(owner.check() if rng.random() < 0.5 else ())])
    if rng.random() < 0.9:
        link.deliver(*frames)
    link.now += 1.0
    link.settle()


def _check(links: list[Link]) -> None:
    index = links[0].index
    index.check()
    assert len(index) <= 20
    for link in links:
        assert FeedState.LIVE is link.reader.state
        for held, theirs in zip(link.held(), link.owner.sets, strict=True):
            assert held <= theirs
            assert link.owner.forest.is_closed(held)
    for hash_ in links[0].owner.forest.hashes:
        assert sum(index.holds(link.target, hash_, "disk") for link in links) <= 2


@pytest.mark.parametrize("full", ["refuse", "lru"])
def test_resume_points_take_no_row(full: Literal["refuse", "lru"]) -> None:
    """With a bound only resume points of blocks that are held are kept, and they leave with their blocks."""
    index = BlockIndex(IndexBounds(max_blocks=3, full=full))
    index.resume(T1, b"")
    for root in (100, 200):
        index.store(T1, [root, root + 1], "device")
        index.resume(T1, [root, root + 1])
        index.check()

    assert 3 >= len(index)
    assert {T1: 2 if full == "refuse" else 1} == index.overlap([100, 101])
    assert {T1: 1 if full == "refuse" else 2} == index.overlap([200, 201])
    assert index.agrees_on_resumable(T1, 4, 602)
    assert not index.agrees_on_resumable(T1, 2, 201)
