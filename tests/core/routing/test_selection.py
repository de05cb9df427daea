"""Candidates, filters, policy, pick; and the same explained."""

from __future__ import annotations

import random

import pytest

from kvrouter.core.fleet.pool import Pool
from kvrouter.core.fleet.router import Router, RouterRules
from kvrouter.core.routing.builtin_policy import BuiltInPolicy
from kvrouter.core.routing.filters import FilterSettings, MaxOngoing, new_filters
from kvrouter.core.routing.policy import RouteRequest
from kvrouter.core.routing.selection import Selection
from kvrouter.core.wire.ids import RouterId
from kvrouter.errors import NoWorkersError
from kvrouter.policies.baseline import RoundRobin
from kvrouter.policies.kv import Kv
from kvrouter.policies.prefix_affinity import PrefixAffinity
from kvrouter.policies.scored import Scored
from tests.core.worlds import T1, T2, T3, W1, W2, W3, card, chain_from, new_pool, prompt, request, worker_beat
from tests.policies.tables import REQUEST, candidate, columns, moment, target

CHAIN = chain_from(1000, 10)


def test_filters_then_policy() -> None:
    """The policy picks from the candidates that the filters keep; there may be none."""
    selection = Selection(Kv(), (MaxOngoing(2),))
    full, cached = candidate("w1", overlap=9, requests=2), candidate("w2", overlap=5)

    left = selection.eligible(REQUEST, columns([full, cached, candidate("w3")]), moment())

    assert [cached] == selection.choose(REQUEST, left, moment())
    assert [] == selection.eligible(REQUEST, columns([full]), moment())


def test_explained_decision() -> None:
    """It contains every target: eligible ones with their terms, the others with what removed them."""
    selection = Selection(Kv(), (MaxOngoing(2),))
    candidates = [candidate("w1", overlap=9, requests=2), candidate("w2", overlap=5), candidate("w3")]

    decision = selection.explain(REQUEST, columns(candidates), moment(now=7.0), {target("w4"): "draining"})

    assert (target("w2"), "req", 7.0) == (decision.target, decision.request_id, decision.now)
    told = {str(one.target.worker_id): (one.removed_by, one.terms.get("cost")) for one in decision.verdicts}
    assert {
        "w1": ("max-ongoing-requests", None), "w2": ("", 15.0), "w3": ("", 20.0), "w4": ("draining", None)
    } == told  # fmt: skip


def test_explaining_takes_no_turn() -> None:
    """A dry run may be repeated: the next request still gets the turn."""
    policy = RoundRobin()
    candidates = columns([candidate("w1"), candidate("w2")])

    explained = [Selection(policy).explain(REQUEST, candidates, moment()) for _ in range(3)]

    assert {target("w1")} == {decision.target for decision in explained}
    assert 0 == policy.turn


def test_explaining_without_an_eligible_candidate() -> None:
    """There is no choice, and every target has its reason."""
    selection = Selection(Kv(), (MaxOngoing(0),))

    decision = selection.explain(REQUEST, columns([candidate("w1")]), moment())

    assert None is decision.target
    assert ["max-ongoing-requests"] == [one.removed_by for one in decision.verdicts]


@pytest.fixture
def pool() -> Pool:
    """Three workers that are up."""
    return new_pool(card("w1"), card("w2"), card("w3"))


def new_router(
    pool: Pool, policy: BuiltInPolicy | None = None, settings: FilterSettings | None = None
) -> Router:
    """A router with this policy behind these filters."""
    return Router(
        pool,
        RouterRules(
            policy or Kv(), random.Random(1).random, filters=new_filters(settings or FilterSettings())
        ),
        router_id=RouterId("me"),
        incarnation=1,
        synced=False,
    )


def test_all_filtered_is_a_503(pool: Pool) -> None:
    """The message names the filters that removed a worker, and no others."""
    settings = FilterSettings(active_prefill_tokens_threshold=10**9, max_ongoing_requests=1)
    router = new_router(pool, settings=settings)
    for _ in range(3):
        router.route(request(prompt(CHAIN)), 0.0)

    with pytest.raises(
        NoWorkersError, match=r"filters left none of 3 workers of 'llama'.*: max-ongoing-requests$"
    ):
        router.route(request(prompt(CHAIN)), 0.0)


