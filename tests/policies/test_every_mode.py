"""Every mode: one candidate, equal candidates, candidates without reports."""

from __future__ import annotations

from collections import Counter

import pytest

from kvrouter.core.routing.builtin_policy import BuiltInPolicy
from kvrouter.core.routing.policy import RouteRequest, Wanted, parse_wanted
from kvrouter.core.wire.ids import WorkerId
from kvrouter.errors import BadRequestError
from kvrouter.policies import POLICIES, PolicySettings, new_policy
from tests.policies.tables import REQUEST, candidate, columns, moment, picked, turns

NAMES = ["w1", "w2", "w3", "w4"]
MODES = sorted(set(POLICIES) - {"direct"})


@pytest.fixture(params=MODES)
def policy(request: pytest.FixtureRequest) -> BuiltInPolicy:
    """Each mode with its published settings."""
    return new_policy(request.param, PolicySettings())


def test_one_worker_is_always_picked(policy: BuiltInPolicy) -> None:
    """A single candidate is picked, regardless of its load."""
    only = [candidate("w1", charged=10**6, requests=500, waiting=99, usage=1.0)]

    assert ["w1"] == picked(policy, only)
    assert [0] == list(policy.order(REQUEST, columns(only), moment()))


@pytest.mark.parametrize("chance", [0.0, 0.5, 1 - 2**-53])
def test_every_chance_gives_a_candidate(policy: BuiltInPolicy, chance: float) -> None:
    """The least and the greatest random number pick a candidate."""
    for count in (1, 2, 3, 7):
        candidates = [candidate(f"w{number}", overlap=number) for number in range(count)]

        assert 0 <= policy.pick(REQUEST, columns(candidates), moment(chance)) < count


def test_equal_workers_are_picked_equally_often(policy: BuiltInPolicy) -> None:
    """Ties do not always go to the same worker (#737, #3581, sglang #32983)."""
    candidates = [candidate(name) for name in NAMES]

    picks = Counter(turns(policy, candidates, 2000))

    assert all(abs(picks[place] - 500) < 90 for place in range(4)), picks


def test_equally_cached_workers_are_picked_equally_often(policy: BuiltInPolicy) -> None:
    """The same applies where all workers have cached the prompt."""
    candidates = [candidate(name, overlap=9, requests=2) for name in NAMES]

    picks = Counter(turns(policy, candidates, 2000))

    assert all(abs(picks[place] - 500) < 90 for place in range(4)), picks


def test_no_reports_and_no_tokens(policy: BuiltInPolicy) -> None:
    """A mode chooses without reports of engines and without tokens of the prompt."""
    candidates = [candidate(name, waiting=None, usage=None) for name in NAMES]

    assert policy.pick(RouteRequest("text"), columns(candidates), moment()) in range(4)
    assert policy.pick(REQUEST, columns(candidates), moment()) in range(4)


def test_terms_explain_each_candidate_and_change_nothing(policy: BuiltInPolicy) -> None:
    """Each candidate has a row with the same names; a second call gives equal rows."""
    candidates = [candidate(name, overlap=3, requests=1) for name in NAMES]
    what = moment()

    rows = policy.terms(REQUEST, columns(candidates), what)

    assert 4 == len(rows)
    assert len({tuple(row) for row in rows}) == 1
    assert rows == policy.terms(REQUEST, columns(candidates), moment())


@pytest.mark.parametrize(
    ("header", "wanted"),
    [
        ("w1", Wanted(WorkerId("w1"))),
        ("w1/0", Wanted(WorkerId("w1"), 0)),
        ("a-b/12", Wanted(WorkerId("a-b"), 12)),
    ],
)
def test_parse_wanted(header: str, wanted: Wanted) -> None:
    """A worker, or a worker and a rank."""
    assert wanted == parse_wanted(header)


@pytest.mark.parametrize("header", ["", "/1", "w1/", "w1/x", "w1/-1", "w1/1/2"])
def test_parse_wanted_rejects(header: str) -> None:
    """The error shows the format of the header."""
    with pytest.raises(BadRequestError, match="<worker_id>"):
        parse_wanted(header)
