"""The duration of a step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.lab.mocker.engine import StepWork, Timing

amounts = st.integers(0, 10_000)


def test_empty_step_reads_the_weights() -> None:
    """Even one token costs a pass over the weights."""
    assert Timing().base_s == Timing().step_s(StepWork())


@given(amounts, amounts, amounts, amounts)
def test_speedup_scales_everything(prefill: int, decode: int, context: int, host: int) -> None:
    """Ten times the speed is a tenth of the time, for any work."""
    work = StepWork(prefill, decode, context, host)

    assert Timing().step_s(work) == pytest.approx(10 * Timing().scaled(10).step_s(work))


@given(amounts, amounts)
def test_more_work_takes_longer(prefill: int, more: int) -> None:
    """Time grows with the tokens to prefill: a cache hit saves it."""
    assert Timing().step_s(StepWork(prefill)) <= Timing().step_s(StepWork(prefill + more))
