"""A custom policy that compares seconds, as weight `auto` does, in the simulator."""

from __future__ import annotations

from collections.abc import Sequence

from kvrouter.core.routing.policy import Candidate, Choice, Policy, RouteRequest
from kvrouter.core.wire.ids import Target
from kvrouter.policies import CUSTOM, PolicySettings
from kvrouter.policies.importing import GuardedPolicies
from kvrouter.simulate import workloads
from kvrouter.simulate.cells import Cell

TIMES: list[float] = []
ENDS: list[tuple[float | None, float]] = []


class Earliest(Policy):
    """The least seconds until the first byte."""

    def choose(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Choice:
        TIMES.append(request.now)
        return min(candidates, key=lambda one: one.wait_s + one.own_s)

    def on_request_end(
        self, request: RouteRequest, target: Target, ttft_s: float | None, seconds: float
    ) -> None:
        ENDS.append((ttft_s, seconds))


def test_the_rule_as_a_custom_policy() -> None:
    """It is ahead of the published formula, and sees the virtual clock."""
    TIMES.clear()
    ENDS.clear()
    cell = Cell(workloads.docs(600, 200), cache=0.5, load=0.7, workers=4)

    own = cell.measure(CUSTOM, PolicySettings(custom=GuardedPolicies("Earliest", Earliest)), 0)
    published = cell.measure("kv", PolicySettings(overlap_weight=1.0), 0)

    assert own.ttft_p90_s < published.ttft_p90_s
    assert TIMES == sorted(TIMES)
    assert 0 < TIMES[-1]
    assert 600 == len(ENDS)
    assert all(ttft_s is not None and 0 < ttft_s <= seconds for ttft_s, seconds in ENDS)
