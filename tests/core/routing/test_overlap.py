"""What a prompt finds on a target, in examples of the design and within its bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.routing.overlap import Overlap, find_overlap, uncached_tokens


def test_last_token_is_always_computed() -> None:
    """160 tokens that are all cached still overlap in 9 blocks of 16 only; 161 in all ten."""
    assert 9 == find_overlap(160, 16, [10], 0).overlap_blocks
    assert 10 == find_overlap(161, 16, [10], 0).overlap_blocks
    assert 16 == uncached_tokens(160, 16, find_overlap(160, 16, [10], 0))


@pytest.mark.parametrize("isl", [0, 1, 15])
def test_prompt_without_a_full_block(isl: int) -> None:
    """Nothing overlaps, even if the tables have depths: all tokens must be computed."""
    overlap = find_overlap(isl, 16, [5, 6, 7], 9)

    assert Overlap(0, 0, 0) == overlap
    assert isl == uncached_tokens(isl, 16, overlap)


def test_blocks_in_flight_are_as_good_as_cached() -> None:
    """The deeper of index and requests in flight counts; without either, nothing does."""
    assert 7 == find_overlap(160, 16, [3], 7).overlap_blocks
    assert 7 == find_overlap(160, 16, [7], 3).overlap_blocks
    assert 7 == find_overlap(160, 16, [], 7).overlap_blocks
    assert Overlap(0, 0, 0) == find_overlap(160, 16, [], 0)


def test_credit_of_slower_tiers() -> None:
    """A block in host memory is worth 0.75 of one on the device, one on disk 0.25."""
    overlap = find_overlap(1601, 16, [2, 6, 16], 0)

    assert Overlap(2, 2 + 0.75 * 4 + 0.25 * 10, 16) == overlap
    assert 1601 - 7.5 * 16 == uncached_tokens(1601, 16, overlap)


def test_host_without_disk() -> None:
    """Two tier sets make device and host credit."""
    assert Overlap(2, 2 + 0.75 * 4, 6) == find_overlap(1601, 16, [2, 6], 0)


def test_credit_without_slower_tiers_is_the_overlap() -> None:
    """With a device only, credit and overlap are the same number."""
    assert Overlap(4, 4, 4) == find_overlap(160, 16, [4], 0)


def test_in_flight_blocks_lift_the_wider_sets() -> None:
    """A prefix in flight is deeper than host memory: no credit goes below it."""
    assert Overlap(8, 8, 8) == find_overlap(1601, 16, [2, 6], 8)


def test_the_last_token_caps_all_tiers() -> None:
    """Host and disk stop before the last token as well."""
    assert Overlap(2, 2 + 0.75 * 7, 9) == find_overlap(160, 16, [2, 10, 10], 0)


@given(st.integers(0, 500), st.integers(1, 32), st.lists(st.integers(0, 40), max_size=3), st.integers(0, 40))
def test_overlap_stays_in_bounds(isl: int, block_size: int, depths: list[int], in_flight: int) -> None:
    """Device ≤ credit ≤ widest, all below the last token, and at least one token is computed."""
    overlap = find_overlap(isl, block_size, sorted(depths), in_flight)

    assert overlap.overlap_blocks <= overlap.credit_blocks <= overlap.widest_blocks
    assert overlap.widest_blocks * block_size < max(isl, 1)
    assert min(isl, 1) <= uncached_tokens(isl, block_size, overlap) <= isl
