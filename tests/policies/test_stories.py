"""Known failures of other routers, on simulated engines: each mode avoids or reproduces them.

A mode that reproduces a published system has its failures, too; docs/policies.md lists them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from kvrouter.core.routing.builtin_policy import BuiltInPolicy
from kvrouter.core.wire.ids import WorkerId
from kvrouter.lab.simulate.engines import Arrival
from kvrouter.lab.simulate.fleet import Run
from kvrouter.policies import POLICIES, PolicySettings, new_policy
from kvrouter.policies.prefix_affinity import PrefixAffinity
from tests.long import IS_LONG
from tests.policies.world import arrival, fleet

WORKERS = ("w1", "w2", "w3", "w4")
# With an infinite imbalance threshold, as in Ray since December 2025.
RAY_NOW = "prefix-affinity, unbounded"
OURS = ("kv", "two-stage")
# What reads no prefix is the same story each time: one of them, or all in the long form.
BY_LOAD = ("p2c", "least-loaded", "round-robin")[: None if IS_LONG else 1]


def served(mode: str, arrivals: list[Arrival], joins: dict[str, float] | None = None) -> Run:
    """Run the arrivals over four workers."""
    policy: BuiltInPolicy = (
        PrefixAffinity(math.inf) if mode == RAY_NOW else new_policy(mode, PolicySettings())
    )
    return fleet(policy, len(WORKERS), joins=joins).run(arrivals)


def one_at_a_time() -> list[Arrival]:
    """Forty prompts that share nothing; each has ended before the next arrives."""
    return [arrival(3.0 * number, ((10_000 + number, 64),), 16) for number in range(40)]


@pytest.mark.parametrize("mode", [*sorted(set(POLICIES) - {"direct"}), RAY_NOW])
def test_idle_fleet_is_used_evenly(mode: str) -> None:
    """No mode always takes the same worker on a tie (#737, #7836, #3581, sglang #32983)."""
    run = served(mode, one_at_a_time())

    assert all(0.08 < run.share(worker) < 0.5 for worker in WORKERS)


def hot_prefix(start: float = 2.0) -> list[Arrival]:
    """One request caches 4,096 tokens on one worker; then 60 requests a second share them."""
    first = arrival(0.0, ((1, 256), (9_999, 8)), 8)
    return [
        first,
        *(arrival(start + number / 60, ((1, 256), (10_000 + number, 8)), 128) for number in range(600)),
    ]


@pytest.mark.parametrize("mode", [*OURS, "prefix-affinity", *BY_LOAD])
def test_hot_prefix_spreads(mode: str) -> None:
    """These modes take another worker as soon as the one with the shared prefix is busier."""
    run = served(mode, hot_prefix())

    assert max(run.share(worker) for worker in WORKERS) < 0.35
    assert run.ttft.p90 < 0.2
    assert run.hit_rate > 0.9, "most tokens are still cached"


@pytest.mark.parametrize("mode", ["kv-score", "scored", RAY_NOW])
def test_hot_prefix_overloads_one_worker(mode: str) -> None:
    """As published, cached tokens outweigh any queue, so one worker's queue grows (#737).

    The tuning guide calls this a feedback loop, and recommends a temperature above 0.
    """
    run = served(mode, hot_prefix())

    assert 1.0 == max(run.share(worker) for worker in WORKERS)
    assert max(run.deepest.values()) > 200
    assert run.ttft.p90 > 5


def test_hot_prefix_under_sticky() -> None:
    """It stays until the wait exceeds the penalty: until then a long queue grows."""
    run = served("sticky", hot_prefix())

    assert 0.3 < max(run.share(worker) for worker in WORKERS) < 0.7
    assert 60 < max(run.deepest.values()) < 300
    assert 0.2 < run.ttft.p90 < 5


def test_temperature_breaks_the_feedback_loop() -> None:
    """With softmax, as its guide advises, kv-score spreads the same traffic."""
    world = fleet(new_policy("kv-score", PolicySettings(temperature=1.0)), len(WORKERS))

    run = world.run(hot_prefix())

    assert max(run.share(worker) for worker in WORKERS) < 0.7
    assert run.ttft.p90 < 1


def newcomer(rate: float) -> list[Arrival]:
    """Requests with a shared system prompt of 2,048 tokens, 256 unique ones, and 128 output tokens."""
    return [arrival(number / rate, ((1, 128), (10_000 + number, 16)), 128) for number in range(800)]


@pytest.mark.parametrize("mode", [*OURS, "prefix-affinity", *BY_LOAD])
def test_newcomer_is_used_when_needed(mode: str) -> None:
    """An empty worker that joins a busy fleet gets about a fifth of the traffic (#10574)."""
    run = served(mode, newcomer(rate=100), {"w5": 2.0})

    assert 0.15 < run.share("w5", last=300) < 0.35
    assert run.ttft.p90 < 0.2


@pytest.mark.parametrize("mode", ["kv-score", "scored", "sticky", RAY_NOW])
def test_newcomer_is_starved(mode: str) -> None:
    """As published, requests stay with the caches, even if these are busy (sticky: until the penalty)."""
    run = served(mode, newcomer(rate=100), {"w5": 2.0})

    assert run.share("w5", last=300) < 0.02


def test_kv_gives_a_newcomer_a_copy_of_what_all_requests_share() -> None:
    """Also at a tenth of that load: it takes its part of the requests, and none of them waits."""
    run = served("kv", newcomer(rate=10), {"w5": 2.0})

    assert 0.14 < run.share("w5", last=300) < 0.26
    assert run.ttft.p90 < 0.05


def misses() -> list[Arrival]:
    """Twelve new prompts a second of 4,096 tokens each; a worker computes five a second."""
    return [arrival(number / 12, ((10_000 + number, 256),), 8) for number in range(480)]


@pytest.mark.parametrize("mode", [*OURS, "sticky", *BY_LOAD])
def test_misses_go_by_load(mode: str) -> None:
    """A worker that joins gets about a fifth of the uncached prompts."""
    run = served(mode, misses(), {"w5": 15.0})

    assert 0.14 < run.share("w5", last=300) < 0.26
    assert run.ttft.p90 < 0.5


@pytest.mark.parametrize(
    ("mode", "share", "deepest"),
    [("prefix-affinity", (0.28, 0.5), (10, 14)), (RAY_NOW, (0.28, 0.7), (40, 200))],
)
def test_misses_to_the_smallest_tree_spiral(
    mode: str, share: tuple[float, float], deepest: tuple[int, int]
) -> None:
    """As published, the newcomer's tree is the smallest, so it gets every miss (sglang #14532).

    The published imbalance threshold of 10 stops this at eleven requests. Without it the queue grows
    until the newcomer's tree is as large as the others.
    """
    run = served(mode, misses(), {"w5": 15.0})

    assert share[0] < run.share("w5", last=300) < share[1]
    assert deepest[0] < run.deepest[WorkerId("w5")] < deepest[1]
    assert run.deepest[WorkerId("w5")] >= max(run.deepest[WorkerId(worker)] for worker in WORKERS)


def test_runs_are_deterministic() -> None:
    """With virtual time and seeded random numbers two runs are equal."""
    runs: list[Callable[[], Run]] = [lambda: served("kv", hot_prefix()[:50])] * 2

    assert runs[0]() == runs[1]()
