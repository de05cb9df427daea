"""The access log: one event for a served request, and one for each that failed. The trace has the same facts.

    Record ──begin──> is it logged? traced? ──> … ──end──> log: request.served; spans (traces.py)
                                                    └──> log: request.failed, always

`--access-log sampled` logs one request in a hundred, chosen by chance; failures are logged in every mode.

Lines of served requests are written together: the code of logging, which is long, has left the processor's
caches whenever a line comes alone, and then takes five times as long.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import structlog

from kvrouter.errors import KvRouterError
from kvrouter.frontend.operators.decision_views import DecisionViews
from kvrouter.frontend.records.client_totals import ClientAddresses
from kvrouter.frontend.records.record import Ending, Record, Work
from kvrouter.frontend.records.traces import end_trace
from kvrouter.frontend.settings import AccessOptions
from kvrouter.relay.request import Request

if TYPE_CHECKING:
    from kvrouter.telemetry.spans import Tracing

log = structlog.get_logger()

SAMPLED = 0.01
# The most lines that are written together: they hold up the event loop for less than 1 ms.
TOGETHER = 16
WRITE_EVERY_S = 0.25
# A request with a longer body does not wait: it would stay in memory.
_SMALL_BYTES = 64 * 1024
# A client's path and model are as long as it likes.
_MOST_CHARACTERS = 200
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")


class AccessLog:
    """`chance()` returns a number in [0, 1). `decisions`: where the terms are that --log-level debug adds.

    `tracing`: None if it is off.
    """

    def __init__(
        self,
        options: AccessOptions,
        decisions: DecisionViews,
        chance: Callable[[], float],
        tracing: Tracing | None = None,
    ) -> None:
        self._tracing = tracing
        self.addresses = ClientAddresses(options.trusted_proxies)
        self._decisions = decisions
        self._chance = chance
        self._waiting: list[tuple[float, Record]] = []  # served requests whose lines are not written yet
        self._timer: asyncio.TimerHandle | None = None
        self.change(options)

    def change(self, options: AccessOptions) -> None:
        """Use these settings for requests that begin from now on."""
        self._share = {"off": 0.0, "sampled": SAMPLED, "all": 1.0}[options.mode]
        self.is_on = self._share > 0 or self._tracing is not None
        """Whether `begin` has anything to do."""
        self.addresses.trust(options.trusted_proxies)

    def begin(self, record: Record) -> None:
        """Find out whether a new request is logged, and begin its trace."""
        record.is_logged = self._share > 0 and self._chance() < self._share
        if self._tracing is not None:
            request = record.request
            trace = self._tracing.begin(request.head.fields, record.began_at)
            request.trace = trace.headers(None)  # if it is not sampled, the worker shall not sample it either
            record.trace = trace if trace.is_recorded else None
        record.is_noted = record.is_logged or record.trace is not None

    def end(self, record: Record) -> None:
        """Log a request that is logged, or has failed, and end its trace."""
        ending, work = record.ending(), record.work
        # a client that stops an answer that has begun is no failure of the router
        is_failure = ending != "ok" and not (ending == "left" and record.request.client.has_begun)
        if not is_failure and not record.is_noted:
            return
        is_small = work is not None and len(work.body) <= _SMALL_BYTES
        if ending == "ok" and is_small and record.trace is None:
            self._wait(record)
        else:
            self.flush()  # lines stay in order
            self._tell(time.time(), record, is_logged=is_failure or record.is_logged)

    def _wait(self, record: Record) -> None:
        self._waiting.append((time.time(), record))
        if len(self._waiting) >= TOGETHER:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WRITE_EVERY_S, self.flush)

    def flush(self) -> None:
        """Write the lines that wait for others."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, []
        for at, record in waiting:
            self._tell(at, record, is_logged=True)

    def _tell(self, at: float, record: Record, *, is_logged: bool) -> None:
        """`at`: when it ended, the time of the day."""
        work, error, trace, ending = record.work, record.error, record.trace, record.ending()
        facts = self._asked(record.request, record.id) | {
            "status": record.status,
            "outcome": ending,
            "duration_s": round(record.lasted_s, 6),
        }
        if why := _reason(record):
            facts["error"] = why[:_MOST_CHARACTERS]
        if work is not None:
            facts |= _routed(work, record)
        facts |= _noted(record)
        bug = None if isinstance(error, KvRouterError) else error
        if trace is not None:
            end_trace(trace, record, facts, bug)
        if not is_logged:
            return
        if trace is not None:
            facts["trace"] = trace.id
        if record.attempts and log.is_enabled_for(logging.DEBUG):
            facts |= self._decisions.terms_of(record.id)
        facts["timestamp"] = (
            datetime.datetime.fromtimestamp(at, datetime.UTC).isoformat().replace("+00:00", "Z")
        )
        _write(ending, record.status, facts, bug)

    def refused(
        self,
        request: Request | None,
        request_id: str,
        error: KvRouterError,
        ending: Ending,
        client: str = "",
    ) -> None:
        """Log a request that reached no worker's route. `request`: None if it could not be read."""
        facts: dict[str, Any] = {"request": request_id, "client": self.addresses.of_connection(client)}
        if request is not None:
            facts = self._asked(request, request_id)
        facts |= {"status": error.status, "outcome": ending, "error": str(error)[:_MOST_CHARACTERS]}
        self.flush()
        _write(ending, error.status, facts)

    def _asked(self, request: Request, request_id: str) -> dict[str, Any]:
        facts = {
            "request": request_id,
            "client": self.addresses.of(request),
            "method": request.head.method,
            "path": request.head.route[:_MOST_CHARACTERS],
        }
        if trace := trace_id_of(request.headers.get("traceparent", "")):
            facts["trace"] = trace
        return facts


