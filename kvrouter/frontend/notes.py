"""What is noted of a request while it is served: for its line in the access log, and for its trace.

begun ──accepted──> ──queued──> ──decided──> ──sent──> ──first byte──> ──answered──> … ended
receive   tokenize      queue      decide     upstream        stream        │
                                     ^                                      │ another worker
                                     └──────────────────────────────────────┘
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from kvrouter.core.fleet.router import Placement
from kvrouter.core.tables.predictions import Usage
from kvrouter.relay.exchange import Done, Lost, Outcome, Rejected, Retried, TimedOut
from kvrouter.relay.request import Request
from kvrouter.relay.upstream import address_of

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from kvrouter.telemetry.spans import Trace

clock = time.perf_counter


class Notes(Struct):
    """Of one request. The clock is not the event loop's, which has whole ms under uvloop (0.23)."""

    begun: float
    """A reading of `clock`, as all times here that do not end in `_s`."""
    mark: float
    """When the last step ended."""
    is_logged: bool = True
    """False: only traced."""
    trace: Trace | None = None
    """None: it is not sampled."""
    accept_s: float | None = None
    """Body, tokens and hashes."""
    queue_s: float | None = None
    """None: there is no queue, or it did not get so far."""
    decide_s: float | None = None
    """Of all attempts."""
    first_byte_s: float | None = None
    """From the arrival, as `duration_s`."""
    duration_s: float | None = None
    usage: Usage | None = None
    output_tokens: int | None = None
    choice: tuple[float, float, Callable[[], dict[str, Any]]] | None = None
    """When the running attempt was decided, and by what: asked when it is over, as that takes a while."""
    attempt: Span | None = None
    """The span of the running attempt."""
    attempts: int = 0
    first_byte_at: float = 0.0
    """Of the running attempt; 0: not yet."""

    def tokenized(self, began: float) -> None:
        if self.trace is not None:
            self.trace.step("tokenize", began, clock())

    def accepted(self) -> None:
        self.accept_s = self._step()

    def queued(self) -> None:
        began = self.mark
        self.queue_s = self._step()
        if self.trace is not None:
            self.trace.step("queue", began, self.mark)

    def deciding(self) -> None:
        self._step()

    def decided(self, last_terms: Callable[[], Callable[[], dict[str, Any]]]) -> None:
        """`last_terms()()`: what the choice was judged by; the second call comes later."""
        began = self.mark
        self.decide_s = (self.decide_s or 0.0) + self._step()
        if self.trace is not None:
            self.choice = began, self.mark, last_terms()

    def sending(self, request: Request, placement: Placement) -> None:
        """Begin an attempt, whose worker gets the trace context."""
        trace = self.trace
        if trace is not None:
            self.attempts, self.first_byte_at = self.attempts + 1, 0.0
            self.attempt = trace.upstream(clock(), _of_worker(placement, self.attempts))
            request.trace = trace.headers(self.attempt)

    def got_first_byte(self) -> None:
        self.first_byte_at = clock()
        self.first_byte_s = self.first_byte_at - self.begun

    def counted(self, find_usage: Callable[[bytes], Usage], tail: bytes, output_tokens: int | None) -> None:
        """The end of the answer, with what its engine counted."""
        self.usage, self.output_tokens = find_usage(tail), output_tokens

    def answered(self, outcome: Outcome | None, events: int = 0) -> None:
        """The attempt is over, after so many events of a stream. `outcome`: None if it was cancelled."""
        span, trace, choice, now = self.attempt, self.trace, self.choice, clock()
        self.choice = None
        if choice is not None and trace is not None:
            began, ended, terms = choice
            trace.step("decide", began, ended, _attributes(terms()))
        if span is None or trace is None:
            return
        if self.first_byte_at:
            trace.event(span, "first byte", self.first_byte_at)
            trace.step("stream", self.first_byte_at, now, {"kvrouter.events": events}, under=span)
        facts, error = _ended(outcome)
        trace.end(span, now, facts, error)
        self.attempt = None

    def ended(self) -> None:
        self.answered(None)  # if it was cancelled while it connected: else there is nothing left to end
        self.duration_s = clock() - self.begun

    def _step(self) -> float:
        """Seconds since the last step."""
        before, self.mark = self.mark, clock()
        return self.mark - before


class _NotNoted(Notes):
    """Of requests that are neither logged nor traced: nearly all, so nothing is measured."""

    def tokenized(self, began: float) -> None: ...
    def accepted(self) -> None: ...
    def queued(self) -> None: ...
    def deciding(self) -> None: ...
    def decided(self, last_terms: Callable[[], Callable[[], dict[str, Any]]]) -> None: ...
    def sending(self, request: Request, placement: Placement) -> None: ...
    def got_first_byte(self) -> None: ...
    def counted(
        self, find_usage: Callable[[bytes], Usage], tail: bytes, output_tokens: int | None
    ) -> None: ...
    def answered(self, outcome: Outcome | None, events: int = 0) -> None: ...
    def ended(self) -> None: ...


NOT_NOTED: Notes = _NotNoted(0.0, 0.0, is_logged=False)


def _of_worker(placement: Placement, number: int) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "kvrouter.attempt": number,
        "kvrouter.worker": str(placement.target.worker_id),
        "kvrouter.rank": placement.target.rank,
    }
    with contextlib.suppress(ValueError):  # a URL that cannot be connected to either
        facts["server.address"], facts["server.port"], _ = address_of(placement.url)
    return facts


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
