"""What is known of one request, from its arrival to its end.

    arrived ──> tokenized ──> accepted ──> queued ──> attempt ──> … ──> served ──> ended
                                                         ^ │
                                        another worker ──┘ └── decided ──> sent ──> first byte ──> ended

It is written where the request is served. An attempt is read when it has ended, and the request when it is
over (readers.py). To note a time is one reading of the clock, so nothing asks first whether a log or a trace
wants it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from msgspec import Struct

from kvrouter.bodies.apis import Api
from kvrouter.connectors import SERVED
from kvrouter.connectors.source import Source
from kvrouter.core.fleet.router import Placement, Router
from kvrouter.core.routing.policy import RouteRequest
from kvrouter.core.routing.worker import Worker
from kvrouter.core.tables.predictions import PredictionKind, Usage
from kvrouter.core.wire.ids import Target
from kvrouter.frontend.keys.keys_file import Key
from kvrouter.frontend.requests.kept_responses import NewResponse
from kvrouter.prompts.ways import Sendable
from kvrouter.relay.answer import Served
from kvrouter.relay.outcomes import Done, Limits, Outcome, Rejected
from kvrouter.relay.request import Request
from kvrouter.telemetry.metrics import TargetCounts

if TYPE_CHECKING:
    from kvrouter.telemetry.spans import Trace

# Of all times here that are read after the request, since the event loop's has whole ms under uvloop (0.23).
clock = time.perf_counter
# The status of a request whose client has left.
CLIENT_LEFT = 499

Ending: TypeAlias = Literal["ok", "refused", "failed", "broken", "left"]
"""refused: 4xx, of router or worker, and any error outside the APIs' routes; failed: 5xx; broken: after the
first byte; left: the client did."""


class Traits(Struct, frozen=True):
    """Properties of a request that decide whether its prediction can be compared, and how."""

    kind: PredictionKind | None
    is_single: bool
    reads_cache: bool
    """False if the engine computes the whole prompt, cached or not: 0 cached tokens are right then."""


class SentIds(Struct):
    """Token ids that a chat may be sent with."""

    field: bytes
    """As the body has them."""
    sendable: Sendable | None
    """None: the chat has been answered, and no further attempt needs them."""
    context_tokens: int
    """What they and the asked output take of a context."""

    def may_go_to(self, worker: Worker | None) -> bool:
        """Whether they are what its engine would compute, and it would not reject the chat for its length."""
        if worker is None or 0 < worker.card.max_model_len <= self.context_tokens:
            return False
        return self.sendable is not None and self.sendable.may_go_to(worker)

    def release(self) -> None:
        """Free the memory: a long answer would hold it as long as it streams."""
        self.field, self.sendable = b"", None


class Work(Struct, frozen=True):
    """A client's request, ready to be routed."""

    id: str
    request: Request
    body: bytes
    stream: bool
    route: RouteRequest
    router: Router
    received_at: float
    traits: Traits | None
    """None if its tokens are not known: then nothing is predicted."""
    api: Api
    response: NewResponse | None
    """What `previous_response_id` may name later."""
    is_dry_run: bool
    """Whether to reply with the decision only, without sending the request."""
    reads_end: bool
    """Whether its policy is told how long the answer was."""
    shows_worker: bool
    """Whether its client may see which worker answers."""
    key: Key | None
    """Of its client; None: no keys are in use, or it is an operator."""
    ids: SentIds | None
    """Its token ids, for engines that may get them."""
    movable: bool = False
    """Whether its stream may move to another worker."""
    origin: Work | None = None
    """The client's own request, if this one goes on with its stream."""
    limits: str = ""
    """Lines for the head of its answer: how much its key may still use."""