def test_filters_may_change_while_it_runs(pool: Pool) -> None:
    """A threshold set at run time holds from the next request on."""
    router = new_router(pool)
    router.modes.use_filters(new_filters(FilterSettings(max_ongoing_requests=1)))

    assert {T1, T2, T3} == {router.route(request(), 0.0).target for _ in range(3)}


def test_decide_books_nothing(pool: Pool) -> None:
    """A dry run: the choice and the reasons, and no trace of it."""
    pool.index.store(T2, CHAIN[:8])
    pool.update(W1, worker_beat(state="draining"))
    router = new_router(pool)

    decision = router.decide(request(prompt(CHAIN)), 1.0, exclude=frozenset({T3}))

    assert (T2,) == decision.order
    reasons = {one.target: one.removed_by for one in decision.verdicts}
    assert {T1: "draining", T2: "", T3: "failed this request"} == reasons
    assert {} == pool.active.owners()
    assert T2 == router.route(request(prompt(CHAIN)), 1.0).target


def test_why_the_pool_offers_no_candidate(pool: Pool) -> None:
    """Down, draining, no adapter: each says so. Another block size is not among the reasons."""
    pool.update(W1, worker_beat(state="down"))
    pool.update(W2, worker_beat("w2", state="draining"))
    pool.update(W3, worker_beat(card("w3", block_size=32, started_at_us=9)))

    assert {
        T1: "down", T2: "draining", T3: "has no adapter 'a'"
    } == pool.refusals(request(lora_name="a"))  # fmt: skip
    assert {T1, T2} == pool.refusals(request()).keys()


def test_fallbacks_are_tried_in_their_order(pool: Pool) -> None:
    """Scored with three endpoints: a retry takes the next of the first decision, if it is still there."""
    for place, worker in enumerate(("w1", "w2", "w3")):
        pool.index.store(target(worker), CHAIN[: 9 - place])
    router = new_router(pool, Scored(max_endpoints=3))

    first = router.route(request(prompt(CHAIN)), 0.0)
    assert (T1, (T2, T3)) == (first.target, first.fallbacks)

    second = router.route(request(prompt(CHAIN)), 0.0, exclude=frozenset({T1}), prefer=first.fallbacks)
    assert (T2, (T3,)) == (second.target, second.fallbacks)

    third = router.route(request(prompt(CHAIN)), 0.0, exclude=frozenset({T1, T2}), prefer=(T2,))
    assert T3 == third.target, "no fallback is left, so the policy chooses again"


def test_session_is_bound_where_it_was_sent(pool: Pool) -> None:
    """With soft affinity the next request follows; when the target is gone it is free again."""
    router = new_router(pool, RoundRobin(), FilterSettings(session_affinity="soft"))
    chat = RouteRequest("req", session="chat")

    first = router.route(chat, 0.0).target
    assert {first} == {router.route(chat, float(now)).target for now in range(1, 5)}

    router.forget([first])
    assert None is router.tables.sessions.target_of("chat", 5.0)


def test_text_is_remembered_when_prefill_is_done(pool: Pool) -> None:
    """Not when it is booked; one that is freed before, by an error, leaves nothing."""
    router, asked = new_router(pool, PrefixAffinity()), RouteRequest("req", text="hello world")
    texts = router.tables.texts
    failed = router.route(asked, 0.0)
    router.bookings.free(failed.key)
    served = router.route(asked, 1.0)
    assert 0 == sum(texts.chars(one) for one in (T1, T2, T3))

    router.bookings.first_byte(served.key, 2.0)

    assert 11 == texts.chars(served.target) == sum(texts.chars(one) for one in (T1, T2, T3))
    router.forget([served.target])
    assert 0 == texts.chars(served.target)


def test_rates_are_those_the_policy_sees(pool: Pool) -> None:
    """What streamed requests teach stands in the policy's state."""
    router = new_router(pool)
    placed = router.route(request(prompt(CHAIN)), 0.0)

    router.bookings.first_byte(placed.key, 0.5)

    assert [320.0, 320.0] == router.tables.rates.peaks([placed.target, target("w9")])
