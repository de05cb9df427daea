"""The guard around a custom policy: ranks, and no error of the policy loses a request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from kvrouter.core.routing.policy import Candidate, Choice, Policy, RouteRequest
from kvrouter.core.routing.selection import Selection
from kvrouter.policies.guarded import ANSWER, GuardedPolicy
from tests.policies.guarded_classes import Fails, Last, Returns
from tests.policies.tables import REQUEST, candidate, columns, moment, picked, seeded, target

A, B, C = candidate("a", requests=2), candidate("b", requests=1), candidate("c", requests=5)
ALL = [A, B, C]


def order(answer: Any, candidates: list[Candidate] = ALL, chance: float = 0.0) -> list[str]:
    """The workers in the order in which they are tried."""
    policy = GuardedPolicy(Returns(answer), "custom")
    chosen = Selection(policy).choose(REQUEST, columns(candidates), moment())
    assert {} == policy.troubles
    return [str(one.target.worker_id) for one in chosen]


def test_one_target() -> None:
    """A target or a candidate is the pick; no other target is named for retries."""
    assert ["c"] == order(target("c"))
    assert ["a"] == order(A)


def test_ranks() -> None:
    """The targets of the first rank by requests, then of the next rank; no target twice."""
    assert ["a", "c", "b"] == order([[C, A], [B, A]])
    assert ["b", "a", "c"] == order([[target("a"), target("b"), target("c")]])
    assert ["b", "a"] == order([[], (B,), [A, A]])


def test_rank_without_an_eligible_target() -> None:
    """Targets that filters removed are ignored, even a whole rank."""
    assert ["c"] == order([[target("gone"), B], [target("c")]], [A, C])


def test_ties_in_a_rank() -> None:
    """Equal load in a rank: chance decides."""
    equal = [candidate("x"), candidate("y"), candidate("z", requests=1)]
    policy, chance = GuardedPolicy(Returns([equal]), "custom"), seeded(1)

    assert {0, 1} == {policy.pick(REQUEST, columns(equal), chance) for _ in range(100)}


@pytest.mark.parametrize(
    ("answer", "where", "message"),
    [
        (None, ANSWER, "choose returned None: return a Target, a Candidate, or a list of lists"),
        (0, ANSWER, "choose returned 0"),
        ("a", ANSWER, "choose returned 'a'"),
        ([A, B], ANSWER, "choose returned [Candidate("),
        ([target("a"), target("b")], ANSWER, "choose returned [Target("),
        ([["a"]], ANSWER, "choose returned [['a']]"),
        (target("gone"), ANSWER, "no eligible target: gone/0"),
        ([[], []], ANSWER, "no eligible target: an empty list"),
        (ValueError("no idea"), "choose", "ValueError: no idea"),
    ],
    ids=str,
)
def test_errors_fall_back(answer: Any, where: str, message: str) -> None:
    """An unusable choice means the fewest requests; it is counted each time and reported once."""
    policy = GuardedPolicy(Returns(answer), "custom")

    assert ["b"] == picked(policy, ALL)
    (news,) = policy.take_news()
    assert ("custom", where) == news[:2]
    assert message in news.what
    assert ("Traceback" in news.traceback) == (where == "choose")
    assert {where: 60} == policy.troubles
    assert [] == policy.take_news()


def test_cancelled_error_in_choose() -> None:
    """A CancelledError out of choose is an error of the policy: the request is still routed."""
    policy = GuardedPolicy(Returns(asyncio.CancelledError()), "custom")

    assert ["b"] == picked(policy, ALL)
    assert {"choose": 60} == policy.troubles


def test_policy_may_change_its_list() -> None:
    """It may sort or empty its list of candidates without an effect elsewhere."""

    class Takes(Policy):
        def choose(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Choice:
            assert isinstance(candidates, list)
            last = candidates.pop()
            candidates.clear()
            return [[last]]

    policy, eligible = GuardedPolicy(Takes(), "takes"), list(ALL)

    assert [C] == Selection(policy).choose(REQUEST, columns(eligible), moment())
    assert ALL == eligible
    assert {} == policy.troubles


def test_fallback_has_an_order() -> None:
    """Retries after an error go by load, too."""
    chosen = Selection(GuardedPolicy(Fails(), "fails")).choose(REQUEST, columns(ALL), moment())

    assert [B, A, C] == chosen


def test_hooks_are_passed_on_and_guarded() -> None:
    """Hooks reach the policy; an exception in one is counted and does not escape."""
    good, bad = Last(), GuardedPolicy(Fails(), "fails")

    for policy in (GuardedPolicy(good, "last"), bad):
        policy.on_workers([A.card])
        policy.on_request_routed(REQUEST, target("a"), 200)
        policy.on_worker_removed(target("a").worker_id)
        policy.close()

    assert [("workers", ["a"]), ("routed", "req", "a/0", 200), ("removed", "a"), ("close",)] == good.calls
    assert {"on_workers", "on_request_routed", "on_worker_removed", "close"} == set(bad.troubles)


def test_a_class_without_the_base() -> None:
    """A policy needs only `choose`."""

    class Bare:
        def choose(self, request: RouteRequest, candidates: list[Candidate]) -> Candidate:
            return candidates[0]

    policy = GuardedPolicy(Bare(), "bare")  # type: ignore[arg-type]  # it lacks the base on purpose
    policy.on_workers([])
    policy.close()

    assert ["a"] == picked(policy, ALL)
    assert {} == policy.troubles
    assert policy.needs_tokens
    assert not policy.needs_text


def test_a_decision_is_explained() -> None:
    """It has the terms that most policies look at, and calls no hook."""
    good = Last()
    decision = Selection(GuardedPolicy(good, "last")).explain(REQUEST, columns(ALL), moment())

    assert target("c") == decision.target
    assert {"overlap_blocks", "prefill_blocks", "decode_blocks", "requests"} == set(
        decision.verdicts[0].terms
    )
    assert [] == good.calls


def test_the_bare_base_falls_back() -> None:
    """If a policy's constructor fails, the guard takes the fewest requests."""
    assert ["b"] == picked(GuardedPolicy(Policy(), "broken"), ALL)
