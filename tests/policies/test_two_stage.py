"""Mode two-stage: first a group is picked, then mode kv picks within it."""

from __future__ import annotations

from collections import Counter

import pytest

from kvrouter.core.routing.decisions import Decided
from kvrouter.core.routing.policy import Candidate, Prompt, RouteRequest
from kvrouter.core.routing.selection import Selection
from kvrouter.errors import ConfigError
from kvrouter.policies.two_stage import TwoStage
from tests.core.worlds import chain_from
from tests.policies.tables import REQUEST, candidate, columns, moment, picked, target, turns


def grouped(*groups: str) -> list[Candidate]:
    """Workers w0, w1, … in these groups."""
    return [
        candidate(f"w{number}", labels={"group": group} if group else {})
        for number, group in enumerate(groups)
    ]


def group_of(policy: TwoStage, request: RouteRequest, candidates: list[Candidate]) -> str:
    """The group of the picked worker."""
    place = policy.pick(request, columns(candidates), moment())
    return str(candidates[place].labels.get("group", ""))


def prompt_request(start: int, blocks: int = 10) -> RouteRequest:
    """A request whose blocks depend on `start`."""
    return RouteRequest("req", (Prompt(chain_from(start, blocks), blocks * 16),))


def test_round_robin_over_groups_kv_within() -> None:
    """Groups take turns; within each the cached worker wins."""
    candidates = [
        candidate("a1", labels={"group": "a"}),
        candidate("a2", labels={"group": "a"}, overlap=5),
        candidate("b1", labels={"group": "b"}, overlap=9),
        candidate("b2", labels={"group": "b"}, active=50),
    ]

    picks = [candidates[place].target.worker_id for place in turns(TwoStage(), candidates, 4)]

    assert ["a2", "b1", "a2", "b1"] == picks


def test_kept_decision_reports_the_group_of_its_turn() -> None:
    """Later turns do not change the group that it reports."""
    candidates, at = columns(grouped("a", "b")), moment()
    selection = Selection(TwoStage())

    kept = []
    for _ in range(3):
        best = selection.choose(REQUEST, candidates, at)
        selection.policy.routed(REQUEST, best[0], at)
        order = tuple(one.target for one in best)
        kept.append(Decided(REQUEST, at, selection, order, candidates, candidates, {}))

    for decided, winner in zip(kept, ["w0", "w1", "w0"], strict=True):
        told = decided.explain()
        in_group = [one.target for one in told.verdicts if one.terms["in_group"]]
        assert [target(winner)] == in_group == list(told.ties) == [told.target]


def test_workers_without_label_take_turns_too() -> None:
    """Workers without a label form a group, which gets its turn only."""
    assert [0, 1, 0, 1] == turns(TwoStage(), grouped("", "b"), 4)


def test_without_labels_it_is_kv() -> None:
    """Without labels all workers are in one group."""
    assert ["w2"] == picked(
        TwoStage(), [candidate("w1", active=3), candidate("w2"), candidate("w3", active=1)]
    )


def test_hash_keeps_prefixes_together() -> None:
    """Prompts that share the first four blocks go to one group."""
    policy, candidates = TwoStage("hash"), grouped("a", "b", "c", "d")
    shared = chain_from(77, 4)
    groups = {
        group_of(policy, RouteRequest("r", (Prompt(shared + chain_from(1000 * tail, 6), 160),)), candidates)
        for tail in range(1, 30)
    }

    assert 1 == len(groups)


def test_hash_spreads_prefixes() -> None:
    """Prompts with different first blocks spread over the groups."""
    candidates = grouped("a", "b", "c", "d")

    groups = Counter(group_of(TwoStage("hash"), prompt_request(100 * n), candidates) for n in range(400))

    assert 4 == len(groups)
    assert min(groups.values()) > 60


def test_group_that_leaves_moves_only_its_prompts() -> None:
    """Rendezvous hashing: prompts of the other groups stay."""
    policy, before = TwoStage("hash"), grouped("a", "b", "c", "d")
    after = [one for one in before if one.labels["group"] != "c"]

    for number in range(100):
        was = group_of(policy, prompt_request(100 * number), before)
        if was != "c":
            assert was == group_of(policy, prompt_request(100 * number), after)


def test_short_prompts() -> None:
    """With fewer than K blocks all are hashed; without blocks or tokens groups take turns."""
    policy, candidates = TwoStage("hash"), grouped("a", "b")
    assert group_of(policy, prompt_request(5, 2), candidates) == group_of(
        policy, prompt_request(5, 2), candidates
    )

    assert [0, 1, 0, 1] == turns(policy, candidates, 4, RouteRequest("text"))


def test_header_names_the_group() -> None:
    """The name of a group is that group; another value is hashed; without the header groups take turns."""
    policy, candidates = TwoStage("header:x-bucket"), grouped("chat", "code", "math")

    assert "x-bucket" == policy.header
    for name in ("code", "chat", "math"):
        assert name == group_of(policy, RouteRequest("r", bucket=name), candidates)
    assert 1 == len({group_of(policy, RouteRequest("r", bucket="other"), candidates) for _ in range(5)})
    assert [0, 1, 2] == turns(policy, candidates, 3, RouteRequest("r"))


@pytest.mark.parametrize("stage_one", ["", "header:", "roundrobin", "header"])
def test_wrong_stage_one(stage_one: str) -> None:
    """An unknown stage one stops the start, and the error lists the known ones."""
    with pytest.raises(ConfigError, match=r"header:"):
        TwoStage(stage_one)
    with pytest.raises(ConfigError, match="at least 1"):
        TwoStage("hash", blocks=0)
