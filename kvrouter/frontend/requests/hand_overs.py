"""The two halves of a request, and what is handed over from one to the other.

begin ──> the prefill worker's answer ──> prefilled ──> finish ──> the decode worker's body
│          ├── first_output: the transfer's time
└─ failed  └── ended: whether the pair works
"""

from __future__ import annotations

from kvrouter.connectors import SERVED, decode_body, prefill_body
from kvrouter.core.wire.heartbeats import DECODE
from kvrouter.errors import WorkerRejectedError
from kvrouter.frontend.records.record import AttemptRecord
from kvrouter.relay.collected import Collected
from kvrouter.relay.events import message_in
from kvrouter.relay.exchange import Done, Lost, Outcome
from kvrouter.telemetry.metrics import RequestMetrics


class HandOvers:
    def __init__(self, metrics: RequestMetrics) -> None:
        self._metrics = metrics

    def count_whole(self, running: AttemptRecord) -> None:
        """Count a request that one worker of a pool with roles serves."""
        pool = running.work.router.pool
        worker = pool.workers.get(running.placement.target.worker_id)
        if worker is not None and worker.card.role == DECODE:
            self._metrics.pd_requests.inc("decode" if pool.split.islands else "fallback")

    def begin(self, first: AttemptRecord) -> Collected:
        """The prefill half is sent with this body; what takes its answer."""
        first.body = prefill_body(first.work.body, SERVED[first.placement.connector].asking)
        return Collected()

    def prefilled(self, first: AttemptRecord, now: float) -> None:
        """The prefill worker's answer is over: if it is good, that is the end of the prefill."""
        first.body = None
        if first.is_good:
            first.work.router.bookings.first_byte(first.placement.key, now)

    def finish(self, running: AttemptRecord, outcome: Outcome, answer: bytes) -> Outcome | None:
        """Hand over what the prefill worker answered; returns why nothing was computed.

        Raises WorkerRejectedError if the request is at fault.
        """
        first, work = running.prefill, running.work
        assert first is not None
        if isinstance(outcome, Done) and outcome.status >= 300:
            raise WorkerRejectedError(outcome.status, *message_in(answer))
        if not first.is_good:
            return Lost(outcome.failure) if isinstance(outcome, Done) else outcome
        connector = SERVED[first.placement.connector]
        handed = connector.handed_over(answer, first.placement.url)
        running.is_handed_over = handed is not None or connector.asking is None
        running.body = decode_body(work.body, handed)
        self._metrics.pd_requests.inc("pair" if running.is_handed_over else "fallback")
        return None

    def first_output(self, running: AttemptRecord, first: AttemptRecord) -> None:
        """Learn how long it took to hand the prompt over."""
        running.body = None
        tokens, seconds = running.placement.choice.own_prefill_tokens, running.first_at - first.ended_at
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
