"""The cost in blocks and in seconds, in examples by hand and in both versions; and choosing by it."""

from __future__ import annotations

import math
import random
from array import array
from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvrouter.core.native import versions
from kvrouter.core.routing.cost import (
    MOST_GAMMA,
    InSeconds,
    in_blocks,
    in_seconds,
    left_s,
    lowest,
    next_copies,
    sample,
    sample_scores,
    spread,
)
from kvrouter.core.tables.prefill_speeds import Speed

amounts = st.integers(0, 2**40)
moments = st.floats(0, 1e6)
rows = st.tuples(amounts, amounts, amounts, amounts, moments, amounts)
costs = st.lists(st.floats(0, 1e6), min_size=1, max_size=20)
chances = st.floats(0, 1, exclude_max=True)
Row = tuple[int, int, int, int, float, int]


def costs_of(
    *targets: Row, now: float = 10.0, fixed: float = 0.0, speed: float = 1e-4, arrivals: float = 0.0
) -> InSeconds:
    """Each target: charged, prompts, head, context, began, own."""
    charged, prompts, heads, context, began, own = zip(*targets, strict=True)
    columns = (
        array("q", charged),
        array("q", prompts),
        array("q", heads),
        array("q", context),
        array("d", began),
        array("q", own),
    )
    return in_seconds(now, Speed(speed, fixed_s=fixed), arrivals, 16, *columns)


def blocks_of(weight: float, *targets: tuple[int, int, int, int]) -> list[float]:
    """Each target: charged tokens, own tokens, active blocks, own blocks."""
    charged, own, active, own_blocks = (array("q", column) for column in zip(*targets, strict=True))
    return in_blocks(weight, 16, charged, own, active, own_blocks).each


@pytest.mark.usefixtures("core")
def test_the_sources_example() -> None:
    """Prefill 8/5/2 and decode 10/7/9 at weight 1 cost 18, 12, 11."""
    targets = (0, 8 * 16, 10, 0), (16, 4 * 16, 3, 4), (32, 0, 0, 9)

    assert [18, 12, 11] == blocks_of(1.0, *targets)
    assert [10, 7, 9] == blocks_of(0.0, *targets)


@pytest.mark.usefixtures("core")
def test_a_further_term() -> None:
    """It counts in blocks, and in seconds as long as an idle target computes its blocks."""
    columns = [array("q", [amount]) for amount in (0, 160, 5, 10)]
    blocks = in_blocks(1.0, 16, *columns)
    seconds = costs_of((0, 0, 0, 0, 0.0, 160), speed=1e-3)

    assert [25.0 + 7.0 - 2.0] == blocks.plus("zone", [7.0]).plus("rack", [-2.0]).each
    assert [0.16 + 7 * 0.016] == pytest.approx(seconds.plus("zone", [7.0]).each)
    both = seconds.plus("zone", [7.0]).plus("rack", [-2.0])
    assert [5 * 0.016] == pytest.approx(list(both.wait_and_added_s()))


@pytest.mark.usefixtures("core")
def test_progress_is_taken_off() -> None:
    """Of a head of 1,000 tokens 60 ms are done; 500 tokens wait behind it; 200 are the request's own."""
    found = costs_of((1500, 2, 1000, 0, 9.94, 200), (0, 0, 0, 0, 0.0, 900))

    assert [pytest.approx(0.09), 0.0] == list(found.wait_s)
    assert [pytest.approx(0.02), pytest.approx(0.09)] == list(found.own_s)
    assert [pytest.approx(0.11), pytest.approx(0.09)] == found.each


@pytest.mark.usefixtures("core")
def test_each_prompt_takes_its_fixed_part() -> None:
    """The request's own, the head's, of which 6 ms are done, and the seconds of the two that wait."""
    found = costs_of((100, 3, 40, 0, 9.994, 20), (0, 0, 0, 0, 0.0, 6000), fixed=0.01)

    assert [pytest.approx(0.008 + 2 * 0.01 + 0.006), 0.0] == list(found.wait_s)
    assert [pytest.approx(0.012), pytest.approx(0.61)] == list(found.own_s)