def _write(ending: Ending, status: int, facts: dict[str, Any], bug: BaseException | None = None) -> None:
    event = "request.served" if ending == "ok" else "request.failed"
    if bug is not None:
        log.error(event, **facts, exc_info=bug)
        return
    is_ours = ending == "broken" or status >= 500
    log.log(logging.WARNING if is_ours else logging.INFO, event, **facts)


def _reason(record: Record) -> str:
    if record.served is None:
        return "the client left"
    return str(record.error) if record.error is not None else record.served.failure


def _routed(work: Work, record: Record) -> dict[str, Any]:
    facts: dict[str, Any] = {"model": work.router.pool.model[:_MOST_CHARACTERS], "stream": work.stream}
    last = record.last
    if mode := work.route.mode or work.router.selection.mode:
        facts["mode"] = mode
    reported = last.usage.prompt_tokens if last is not None and last.usage is not None else None
    if tokens := work.route.isl or reported:  # the engine counts those that are not known here
        facts["prompt_tokens"] = tokens
    if last is not None:
        choice, target = last.placement.choice, last.placement.target
        facts |= {"worker": str(target.worker_id), "rank": target.rank, "retries": len(record.attempts) - 1}
        if record.moves:
            facts["moves"] = record.moves
        if last.prefill is not None:
            facts["prefill_worker"] = str(last.prefill.placement.target.worker_id)
            choice = last.prefill.placement.choice
        if last.placement.pull is not None:
            facts["kv_source"] = str(last.placement.pull.source.worker_id)
        if work.route.isl:
            facts["predicted_cached_tokens"] = choice.overlap_blocks * last.placement.block_size
    return facts


def _noted(record: Record) -> dict[str, Any]:
    """Counts of its engine, and the times of its steps."""
    facts: dict[str, Any] = {}
    last, seconds = record.last, {}
    if record.accepted_at:
        seconds["accept_s"] = record.accepted_at - record.began_at
    if record.queued_at:
        seconds["queue_s"] = record.queued_at - record.accepted_at
    if last is not None:
        if last.usage is not None and last.usage.cached_tokens is not None:
            facts["cached_tokens"] = last.usage.cached_tokens
        if last.output_tokens is not None:
            facts["output_tokens"] = record.output_tokens
        seconds["decide_s"] = sum(
            [ended - began for began, ended in (one.decided for one in record.attempts)]
        )
        if first_at := next((one.first_at for one in record.attempts if one.first_at), 0.0):
            seconds["first_byte_s"] = first_at - record.began_at
    return facts | {name: round(each, 6) for name, each in seconds.items()}


def trace_id_of(traceparent: str) -> str:
    """Of a W3C trace context: 32 hexadecimal digits, not all zero; empty if it is none."""
    found = _TRACEPARENT.fullmatch(traceparent)
    return found[1] if found is not None and found[1].strip("0") else ""
