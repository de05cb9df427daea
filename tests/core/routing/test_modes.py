"""A request may name a mode: its policy is made once, with its own turns and the router's tables."""

from __future__ import annotations

import random
from functools import partial

import pytest

from kvrouter.core.fleet.pool import Pool
from kvrouter.core.fleet.router import Router, RouterRules
from kvrouter.core.routing.decisions import DecisionRing
from kvrouter.core.routing.filters import FilterSettings, new_filters
from kvrouter.core.routing.policy import RouteRequest
from kvrouter.core.wire.ids import RouterId
from kvrouter.errors import BadRequestError
from kvrouter.policies import PolicySettings, new_policy
from kvrouter.policies.baseline import RoundRobin
from kvrouter.policies.kv import Kv
from tests.core.worlds import T1, T2, T3, W1, card, chain_from, new_pool, prompt, request, worker_beat

CHAIN = chain_from(1000, 10)


@pytest.fixture
def pool() -> Pool:
    """Three workers that are up."""
    return new_pool(card("w1"), card("w2"), card("w3"))


@pytest.fixture
def router(pool: Pool) -> Router:
    """Mode kv; requests may name any other mode; decisions are kept."""
    return new_router(pool, DecisionRing(10))


def new_router(pool: Pool, decisions: DecisionRing) -> Router:
    """Mode kv; requests may name any other mode."""
    rules = RouterRules(
        Kv(),
        random.Random(1).random,
        decisions=decisions,
        mode="kv",
        new_policy=partial(new_policy, settings=PolicySettings()),
    )
    return Router(pool, rules, router_id=RouterId("me"), incarnation=1, synced=True)


def asked(request_id: str = "req", **facts: object) -> RouteRequest:
    """A request for the chain."""
    return RouteRequest(request_id, (prompt(CHAIN),), **facts)  # type: ignore[arg-type]


def test_each_mode_takes_its_own_turns(router: Router) -> None:
    """A request in one mode advances the turn of that mode only."""
    targets = [router.route(asked(mode="round-robin"), 0.0).target for _ in range(6)]
    one, own = router.modes.of("round-robin").policy, router.selection.policy

    assert [T1, T2, T3] * 2 == targets
    assert router.selection is router.modes.of("") is router.modes.of("kv")
    assert isinstance(one, RoundRobin)
    assert isinstance(own, Kv)
    assert 6 == one.turn


def test_filters_are_those_of_the_router(router: Router) -> None:
    """Other modes use them, also after a change."""
    router.route(asked(mode="random"), 0.0)
    router.modes.use_filters(new_filters(FilterSettings(max_ongoing_requests=1)))

    rest = {router.route(asked(mode="random"), 0.0).target for _ in range(2)}

    assert 2 == len(rest)
    assert all(1 == router.pool.active.requests(target) for target in (T1, T2, T3))


def test_a_router_of_one_mode(pool: Pool) -> None:
    """Without `new_policy`, a request for another mode is rejected."""
    router = Router(
        pool, RouterRules(Kv(), lambda: 0.0), router_id=RouterId("me"), incarnation=1, synced=False
    )

    with pytest.raises(BadRequestError, match="p2c"):
        router.route(asked(mode="p2c"), 0.0)


def test_texts_are_remembered_by_the_mode_that_asked(router: Router) -> None:
    """A request in prefix-affinity records its text, one in kv does not."""
    for mode, text in (("prefix-affinity", "hello"), ("", "world")):
        placed = router.route(RouteRequest("req", text=text, mode=mode), 0.0)
        router.bookings.mark_prefill_completed(placed.key, 0.0)

    assert 5 == sum(router.tables.texts.chars(target) for target in (T1, T2, T3))


def test_a_kept_decision_equals_its_dry_run(router: Router) -> None:
    """Terms, order, ties and removed targets; later changes of the tables do not change it."""
    router.pool.update(W1, worker_beat(state="draining"))
    router.pool.index.store(T2, CHAIN[:8])
    predicted = router.decide(asked(), 5.0)
    router.route(asked(), 5.0)
    router.pool.update(W1, worker_beat())
    router.pool.index.clear(T2)

    (kept,) = router.decisions.of("req") if router.decisions else []

    assert predicted == kept.explain()
    assert {T1: "draining"} == {one.target: one.removed_by for one in predicted.verdicts if one.removed_by}
    assert (T2,) == predicted.order == predicted.ties


def test_ties_are_reported(router: Router) -> None:
    """The targets that chance chose from."""
    router.pool.index.store(T2, CHAIN[:8])
    router.pool.index.store(T3, CHAIN[:8])

    assert (T2, T3) == router.decide(asked(), 0.0).ties
    assert (T1, T2, T3) == router.decide(asked(overlap_weight=0.0), 0.0).ties
    assert 1 == len(router.decide(asked(mode="round-robin"), 0.0).ties)


def test_why_not_the_others(router: Router) -> None:
    """What removed a target, its terms next to the choice's terms, or that chance chose."""
    router.pool.update(W1, worker_beat(state="draining"))
    router.pool.index.store(T2, CHAIN[:8])
    decision = router.decide(asked(), 0.0)
    texts = {one.target: decision.why_not(one) for one in decision.verdicts}
    router.pool.index.clear(T2)
    equal = router.decide(asked(), 0.0)

    assert ("no candidate: draining", "") == (texts[T1], texts[T2])
    assert "cost 20 against 12: 8 fewer blocks cached, 128 more tokens to prefill" == texts[T3]
    assert {"", "no candidate: draining", "equal in cost: one of 2, drawn at random"} == {
        equal.why_not(one) for one in equal.verdicts
    }
    assert "turn" not in router.decide(asked(mode="round-robin"), 0.0).why_not(equal.verdicts[0])


def test_removed_by_a_filter_that_has_changed_since(router: Router) -> None:
    """A target is reported as removed by the filter of then, even if the filters of now would keep it."""
    router.modes.use_filters(new_filters(FilterSettings(max_ongoing_requests=1)))
    router.route(asked("a"), 0.0)
    router.route(asked("b"), 0.0)
    router.modes.use_filters(())

    (kept,) = router.decisions.of("b") if router.decisions else []

    assert ["max-ongoing-requests"] == [one.removed_by for one in kept.explain().verdicts if one.removed_by]


def test_the_ring_is_bounded(pool: Pool) -> None:
    """By number and by bytes; the newest decision always stays."""
    ring = DecisionRing(3)
    router = new_router(pool, ring)
    for number in range(5):
        router.route(asked(f"r{number}"), 0.0)
    assert (3, ["r4", "r3"]) == (len(ring), [one.request.request_id for one in ring.last(2)])
    assert ([], 1) == (ring.of("r1"), len(ring.of("r2")))

    tiny = DecisionRing(3, max_bytes=1)
    router = new_router(pool, tiny)
    for number in range(5):
        router.route(asked(f"r{number}"), 0.0)
    assert ["r4"] == [one.request.request_id for one in tiny.last(9)]


def test_nothing_is_kept_of_a_refused_request(router: Router) -> None:
    """A request without an eligible target leaves no decision."""
    for target in (T1, T2, T3):
        router.pool.remove(target.worker_id)
    with pytest.raises(Exception, match="no live worker"):
        router.route(request(), 0.0)

    assert 0 == len(router.decisions or [])
