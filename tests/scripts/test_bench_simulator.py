"""`scripts/bench simulator`: its figures."""

from __future__ import annotations

import pytest

from kvrouter.lab.simulate.percentiles import Percentiles
from scripts.kit.bench.simulator import Both, simulated
from scripts.kit.demo import arrivals
from scripts.kit.workload import Chats


@pytest.mark.parametrize(
    ("cached", "p90", "is_equal"),
    [(0.51, 1.14, True), (0.53, 1.0, False), (0.5, 1.16, False), (0.5, 0.84, False)],
)
def test_equal(cached: float, p90: float, *, is_equal: bool) -> None:
    """Two points of cached tokens, and 15 % of time."""
    both = Both("kv", (0.5, cached), (Percentiles(0.1, 1.0, 2.0), Percentiles(0.1, p90, 9.0)))

    assert is_equal == both.is_equal


def test_simulated_half() -> None:
    """The demo's requests: kv finds more of them in caches, and is faster."""
    requests = arrivals(Chats(120, 20.0).drawn())
    plain, kv = simulated("round-robin", requests), simulated("kv", requests)

    assert kv[0] > plain[0] > 0
    assert kv[1].p90 < plain[1].p90
