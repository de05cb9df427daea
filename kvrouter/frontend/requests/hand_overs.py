"""The two halves of a request, and what is handed over from one to the other.

begin ──> the prefill worker's answer ──> prefilled ──> finish ──> the decode worker's body
│          ├── first_output: the transfer's time
└─ failed  └── ended: whether the pair works
"""

from __future__ import annotations

import time

from msgspec.structs import replace

from kvrouter.connectors import SERVED, decode_body, prefill_body
from kvrouter.connectors.source import source_at
from kvrouter.core.fleet.router import Placement
from kvrouter.core.routing.policy import RouteRequest
from kvrouter.errors import WorkerRejectedError
from kvrouter.frontend.records.record import AttemptRecord
from kvrouter.relay.collected import Collected
from kvrouter.relay.events import message_in
from kvrouter.relay.exchange import Done, Lost, Outcome
from kvrouter.telemetry.metrics import RequestMetrics


class HandOvers:
    def __init__(self, metrics: RequestMetrics) -> None:
        self._metrics = metrics

    def next_try(
        self, last: AttemptRecord, route: RouteRequest, *, is_last: bool
    ) -> tuple[RouteRequest, AttemptRecord | None]:
        """What to route after `last`; and that, if what was computed for it never reached its worker."""
        if not route.may_split:
            return route, None
        if last.is_refused and last.is_handed_over:
            return route, last
        if is_last and not last.work.router.pool.settings.refuses_whole:
            route = replace(route, may_split=False)  # hand-overs have failed: the last try needs none
        return route, None

    def add_prefill(self, running: AttemptRecord, first: Placement, unread: AttemptRecord | None) -> None:
        """Add the half at the prefill worker: that of `unread`, if it is the same."""
        if unread is not None and unread.placement.prefill is first:
            running.prefill, running.body, running.is_handed_over = unread.prefill, unread.body, True
            return
        metrics = self._metrics
        counts = metrics.targets.get(first.target) or metrics.new_target(first.target)
        running.prefill = replace(running, placement=first, counts=counts)

    def begin(self, first: AttemptRecord) -> Collected:
        """The prefill half is sent with this body; what takes its answer."""
        placement, work = first.placement, first.work
        worker = work.router.pool.workers.get(placement.target.worker_id)
        card = None if worker is None else worker.card
        first.source = source = source_at(placement.url, card, placement.target.rank)
        first.body = prefill_body(work.body, SERVED[placement.connector].asking(source))
        return Collected()

    def prefilled(self, first: AttemptRecord, now: float) -> None:
        """The prefill worker's answer is over: if it is good, that is the end of the prefill."""
        first.body = None
        if first.is_good:
            first.work.router.bookings.first_byte(first.placement.key, now)

    def finish(self, running: AttemptRecord, outcome: Outcome, kept: Collected, now: float) -> Outcome | None:
        """Hand over what the prefill worker answered; returns why nothing was computed.

        Raises WorkerRejectedError if the request is at fault.
        """
        first, work, answer = running.prefill, running.work, kept.body
        assert first is not None
        assert first.source is not None
        if isinstance(outcome, Done) and outcome.status >= 300:
            raise WorkerRejectedError(outcome.status, *message_in(answer))
        if not first.is_good:
            return Lost(outcome.failure) if isinstance(outcome, Done) else outcome
        connector = SERVED[first.placement.connector]
        lease_s = connector.lease_s
        # Its clock may be wrong, but it did not answer before it was asked.
        is_late = now - first.sent_at >= lease_s and kept.age_s(time.time()) >= lease_s
        handed = None if is_late else connector.handed_over(answer, first.source)
        running.is_handed_over = handed is not None or not connector.has_parameters
        running.body = decode_body(work.body, handed)
        pool = work.router.pool
        # a prompt of less than a block leaves nothing to hand over
        if not running.is_handed_over and pool.settings.refuses_whole and work.route.isl > pool.block_size:
            first.outcome = Lost("the prefill worker has handed nothing over (--pd-fallback refuse)")
            return first.outcome
        return None

    def first_output(self, running: AttemptRecord, first: AttemptRecord) -> None:
        """Learn how long it took to hand the prompt over."""
        running.body = None
        tokens = running.placement.choice.own_prefill_tokens
        seconds = running.first_at - max(first.ended_at, running.decided[1])
        if running.is_handed_over:
            running.work.router.tables.transfers.observe(seconds, tokens)
            self._metrics.kv_transfer.observe(seconds)

    def ended(self, running: AttemptRecord, outcome: Outcome, now: float) -> None:
        """What has become of a pair."""
        assert running.prefill is not None
        transfers = running.work.router.tables.transfers
        pair = running.prefill.placement.target.worker_id, running.placement.target.worker_id
        if running.is_good:
            transfers.worked(*pair)
        elif not isinstance(outcome, Done) or outcome.status >= 500 or outcome.failure:
            self._metrics.pd_pair_failures.inc()
            transfers.failed(*pair, now)
