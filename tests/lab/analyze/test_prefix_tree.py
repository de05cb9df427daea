"""The prefix tree of a trace."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.wire.hashes import sequence_hashes
from kvrouter.core.wire.ids import BlockHash
from kvrouter.lab.analyze.prefix_tree import Branch, PrefixTree


def names(*blocks: int) -> list[int]:
    """Names of the prefixes of a prompt."""
    return [*sequence_hashes([BlockHash(block) for block in blocks])]


def test_core_depths() -> None:
    """A later request makes the core of an earlier one deeper, and only as far as both go."""
    tree = PrefixTree()

    found = [tree.visit(names(*blocks), 0.0) for blocks in ((0, 1, 2), (0, 1, 3), (0, 4), (9,))]

    assert [0, 2, 1, 0] == found
    assert [2, 2, 1, 0] == [*tree.core_depths]
    assert (6, 2, 2) == (tree.blocks, tree.core_blocks, tree.depth)
    tree.check()


def test_equal_blocks_after_other_prefixes() -> None:
    """They are different blocks."""
    tree = PrefixTree()
    tree.visit(names(1, 2), 0.0)

    assert 0 == tree.visit(names(2), 1.0)


def test_ages() -> None:
    """Each visit of a known block counts, by the time since the last one, to a quarter of an octave."""
    tree = PrefixTree()
    for now in (0.0, 0.0, 8.0, 108.0):
        tree.visit(names(1), now)

    assert 3 == tree.ages.total()
    assert [0.0, 8.0, pytest.approx(100, rel=0.19)] == sorted(tree.ages)


def test_parting() -> None:
    """Nearly all requests have the trunk; a branch reaches as far as nearly all of its requests do."""
    tree = PrefixTree()
    for number in range(10):
        tree.visit(names(7, 8, 1, 2, 100 + number), 0.0)
    for number in range(5):
        tree.visit(names(7, 8, 3, 200 + number), 0.0)
    tree.visit(names(7), 0.0)

    parting = tree.parting()

    assert Branch(15, 2) == parting.trunk
    assert [Branch(10, 4), Branch(5, 3)] == parting.branches


def test_nothing_shared() -> None:
    """The trunk is the root, and there are no branches."""
    tree = PrefixTree()
    for number in range(5):
        tree.visit(names(number), 0.0)

    assert (Branch(5, 0), []) == (tree.parting().trunk, tree.parting().branches)
    assert Branch(0, 0) == PrefixTree().parting().trunk


@given(st.lists(st.lists(st.integers(0, 2), max_size=5).map(tuple), max_size=12))
def test_counts_as_a_list_of_prefixes_does(prompts: list[tuple[int, ...]]) -> None:
    """Any few prompts of few blocks: the same figures as from all their prefixes, written down."""
    tree = PrefixTree()
    found = [tree.visit(names(*prompt), 0.0) for prompt in prompts]
    tree.check()

    prefixes = [[prompt[: depth + 1] for depth in range(len(prompt))] for prompt in prompts]
    visits = Counter(prefix for all_of in prefixes for prefix in all_of)
    before = [{prefix for all_of in prefixes[:place] for prefix in all_of} for place in range(len(prompts))]
    known = [sum(prefix in seen for prefix in own) for own, seen in zip(prefixes, before, strict=True)]
    assert known == found
    assert [sum(visits[prefix] >= 2 for prefix in own) for own in prefixes] == [*tree.core_depths]
    assert (len(visits), sum(number >= 2 for number in visits.values())) == (tree.blocks, tree.core_blocks)
    assert sum(known) == tree.ages.total()


@pytest.mark.parametrize("most", [1 << 30, 400])
def test_a_bounded_tree_estimates(most: int) -> None:
    """A tree of 400 blocks instead of 6,000 finds the same figures to within its resolution."""
    chance, tree = random.Random(1), PrefixTree(most)
    for number in range(600):
        group = chance.randrange(40)
        shared = [group * 100 + place for place in range(60)]
        tree.visit(names(*shared, *(10_000 + 10 * number + place for place in range(6))), 0.0)
    tree.check()

    assert (tree.scale > 1) == (most == 400)
    assert pytest.approx(6000, rel=0.15) == tree.blocks
    assert pytest.approx(2400, rel=0.2) == tree.core_blocks
    assert pytest.approx(60, abs=tree.scale) == sorted(tree.core_depths)[300]
    assert pytest.approx(560 * 60, rel=0.2) == tree.ages.total()
