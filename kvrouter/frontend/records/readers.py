"""What reads the record of a request: metrics, /clients, audit, access log, traces.

    placed ──> first_byte ──> attempt_ended ──> attempt_freed ──> … ──> ended

All but the last read an attempt: a stream may last for an hour, and is counted before.
"""

from __future__ import annotations

import asyncio
from itertools import cycle, repeat

import structlog

from kvrouter.core.audit.findings import Audit
from kvrouter.errors import KvRouterError
from kvrouter.frontend.operators.decision_views import DecisionViews
from kvrouter.frontend.records.access_log import AccessLog
from kvrouter.frontend.records.client_totals import ClientTotals
from kvrouter.frontend.records.prediction_checks import check_answer
from kvrouter.frontend.records.record import AttemptRecord, Ending, Record, clock, ending_without_worker
from kvrouter.frontend.records.tenant_totals import TenantTotals
from kvrouter.frontend.requests import engine_routes
from kvrouter.relay.engine_answers import UNKNOWN_MODEL
from kvrouter.relay.exchange import Attempt
from kvrouter.relay.outcomes import Lost, Rejected, Retried
from kvrouter.relay.request import Request
from kvrouter.telemetry.metrics import OTHER, RequestMetrics

log = structlog.get_logger()

# Paths that the label `route` of kvrouter_requests_total may have.
ROUTES = engine_routes.PATHS
# One attempt of this many is measured for kvrouter_step_seconds: to measure each would cost 1 % of it.
DECISION_TIMED_EVERY = 16


class Readers:
    """`decisions`: as people see them; the others read what their names say."""

    def __init__(
        self,
        metrics: RequestMetrics,
        *,
        clients: ClientTotals,
        audit: Audit,
        access: AccessLog,
        decisions: DecisionViews,
        tenants: TenantTotals,
    ) -> None:
        self.metrics = metrics
        self.clients = clients
        self.access = access
        self.decisions = decisions
        self.tenants = tenants
        self._audit = audit
        self._now = asyncio.get_running_loop().time
        self._times_decision = cycle((True, *repeat(False, DECISION_TIMED_EVERY - 1)))

    def placed(self, running: AttemptRecord) -> None:
        """A worker was chosen and booked."""
        metrics, work = self.metrics, running.work
        if next(self._times_decision):
            began, ended = running.decided
            metrics.steps.observe(ended - began, "decide")
        if not work.route.prompts:
            return
        first, tokens = running.prefill or running, work.route.isl
        overlap_tokens = first.placement.choice.overlap_blocks * work.router.pool.block_size
        running.prompt_tokens, running.overlap_tokens = tokens, overlap_tokens
        metrics.tokens.values[running.model, "prompt"] += tokens
        metrics.tokens.values[running.model, "overlap"] += overlap_tokens
        first.counts.prompt_tokens += tokens
        first.counts.overlap_tokens += overlap_tokens

    def first_byte(self, running: AttemptRecord, now: float, ttft_s: float | None) -> None:
        """A stream has begun. `ttft_s`: since its decision; None: it says nothing of the prefill."""
        if running.work.origin is None:  # else its client had it long ago
            self.metrics.first_byte.observe(now - running.work.received_at, running.model)
        if ttft_s is not None:
            running.counts.first_byte_s += ttft_s
            running.counts.first_bytes += 1

    def attempt_ended(self, record: Record, running: AttemptRecord, attempt: Attempt) -> None:
        """Count what an attempt has relayed, whole or not, and compare the prediction of a good one."""
        work, metrics, events = running.work, self.metrics, attempt.events
        running.events = events
        if work.api.parse is not None:
            running.output_tokens = tokens = attempt.output_tokens()
            if tokens:
                metrics.tokens.values[running.model, "output"] += tokens
            if running.first_at and events > 1:
                metrics.between.observe((clock() - running.first_at) / (events - 1), running.model)
        elif work.key is not None:
            running.output_tokens = attempt.output_tokens()
        if work.traits is not None or record.is_noted or work.key is not None:
            running.usage = work.api.find_usage(attempt.tail)
            # of a pair, this engine has computed no prompt
            if work.traits is not None and running.prefill is None and running.is_good:
                check_answer(running, running.usage, self._audit, self._now())

    def attempt_freed(self, running: AttemptRecord, ending: Ending) -> None:
        """No connection is tried again for it: its booking ends."""
        running.counts.answers[ending] += 1

    def attempt_failed(self, running: AttemptRecord, failure: Rejected | Lost | Retried) -> str:
        """Count and log an attempt that failed; returns what the log has as its detail."""
        match failure:
            case Rejected(status, body=body):
                reason, detail = "retried" if status == UNKNOWN_MODEL else str(status), body[:200]
            case Lost(detail):
                reason = "lost"
            case Retried(detail):
                reason = "retried"
        reason = "died" if running.is_lost else reason
        self.metrics.failed_attempts.inc(reason)
        log.warning(
            "worker.failed_request",
            request=running.work.id,
            worker=str(running.placement.target),
            reason=reason,
            detail=detail,
        )
        return str(detail)

    def ended(self, record: Record) -> None:
        """A request is over."""
        record.ended_at = clock()
        metrics, work, ending = self.metrics, record.work, record.ending()
        model, mode = "", ""
        if work is not None:
            model = metrics.models[work.router.pool.model]
            mode = work.route.mode or work.router.modes.default.mode
            split = work.router.pool.split
            if (split.whole is not None or split.peers) and (path := record.path):
                metrics.pd_requests.inc(path)
        # Only the APIs' own routes lead here, so the path is not the client's choice.
        metrics.requests.values[model, record.request.head.route, mode, record.status, ending] += 1
        seconds, last, output_tokens = record.lasted_s, record.asked or record.last, record.output_tokens
        self.clients.of(record.request, self._now()).count(last, output_tokens, ending, seconds)
        if record.tenant:
            self.tenants.count(record.tenant, last, output_tokens, ending, seconds)
        if record.served is not None:
            metrics.duration.observe(seconds, model)
        if ending != "ok" or record.error is not None or record.is_noted:
            self.access.end(record)

    def refused(
        self, request: Request | None, request_id: str, error: KvRouterError, client: str = ""
    ) -> None:
        """Count and log a request that reached no worker's route. `request`: None if it was not readable."""
        route = OTHER if request is None or request.head.route not in ROUTES else request.head.route
        ending = ending_without_worker(error.status, is_api=route != OTHER)
        self.metrics.requests.values["", route, "", error.status, ending] += 1
        self.access.refused(request, request_id, error, ending, client)
