"""Mode sticky: use the hit set until its wait exceeds the penalty."""

from __future__ import annotations

import pytest

from kvrouter.core.routing.policy import RouteRequest
from kvrouter.core.tables.prefill_speeds import PrefillRates
from kvrouter.policies.sticky import DEFAULT_PREFILL_RATE, Sticky
from tests.policies.tables import REQUEST, candidate, columns, moment, picked, target

# Prefill tokens that take a second on a worker without a measured rate.
SECOND = int(DEFAULT_PREFILL_RATE)


@pytest.mark.parametrize(("overlap", "winner"), [(8, "w1"), (7, "w2")])
def test_hit_set_begins_at_its_rate(overlap: int, winner: str) -> None:
    """8 of 10 blocks is 0.8 and a hit; 7 is not a hit, and load decides."""
    candidates = [candidate("w1", overlap=overlap, requests=5), candidate("w2")]

    assert [winner] == picked(Sticky(), candidates)


@pytest.mark.parametrize(("charged", "winner"), [(SECOND, "w1"), (SECOND + 1, "w2")])
def test_stays_until_the_penalty(charged: int, winner: str) -> None:
    """A wait that is longer by exactly the penalty is still accepted."""
    candidates = [candidate("w1", overlap=9, charged=charged, requests=5), candidate("w2", requests=4)]

    assert [winner] == picked(Sticky(penalty_s=1.0), candidates)


def test_penalty_counts_from_the_best_other() -> None:
    """The penalty is measured against the shortest wait outside the hit set."""
    candidates = [
        candidate("w1", overlap=9, charged=3 * SECOND),
        candidate("w2", charged=2 * SECOND),
        candidate("w3", charged=9 * SECOND),
    ]

    assert ["w1"] == picked(Sticky(), candidates)


def test_all_hits() -> None:
    """If all are in the hit set, the shortest wait wins."""
    candidates = [candidate("w1", overlap=9, charged=9 * SECOND), candidate("w2", overlap=8, charged=SECOND)]

    assert ["w2"] == picked(Sticky(), candidates)


def test_measured_rates() -> None:
    """A slow worker's queue takes longer: 10,000 tokens take 10 s at 1,000 tokens/s, 0.5 s by default."""
    rates = PrefillRates()
    rates.observe(target("w1"), 1000, 1.0)
    rates.observe(target("w1"), 100, 1.0)  # the peak remains 1,000
    rates.observe(target("w2"), 40_000, 1.0)
    candidates = [candidate("w1", overlap=9, charged=10_000, requests=1), candidate("w2", requests=0)]

    assert ["w1"] == picked(Sticky(), candidates)
    assert ["w2"] == picked(Sticky(), candidates, rates=rates)


def test_least_loaded_after_saturation() -> None:
    """Past the penalty the fewest requests win, the hit set included."""
    candidates = [
        candidate("w1", overlap=9, charged=2 * SECOND, requests=0),
        candidate("w2", requests=1),
    ]

    assert ["w1"] == picked(Sticky(), candidates)


def test_unknown_tokens() -> None:
    """Without tokens the hit set is empty: load decides."""
    unknown = [candidate("w1", requests=2), candidate("w2", requests=1)]

    assert ["w2"] == picked(Sticky(), unknown, RouteRequest("text"))


def test_terms() -> None:
    """The terms are the hit rate, the time to first token, and the requests."""
    [row] = Sticky().terms(
        REQUEST, columns([candidate("w1", overlap=9, charged=SECOND, requests=3)]), moment()
    )

    assert {"hit_rate": 0.9, "ttft_s": 1.0, "requests": 3} == row
