"""The default rule as a custom policy: it is shown all that the built-in one reads, also in the simulator."""

from __future__ import annotations

import random
from collections.abc import Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from kvrouter.core.routing.builtin_policy import BuiltInPolicy
from kvrouter.core.routing.policy import AUTO, Candidate, Choice, Policy, RouteRequest
from kvrouter.core.wire.ids import Target
from kvrouter.errors import ConfigError
from kvrouter.lab.simulate import generated, workloads
from kvrouter.lab.simulate.cells import Cell
from kvrouter.lab.simulate.fleet import Run, SimulatedFleet
from kvrouter.lab.simulate.placement import SimulatedReplicas
from kvrouter.lab.simulate.step_model import REFERENCE
from kvrouter.policies import CUSTOM, PolicySettings
from kvrouter.policies.guarded import GuardedPolicy
from kvrouter.policies.importing import GuardedPolicies, guarded
from kvrouter.policies.kv import Kv

EXAMPLE = Path(__file__).parents[2] / "docs/examples/auto_policy.py"


class Always(random.Random):
    """Draws the first of several that are equal."""

    def random(self) -> float:
        return 0.0


class Watched(Policy):
    """Passes on to the example, and keeps what it is shown."""

    def __init__(self) -> None:
        self.seen: list[tuple[RouteRequest, Sequence[Candidate]]] = []
        self.ends: list[tuple[float | None, float, int | None]] = []
        self.rule = example()

    def choose(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Choice:
        self.seen.append((request, list(candidates)))
        return self.rule.choose(request, candidates)

    def on_request_end(
        self,
        request: RouteRequest,
        target: Target,
        ttft_s: float | None,
        seconds: float,
        output_tokens: int | None,
    ) -> None:
        self.ends.append((ttft_s, seconds, output_tokens))


def example() -> Policy:
    """An `Auto` of docs/examples/auto_policy.py."""
    spec = spec_from_file_location("auto_policy", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    policy: Policy = module.Auto()
    return policy


DOCS, HOT = generated.docs(600, 200), generated.hot(1, count=300)


def served(
    policy: BuiltInPolicy, workload: workloads.Workload, leaving: float = 0.0, workers: int = 4
) -> Run:
    """One replica, engines at 70 % of what they can do; the cache is small."""
    cell = Cell(workload, cache=0.5, load=0.7, workers=workers, leaving=leaving)
    fleet = SimulatedFleet(
        lambda agenda: SimulatedReplicas(agenda, [policy], Always()),
        REFERENCE,
        cell.capacity_blocks,
        [1.0] * workers,
    )
    return fleet.run(cell.arrivals(0))


class WithoutCopies(Kv):
    """The rule without the copies of hot prefixes."""

    def _next_copy(self, *_: object) -> None: ...


@pytest.mark.parametrize(("workload", "workers"), [(DOCS, 4), (HOT, 16)], ids=["docs", "hot"])
def test_the_rule_as_a_custom_policy(workload: workloads.Workload, workers: int) -> None:
    """It picks the same target for each request, copies of a hot prefix included."""
    built_in = served(Kv(overlap_weight=AUTO), workload, workers=workers)
    custom = GuardedPolicy(example(), "auto")

    assert built_in.targets == served(custom, workload, workers=workers).targets
    assert not custom.troubles


def test_a_hot_prefix_needs_copies() -> None:
    """So the case above shows that they are the same."""
    with_copies, without = (
        served(kind(overlap_weight=AUTO), HOT, workers=16) for kind in (Kv, WithoutCopies)
    )

    assert with_copies.targets != without.targets


def test_what_a_custom_policy_sees() -> None:
    """Times on the router's clock, what was learnt, and the prefill that is left, in tokens and seconds."""
    policy = Watched()
    served(GuardedPolicy(policy, "watched"), generated.docs(300, 100))

    times = [request.now for request, _ in policy.seen]
    request, _ = policy.seen[-1]
    assert times == sorted(times)
    assert "0 of 8" in policy.seen[0][0].doubt
    assert not request.doubt
    assert request.speed.samples > 250
    assert 0 < request.speed.error < 0.5
    assert 30e-6 < request.speed.seconds_per_token < 80e-6
    assert request.arrivals_per_s > 0
    busy = [(asked, one) for asked, several in policy.seen for one in several if one.charged_tokens]
    for asked, one in busy:
        assert 0 < one.head_tokens <= one.charged_tokens
        assert 0 <= one.head_s < asked.now
        assert one.left_tokens * asked.speed.seconds_per_token <= one.wait_s + 1e-12
    assert any(one.left_tokens < one.charged_tokens - 100 for _, one in busy)
    assert any(one.context_tokens for _, one in busy)
    idle = [one for _, several in policy.seen for one in several if not one.charged_tokens]
    assert {(0.0, 0.0, 0, 0.0)} == {
        (one.wait_s, one.left_tokens, one.head_tokens, one.head_s) for one in idle
    }


def test_ends() -> None:
    """With first byte, seconds and output tokens; a client that leaves has no known output."""
    policy, workload = Watched(), generated.docs(300, 100)
    run = served(GuardedPolicy(policy, "watched"), workload, leaving=0.3)

    whole = [one for one in policy.ends if one[2] is not None]
    assert len(policy.ends) == 300
    assert len(whole) == len(run.completed) < 300
    assert sorted(tokens or 0 for _, _, tokens in whole) == sorted(
        run.arrivals[number].output_tokens for number in run.completed
    )
    assert all(ttft_s is not None and 0 < ttft_s <= seconds for ttft_s, seconds, _ in whole)


class Earlier(Policy):
    """Written before `on_request_end` was passed the output tokens."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def choose(self, _request: RouteRequest, candidates: Sequence[Candidate]) -> Choice:
        return candidates[0]

    def on_request_end(  # type: ignore[override]
        self, request: RouteRequest, target: Target, ttft_s: float | None, seconds: float
    ) -> None:
        self.seconds.append(seconds)


class TooFew(Earlier):
    """Three arguments are too few."""

    def on_request_end(self, request: RouteRequest, target: Target, ttft_s: float | None) -> None:  # type: ignore[override]
        raise AssertionError


def test_an_end_hook_of_four_arguments() -> None:
    """It is called without the output tokens; with three arguments it is refused at the start."""
    policy = Earlier()
    guard = guarded(policy, "earlier")

    guard.on_request_end(RouteRequest("r"), Target("w"), 0.5, 1.5, 7)  # type: ignore[arg-type]

    assert [1.5] == policy.seconds
    assert not guard.troubles
    with pytest.raises(ConfigError, match=r"write on_request_end\(self, .*output_tokens"):
        guarded(TooFew(), "too few")


def test_it_is_ahead_of_the_published_formula() -> None:
    """As `--router-policy auto_policy:Auto` of the simulator."""
    cell = Cell(generated.docs(600, 200), cache=0.5, load=0.7, workers=4)

    own = cell.measure(CUSTOM, PolicySettings(custom=GuardedPolicies("Auto", example)), 0)
    published = cell.measure("kv", PolicySettings(overlap_weight=1.0), 0)

    assert own.ttft_p90_s < published.ttft_p90_s
