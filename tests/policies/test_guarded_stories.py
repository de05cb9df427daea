"""The example of docs/writing-a-policy.md, unchanged, over simulated engines in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvrouter.core.routing.policy import RouteRequest
from kvrouter.lab.simulate.fleet import Run
from kvrouter.policies.guarded import GuardedPolicy
from kvrouter.policies.importing import load_custom_policy
from tests.client.examples import blocks
from tests.policies.test_stories import WORKERS, hot_prefix, newcomer, one_at_a_time
from tests.policies.world import fleet, router_of

ZONES = {"w1": "a", "w2": "a", "w3": "b", "w4": "b"}


@pytest.fixture
def zoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that constructs the example's policy as a frontend does."""
    (tmp_path / "zoned.py").write_text(blocks("writing-a-policy.md")[0])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "zoned", raising=False)

    def make(*arguments: str) -> GuardedPolicy:
        policies = load_custom_policy("zoned:Zoned", arguments)
        policies.begin()
        return policies()

    return make


def test_the_example_is_short() -> None:
    """It has at most 30 lines of code."""
    lines = [line for line in blocks("writing-a-policy.md")[0].splitlines() if line.strip()]

    assert 30 >= len([line for line in lines if not line.startswith(('"""', "import", "from"))])


def served(policy: GuardedPolicy, **world: Any) -> Run:
    """The hot prefix over two zones, at a rate that half the fleet can serve; the policy makes no errors."""
    run = fleet(policy, len(WORKERS), zones=ZONES, **world).run(hot_prefix()[::2])
    assert {} == policy.troubles
    return run


def test_it_stays_in_its_zone(zoned: Any) -> None:
    """A hot prefix spreads over the two workers of the zone, and over no other."""
    run = served(zoned("zone=a"))

    assert 0.4 < run.share("w1") < 0.6
    assert 1.0 == run.share("w1") + run.share("w2")
    assert run.hit_rate > 0.9
    assert run.ttft.p90 < 0.5


def test_refresh_takes_effect(zoned: Any, tmp_path: Path) -> None:
    """The file of workers to avoid is read while requests are routed."""
    (tmp_path / "avoid").write_text("w1\n")
    run = served(zoned("zone=a", f"avoid={tmp_path / 'avoid'}"))

    assert 1.0 == run.share("w2", last=250)


def test_a_zone_without_workers(zoned: Any) -> None:
    """Without workers in the zone, any healthy worker; an idle fleet is used evenly."""
    run = fleet(zoned("zone=none"), len(WORKERS), zones=ZONES).run(one_at_a_time())

    assert all(0.08 < run.share(worker) < 0.5 for worker in WORKERS)


def test_a_newcomer_gets_its_share(zoned: Any) -> None:
    """A third worker that joins the zone gets about a third of the requests."""
    policy = zoned("zone=a")
    world = fleet(policy, len(WORKERS), zones={**ZONES, "w5": "a"}, joins={"w5": 2.0})
    run = world.run(newcomer(rate=50))

    assert 0.2 < run.share("w5", last=200) < 0.5
    assert {} == policy.troubles


def test_failing_worker_is_avoided(zoned: Any) -> None:
    """After three failed responses a worker gets no requests, until it has left and joined again."""
    policy = zoned("zone=a")
    router = router_of(fleet(policy, 2, zones={"w1": "a"}))
    ask = RouteRequest("r")

    def winner() -> str:
        placed = router.route(ask, 0.0)
        router.bookings.answered(placed.key, 503 if placed.target.worker_id == "w1" else 200)
        router.bookings.free(placed.key)
        return str(placed.target.worker_id)

    assert ["w1", "w1", "w1", "w2"] == [winner() for _ in range(4)]
    router.forget([target for target in router.pool.targets if target.worker_id == "w1"])
    assert "w1" == winner()
