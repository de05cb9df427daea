"""Prefill and decode apart: which pair is chosen, when one is better, and what peers get of both halves."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from kvrouter.core.fleet.pool import Pool
from kvrouter.core.fleet.router import Placement, Router, RouterRules
from kvrouter.core.routing.admission import AdmissionQueue, AdmissionSettings
from kvrouter.core.routing.filters import MaxOngoing
from kvrouter.core.routing.policy import RouteRequest
from kvrouter.core.tables.bookings import Service
from kvrouter.core.tables.transfers import FAILURES_MOST, PAIRS_MOST, REST_S, Transfers
from kvrouter.core.wire.heartbeats import Card
from kvrouter.core.wire.ids import RouterId, Target, WorkerId
from kvrouter.core.wire.ops import AddRequest, FirstByte, Free, MarkPrefillCompleted, Op, decode_frame
from kvrouter.errors import NoWorkersError
from kvrouter.policies.baseline import RoundRobin
from kvrouter.policies.kv import Kv
from tests.core import worlds
from tests.core.worlds import book, chain_from, new_pool, prompt, request

CHAIN = chain_from(1000, 200)
TOKENS = 3205
P1, P2, D1, D2, B1 = [Target(WorkerId(name), 0) for name in ("p1", "p2", "d1", "d2", "b1")]


def card(worker_id: str, role: str = "both", **facts: Any) -> Card:
    """A worker with connector nixl."""
    return worlds.card(worker_id, role=role, kv_connector="nixl", **facts)


def split_pool(*cards: Any, **settings: Any) -> Pool:
    """Two workers of each role, unless cards are given."""
    roles = {"p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode"}
    return new_pool(*(cards or [card(name, role=role) for name, role in roles.items()]), **settings)


def new_router(pool: Pool, weight: Any = "auto", *, is_taught: bool = True) -> Router:
    """In mode kv. 50 µs a token, and 10 ms a prompt, if it is taught."""
    rules = RouterRules(Kv(overlap_weight=weight), random.Random(1).random)
    router = Router(pool, rules, router_id=RouterId("me"), incarnation=1000, synced=True)
    if is_taught:
        for tokens in (100, 2000) * 40:
            router.tables.speeds.learn(Service(P1, tokens, 0.01 + tokens * 50e-6, 0))
    return router


def decoding(router: Router, sequences: int = 10) -> Router:
    """With so many sequences on each target that generates answers: an idle one would serve prompts whole."""
    for place, target in enumerate(router.pool.targets):
        for number in range(sequences if target.worker_id.startswith(("d", "b")) else 0):
            key = book(router.pool, target, chain_from(10**9 + place * 10**6 + number, 1))
            router.pool.active.mark_prefill_completed(key)
    return router


def ask(number: int = 1, tokens: int = TOKENS, **fields: Any) -> RouteRequest:
    """A request of which nothing is cached, unless a test has stored its chain."""
    chain = CHAIN if number == 1 else chain_from(number * 10_000, tokens // 16)
    return replace(request(prompt(chain[: tokens // 16], tokens)), may_split=True, **fields)


def pair_of(placed: Placement) -> tuple[Target | None, Target]:
    return placed.prefill.target if placed.prefill is not None else None, placed.target


def published(router: Router) -> list[Op]:
    return [op for frame in router.feed.frames() for op in decode_frame(frame).ops or []]


def test_both_halves_are_booked() -> None:
    """In one step, with two numbers and one request id; peers get the role of each."""
    router = decoding(new_router(split_pool()))
    pool = router.pool

    placed = router.route(ask(), 0.0)

    prefill, decode = pair_of(placed)
    assert {prefill} <= {P1, P2}
    assert decode in {D1, D2}
    first, second = published(router)
    assert isinstance(first, AddRequest)
    assert isinstance(second, AddRequest)
    assert ("prefill", "decode") == (first.role, second.role)
    assert (TOKENS, 0) == (first.prefill_tokens, second.prefill_tokens)
    assert first.request_id == second.request_id
    assert (TOKENS, 200, 1) == pool.active.load(prefill or D1)
    assert (0, 210, 11) == pool.active.load(decode)


def test_the_end_of_a_prefill() -> None:
    """It teaches how fast the prefill worker is; the decode worker's first byte does not."""
    router = decoding(new_router(split_pool()))
    placed = router.route(ask(), 0.0)
    published(router)
    assert placed.prefill is not None
    samples = router.tables.speeds.speed.samples

    router.bookings.first_byte(placed.prefill.key, 0.2)
    router.bookings.free(placed.prefill.key, 0.2)
    router.bookings.first_byte(placed.key, 0.3)

    assert samples + 1 == router.tables.speeds.speed.samples
    number, other = placed.prefill.key.number, placed.key.number
    assert [
        FirstByte(number, 200_000),
        MarkPrefillCompleted(number),
        Free(number),
        MarkPrefillCompleted(other),
    ] == (published(router))
    assert (0, 0, 0) == router.pool.active.load(placed.prefill.target)