class AttemptRecord(Struct):
    """An attempt, from its decision on: a request at a worker, with a booking of its own.

    Times are those of `clock`. `Attempt` of the relay carries its bytes.
    """

    work: Work
    placement: Placement
    # The targets that it must not move to; None: no retry is left, so it stays.
    excluded: frozenset[Target] | None
    model: str
    """The label of its model in metrics."""
    counts: TargetCounts
    """Of its target."""
    decided: tuple[float, float]
    """When the decision began and ended."""
    sent_at: float
    """By the clock of decisions, as that of the loss of its worker."""
    terms: Callable[[], dict[str, Any]] | None = None
    """What the choice was judged by, if it is traced: asked when it is over, as that takes a while."""
    span: Any = None
    """Of OpenTelemetry, if it is traced and was sent: its worker gets the id."""
    prompt_tokens: int = 0
    """0: its tokens are not known."""
    overlap_tokens: int = 0
    """Predicted to be cached."""
    first_at: float = 0.0
    """When its first data came; 0: not yet, or it is not streamed."""
    is_lost: bool = False
    """Whether its worker was lost with it in hand."""
    is_refused: bool = False
    """Whether its worker refused the connection at once."""
    prefill: AttemptRecord | None = None
    """The other half of the request, if another worker computes its prompt."""
    body: bytes | None = None
    """What its worker gets in place of the client's body."""
    source: Source | None = None
    """Of the half that computes the prompt: where the other half's worker finds it."""
    is_handed_over: bool = False
    """Whether its worker was given what the other half has computed."""
    # From here on: once it is over.
    outcome: Outcome | None = None
    """None: it was cancelled, as the client left or this replica ended."""
    ended_at: float = 0.0
    events: int = 0
    """Of a stream."""
    output_tokens: int | None = None
    """None: not known."""
    usage: Usage | None = None
    """What its engine counted, if a reader of the record needs it."""

    @property
    def is_good(self) -> bool:
        """Whether its worker has answered with 200, to the end."""
        return isinstance(self.outcome, Done) and self.outcome.status == 200 and not self.outcome.failure

    @property
    def ending(self) -> Ending:
        """How it ended; left: its client did, or the replica ended it."""
        outcome = self.outcome
        if outcome is None:
            return "left"
        if not isinstance(outcome, (Done, Rejected)):
            return "failed"
        if isinstance(outcome, Done) and outcome.failure:
            return "broken"
        return "ok" if outcome.status < 400 else "refused" if outcome.status < 500 else "failed"

    @property
    def is_at_once(self) -> bool:
        """Whether both halves of it are sent at the same time."""
        first = self.prefill
        return first is not None and SERVED[first.placement.connector].is_at_once

    @property
    def reached(self) -> AttemptRecord:
        """The half that the request has come to, and ended at if it failed: itself if there are no two."""
        first = self.prefill
        return first if self.outcome is None and first is not None and not first.is_good else self

    def sources(self) -> list[Target]:
        """The targets of the worker whose blocks it was given; none if it can only be given them anew."""
        first, pool = self.prefill, self.work.router.pool
        if first is None or self.is_at_once:
            return []
        return pool.targets_of(first.placement.target.worker_id)

    def legs(self) -> list[AttemptRecord]:
        """Its halves, in turn."""
        return [self] if self.prefill is None else [self.prefill, self]


class Record(Struct):
    """One request. Times are those of `clock`."""

    request: Request
    id: str
    received_at: float
    """By the clock of decisions, as the times of sessions."""
    began_at: float
    limits: Limits = Limits()
    """As they were when it began: a reload changes those of later requests."""
    is_logged: bool = False
    """Whether it is logged even if it is served."""
    trace: Trace | None = None
    """None: it is not sampled."""
    is_noted: bool = False
    """Whether it is logged or traced even if it is served."""
    tokenized: tuple[float, float] | None = None
    """When that began and ended."""
    accepted_at: float = 0.0
    """Body, tokens and hashes are read; 0: not so far."""
    queued_at: float = 0.0
    """When it left the queue, let pass or refused; 0: there is none, or not so far."""
    work: Work | None = None
    """None: it was not accepted."""
    attempts: list[AttemptRecord] = []
    """Where it was sent, in turn. Each has a worker, a booking, times and an outcome of its own, as has the
    prefill half of one, and each part of a stream that has moved."""
    served: Served | None = None
    """None: it is not over, or its client left."""
    error: Exception | None = None
    """Why this replica answered in place of a worker."""
    ended_at: float = 0.0
    tenant: str = ""
    """Of its client's key; empty: there is none."""
    moves: int = 0
    """How often its stream has moved to another worker."""

    @property
    def last(self) -> AttemptRecord | None:
        """The attempt whose answer the client got, if it got one of a worker's."""
        return self.attempts[-1] if self.attempts else None

    @property
    def asked(self) -> AttemptRecord | None:
        """The last attempt with the client's own prompt: others go on with a stream."""
        if not self.moves:
            return self.attempts[-1] if self.attempts else None
        return next((one for one in reversed(self.attempts) if one.work.origin is None), None)

    @property
    def output_tokens(self) -> int:
        """Of all workers of a stream."""
        if not self.moves:
            return self.attempts[-1].output_tokens or 0 if self.attempts else 0
        return sum(one.output_tokens or 0 for one in self.attempts)

    @property
    def lasted_s(self) -> float:
        """From its arrival to its end."""
        return self.ended_at - self.began_at

    @property
    def status(self) -> int:
        """The status that its client got."""
        return CLIENT_LEFT if self.served is None else self.served.status

    @property
    def path(self) -> str:
        """How prefill and decode workers shared it; empty: they did not, or nothing was computed."""
        last = self.last
        if last is None:
            return ""
        path, first = last.placement.path, last.prefill
        if first is not None and not last.is_handed_over:
            return "fallback" if first.is_good else ""
        has_failed = path == "decode" and any(one.prefill is not None for one in self.attempts)
        return "fallback" if has_failed else path

    def ending(self) -> Ending:
        """How it ended."""
        served = self.served
        if served is None:
            return "left"
        if served.failure or served.needs_reset:
            return "broken"
        if served.status < 400:
            return "ok"
        return "refused" if served.status < 500 else "failed"


def ending_without_worker(status: int, *, is_api: bool) -> Ending:
    """Alerts count `failed`: one dashboard too many (503) or HTTP/2 (505) is no failed request of a user."""
    return "failed" if is_api and status >= 500 else "refused"
