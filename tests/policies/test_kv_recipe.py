"""A new term of the cost of kv, added as CONTRIBUTING says: it counts under every weight."""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest
from msgspec.structs import replace

from kvrouter.core.routing.builtin_policy import BuiltInPolicy, Moment
from kvrouter.core.routing.pairs import Pair, choose_pair
from kvrouter.core.routing.policy import AUTO, OverlapWeight
from kvrouter.core.routing.selection import Selection
from kvrouter.core.tables.arrivals import PrefixShares
from kvrouter.core.tables.prefill_speeds import Speed
from kvrouter.policies import kv
from kvrouter.policies.two_stage import TwoStage
from tests.core.worlds import fixed
from tests.policies.tables import REQUEST, candidate, columns, moment

pytestmark = pytest.mark.usefixtures("core")

CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"
KNOWN = replace(moment(), speed=Speed(1e-4, samples=100))
COLD = replace(moment(), doubt="nothing was measured")
NEAR, FAR = {"zone": "a"}, {"zone": "b"}


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """policies/kv.py with the lines of CONTRIBUTING at the end of `Kv.costs`."""
    (lines,) = re.findall(r"of `Kv\.costs`.*?```python\n(.*?) *```", CONTRIBUTING.read_text(), re.DOTALL)
    end = " " * 8 + "return costs\n"
    source = inspect.getsource(kv)
    assert 1 == source.count(end)
    module = ModuleType("kv_with_a_zone")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(source.replace(end, textwrap.indent(textwrap.dedent(lines), " " * 8)), module.__dict__)
    return module


@pytest.mark.parametrize(
    ("weight", "when"), [(0.0, KNOWN), (0.5, KNOWN), (1.0, KNOWN), (3.0, KNOWN), (AUTO, KNOWN), (AUTO, COLD)]
)
def test_it_changes_the_choice(changed: ModuleType, weight: OverlapWeight, when: Moment) -> None:
    """Under a fixed weight, under auto, and while auto has no seconds; the decision shows the term."""
    far, near = candidate("w1", overlap=1, labels=FAR), candidate("w2", active=1, labels=NEAR)
    eligible = columns([far, near])

    decision = Selection(changed.Kv(overlap_weight=weight)).explain(REQUEST, eligible, when)

    assert 0 == kv.Kv(overlap_weight=weight).pick(REQUEST, eligible, when)
    assert near.target == decision.target
    rows = [one.terms for one in decision.verdicts]
    assert [20.0, 0.0] == [row["zone_blocks"] for row in rows]
    for row in rows:
        if weight == AUTO and when is KNOWN:
            parts = [value for name, value in row.items() if name.startswith("seconds.")]
            assert sum(parts[:-1]) == pytest.approx(parts[-1])
            assert row["seconds.zone"] == pytest.approx(row["zone_blocks"] * 16 * 1e-4)
            published, added = row["equivalent_weight"], 0.0
        else:
            published, added = row["overlap_weight"], row["zone_blocks"]
        formula = published * row["prefill_blocks"] + row["decode_blocks"]
        assert row["cost"] == pytest.approx(formula + added)


def test_it_counts_for_copies(changed: ModuleType) -> None:
    """One more copy of a hot prefix goes to the near one of two idle targets."""
    shares = PrefixShares()
    for _ in range(100):
        shares.count(REQUEST.prompts[0].hashes, 5)
    hot = replace(KNOWN, tables=moment(shares=shares).tables)
    others = [candidate("w2", labels=FAR), candidate("w3", labels=NEAR), candidate("w4", labels=FAR)]
    eligible = columns([candidate("w1", overlap=5, labels=NEAR), *others])

    def copied(policy: BuiltInPolicy) -> set[int]:
        return {policy.pick(REQUEST, eligible, replace(hot, random=fixed(n / 10))) for n in range(10)}

    assert {1, 2, 3} == copied(kv.Kv(overlap_weight=AUTO))
    assert {2} == copied(changed.Kv(overlap_weight=AUTO))


@pytest.mark.parametrize(("weight", "when"), [(1.0, KNOWN), (AUTO, KNOWN), (AUTO, COLD)])
def test_it_counts_for_pairs(changed: ModuleType, weight: OverlapWeight, when: Moment) -> None:
    """The near one of two prefill workers, and of two decode workers; the decision shows the term."""
    prefills = columns([candidate("p1", labels=FAR), candidate("p2", active=1, labels=NEAR)])
    decodes = columns([candidate("d1", labels=FAR), candidate("d2", active=1, labels=NEAR)])
    whole = columns([])

    def chosen(policy: BuiltInPolicy) -> Pair:
        selection = Selection(policy)
        sharing = choose_pair(REQUEST, selection, [(prefills, decodes)], whole, when, least_tokens=None)
        assert sharing.pair is not None
        return sharing.pair

    pair = chosen(changed.Kv(overlap_weight=weight))
    decision = pair.explain(REQUEST, whole, when, {})
    assert pair.computes == chosen(TwoStage(within=changed.Kv(overlap_weight=weight))).computes

    assert "d1" == chosen(kv.Kv(overlap_weight=weight)).answers.target.worker_id
    assert ("p2", "d2") == (pair.computes.target.worker_id, pair.answers.target.worker_id)
    assert decision.prefill is not None
    for half in (decision, decision.prefill):
        assert [20.0, 0.0] == [one.terms["zone_blocks"] for one in half.verdicts if one.terms]
    for row in (one.terms for one in decision.prefill.verdicts):
        if weight == AUTO and when is KNOWN:
            parts = [value for name, value in row.items() if name.startswith("seconds.")]
            assert sum(parts[:-1]) == pytest.approx(parts[-1])
            formula = row["equivalent_weight"] * row["prefill_blocks"] + row["decode_blocks"]
        else:
            formula = row["overlap_weight"] * row["prefill_blocks"] + row["zone_blocks"]
        assert row["cost"] == pytest.approx(formula)


@pytest.mark.parametrize(
    ("far", "waiting", "is_shared"),
    [("", 0, False), ("whole", 0, True), ("", 200, True), ("prefill", 200, False), ("decode", 200, False)],
)
def test_it_counts_between_a_pair_and_one(
    changed: ModuleType, far: str, waiting: int, *, is_shared: bool
) -> None:
    """The term is worth 32 ms. A whole worker answers 4 ms sooner, or 16 ms later if prompts wait there."""
    prefills, decodes, whole = [
        columns([candidate(name, charged=charged, labels=FAR if name == far else NEAR)])
        for name, charged in (("prefill", 0), ("decode", 0), ("whole", waiting))
    ]
    policy = Selection(changed.Kv(overlap_weight=AUTO))

    sharing = choose_pair(REQUEST, policy, [(prefills, decodes)], whole, KNOWN, least_tokens=None)

    assert is_shared == (sharing.pair is not None)