def test_least_seconds() -> None:
    """The prefill worker with the least to do, the decode worker that holds the fewest blocks."""
    router = decoding(new_router(split_pool()))
    first = router.route(ask(1), 0.0)
    second = router.route(ask(2), 0.0)

    assert {P1, P2} == {pair_of(first)[0], pair_of(second)[0]}
    assert {D1, D2} == {first.target, second.target}


def test_a_cached_prompt_goes_where_it_is_cached() -> None:
    router = decoding(new_router(split_pool()))
    router.pool.index.store(P2, CHAIN[:150])

    assert {P2} == {pair_of(router.route(ask(), 0.0))[0]}


def test_a_decode_worker_that_holds_the_prompt_serves_it() -> None:
    """What is left to compute there is less than a hand-over."""
    router = new_router(split_pool())
    router.pool.index.store(D2, CHAIN)

    assert (None, D2) == pair_of(router.route(ask(), 0.0))


def test_busy_prefill_workers() -> None:
    """What they cannot do in time stays at a decode worker."""
    router = decoding(new_router(split_pool()), 3)
    placed = [pair_of(router.route(ask(number), 0.0)) for number in range(2, 12)]

    assert any(prefill is None for prefill, _ in placed)
    assert any(prefill is not None for prefill, _ in placed)


def test_decoding_sequences_have_a_price() -> None:
    """A decode worker with many of them is spared a prompt that an idle one would take."""

    def handed_over(sequences: int) -> bool:
        router = new_router(split_pool(card("p1", role="prefill"), card("d1", role="decode")))
        for number in range(sequences):
            one = router.route(replace(ask(number + 20, 32), may_split=False), 0.0)
            router.bookings.first_byte(one.key, 0.01)
        book(router.pool, P1, chain_from(99_000, 50), 800)  # a prompt is waiting there
        return pair_of(router.route(ask(6, 800), 0.0))[0] is not None

    assert [False, True] == [handed_over(0), handed_over(40)]


def test_a_request_that_will_decode_has_the_same_price() -> None:
    """It counts while its prompt is computed elsewhere, and makes no prompt wait at the decode worker."""
    router = new_router(split_pool(card("p1", role="prefill"), card("d1", role="decode")))
    idle = router.decide(ask(), 0.0).remote["local_s"]
    halves = [book(router.pool, D1, chain_from(90_000 + one, 1), role="decode") for one in range(5)]
    coming = router.decide(ask(), 1.0).remote["local_s"]
    for key in halves:
        router.pool.active.mark_prefill_completed(key, 1.0)

    assert 1.5 * idle < coming
    assert coming == pytest.approx(router.decide(ask(), 1.0).remote["local_s"], rel=0.001)


@pytest.mark.parametrize(("least", "expected"), [(None, True), (TOKENS - 1, True), (TOKENS, False)])
def test_threshold(least: int | None, expected: bool) -> None:
    router = decoding(new_router(split_pool(pd_min_uncached_tokens=least)))
    assert expected == (pair_of(router.route(ask(), 0.0))[0] is not None)


@pytest.mark.parametrize("tokens", [500, 520])
def test_before_anything_is_known(tokens: int) -> None:
    """Without speeds more than 512 uncached tokens are handed over."""
    router = new_router(split_pool(), is_taught=False)
    assert (tokens > 512) == (pair_of(router.route(ask(3, tokens), 0.0))[0] is not None)


def test_published_formula() -> None:
    """With a number: prefill by `w * prefill_blocks`, decode by `decode_blocks`; any mode may be split."""
    router = new_router(split_pool(), 2.0)
    decision = router.decide(ask(), 0.0)
    assert decision.prefill is not None
    first = {one.target: one.terms for one in decision.prefill.verdicts}
    assert {P1, P2} == first.keys()
    assert 2 * TOKENS / 16 == first[P1]["cost"]
    assert {200} == {one.terms["cost"] for one in decision.verdicts if not one.removed_by}

    rules = RouterRules(RoundRobin(), random.Random(1).random)
    other = Router(split_pool(), rules, router_id=RouterId("me"), incarnation=1, synced=True)
    assert pair_of(other.route(ask(), 0.0))[0] is not None


