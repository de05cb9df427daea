"""#589: several replicas that decide at the same moment all chose the one idle worker."""

from __future__ import annotations

import pytest

from scripts.kit.bench.herding import place_bursts


def worst_loads(replicas: int, burst: int, busy: int, seed: int) -> list[int]:
    """Requests on the fullest worker after each burst; bookings are published after it."""
    return [placed.fullest for placed in place_bursts(replicas, burst, seed, busy=busy)]


def mean(values: list[int]) -> float:
    """The average."""
    return sum(values) / len(values)


def test_several_routers_pick_the_same_best_worker() -> None:
    """The first burst of eight goes to the one idle worker; later bursts spread over all workers."""
    worst = worst_loads(replicas=8, burst=8, busy=3, seed=1)

    assert 8 == worst[0]
    assert mean(worst[20:]) < 6  # 4 is the best with complete knowledge


def test_random_ties_alone_do_not_help() -> None:
    """Replicas that do not learn send every burst of eight to the idle worker."""
    placed = place_bursts(replicas=8, burst=8, seed=1, learns=False)

    assert {8} == {each.to_idle for each in placed}


def test_large_bursts_level_out() -> None:
    """32 at once on 8 replicas: 16 on the idle worker at first, near the ideal of 7 later."""
    worst = worst_loads(replicas=8, burst=32, busy=3, seed=2)

    assert worst[0] >= 14
    assert mean(worst[20:]) < 10


@pytest.mark.parametrize("burst", [1, 8, 32])
def test_one_replica_is_not_moved(burst: int) -> None:
    """A single replica always takes the lowest cost."""
    ideal = max(3, -(-(7 * 3 + burst) // 8))

    assert {ideal} == set(worst_loads(replicas=1, burst=burst, busy=3, seed=3))
