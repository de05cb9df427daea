"""Mode kv on real tables: the example of docs/concepts/design.md#cost, siblings, weight, temperature."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvrouter.core.fleet.pool import Pool
from kvrouter.core.routing.policy import RouteRequest
from kvrouter.core.tables.bookings import Booking
from kvrouter.core.wire.heartbeats import WorkerBeat
from kvrouter.core.wire.ids import BookingKey, RouterId, Target, WorkerId
from kvrouter.policies.kv import Kv
from tests.core.worlds import (
    T1,
    T2,
    T3,
    book,
    card,
    chain_from,
    new_pool,
    prompt,
    request,
    worker_beat,
)
from tests.policies.tables import moment, seeded

CHAIN = chain_from(1000, 10)


def costs(pool: Pool, what: RouteRequest, weight: float = 1.0) -> list[float]:
    """The cost of each candidate, in order of name."""
    return Kv(overlap_weight=weight).costs(what, pool.candidates(what), moment()).each


def pick(pool: Pool, what: RouteRequest, chance: float = 0.0, weight: float = 1.0) -> Target:
    """The target that the policy picks."""
    candidates = pool.candidates(what)
    return candidates[Kv(overlap_weight=weight).pick(what, candidates, moment(chance))].target


def published_pool() -> Pool:
    """Overlap 2/5/8 of ten blocks, 10/7/9 other active blocks, nothing charged."""
    pool = new_pool(card("w1"), card("w2"), card("w3"))
    for target, overlap, active in [(T1, 2, 10), (T2, 5, 7), (T3, 8, 9)]:
        pool.index.store(target, CHAIN[:overlap])
        book(pool, target, chain_from(active * 10_000, active))
    return pool


def test_the_whole_worked_example() -> None:
    """Prefill 8/5/2, decode 20/17/19: costs 28, 22, 21, and worker 3 wins."""
    pool, what = published_pool(), request(prompt(CHAIN))
    candidates = pool.candidates(what)

    assert [8, 5, 2] == [found.prefill_blocks for found in candidates]
    assert [20, 17, 19] == [found.decode_blocks for found in candidates]
    assert [28, 22, 21] == costs(pool, what)
    assert T3 == pick(pool, what)


def test_weight_decides_between_cache_and_load() -> None:
    """At weight 0 the least loaded wins; a request's own weight beats the setting."""
    pool = published_pool()

    assert T2 == pick(pool, request(prompt(CHAIN)), weight=0.0)
    assert T2 == pick(pool, request(prompt(CHAIN), overlap_weight=0.0))
    assert T3 == pick(pool, request(prompt(CHAIN), overlap_weight=2.0), weight=0.0)


def test_weight_zero_ignores_index_and_charge() -> None:
    """At weight 0 only active blocks have a cost: neither overlap nor charged tokens count."""
    pool, what = new_pool(card("w1"), card("w2")), request(prompt(CHAIN))
    pool.index.store(T1, CHAIN)
    book(pool, T2, [], prefill_tokens=10**6)

    assert [10, 10] == costs(pool, what, weight=0.0)


def test_weight_zero_counts_shared_blocks_once() -> None:
    """Blocks shared with requests in flight add no load, even at weight 0."""
    pool, what = new_pool(card("w1"), card("w2")), request(prompt(CHAIN))
    book(pool, T1, CHAIN[:8])
    book(pool, T2, chain_from(50_000, 7))

    assert [8 + 2, 7 + 10] == costs(pool, what, weight=0.0)
    assert T1 == pick(pool, what, weight=0.0)


def sibling_pool(shared: int, own: int, advantage: int, others: int = 2) -> Pool:
    """A first sibling is in flight on w1; w1 has `advantage` fewer other active blocks than the rest."""
    names = [f"w{number}" for number in range(1, others + 2)]
    pool = new_pool(*(card(name) for name in names))
    first = chain_from(1000, shared) + chain_from(2000, own)
    book(pool, T1, first, prefill_tokens=(shared + own) * 16)
    for number, name in enumerate(names[1:], start=1):
        book(pool, Target(WorkerId(name)), chain_from(100_000 * number, advantage))
    return pool


