"""The seconds that weight `auto` compares: examples by hand, and the C version against the Python one."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.native import versions
from kvrouter.core.routing.prefill_times import MOST_GAMMA, Costs, cost_s, left_s, next_copies

amounts = st.integers(0, 2**40)
moments = st.floats(0, 1e6)
rows = st.tuples(amounts, amounts, amounts, amounts, moments, amounts)
Row = tuple[int, int, int, int, float, int]


def costs_of(
    *targets: Row, now: float = 10.0, fixed: float = 0.0, speed: float = 1e-4, arrivals: float = 0.0
) -> Costs:
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
    return cost_s(now, fixed, speed, arrivals, *columns)


@pytest.mark.usefixtures("core")
def test_progress_is_taken_off() -> None:
    """Of a head of 1,000 tokens 60 ms are done; 500 tokens wait behind it; 200 are the request's own."""
    found = costs_of((1500, 2, 1000, 0, 9.94, 200), (0, 0, 0, 0, 0.0, 900))

    assert [pytest.approx(0.09), 0.0] == list(found.wait_s)
    assert [pytest.approx(0.02), pytest.approx(0.09)] == list(found.own_s)
    assert [pytest.approx(0.11), pytest.approx(0.09)] == found.cost_s


@pytest.mark.usefixtures("core")
def test_each_prompt_takes_its_fixed_part() -> None:
    """The request's own, the head's, of which 6 ms are done, and those of the two that wait."""
    found = costs_of((100, 3, 40, 0, 9.994, 20), (0, 0, 0, 0, 0.0, 6000), fixed=0.01)

    assert [pytest.approx(0.008 + 2 * 0.01 + 0.006), 0.0] == list(found.wait_s)
    assert [pytest.approx(0.012), pytest.approx(0.61)] == list(found.own_s)


@pytest.mark.usefixtures("core")
def test_context_slows_what_is_left() -> None:
    """A held block adds nothing to an idle target's wait, and makes each token slower."""
    idle, busy = costs_of((0, 0, 0, 0, 0.0, 1000), (0, 0, 0, 1_000_000, 0.0, 1000)).cost_s

    assert busy == pytest.approx(1.78 * idle)


@pytest.mark.usefixtures("core")
def test_congestion_has_a_price() -> None:
    """Requests that arrive, per target, during the median wait; it weighs only on the request's own work."""
    quiet, busy = (1000, 1, 1000, 0, 10.0, 100), (3000, 1, 3000, 0, 10.0, 100)

    found = costs_of(quiet, busy, busy, arrivals=15.0)

    assert 15 / 3 * 0.3 == pytest.approx(found.gamma)
    assert 0.1 + 0.01 * (1 + found.gamma) == pytest.approx(found.cost_s[0])
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
