"""Whether a request must wait, and in which lane."""

from __future__ import annotations

import pytest

from kvrouter.core.fleet.pool import Pool, PoolSettings
from kvrouter.core.fleet.router import Router, RouterRules
from kvrouter.core.routing.admission import AdmissionQueue, AdmissionSettings
from kvrouter.core.routing.breaker import BreakerSettings, CircuitBreakers
from kvrouter.core.routing.filters import FilterSettings, new_filters
from kvrouter.core.routing.policy import RouteRequest
from kvrouter.core.wire.ids import PoolId, RouterId
from kvrouter.policies.baseline import LeastLoaded
from tests.core.worlds import POOL, T1, T2, book, card, chain_from, fixed, new_pool, prompt, request

ASKED = request(prompt(chain_from(0, 10)))
QUEUE = AdmissionQueue(AdmissionSettings(threshold=2.0))


def new_router(pool: Pool, settings: FilterSettings | None = None) -> Router:
    """A router with these filters."""
    return Router(
        pool,
        RouterRules(LeastLoaded(), fixed(0.0), filters=new_filters(settings or FilterSettings())),
        router_id=RouterId("me"),
        incarnation=1,
        synced=False,
    )


@pytest.fixture
def pool() -> Pool:
    """Two workers that compute 100 tokens a step."""
    return new_pool(*(card(name, max_batched_tokens=100) for name in ("w1", "w2")))


def test_all_full(pool: Pool) -> None:
    """A request waits when every worker has more than twice its step charged, without this request."""
    router = new_router(pool)
    book(pool, T1, [1], prefill_tokens=201)
    second = book(pool, T2, [2], prefill_tokens=200)
    assert not router.must_wait(ASKED, 0.0, QUEUE)

    pool.active.free(second)
    book(pool, T2, [2], prefill_tokens=201)
    assert router.must_wait(ASKED, 0.0, QUEUE)


def test_only_eligible_workers_count(pool: Pool) -> None:
    """A worker that a filter removes does not keep a request from waiting."""
    router = new_router(pool, FilterSettings(active_decode_blocks_threshold=0.5))
    pool.workers[T2.worker_id].card.tiers["device"] = 2
    book(pool, T1, [1], prefill_tokens=201)
    book(pool, T2, [2, 3])

    assert router.must_wait(ASKED, 0.0, QUEUE)


@pytest.mark.parametrize(
    ("settings", "waits"),
    [
        (FilterSettings(session_affinity="soft"), False),
        (FilterSettings(session_affinity="hard"), True),
        (FilterSettings(node="here"), False),
    ],
)
def test_preference_does_not_make_a_request_wait(settings: FilterSettings, waits: bool) -> None:
    """The bound worker, or the one on this node, is full: the request waits only if no other may serve it."""
    pool = new_pool(
        card("w1", max_batched_tokens=100, labels={"node": "here"}), card("w2", max_batched_tokens=100)
    )
    router = new_router(pool, settings)
    router.tables.sessions.bind("s", T1, 0.0)
    book(pool, T1, [1], prefill_tokens=201)

    assert waits is router.must_wait(RouteRequest("r", session="s"), 1.0, QUEUE)


def test_request_waits_for_requests_in_flight(pool: Pool) -> None:
    """All workers have reached --max-ongoing-requests: the request waits until one ends."""
    router = new_router(pool, FilterSettings(max_ongoing_requests=1))
    keys = [book(pool, target, [1]) for target in (T1, T2)]
    assert router.must_wait(ASKED, 0.0, QUEUE)

    pool.active.free(keys[0])
    assert not router.must_wait(ASKED, 0.0, QUEUE)


def test_request_that_cannot_wait(pool: Pool) -> None:
    """Without workers, or with all busy or broken, `route` raises at once."""
    assert not new_router(Pool(PoolId(POOL), PoolSettings())).must_wait(ASKED, 0.0, QUEUE)

    for target in (T1, T2):
        book(pool, target, [1], prefill_tokens=1000)
    busy = new_router(pool, FilterSettings(active_prefill_tokens_threshold=500, max_ongoing_requests=1))
    assert not busy.must_wait(ASKED, 0.0, QUEUE)

    circuits = CircuitBreakers(BreakerSettings(failures=1))
    for target in (T1, T2):
        circuits.failed(target, 0.0)
    broken = new_router(pool)
    broken.modes.use_filters(new_filters(FilterSettings(), circuits))
    assert not broken.must_wait(ASKED, 0.0, QUEUE)


def test_lanes(pool: Pool) -> None:
    """Requests for an adapter have a lane; requests of a hard session share the lane of their worker."""
    sessions = [RouteRequest("r", session=name) for name in ("a", "b", "c")]
    hard, soft = (
        new_router(pool, FilterSettings(session_affinity="hard")),
        new_router(pool, FilterSettings(session_affinity="soft")),
    )
    for router in (hard, soft):
        router.tables.sessions.bind("a", T1, 0.0)
        router.tables.sessions.bind("b", T1, 0.0)

    plain = hard.lane(ASKED, 1.0)
    assert hard.lane(sessions[0], 1.0) == hard.lane(sessions[1], 1.0) != plain
    assert plain == hard.lane(sessions[2], 1.0)
    assert plain == soft.lane(sessions[0], 1.0)
    assert plain != hard.lane(request(lora_name="adapter"), 1.0)