@pytest.mark.parametrize("weight", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("shared", "own"), [(6, 2), (1, 4), (30, 10)])
def test_cost_of_a_second_sibling(weight: float, shared: int, own: int) -> None:
    """(w+1)(P+2u) next to the first, (w+1)(P+u) on an idle target."""
    second = request(prompt(chain_from(1000, shared) + chain_from(3000, own)))

    together, elsewhere, _ = costs(sibling_pool(shared, own, advantage=0), second, weight)

    assert (weight + 1) * (shared + 2 * own) == together
    assert (weight + 1) * (shared + own) == elsewhere


@pytest.mark.parametrize("weight", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("shared", "own"), [(6, 2), (1, 4), (30, 10)])
def test_sibling_boundary(weight: float, shared: int, own: int) -> None:
    """A sibling joins the first one only if all others have over (w+1)u more active blocks."""
    second = request(prompt(chain_from(1000, shared) + chain_from(3000, own)))
    boundary = int((weight + 1) * own)

    joined = [pick(sibling_pool(shared, own, boundary + 1), second, chance, weight) for chance in (0.0, 0.99)]
    apart = [pick(sibling_pool(shared, own, boundary - 1), second, chance, weight) for chance in (0.0, 0.99)]
    tied = [pick(sibling_pool(shared, own, boundary), second, chance, weight) for chance in (0.0, 0.99)]

    assert [T1, T1] == joined
    assert T1 not in apart
    assert [T1, T3] == tied, "exactly at the boundary it is a tie"


def test_sibling_goes_to_the_less_busy_target() -> None:
    """One target below the boundary is enough to draw the sibling away."""
    pool = sibling_pool(6, 2, advantage=100)
    pool.update(WorkerId("w9"), _up("w9"))

    assert Target(WorkerId("w9")) == pick(pool, request(prompt(chain_from(1000, 6) + chain_from(3000, 2))))


def _up(name: str) -> WorkerBeat:
    return worker_beat(card(name))


def test_ties_are_random_among_the_equal() -> None:
    """An idle pool's workers are picked about equally often."""
    pool, what, rng = new_pool(card("w1"), card("w2"), card("w3")), request(prompt(CHAIN)), random.Random(1)

    picks = Counter(pick(pool, what, rng.random()) for _ in range(900))

    assert all(abs(picks[target] - 300) < 60 for target in (T1, T2, T3))


def test_temperature_spreads_the_choice() -> None:
    """Above 0 the draw is a softmax over the normalised costs, here of 28, 22 and 21."""
    pool, what, draws = published_pool(), request(prompt(CHAIN)), 3000
    weights = [2.718281828459045 ** (-(value - 21) / (7 * 0.5)) for value in (28, 22, 21)]

    picks = _draw(pool, what, Kv(temperature=0.5), draws)

    expected = [draws * weight / sum(weights) for weight in weights]
    # 13.8 is chi-squared at 99.9 % for 2 degrees of freedom.
    assert sum((picks[i] - want) ** 2 / want for i, want in enumerate(expected)) < 13.8


def test_requests_own_temperature_wins() -> None:
    """The temperature of a request overrides the setting."""
    pool = published_pool()

    assert [2] == list(_draw(pool, request(prompt(CHAIN), temperature=0.0), Kv(temperature=5.0), 50))
    assert {0, 1, 2} == set(_draw(pool, request(prompt(CHAIN), temperature=5.0), Kv(), 50))


def _draw(pool: Pool, what: RouteRequest, policy: Kv, draws: int) -> Counter[int]:
    candidates, chance = pool.candidates(what), seeded(5)
    return Counter(policy.pick(what, candidates, chance) for _ in range(draws))


def test_kv_needs_tokens() -> None:
    """The overlap needs the tokens."""
    assert Kv.needs_tokens


def test_without_tokens_the_fewest_requests() -> None:
    """A request whose blocks are unknown goes to the target with the fewest requests."""
    pool = new_pool(card("w1"), card("w2"))
    for number in range(3):
        pool.active.book(Booking(BookingKey(RouterId("r"), number), "text", T1, [], 0, 0, 0))
    book(pool, T2, chain_from(7000, 40))

    assert {T2} == {pick(pool, RouteRequest("text"), chance) for chance in (0.0, 0.5, 0.99)}
