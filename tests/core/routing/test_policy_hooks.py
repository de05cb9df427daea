"""The events that the router calls its policy for: workers, responses, removed workers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvrouter.core.fleet.own_bookings import GIVEN_UP
from kvrouter.core.fleet.router import Router, RouterRules
from kvrouter.core.routing.builtin_policy import BuiltInPolicy, Moment
from kvrouter.core.routing.candidates import Candidates
from kvrouter.core.routing.policy import RouteRequest
from kvrouter.core.wire.heartbeats import Card, RankBeat
from kvrouter.core.wire.ids import RouterId, Target, WorkerId
from tests.core.worlds import T1, T2, W1, W2, card, fixed, new_pool, request, worker_beat


class Recorder(BuiltInPolicy):
    """Records its calls."""

    reads_ends = True

    def __init__(self) -> None:
        self.workers: list[list[str]] = []
        self.statuses: list[tuple[str, int]] = []
        self.removed: list[str] = []

    def pick(self, _request: RouteRequest, _candidates: Candidates, _moment: Moment) -> int:
        return 0

    def on_workers(self, workers: Sequence[Card]) -> None:
        self.workers.append([one.worker_id for one in workers])

    def on_request_routed(self, request: RouteRequest, target: Target, status: int) -> None:
        assert T1 == target
        self.statuses.append((request.request_id, status))

    def on_worker_removed(self, worker_id: WorkerId) -> None:
        self.removed.append(worker_id)


@pytest.fixture
def policy() -> Recorder:
    """A policy that records its calls."""
    return Recorder()


@pytest.fixture
def router(policy: Recorder) -> Router:
    """A router with two workers."""
    pool = new_pool(card("w1", ranks=2), card("w2"))
    return Router(
        pool, RouterRules(policy, fixed(0.0)), router_id=RouterId("me"), incarnation=1, synced=False
    )


def test_workers_are_reported_when_they_change(router: Router, policy: Recorder) -> None:
    """Each worker is listed once, at the first decision and after each change, but not at every heartbeat."""
    router.route(request(), 0.0)
    for state in ("up", "draining", "down", "up"):
        router.pool.update(W2, worker_beat("w2", state=state, ranks=[RankBeat(0, 100, 0, running=3)]))
        router.report_workers()
    router.decide(request(), 0.0)

    assert [["w1", "w2"], ["w1"], ["w1", "w2"]] == policy.workers


def test_a_changed_card_is_reported(router: Router, policy: Recorder) -> None:
    """Other labels are another list."""
    router.report_workers()
    router.pool.update(W1, worker_beat(card("w1", ranks=2, labels={"zone": "a"})))
    router.report_workers()

    assert 2 == len(policy.workers)


def test_the_status_of_a_response_is_reported_once(router: Router, policy: Recorder) -> None:
    """The first status counts; a request freed without one gets 499; unknown bookings are ignored."""
    begun, refused, left = (router.route(RouteRequest(name), 0.0).key for name in ("a", "b", "c"))
    router.bookings.first_byte(begun, 1.0)
    router.bookings.answered(begun, 500)
    router.bookings.answered(refused, 429)
    for key in (begun, refused, left, left):
        router.bookings.free(key)
    router.bookings.answered(left, 200)

    assert [("a", 200), ("b", 429), ("c", GIVEN_UP)] == policy.statuses


def test_a_predicted_prefill_is_not_a_response(router: Router, policy: Recorder) -> None:
    """The status of what is not streamed is known at its end only."""
    key = router.route(request(), 0.0, streamed=False).key
    router.bookings.mark_prefill_completed(key, 1.0)
    assert [] == policy.statuses
    router.bookings.answered(key, 503)
    assert [("req", 503)] == policy.statuses


def test_a_removed_worker_is_reported_once(router: Router, policy: Recorder) -> None:
    """Not once for each rank."""
    router.forget([T1, Target(W1, 1), T2])

    assert ["w1", "w2"] == policy.removed


def test_an_engine_that_is_lost_is_reported(router: Router, policy: Recorder) -> None:
    """A policy forgets what the worker held, and is told again which workers take requests."""
    router.report_workers()
    router.engine_lost(W1)
    router.report_workers()

    assert ["w1"] == policy.removed
    assert [["w1", "w2"]] * 2 == policy.workers
