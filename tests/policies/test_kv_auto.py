"""Mode kv with weight auto: seconds are compared, and shown as the published formula."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvrouter.core.fleet.router import Router, RouterRules
from kvrouter.core.routing.builtin_policy import Moment
from kvrouter.core.routing.cost import FALLBACK_WEIGHT
from kvrouter.core.routing.policy import AUTO
from kvrouter.core.routing.selection import Selection
from kvrouter.core.tables.arrivals import PrefixShares
from kvrouter.core.tables.prefill_speeds import CLASSES_S, FEW, Calibration, Speed, TtftClass
from kvrouter.core.wire.ids import RouterId, Target
from kvrouter.policies.kv import Kv
from tests.core.worlds import T1, T2, card, chain_from, fixed, new_pool, prompt, request
from tests.policies.tables import REQUEST, candidate, columns, moment, picked

pytestmark = pytest.mark.usefixtures("core")

KNOWN = Speed(1e-4, 100, 0.05)


def at(now: float = 0.0, chance: float = 0.0, *, speed: Speed = KNOWN, rate: float = 0.0) -> Moment:
    """A moment in which the speed of prefill is known."""
    return replace(moment(chance, now=now), speed=speed, arrivals_per_s=rate, doubt=speed.doubt)


def test_a_held_block_adds_nothing() -> None:
    """A thousand of them cost the published formula more than a whole prompt to compute."""
    eligible = columns([candidate("w1", overlap=10, active=1000), candidate("w2")])

    assert 0 == Kv(overlap_weight=AUTO).pick(REQUEST, eligible, at())
    assert 1 == Kv().pick(REQUEST, eligible, at())


def test_progress_counts() -> None:
    """A target whose head is 95 % through beats one that has less charged and has just begun."""
    policy = Kv(overlap_weight=AUTO)
    eligible = columns([candidate("w1", charged=1000), candidate("w2", charged=400)])
    eligible._columns.began[1] = 0.095

    assert 0 == policy.pick(REQUEST, eligible, at(0.095))


def test_terms_are_the_formula() -> None:
    """Each target's own weight gives its cost; costs are in the order of the seconds."""
    eligible = columns(
        [candidate("w1", overlap=4, charged=300, active=7), candidate("w2", active=90), candidate("w3")]
    )

    rows = Kv(overlap_weight=AUTO).terms(REQUEST, eligible, at(rate=30.0))

    for row in rows:
        weight, prefill, decode = (row[k] for k in ("equivalent_weight", "prefill_blocks", "decode_blocks"))
        assert row["cost"] == pytest.approx(weight * prefill + decode)
        seconds = row["wait_s"] + row["own_s"] * (1 + row["gamma"])
        assert row["cost"] == pytest.approx(seconds / 1e-4 / 16)
        assert weight == row["overlap_weight"]


def test_the_seconds_and_their_parts_come_first() -> None:
    """They are what is compared, and the parts add up to it."""
    policy, now = Kv(overlap_weight=AUTO), at(rate=30.0)
    eligible = columns([candidate("w1", overlap=4, charged=300), candidate("w2", charged=90)])

    rows = policy.terms(REQUEST, eligible, now)

    names = ["seconds.waiting", "seconds.own_prefill", "seconds.congestion", "seconds.total"]
    for row in rows:
        assert names == list(row)[:4]
        waiting, own_prefill, congestion, total = (row[name] for name in names)
        assert (waiting, own_prefill) == (row["wait_s"], row["own_s"])
        assert congestion == own_prefill * row["gamma"] > 0
        assert total == pytest.approx(waiting + own_prefill + congestion)
    assert policy.costs(REQUEST, eligible, now).each == [row["seconds.total"] for row in rows]
    decision = Selection(policy).explain(REQUEST, eligible, now)
    first, second = (f"{row['seconds.total']:.4g}" for row in rows)
    assert decision.why_not(decision.verdicts[0]).startswith(f"seconds {first} against {second}: ")


