"""Baselines: round-robin, random, p2c, least-loaded, and direct."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from kvrouter.core.fleet.pool import Pool
from kvrouter.core.routing.builtin_policy import BuiltInPolicy, Moment
from kvrouter.core.routing.policy import RouteRequest, Wanted
from kvrouter.core.wire.ids import Target, WorkerId
from kvrouter.errors import BadRequestError, NoWorkersError
from kvrouter.policies import POLICIES
from kvrouter.policies.baseline import Direct, LeastLoaded, PowerOfTwo, Random, RoundRobin
from tests.core.worlds import T1, T2, T3, W2, card, new_pool, request, worker_beat
from tests.policies.tables import REQUEST, candidate, columns, moment, picked, seeded


@pytest.fixture
def pool() -> Pool:
    """Three workers that are up."""
    return new_pool(card("w3"), card("w1"), card("w2"))


def pick(pool: Pool, policy: BuiltInPolicy, at: Moment) -> Target:
    """One choice."""
    candidates = pool.candidates(request())
    chosen = candidates[policy.pick(request(), candidates, at)]
    policy.routed(request(), chosen, at)
    return chosen.target


def test_round_robin_takes_turns(pool: Pool) -> None:
    """Each worker in turn, by name."""
    at, policy = moment(), RoundRobin()

    assert [T1, T2, T3, T1, T2] == [pick(pool, policy, at) for _ in range(5)]


def test_round_robin_skips_a_draining_worker(pool: Pool) -> None:
    """The remaining workers take turns evenly."""
    at, policy = moment(), RoundRobin()
    pick(pool, policy, at)

    pool.update(W2, worker_beat(state="draining"))

    assert {T1: 3, T3: 3} == Counter(pick(pool, policy, at) for _ in range(6))


def test_random_is_uniform(pool: Pool) -> None:
    """Each worker about equally often."""
    at, policy = seeded(2), Random()

    picks = Counter(pick(pool, policy, at) for _ in range(3000))

    assert all(abs(picks[target] - 1000) < 100 for target in (T1, T2, T3))


def test_random_reaches_both_ends(pool: Pool) -> None:
    """The least random number picks the first worker, the greatest the last."""
    assert T1 == pick(pool, Random(), moment())
    assert T3 == pick(pool, Random(), moment(1 - 2**-53))


def test_modes_by_name() -> None:
    """The values of `--router-mode`; the plain ones need no tokens."""
    assert {"kv", "round-robin", "random"} <= set(POLICIES)
    assert not POLICIES["random"].needs_tokens
    assert not POLICIES["round-robin"].needs_tokens


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
    """With two candidates both are always drawn."""
    assert ["w2"] == picked(PowerOfTwo(), [candidate("w1", requests=2), candidate("w2", requests=1)])


def test_power_of_two_never_takes_the_most_loaded() -> None:
    """The candidate with the most requests loses every pair; the others win by their pairs."""
    candidates = [candidate(f"w{load}", requests=load) for load in range(4)]
    chance = seeded(3)

    picks = Counter(PowerOfTwo().pick(REQUEST, columns(candidates), chance) for _ in range(DRAWS))

    # The share of a worker: the pairs, of six, in which it is the less loaded one.
    for place, share in enumerate((3 / 6, 2 / 6, 1 / 6, 0)):
        assert abs(picks[place] - DRAWS * share) <= 4 * math.sqrt(DRAWS * share * (1 - share)), picks


def test_power_of_two_draws_all_pairs_equally() -> None:
    """Five equal candidates are picked equally often."""
    candidates = [candidate(f"w{number}") for number in range(5)]
    chance = seeded(4)

    picks = Counter(PowerOfTwo().pick(REQUEST, columns(candidates), chance) for _ in range(DRAWS))

    assert all(abs(picks[place] - DRAWS / 5) < 4 * math.sqrt(DRAWS * 0.16) for place in range(5)), picks


RANKS = [
    candidate("w1", rank=0, requests=5),
    candidate("w1", rank=1, requests=2),
    candidate("w2", rank=0, requests=0),
]


def wanting(worker_id: str, rank: int | None = None) -> RouteRequest:
    """A request for this worker."""
    return RouteRequest("req", wanted=Wanted(WorkerId(worker_id), rank))


def test_named_rank() -> None:
    """The named rank is picked, regardless of its load."""
    assert 0 == Direct().pick(wanting("w1", 0), columns(RANKS), moment())
    assert ["w2"] == picked(Direct(), RANKS, wanting("w2", 0))


def test_worker_without_rank() -> None:
    """Of the worker's ranks the one with the fewest requests is picked."""
    assert 1 == Direct().pick(wanting("w1"), columns(RANKS), moment())


def test_no_target_named() -> None:
    """The error names the header to send."""
    with pytest.raises(BadRequestError, match="x-kvrouter-target"):
        Direct().pick(RouteRequest("req"), columns(RANKS), moment())


def test_named_target_is_away() -> None:
    """The error lists the available targets."""
    with pytest.raises(NoWorkersError, match="w3 takes no requests now; there are: w1/0, w1/1, w2/0"):
        Direct().pick(wanting("w3"), columns(RANKS), moment())
    with pytest.raises(NoWorkersError, match="w2/7 takes"):
        Direct().pick(wanting("w2", 7), columns(RANKS), moment())
