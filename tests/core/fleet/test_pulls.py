"""Blocks from a peer: who reads from whom, when that is sooner than computing, and what is learnt from it."""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec.structs import replace

from kvrouter.core.fleet.pool import Pool
from kvrouter.core.fleet.router import Placement, Router, RouterRules
from kvrouter.core.routing.builtin_policy import BuiltInPolicy
from kvrouter.core.routing.policy import RouteRequest
from kvrouter.core.tables.bookings import Service
from kvrouter.core.tables.transfers import FAILURES_MOST, FORGOTTEN_S, Transfers
from kvrouter.core.wire.ids import BookingKey, RouterId, Target, WorkerId
from kvrouter.core.wire.ops import AddRequest, decode_frame
from kvrouter.errors import NoWorkersError
from kvrouter.policies.kv import Kv
from kvrouter.policies.two_stage import TwoStage
from tests.core import worlds
from tests.core.worlds import OTHER, T1, T2, T3, book, chain_from, new_pool, prompt, request

CHAIN = chain_from(1000, 200)
TOKENS = 3205
ASK = replace(request(prompt(CHAIN, TOKENS)), may_split=True)
ROOM = {"device": 1000}


def card(worker_id: str, **facts: Any) -> Any:
    facts = {"kv_connector": "p2p", "kv_address": f"{worker_id}:5710", "tiers": ROOM} | facts
    return worlds.card(worker_id, **facts)


def new_router(
    *cards: Any, weight: Any = "auto", held: int = 200, policy: BuiltInPolicy | None = None, **settings: Any
) -> Router:
    """50 µs a token, 10 ms a prompt. w1 holds the chain, and has 5,000 tokens to compute first."""
    pool = new_pool(*(cards or map(card, ("w1", "w2"))), **({"kv_from_peers": True} | settings))
    router = Router(
        pool,
        RouterRules(policy or Kv(overlap_weight=weight), random.Random(1).random),
        router_id=RouterId("me"),
        incarnation=1000,
        synced=True,
    )
    for tokens in (100, 2000) * 40:
        router.tables.speeds.learn(Service(T1, tokens, 0.01 + tokens * 50e-6, 0))
    pool.index.store(T1, CHAIN[:held])
    book(pool, T1, chain_from(10**9, 10), 5000)
    return router


def pulled(placed: Placement) -> tuple[Target, Target | None, int]:
    """Where it goes, from whom that reads, and how many blocks."""
    pull = placed.pull
    return placed.target, None if pull is None else pull.source, 0 if pull is None else pull.blocks


def test_the_idle_reads_from_the_warm() -> None:
    """It is charged with what it computes itself; peers get the role of the booking."""
    router = new_router()

    placed = router.route(ASK, 0.0)

    assert (T2, T1, 200) == pulled(placed)
    assert "pull" == placed.path
    assert 5 == router.pool.active.charged_tokens(T2)
    (op,) = [op for frame in router.feed.frames() for op in decode_frame(frame).ops or []]
    assert isinstance(op, AddRequest)
    assert ("pull", 5, 0) == (op.role, op.prefill_tokens, op.overlap_blocks)


def test_in_two_stages() -> None:
    """The costs within a group are those of kv, for pulls, too."""
    router = new_router(policy=TwoStage(within=Kv(overlap_weight="auto")))

    assert (T2, T1, 200) == pulled(router.route(ASK, 0.0))


def test_none_is_left() -> None:
    router = new_router()

    with pytest.raises(NoWorkersError, match="failed this request"):
        router.route(ASK, 0.0, exclude=frozenset({T1, T2}))
    assert router.decide(ASK, 0.0, exclude=frozenset({T1, T2})).target is None


def test_it_reads_what_it_lacks() -> None:
    router = new_router(held=150)
    router.pool.index.store(T2, CHAIN[:30])

    placed = router.route(ASK, 0.0)

    assert (T2, T1, 120) == pulled(placed)
    assert TOKENS - 150 * 16 == placed.choice.own_prefill_tokens


def test_the_warm_one_if_it_is_idle() -> None:
    """It computes five tokens, and nobody has to read anything."""
    router = new_router()
    router.pool.active.free(BookingKey(OTHER, 1))

    assert (T1, None, 0) == pulled(router.route(ASK, 0.0))


NO_PULL: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "without the flag": ({}, {"kv_from_peers": False}, {}),
    "another connector": ({"kv_connector": "nixl"}, {}, {}),
    "no address": ({"kv_address": ""}, {}, {}),
    "another hash": ({"kv_hash": "x"}, {}, {}),
    "another version": ({"engine_version": "0.34"}, {}, {}),
    "a number as the weight": ({}, {"weight": 1.0}, {}),
    "several answers": ({}, {}, {"may_split": False}),
}


@pytest.mark.parametrize(("facts", "settings", "fields"), NO_PULL.values(), ids=NO_PULL)
def test_nothing_is_read(facts: Any, settings: Any, fields: Any) -> None:
    router = new_router(card("w1"), card("w2", **facts), **settings)

    assert router.route(replace(ASK, **fields), 0.0).pull is None


def test_not_over_a_slow_wire() -> None:
    router = new_router()
    for _ in range(40):
        router.tables.transfers.observe(10.0, 10_000, 0.0)

    assert router.route(ASK, 0.0).pull is None