@pytest.mark.parametrize(
    ("weight", "cost_of", "unseen"), [(AUTO, "wait_s", "unseen_s"), (1, "cost", "unseen_cost")]
)
@pytest.mark.parametrize("part", [0.0, 0.25, 0.5, 0.75])
def test_a_spread_choice_is_explained(weight: float, cost_of: str, unseen: str, part: float) -> None:
    """By hand from what the decision shows: the cheapest first, until the sum exceeds this replica's part."""
    policy = Kv(overlap_weight=weight)
    eligible = columns([candidate(f"w{n}", charged=100 * charged) for n, charged in enumerate((2, 0, 9, 1))])
    now = replace(at(), unseen=3.0, part=part)

    rows = policy.terms(REQUEST, eligible, now)

    left = part * sum(row[unseen] for row in rows)
    for place in sorted(range(4), key=lambda i: rows[i][cost_of]):
        left -= rows[place][unseen]
        if left < 0:
            break
    assert place == policy.pick(REQUEST, eligible, now)
    assert unseen not in policy.terms(REQUEST, eligible, at())[0]
    assert unseen not in Kv(overlap_weight=weight, temperature=1.0).terms(REQUEST, eligible, now)[0]


def test_a_temperature_draws_from_the_seconds() -> None:
    """The slower target is drawn, too, and less often."""
    policy = Kv(overlap_weight=AUTO, temperature=1.0)
    eligible = columns([candidate("w1", overlap=5), candidate("w2")])

    drawn = [policy.pick(REQUEST, eligible, at(chance=step / 100)) for step in range(100)]

    assert 60 < drawn.count(0) < 90


def test_unknown_speeds_fall_back() -> None:
    """To the fixed weight that is best under load; a request may still name its own."""
    policy, cold = Kv(overlap_weight=AUTO), at(speed=Speed())
    eligible = columns([candidate("w1"), candidate("w2")])

    assert FALLBACK_WEIGHT == policy.terms(REQUEST, eligible, cold)[0]["overlap_weight"]
    own = replace(REQUEST, overlap_weight=3.0)
    assert 3.0 == policy.terms(own, eligible, at())[0]["overlap_weight"]
    named = replace(REQUEST, overlap_weight=AUTO)
    assert "own_s" in Kv().terms(named, eligible, at())[0]


def test_a_hot_prefix_is_copied() -> None:
    """Two of four targets should hold what half of the requests share; then no third one does."""
    shares = PrefixShares()
    hashes = REQUEST.prompts[0].hashes
    for number in range(100):
        shares.count(hashes, 5 if number % 2 else 0)
    policy = Kv(overlap_weight=AUTO)
    one, two = candidate("w1", overlap=5), candidate("w2", overlap=5)
    others = [candidate("w3", charged=100), candidate("w4")]
    hot = replace(at(), tables=moment(shares=shares).tables)

    assert 2 == policy.pick(REQUEST, columns([one, *others]), hot)
    assert 0 == policy.pick(REQUEST, columns([one, two, *others]), hot)
    assert 0 == policy.pick(REQUEST, columns([one, *others]), at())


def test_without_tokens_the_fewest_requests() -> None:
    """No seconds can be predicted for an unknown prompt."""
    few = [candidate("w1", requests=3), candidate("w2", requests=1)]

    assert ["w2"] == picked(Kv(overlap_weight=AUTO), few, request())


def new_router(tokens_per_s: int = 0) -> Router:
    """A router with weight auto and two workers, whose cards state this speed."""
    pool = new_pool(*(card(name, prefill_tokens_per_s=tokens_per_s) for name in ("w1", "w2")))
    rules = RouterRules(Kv(overlap_weight=AUTO), fixed(0.0))
    return Router(pool, rules, router_id=RouterId("r"), incarnation=1, synced=False)


def serve(router: Router, start: int, now: float, seconds: float) -> Target:
    """A request of 160 tokens whose first byte comes after `seconds`."""
    placed = router.route(request(prompt(chain_from(start, 10))), now)
    router.bookings.first_byte(placed.key, now + seconds)
    router.bookings.free(placed.key, now + seconds)
    return placed.target


