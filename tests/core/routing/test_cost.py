"""The cost of a candidate, and picking by it."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvrouter.core.routing.cost import (
    Overlap,
    cost,
    find_overlap,
    lowest,
    sample,
    sample_scores,
    spread,
    uncached_tokens,
)

costs = st.lists(st.floats(0, 1e6), min_size=1, max_size=20)
chances = st.floats(0, 1, exclude_max=True)


def test_the_sources_example() -> None:
    """Prefill 8/5/2 and decode 10/7/9 at weight 1 cost 18, 12, 11: worker 3 wins."""
    costs = [cost(1.0, prefill, decode) for prefill, decode in [(8, 10), (5, 7), (2, 9)]]

    assert [18, 12, 11] == costs
    assert 2 == lowest(costs, 0.0)


def test_weight_zero_leaves_decode_blocks() -> None:
    """Without weight only active blocks count."""
    assert 7 == cost(0.0, 1e9, 7)


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


@settings(deadline=None)
@given(st.integers(0, 500), st.integers(1, 32), st.lists(st.integers(0, 40), max_size=3), st.integers(0, 40))
def test_overlap_stays_in_bounds(isl: int, block_size: int, depths: list[int], in_flight: int) -> None:
    """Device ≤ credit ≤ widest, all below the last token, and at least one token is computed."""
    overlap = find_overlap(isl, block_size, sorted(depths), in_flight)

    assert overlap.overlap_blocks <= overlap.credit_blocks <= overlap.widest_blocks
    assert overlap.widest_blocks * block_size < max(isl, 1)
    assert min(isl, 1) <= uncached_tokens(isl, block_size, overlap) <= isl


@settings(deadline=None)
@given(costs, chances)
def test_lowest_is_lowest(values: list[float], chance: float) -> None:
    """What is picked costs no more than the least, within a billionth."""
    assert values[lowest(values, chance)] == pytest.approx(min(values), rel=1e-9, abs=0)


def test_ties_are_random_among_the_equal() -> None:
    """Each of the equal is picked about as often; costs a billionth apart are equal."""
    rng = random.Random(1)
    values = [5.0, 3.0, 3.0 * (1 + 1e-10), 4.0, 3.0]

    picks = Counter(lowest(values, rng.random()) for _ in range(3000))

    assert {1, 2, 4} == set(picks)
    assert all(abs(count - 1000) < 100 for count in picks.values())


def test_nearly_equal_is_not_equal() -> None:
    """Costs that differ by a millionth are not equal."""
    assert 1 == lowest([3.000003, 3.0], 0.0)
    assert 1 == lowest([1e-6, 0.0], 0.0)


@settings(deadline=None)
@given(costs, st.floats(0.01, 10), chances)
def test_sample_is_a_candidate(values: list[float], temperature: float, chance: float) -> None:
    """Any costs give a candidate."""
    assert 0 <= sample(values, temperature, chance) < len(values)


@pytest.mark.parametrize("temperature", [0.2, 0.5, 2.0])
def test_sample_follows_the_softmax(temperature: float) -> None:
    """Draws are distributed as softmax over the normalised costs: chi-square below its 99.9 % bound."""
    values, draws, rng = [10.0, 12.0, 15.0, 20.0], 4000, random.Random(7)
    weights = [2.718281828459045 ** (-(value - 10) / (10 * temperature)) for value in values]
    expected = [draws * weight / sum(weights) for weight in weights]

    drawn = Counter(sample(values, temperature, rng.random()) for _ in range(draws))

    chi_square = sum((drawn[i] - want) ** 2 / want for i, want in enumerate(expected))
    assert chi_square < 16.27  # 3 degrees of freedom


def test_only_differences_count_for_softmax() -> None:
    """Costs are normalised: shifted and stretched costs draw the same."""
    for chance in (0.0, 0.3, 0.6, 0.9, 0.999):
        assert sample([1, 2, 4], 0.5, chance) == sample([110, 120, 140], 0.5, chance)


def test_equal_costs_draw_uniformly() -> None:
    """All equal: each is as likely as any other."""
    rng = random.Random(3)

    drawn = Counter(sample([7.0] * 4, 0.5, rng.random()) for _ in range(4000))

    assert all(abs(drawn[i] - 1000) < 100 for i in range(4))


def test_low_temperature_is_nearly_deterministic() -> None:
    """Near 0 the least cost wins, even for tiny temperatures that underflow the others' weights."""
    assert {1} == {sample([5.0, 3.0, 4.0], 1e-6, chance / 100) for chance in range(100)}


def test_temperature_next_to_nothing() -> None:
    """The smallest number there is: the lowest cost, and no division by 0."""
    assert {1} == {sample([5.0, 4.75, 4.9], 5e-324, chance / 100) for chance in range(100)}
    assert {1} == {sample_scores([0.1, 0.2, 0.15], 5e-324, chance / 100) for chance in range(100)}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_costs_beyond_the_largest_number(temperature: float) -> None:
    """With a weight of 1e308, costs that overflow are equal, and any other cost is lower."""

    def chosen(costs: list[float]) -> set[int]:
        draws = [chance / 100 for chance in range(100)]
        return {sample(costs, temperature, c) if temperature else lowest(costs, c) for c in draws}

    assert {0, 1} == chosen([math.inf, math.inf])
    assert {1} == chosen([math.inf, 3.0])


def test_scores_below_the_lowest_number() -> None:
    """All overflow: each is as likely as any other."""
    assert {0, 1} == {sample_scores([-math.inf] * 2, 1.0, chance / 100) for chance in range(100)}


def test_spread_without_water_is_the_lowest() -> None:
    """No other replica decides: the lowest cost, ties by chance."""
    assert 1 == spread([5.0, 3.0, 4.0], own_cost=10, unseen=0, part=0.5, chance=0.9)
    ties = [spread([3.0, 3.0], own_cost=0, unseen=5, part=0.5, chance=chance) for chance in (0.1, 0.9)]
    assert [0, 1] == ties


def test_spread_gives_each_replica_its_part_of_the_water() -> None:
    """Costs 10, 0, 100 and water of 30: the level is 20, the depths 10, 20 and 0."""
    shares = [
        [spread([10.0, 0.0, 100.0], 30, 1, n / count, 0.5) for n in range(count)] for count in (1, 3, 6)
    ]

    assert [[1], [1, 1, 0], [1, 1, 1, 1, 0, 0]] == shares


def test_spread_gives_equal_candidates_to_different_replicas() -> None:
    """Eight replicas in one instant, and eight idle workers."""
    assert set(range(8)) == {spread([1.0] * 8, 20, 7, n / 8, 0.5) for n in range(8)}


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=8), st.floats(0, 1e4), st.floats(0, 50))
@example([0.0, 1.0], 1.0, 5e-324)
def test_spread_takes_no_candidate_above_the_level(
    costs: list[float], own_cost: float, unseen: float
) -> None:
    """The choice costs at most as much as the cheapest with all the unseen load on it."""
    for replica in range(3):
        chosen = spread(costs, own_cost, unseen, replica / 3, 0.5)
        assert costs[chosen] <= min(costs) + own_cost * unseen + 1e-6 * (1 + max(costs))
