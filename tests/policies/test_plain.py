"""Modes that do not look at the cache."""

from __future__ import annotations

from collections import Counter

import pytest

from kvrouter.core.fleet.pool import Pool
from kvrouter.core.routing.builtin_policy import BuiltInPolicy, Moment
from kvrouter.core.wire.ids import Target
from kvrouter.policies import POLICIES
from kvrouter.policies.baseline import Random, RoundRobin
from tests.core.worlds import T1, T2, T3, W2, card, new_pool, request, worker_beat
from tests.policies.tables import moment, seeded


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
    """The least and the greatest chance pick the first and the last."""
    assert T1 == pick(pool, Random(), moment())
    assert T3 == pick(pool, Random(), moment(1 - 2**-53))


def test_modes_by_name() -> None:
    """`--router-mode` knows these; the plain ones need no tokens."""
    assert {"kv", "round-robin", "random"} <= set(POLICIES)
    assert not POLICIES["random"].needs_tokens
    assert not POLICIES["round-robin"].needs_tokens