def test_it_begins_with_known_speeds() -> None:
    """The router doubts until enough prefills were measured, and says why."""
    router = new_router()
    assert "0 of 8" in router.doubt

    for number in range(FEW):
        serve(router, 1000 * number, float(number), 0.016)

    assert not router.doubt
    row = router.decide(request(prompt(chain_from(1, 10))), 20.0).verdicts[0].terms
    assert 160 * router.tables.speeds.speed.seconds_per_token == pytest.approx(row["own_s"])


def test_cards_state_a_speed_to_begin_with() -> None:
    """Then seconds are compared from the first request on."""
    router = new_router(tokens_per_s=10_000)

    row = router.decide(request(prompt(chain_from(1, 10))), 0.0).verdicts[0].terms

    assert not router.doubt
    assert 160 / 10_000 == pytest.approx(row["own_s"])


@pytest.mark.parametrize("stated", [100, 1_000_000])
def test_a_wrong_card_is_soon_forgotten(stated: int) -> None:
    """It counts until eight prompts were measured."""
    router = new_router(stated)
    for number in range(FEW):
        serve(router, 1000 * number, float(number), 0.016)

    assert not router.doubt
    assert 10_000 == pytest.approx(1 / router.tables.speeds.speed.seconds_per_token)


def test_unheard_replicas_are_a_doubt() -> None:
    """However well the speeds are known."""
    router = new_router()
    for number in range(FEW):
        serve(router, 1000 * number, float(number), 0.016)

    router.unheard = "sync is off"

    assert "sync is off" == router.doubt
    row = router.decide(request(prompt(chain_from(1, 10))), 20.0).verdicts[0].terms
    assert FALLBACK_WEIGHT == row["overlap_weight"]


def test_an_unstreamed_answer_teaches_nothing() -> None:
    """Its first byte comes after decoding."""
    router = new_router()
    placed = router.route(request(prompt(chain_from(1, 10))), 0.0, streamed=False)

    router.bookings.first_byte(placed.key, 9.0)

    assert 0 == router.tables.speeds.speed.samples
    assert placed.target in {T1, T2}


def test_predicted_first_bytes_are_measured() -> None:
    """In the class of what was predicted; not while the speed is unknown, and not if nothing is streamed."""
    router = new_router()
    for number in range(FEW):
        serve(router, 1000 * number, float(number), 0.016)
    assert Calibration() == router.bookings.calibration
    predicted_s = 160 * router.tables.speeds.speed.seconds_per_token

    serve(router, 50_000, 20.0, 0.5)
    placed = router.route(request(prompt(chain_from(60_000, 10))), 30.0, streamed=False)
    router.bookings.first_byte(placed.key, 31.0)
    router.bookings.free(router.route(request(prompt(chain_from(70_000, 10))), 40.0).key, 41.0)

    counted = router.bookings.calibration
    first, *others = counted.classes
    assert predicted_s < CLASSES_S[0]
    assert 1 == first.requests
    assert (first.predicted_s, first.measured_s) == pytest.approx((predicted_s, 0.5))
    assert [TtftClass()] * 9 == others
    assert (3, 0, 0.0) == (counted.decisions, counted.later, counted.later_s)


def test_a_copy_is_counted_as_later() -> None:
    """By the seconds in which the new target computes what the other one holds."""
    router = new_router()
    for number in range(FEW):
        serve(router, 1000 * number, float(number), 0.016)
    chain = chain_from(50_000, 10)
    router.pool.index.store(T1, chain)
    for _ in range(1000):
        router.tables.shares.count(chain, 9)

    placed = router.route(request(prompt(chain)), 20.0)

    counted = router.bookings.calibration
    assert T2 == placed.target
    assert (1, 1) == (counted.decisions, counted.later)
    assert counted.later_s == pytest.approx(144 * router.tables.speeds.speed.seconds_per_token)


def test_the_least_is_that_of_the_eligible() -> None:
    """A target that a filter removed is no candidate."""
    eligible = columns([candidate("w1"), candidate("w2", charged=300), candidate("w3", charged=100)])
    fewer = eligible.at([2, 1])
    assert fewer.predicted_ttft_s(T2) is None

    costs = fewer.costs_in_seconds(0.0, Speed(1e-4), 0.0)

    assert fewer.predicted_ttft_s(T2) == (costs.wait_s[1] + costs.own_s[1], costs.wait_s[0] + costs.own_s[0])