def test_islands_and_labels() -> None:
    """Versions, layouts and the operator's labels must be equal in a pair."""
    cards = [
        card("p1", role="prefill", engine_version="1", labels={"zone": "a"}),
        card("p2", role="prefill", engine_version="2", labels={"zone": "a"}),
        card("d1", role="decode", engine_version="1", labels={"zone": "a"}),
        card("d2", role="decode", engine_version="2", labels={"zone": "b"}),
    ]
    router = decoding(new_router(split_pool(*cards)))
    pairs = {pair_of(router.route(ask(number), 0.0)) for number in range(2, 5)}
    assert {(P1, D1), (P2, D2)} >= {pair for pair in pairs if pair[0]} != set()

    bound = decoding(new_router(split_pool(*cards, pd_same_label=("zone",))))
    assert {(P1, D1)} == {pair_of(bound.route(ask(), 0.0))}
    assert 1 == len(bound.pool.split.islands)


def test_islands_share_the_load() -> None:
    """Between idle prefill workers the decode workers of each island decide."""
    cards = [
        card(f"{role[0]}{number}", role=role, labels={"zone": zone})
        for role in ("prefill", "decode")
        for number, zone in ((1, "a"), (2, "b"))
    ]
    router = decoding(new_router(split_pool(*cards, pd_same_label=("zone",))))
    counts = Counter[Any]()
    for number in range(2, 22):
        placed = router.route(ask(number), float(number))
        counts[pair_of(placed)] += 1
        if placed.prefill is not None:
            router.bookings.free(placed.prefill.key, number + 0.1)
    assert {(P1, D1), (P2, D2)} == counts.keys()
    assert max(counts.values()) <= 12


def test_whole_workers_beside_pairs() -> None:
    """`both` workers serve whole requests; prefill workers never do, and unknown roles nothing."""
    cards = [card("b1"), card("p1", role="prefill"), card("x1", role="encode")]
    pool = split_pool(*cards)
    router = new_router(pool)

    assert {(None, B1)} == {pair_of(router.route(ask(number), 0.0)) for number in range(2, 6)}
    refused = pool.refusals(request())
    assert {"p1", "x1"} == {target.worker_id for target in refused}
    assert any("does not know" in reason for reason in refused.values())


def test_a_lost_pair() -> None:
    """Without a decode worker nothing is served, and the error says why; `refuse` spares decode workers."""
    alone = new_router(split_pool(card("p1", role="prefill")))
    with pytest.raises(NoWorkersError, match="p1 computes prompts only"):
        alone.route(ask(), 0.0)
    assert not alone.pool.has_live_target
    assert not alone.pool.split.serving
    assert len(split_pool().split.serving) == 4

    local = new_router(split_pool(card("d1", role="decode")))
    assert (None, D1) == pair_of(local.route(ask(), 0.0))
    refusing = new_router(split_pool(card("d1", role="decode"), pd_fallback="refuse"))
    with pytest.raises(NoWorkersError, match="--pd-fallback refuse"):
        refusing.route(ask(), 0.0)


def test_a_retry() -> None:
    """Targets that failed are left out of either half."""
    router = decoding(new_router(split_pool()))
    for number, failed in enumerate((P1, D1), start=2):
        placed = router.route(ask(number), 0.0, exclude=frozenset({failed}))
        assert failed not in pair_of(placed)
        assert placed.prefill is not None
    assert pair_of(router.route(ask(7), 0.0, exclude=frozenset({P1, P2})))[0] is None


def test_pairs_that_fail() -> None:
    """After a few failures in a row a pair rests, and then is tried again."""
    transfers, p, d = Transfers(), WorkerId("p"), WorkerId("d")
    for _ in range(FAILURES_MOST):
        assert not transfers.rests(p, d, 1.0)
        transfers.failed(p, d, 1.0)
    assert transfers.rests(p, d, 1.0)
    assert not transfers.rests(p, WorkerId("other"), 1.0)
    assert not transfers.rests(p, d, 1.0 + REST_S)
    transfers.worked(p, d)
    assert not transfers.rests(p, d, 1.0)

    for number in range(2 * PAIRS_MOST):
        for _ in range(FAILURES_MOST):
            transfers.failed(WorkerId(str(number)), d, 1.0)
    assert PAIRS_MOST == len(transfers.resting(1.0))
    transfers.forget([d])
    assert not transfers.has_failures


