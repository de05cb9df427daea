"""`scripts/bench live`: the arithmetic; the measuring needs a fleet."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scripts.kit.bench import live
from scripts.kit.fleet import FleetError
from scripts.kit.load import LoadRequest, Outcome

GOOD = Outcome(
    0, "http://replica", error=None, ttft_s=live.SLO_TTFT_S, latency_s=live.SLO_TTFT_S + 10 * live.SLO_ITL_S,
    prompt_tokens=100, cached_tokens=25, output_tokens=11, worker="a",
)  # fmt: skip


def test_paced() -> None:
    """The rate is that of the whole run, and the distances keep their proportions."""
    requests = [LoadRequest(at_s, b"") for at_s in (0.0, 1.0, 3.0, 4.0)]

    assert [0.0, 2.0, 6.0, 8.0] == [request.at_s for request in live.paced(requests, rate=0.5)]


def test_throughput() -> None:
    """The slow first and last fifth do not count, nor do errors."""
    ends = [1.0, 2.0, *(50.0 + n / 2 for n in range(7)), 200.0]
    outcomes = [Outcome(n, "", error=None, ended_at_s=end) for n, end in enumerate(ends)]

    assert 2.0 == live.throughput([*outcomes, Outcome(10, "", error="late", ended_at_s=51.0)])


def test_throughput_without_answers() -> None:
    """A saturation of nothing is an error, not a rate."""
    with pytest.raises(FleetError, match="0 of 1 requests"):
        live.throughput([Outcome(0, "")])


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (GOOD, True),
        (replace(GOOD, error="status 503"), False),
        (replace(GOOD, ttft_s=live.SLO_TTFT_S + 0.01), False),
        (replace(GOOD, output_tokens=10), False),
        (replace(GOOD, output_tokens=1, latency_s=GOOD.ttft_s), True),
    ],
    ids=["both bounds are met", "error", "first byte late", "tokens slow", "one token"],
)
def test_goodput(outcome: Outcome, *, expected: bool) -> None:
    """An answer is good if it is complete, its first byte was in time, and its tokens came fast enough."""
    assert expected is live.is_good(outcome)


def test_row() -> None:
    """Errors count against goodput, and idle workers for the mean."""
    found = live.row([GOOD, replace(GOOD, ttft_s=9.0), replace(GOOD, error="x")], 0.5, 0.2, [])

    assert 1 / 3 == found.goodput
    assert live.ENGINES == found.busiest
    assert 0.25 == found.figures.cached_token_rate