def test_a_pair_that_fails_rests() -> None:
    router = new_router(*map(card, ("w1", "w2", "w3")))
    for _ in range(FAILURES_MOST):
        router.tables.transfers.failed(WorkerId("w1"), WorkerId("w2"), 0.0)

    assert (T3, T1, 200) == pulled(router.route(ASK, 0.0))


def test_from_the_idlest_of_those_that_hold_most() -> None:
    router = new_router(*map(card, ("w1", "w2", "w3")))
    router.pool.index.store(T2, CHAIN)
    for number in range(20):
        book(router.pool, T2, chain_from(10**8 + 100 * number, 1), 5000)

    assert (T3, T1, 200) == pulled(router.route(ASK, 0.0))


def test_the_decision_explains_it() -> None:
    """As two of the parts of `seconds`: reading, and what the copy evicts."""
    router = new_router()

    decision = router.decide(ASK, 0.0)
    terms = {one.target: one.terms for one in decision.verdicts}

    assert T2 == decision.target
    assert router.tables.transfers.seconds(3200, 0.0) == pytest.approx(terms[T2]["seconds.transfer"])
    assert 0.0 == terms[T2]["seconds.copy"] == terms[T1]["seconds.transfer"]
    parts = ("waiting", "own_prefill", "congestion", "transfer", "copy")
    assert sum(terms[T2][f"seconds.{name}"] for name in parts) == pytest.approx(terms[T2]["seconds.total"])


def test_a_copy_has_a_price_where_it_evicts() -> None:
    """Caches serve half of the tokens, so each is read once more; there is room for 100 of 200 blocks."""
    router = new_router(card("w1"), card("w2", tiers={"device": 100}))
    router.reuse.prompt_tokens, router.reuse.best = 1000, 500

    pull = router.route(ASK, 0.0).pull

    assert pull is not None
    token_s = router.tables.speeds.speed.seconds_per_token
    assert 1600 * token_s * 500 / 500 == pytest.approx(pull.copy_s)


def _answered(router: Router, transfer_s: float) -> None:
    placed = router.route(ASK, 0.0)
    assert placed.pull is not None
    speed = router.tables.speeds.speed
    router.bookings.first_byte(placed.key, speed.fixed_s + 5 * speed.seconds_per_token + transfer_s)
    router.bookings.free(placed.key)


def test_the_first_byte_teaches_the_wire() -> None:
    """And not the speed of prefill, here or at peers."""
    router = new_router()
    before, speed = router.tables.transfers.seconds(3200, 0.0), router.tables.speeds.speed

    for _ in range(3):
        _answered(router, 2 * before)

    assert router.tables.transfers.seconds(3200, 0.0) > 1.1 * before
    assert speed == router.tables.speeds.speed


def test_peers_learn_nothing() -> None:
    pool: Pool = new_pool(card("w1"))
    key = book(pool, T1, CHAIN, 5, role="pull")

    assert pool.active.service(key, 1.0, 0.5) is None


def test_it_was_predicted() -> None:
    """The predicted time to first byte contains the transfer, and not the price of the copy."""
    router = new_router(card("w1"), card("w2", tiers={"device": 100}))
    router.reuse.prompt_tokens, router.reuse.best = 1000, 500

    placed = router.route(ASK, 0.0)

    assert placed.pull is not None
    own = router.bookings._own[placed.key.number]
    speed = router.tables.speeds.speed
    expected = speed.fixed_s + 5 * speed.seconds_per_token + placed.pull.seconds
    assert expected == pytest.approx(own.predicted_ttft_s)


def test_a_request_without_tokens() -> None:
    router = new_router()

    assert router.route(RouteRequest("r", may_split=True), 0.0).pull is None


def test_one_at_a_time_until_the_wire_is_known() -> None:
    router = new_router()
    first = router.route(ASK, 0.0)

    second = router.route(ASK, 0.0)
    assert first.pull is not None
    assert second.pull is None
    for placed in (first, second):
        router.bookings.free(placed.key)
    assert router.route(ASK, 0.0).pull is not None


def test_a_slow_wire_is_seen_before_the_first_transfer_is_over() -> None:
    """In the seconds so far of what is under way."""
    transfers = Transfers()
    at_first = transfers.seconds(10_000, 0.0)
    for number in range(4):
        transfers.begin(BookingKey(RouterId("me"), number), 10_000, 0.0)

    assert at_first == transfers.seconds(10_000, 0.01)
    assert transfers.seconds(10_000, 2.0) > 10 * at_first
    for number in range(4):
        transfers.end(BookingKey(RouterId("me"), number))
    assert at_first == transfers.seconds(10_000, 2.0)


def test_a_wire_that_was_slow_is_tried_again() -> None:
    """After a while without a measurement, and by one transfer."""
    transfers = Transfers()
    at_first = transfers.seconds(10_000, 0.0)
    for _ in range(20):
        transfers.observe(5.0, 10_000, 0.0)

    assert transfers.seconds(10_000, FORGOTTEN_S) > 5 * at_first
    assert at_first == transfers.seconds(10_000, FORGOTTEN_S + 1)
    transfers.begin(BookingKey(RouterId("me"), 1), 10_000, FORGOTTEN_S + 1)
    assert transfers.seconds(10_000, FORGOTTEN_S + 1) > 5 * at_first