def test_a_prefill_worker_whose_pairs_rest() -> None:
    """It is passed over, however idle, and another one hands over; a new engine begins anew."""
    router = decoding(new_router(split_pool()))
    for decode in (D1, D2):
        for _ in range(FAILURES_MOST):
            router.tables.transfers.failed(P1.worker_id, decode.worker_id, 0.0)

    assert {P2} == {pair_of(router.route(ask(number), 0.0))[0] for number in (2, 3)}
    router.engine_lost(P1.worker_id)
    assert P1 == pair_of(router.route(ask(4), 0.0))[0]


def test_transfers_are_learnt() -> None:
    """Seconds per token of the wire; a stall teaches little, and a clock that went back nothing."""
    transfers = Transfers()
    for _ in range(400):
        transfers.observe(0.003 + 1000 * 20e-6, 1000, 0.0)
    learnt = transfers.seconds(1000, 0.0)
    assert 0.023 == pytest.approx(learnt, rel=0.05)
    for seconds, tokens in ((-1.0, 1000), (0.1, 0), (float("nan"), 5)):
        transfers.observe(seconds, tokens, 0.0)
    assert learnt == transfers.seconds(1000, 0.0)
    transfers.observe(1e9, 1000, 0.0)
    assert learnt < transfers.seconds(1000, 0.0) < 1.03 * learnt
    for _ in range(400):  # a wire that has become slower, though
        transfers.observe(0.003 + 1000 * 100e-6, 1000, 0.0)
    assert 0.103 == pytest.approx(transfers.seconds(1000, 0.0), rel=0.05)


# --- workers that serve in pairs only (SGLang) ---


def pairs_only(**others: str) -> Pool:
    """p1 and d1 of SGLang, with other workers by name and role."""
    roles = {"p1": "prefill", "d1": "decode"} | others
    return split_pool(
        *[
            worlds.card(name, role=role, kv_connector="sglang", block_size=16)
            for name, role in sorted(roles.items())
        ]
    )


def test_only_pairs() -> None:
    """Any prompt goes to a pair, also where seconds are not known and in modes without tokens."""
    for rules in (Kv(), RoundRobin()):
        pool = pairs_only()
        router = Router(
            pool,
            RouterRules(rules, random.Random(1).random),
            router_id=RouterId("me"),
            incarnation=1000,
            synced=True,
        )
        assert router.needs_tokens
        assert pool.has_live_target
        assert {P1, D1} == pool.split.serving
        assert (P1, D1) == pair_of(router.route(ask(tokens=32), 0.0))
        assert router.has_eligible(ask(), 0.0, exclude=frozenset())
        for gone in (P1, D1):
            assert not router.has_eligible(ask(), 0.0, exclude=frozenset([gone]))


def test_no_pair_no_answer() -> None:
    """Neither half serves alone, a decode worker not even as a fallback; the reason names both."""
    for name in ("p1", "d1"):
        pool = pairs_only()
        pool.remove(WorkerId(name))
        assert not pool.has_live_target
        with pytest.raises(NoWorkersError, match=r"role (decode, sglang|prefill)"):
            new_router(pool).route(ask(), 0.0)

    router = new_router(pairs_only())
    with pytest.raises(NoWorkersError, match="one prompt and one answer"):
        router.route(replace(ask(), may_split=False), 0.0)
    for _ in range(FAILURES_MOST):
        router.tables.transfers.failed(P1.worker_id, D1.worker_id, 0.0)
    with pytest.raises(NoWorkersError, match="pairs have just failed"):
        router.route(ask(), 1.0)
    assert (P1, D1) == pair_of(router.route(ask(), REST_S + 1))


def test_pairs_only_beside_whole_workers() -> None:
    """The whole worker serves what no pair serves, and what it serves sooner."""
    router = decoding(new_router(pairs_only(b1="both")))

    assert (None, B1) == pair_of(router.route(replace(ask(), may_split=False), 0.0))
    assert (P1, D1) == pair_of(router.route(ask(2), 0.0))
    assert (None, B1) == pair_of(router.route(ask(3), 0.0, exclude=frozenset([P1])))
    assert (P1, D1) == pair_of(router.route(ask(4), 0.0, exclude=frozenset([B1])))


def test_pairs_only_in_the_queue() -> None:
    """A request waits while one half of the pair has no room, whichever that is."""
    for target in (P1, D1):
        pool = pairs_only()
        rules = RouterRules(Kv(), random.Random(1).random, filters=(MaxOngoing(1),))
        router = Router(pool, rules, router_id=RouterId("me"), incarnation=1000, synced=True)
        queue = AdmissionQueue(AdmissionSettings())
        assert not router.must_wait(ask(), 0.0, queue)
        book(pool, target, chain_from(5, 1))
        assert router.must_wait(ask(), 0.0, queue)