@pytest.mark.usefixtures("core")
def test_context_slows_what_is_left() -> None:
    """A held block adds nothing to an idle target's wait, and makes each token slower."""
    idle, busy = costs_of((0, 0, 0, 0, 0.0, 1000), (0, 0, 0, 1_000_000, 0.0, 1000)).each

    assert busy == pytest.approx(1.78 * idle)


@pytest.mark.usefixtures("core")
def test_congestion_has_a_price() -> None:
    """Requests that arrive, per target, during the median wait; it weighs only on the request's own work."""
    quiet, busy = (1000, 1, 1000, 0, 10.0, 100), (3000, 1, 3000, 0, 10.0, 100)

    found = costs_of(quiet, busy, busy, arrivals=15.0)

    assert 15 / 3 * 0.3 == pytest.approx(found.gamma)
    assert 0.1 + 0.01 * (1 + found.gamma) == pytest.approx(found.each[0])
    assert MOST_GAMMA == costs_of(busy, arrivals=1e6).gamma


def test_an_overdue_head_is_not_nearly_done() -> None:
    """It never costs less than its last step, and more with every second that it is overdue."""
    assert 0.2 == pytest.approx(left_s(1.0, 0.8))
    assert 0.02 == left_s(1.0, 1.0)
    assert 0.5 == left_s(1.0, 1.5)
    assert 9.0 == left_s(1.0, 10.0)


@pytest.mark.usefixtures("core")
def test_next_copies() -> None:
    """Of the targets that hold less, those that would begin first; none if enough targets hold it."""
    overlap, own = array("q", [9, 4, 9, 0, 0]), array("d", [0.1, 0.5, 0.1, 0.9, 0.9])
    wait = array("d", [0.0, 0.6, 0.0, 0.2, 0.2])

    assert [1, 3, 4] == next_copies(overlap, wait, own, 2.1)
    assert [] == next_copies(overlap, wait, own, 2.0)
    assert [] == next_copies(array("q", [3, 3]), wait[:2], own[:2], 9.0)


@given(
    st.lists(rows, min_size=1, max_size=40),
    moments,
    st.floats(0, 1),
    st.floats(1e-6, 1e-2),
    st.floats(0, 1e4),
    st.lists(st.integers(0, 3), min_size=40, max_size=40),
)
def test_both_versions_agree(
    targets: list[Row],
    now: float,
    fixed: float,
    speed: float,
    arrivals: float,
    overlap: list[int],
) -> None:
    """In every number."""
    before, found = versions.in_use(), []
    for core in versions.CORES:
        try:
            versions.choose(core)
            costs = costs_of(*targets, now=now, fixed=fixed, speed=speed, arrivals=arrivals)
            blocks = array("q", overlap[: len(targets)])
            found.append((costs, next_copies(blocks, costs.wait_s, costs.own_s, 3.5)))
        finally:
            versions.choose(before)

    assert found[0] == found[1]


def test_native_columns_are_checked() -> None:
    """A column of another length or kind raises, and no target at all."""
    whole, seconds = array("q", [1]), array("d", [0.0])
    native = pytest.importorskip("kvrouter.core.native.columns")

    def call(*columns: array[int] | array[float]) -> None:
        native.cost_s(0.0, 0.0, 1e-4, 0.0, 0.0, 0.02, 8.0, *columns)

    call(whole, whole, whole, whole, seconds, whole)
    wholes = (whole, whole, whole)
    for wrong in ((*wholes, whole, whole, whole), (whole, array("q"), whole, whole, seconds, whole)):
        with pytest.raises(ValueError, match="a column must be"):
            call(*wrong)
    nothing, none = array("q"), array("d")
    with pytest.raises(ValueError, match="a column must be"):
        native.next_copies(whole, seconds, array("d"), 1.0, 0.0)
    with pytest.raises(ValueError, match="no target"):
        call(nothing, nothing, nothing, nothing, none, nothing)


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
