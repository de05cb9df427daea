"""Mode kv-score: 2 x overlap ratio - KV usage - waiting / max waiting, on candidates by hand."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from kvrouter.core.routing.policy import Candidate, RouteRequest
from kvrouter.policies.kv_score import KvScore
from tests.policies.tables import REQUEST, candidate, columns, moment, picked, seeded


def scores(policy: KvScore, *candidates: Candidate, request: RouteRequest = REQUEST) -> list[float]:
    """The score of each."""
    rows = policy.terms(request, columns(candidates), moment())
    return [row["score"] for row in rows]


THREE = (
    candidate("w1", overlap=8, usage=0.9, waiting=4),
    candidate("w2", overlap=5, usage=0.5, waiting=2),
    candidate("w3", overlap=0, usage=0.0, waiting=0),
)


def test_published_formula() -> None:
    """Ratios 0.8/0.5/0, usage 0.9/0.5/0, waiting 1/0.5/0: -0.3, 0, 0."""
    assert pytest.approx([1.6 - 0.9 - 1, 1.0 - 0.5 - 0.5, 0.0]) == scores(KvScore(), *THREE)
    assert ["w2", "w3"] == picked(KvScore(), THREE)


@pytest.mark.parametrize(
    ("overlap", "usage", "waiting", "winner"),
    [
        (2.0, 0.0, 0.0, ["w1"]),
        (0.0, 1.0, 0.0, ["w3"]),
        (0.0, 0.0, 1.0, ["w3"]),
        (2.0, 1.0, 0.0, ["w1"]),
        (0.0, 0.0, 0.0, ["w1", "w2", "w3"]),
    ],
)
def test_each_weight(overlap: float, usage: float, waiting: float, winner: list[str]) -> None:
    """A weight of 0 removes its term; with all at 0 the pick is random."""
    assert winner == picked(KvScore(usage, waiting, overlap), THREE)


def test_no_request_waits() -> None:
    """Without waiting requests the term is 0, not 0 / 0."""
    assert [0.0] == scores(KvScore(), candidate("w1", waiting=0))


def test_unreported_load_is_the_mean_of_the_others() -> None:
    """Reported usage 0.2 and 0.6 gives 0.4, waiting 2 and 4 gives 3; without reports it is 0."""
    silent = candidate("w3", usage=None, waiting=None)
    others = (candidate("w1", usage=0.2, waiting=2), candidate("w2", usage=0.6, waiting=4))

    assert pytest.approx(-0.4 - 3 / 4) == scores(KvScore(), *others, silent)[2]
    assert [0.0] == scores(KvScore(), silent)


def test_default_weight_is_two() -> None:
    """The weight of a request has priority over the setting, and that over the default 2.0."""
    own = RouteRequest("req", REQUEST.prompts, overlap_weight=1.0)
    [half] = [candidate("w1", overlap=5)]

    assert [1.0] == scores(KvScore(), half)
    assert [2.5] == scores(KvScore(overlap_weight=5.0), half)
    assert [0.5] == scores(KvScore(overlap_weight=5.0), half, request=own)


def test_all_busy_is_still_a_choice() -> None:
    """With full caches and long queues everywhere the highest score still wins."""
    full = [
        candidate(name, usage=1.0, waiting=queue) for name, queue in (("w1", 90), ("w2", 80), ("w3", 100))
    ]

    assert ["w2"] == picked(KvScore(), full)


def test_softmax_on_raw_scores() -> None:
    """Temperature 0.5: weights e^(score / 0.5), not normalised by their range as in kv."""
    two, draws = [candidate("w1", usage=0.5), candidate("w2", usage=1.0)], 4000
    policy, chance = KvScore(temperature=0.5), seeded(11)

    picks = Counter(policy.pick(REQUEST, columns(two), chance) for _ in range(draws))

    share = math.exp(-1) / (math.exp(-1) + math.exp(-2))
    assert abs(picks[0] - draws * share) < 4 * math.sqrt(draws * share * (1 - share))


def test_request_may_ask_for_its_own_temperature() -> None:
    """Temperature 0 of a request overrides the setting: the highest score."""
    cold = RouteRequest("req", REQUEST.prompts, temperature=0.0)
    two = [candidate("w1", usage=0.1), candidate("w2", usage=0.0)]

    assert ["w2"] == picked(KvScore(temperature=100.0), two, cold)
