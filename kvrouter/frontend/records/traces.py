"""The spans of a request, from its record once it is over (telemetry/spans.py sends them).

    receive
    ├── tokenize, queue
    └── decide, upstream ── first byte, stream     for each attempt

Only `upstream` begins while the request is served: its worker gets the id.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from kvrouter.frontend.records.record import AttemptRecord, Record, clock
from kvrouter.relay.outcomes import Done, Lost, Outcome, Rejected, Retried, TimedOut
from kvrouter.relay.upstream import address_of

if TYPE_CHECKING:
    from kvrouter.telemetry.spans import Trace

_ATTRIBUTES = {
    "request": "kvrouter.request_id",
    "client": "client.address",
    "method": "http.request.method",
    "path": "url.path",
    "status": "http.response.status_code",
    "model": "gen_ai.request.model",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
}
"""Of OpenTelemetry's conventions; other facts become `kvrouter.NAME`."""
# What the spans say themselves.
_NO_ATTRIBUTES = {"trace", "error", "accept_s", "queue_s", "decide_s", "duration_s"}


def begin_upstream(trace: Trace, running: AttemptRecord, number: int) -> None:
    """The request is sent to a worker, which gets the trace context. `number`: of the attempt, from 1."""
    placement, target = running.placement, running.placement.target
    facts: dict[str, Any] = {
        "kvrouter.attempt": number,
        "kvrouter.worker": str(target.worker_id),
        "kvrouter.rank": target.rank,
    }
    with contextlib.suppress(ValueError):  # a URL that cannot be connected to either
        facts["server.address"], facts["server.port"], _ = address_of(placement.url)
    running.span = trace.upstream(clock(), facts)
    running.work.request.trace = trace.headers(running.span)


def end_trace(trace: Trace, record: Record, facts: dict[str, Any], bug: BaseException | None) -> None:
    """`facts`: those of the access log. `bug`: what was raised in this replica, if anything was."""
    if record.tokenized is not None:
        trace.step("tokenize", *record.tokenized)
    if record.queued_at:
        trace.step("queue", record.accepted_at, record.queued_at)
    legs = [leg for attempt in record.attempts for leg in attempt.legs()]
    for running in {id(leg): leg for leg in legs}.values():  # two attempts may share a prefill half
        _end_attempt(trace, running)
    attributes = {
        _ATTRIBUTES.get(name, f"kvrouter.{name}"): value
        for name, value in facts.items()
        if name not in _NO_ATTRIBUTES
    }
    reason, ending = str(facts.get("error", "")), record.ending()
    is_error = ending == "broken" or record.status >= 500
    if is_error:
        attributes["error.type"] = ending
    elif reason:
        attributes["kvrouter.error"] = reason
    why = (reason or f"status {record.status}") if is_error else ""
    trace.end(None, record.ended_at, attributes, why, bug)


def _end_attempt(trace: Trace, running: AttemptRecord) -> None:
    if running.terms is not None:
        trace.step("decide", *running.decided, _attributes(running.terms()))
    if running.span is None:
        return
    if running.first_at:
        trace.event(running.span, "first byte", running.first_at)
        facts = {"kvrouter.events": running.events}
        trace.step("stream", running.first_at, running.ended_at, facts, under=running.span)
    trace.end(running.span, running.ended_at, *_ended(running.outcome))


def _ended(outcome: Outcome | None) -> tuple[dict[str, Any], str]:
    """The attributes of an attempt that is over, and why it failed; empty: it did not."""
    match outcome:
        case Done(status, failure=failure):
            facts: dict[str, Any] = {"http.response.status_code": status}
            return (facts | {"error.type": "broken"}, failure) if failure else (facts, "")
        case Rejected(status):
            facts = {"http.response.status_code": status, "error.type": str(status)}
            return facts, f"the worker rejected the request with {status}"
        case Lost(reason):
            return {"error.type": "lost"}, reason
        case Retried(reason):
            return {"error.type": "retried"}, reason
        case TimedOut(silent_s):
            return {"error.type": "timeout"}, f"the worker sent nothing for {silent_s:g} s"
        case None:
            return {"error.type": "cancelled"}, "cancelled: the client left, or this replica stops"


def _attributes(facts: dict[str, Any]) -> dict[str, Any]:
    """Names and values as spans have them: {"terms": {"cost": 1.0}} becomes kvrouter.terms.cost."""
    found: dict[str, Any] = {}
    for name, value in facts.items():
        if isinstance(value, dict):
            found |= {f"kvrouter.{name}.{key}": each for key, each in value.items()}
        else:
            found[f"kvrouter.{name}"] = value
    return found
