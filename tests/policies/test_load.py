"""Modes p2c and least-loaded: requests in flight, booked by any replica."""

from __future__ import annotations

import math
from collections import Counter

from kvrouter.policies.baseline import LeastLoaded, PowerOfTwo
from tests.policies.tables import REQUEST, candidate, columns, picked, seeded

DRAWS = 6000


def test_least_loaded() -> None:
    """The fewest requests, without regard to caches and charges; ties at random."""
    candidates = [
        candidate("w1", requests=3, overlap=9),
        candidate("w2", requests=1, charged=9999, usage=1.0, waiting=50),
        candidate("w3", requests=1),
    ]

    assert ["w2", "w3"] == picked(LeastLoaded(), candidates)


def test_power_of_two_of_two_takes_the_less_loaded() -> None:
    """Both are drawn always."""
    assert ["w2"] == picked(PowerOfTwo(), [candidate("w1", requests=2), candidate("w2", requests=1)])


def test_power_of_two_never_takes_the_most_loaded() -> None:
    """The one with the most requests always meets one with fewer; the others as pairs decide."""
    candidates = [candidate(f"w{load}", requests=load) for load in range(4)]
    chance = seeded(3)

    picks = Counter(PowerOfTwo().pick(REQUEST, columns(candidates), chance) for _ in range(DRAWS))

    for place, share in enumerate((3 / 6, 2 / 6, 1 / 6, 0)):  # pairs in which it is the less loaded one
        assert abs(picks[place] - DRAWS * share) <= 4 * math.sqrt(DRAWS * share * (1 - share)), picks


def test_power_of_two_draws_all_pairs_equally() -> None:
    """Five equal ones are picked equally often."""
    candidates = [candidate(f"w{number}") for number in range(5)]
    chance = seeded(4)

    picks = Counter(PowerOfTwo().pick(REQUEST, columns(candidates), chance) for _ in range(DRAWS))

    assert all(abs(picks[place] - DRAWS / 5) < 4 * math.sqrt(DRAWS * 0.16) for place in range(5)), picks
