"""The request path, top to bottom: parse, tokens, hashes, route, relay, free."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from functools import partial

import structlog

from kvrouter.core.audit.findings import Audit
from kvrouter.core.fleet.replica import Replica
from kvrouter.core.fleet.router import Placement
from kvrouter.core.wire.ids import Target
from kvrouter.errors import KvRouterError, NoWorkersError, WorkerDiedError, WorkerSilentError
from kvrouter.frontend import circuits, passthrough
from kvrouter.frontend.accept import Accept, Parse, Work
from kvrouter.frontend.admission_queue import WaitingRoom
from kvrouter.frontend.bodies import openai
from kvrouter.frontend.bodies.edits import with_report_mode
from kvrouter.frontend.decision_views import DecisionViews
from kvrouter.frontend.hung_engines import HungEngines, Probe, Running
from kvrouter.frontend.in_flight import InFlight, cut_off_error
from kvrouter.frontend.operators import Gate
from kvrouter.frontend.prediction_checks import compare, expect_events
from kvrouter.relay.answer import Answer, Served, internal_error, rejected_answer
from kvrouter.relay.engine_answers import UNKNOWN_MODEL
from kvrouter.relay.exchange import (
    Attempt,
    Done,
    Limits,
    Lost,
    Outcome,
    Rejected,
    Retried,
    TimedOut,
)
from kvrouter.relay.request import Request, Serve, request_id_of
from kvrouter.relay.upstream import Upstream, WorkerUnreachableError
from kvrouter.replica.publishing import Publishing
from kvrouter.telemetry.metrics import RequestMetrics, Sample

log = structlog.get_logger()

RETRY_DELAY_S = 0.05
PROGRESS_SLICE = 500
"""Answers whose progress is looked at in one go: less than 1 ms."""


class Completions:
    """Serves /v1/chat/completions and /v1/completions, and passes on the routes of passthrough.py."""

    def __init__(
        self,
        replica: Replica,
        publishing: Publishing,
        audit: Audit,
        accept: Accept,
        decisions: DecisionViews,
        *,
        upstream: Upstream,
        probe: Probe,
        waiting_room: WaitingRoom,
        metrics: RequestMetrics,
        limits: Limits,
        retries: int,
    ) -> None:
        self._in_flight = InFlight()
        self.idle = self._in_flight.idle
        """Set while no request is being served."""
        self.is_draining = False
        """Set: answers close their connections, so that clients come back to another replica."""
        self._loop = asyncio.get_running_loop()
        self._now = self._loop.time
        self._running: dict[Attempt, Running] = {}
        self.hung_engines = HungEngines(self._running, replica.silent_workers, probe, self._now)
        self._replica = replica
        self._publishing = publishing
        self._audit = audit
        self._accept = accept
        self._decisions = decisions
        self._waiting_room = waiting_room
        self._upstream = upstream
        self._metrics = metrics
        self._limits = limits
        self._retries = retries

    def routes(self, gate: Gate) -> dict[str, Serve]:
        """What is served here, by path; all of it is sent with POST. `gate` is asked about dry runs."""
        return {
            "/v1/chat/completions": partial(self.serve, openai.parse_chat, gate),
            "/v1/completions": partial(self.serve, openai.parse_completion, gate),
            **dict.fromkeys(passthrough.POST_ROUTES, partial(self.serve, None, gate)),
        }

    async def serve(self, parse: Parse | None, gate: Gate, request: Request) -> Served:
        """Serve one request; every error becomes an OpenAI body, a client that leaves frees everything.

        Without a way to parse it is a route of passthrough.py: nothing is known of its tokens, so it goes by
        load.
        """
        received_at = self._now()
        request_id = request_id_of(request.headers)
        try:
            self._in_flight.begin(request)
            work = await self._accept.work(request, parse, request_id, received_at)
            if work.is_dry_run:
                gate("a dry run", request.headers)
                served = self._say(request, self._decisions.foretold(work))
            else:
                served = self._tell(work, await self._try_workers(work))
                self._in_flight.answered(request)
        except KvRouterError as error:
            served = self._say(request, openai.error_answer(error, request_id), closes=error.is_body_left)
        except asyncio.CancelledError:
            refusal = self._in_flight.take_refusal(request)
            if refusal is None:
                self._metrics.cancelled.inc()
                raise
            served = self._say(request, openai.error_answer(refusal, request_id))
        except Exception:
            log.exception("request.failed", path=request.head.path)
            served = self._fail(request, request_id)
        finally:
            self._in_flight.end(request)
        self._metrics.requests.inc(str(served.status))
        self._metrics.duration.observe(self._now() - received_at)
        return served

    def _say(self, request: Request, answer: Answer, *, closes: bool = False) -> Served:
        """An answer of our own."""
        keeps_alive = request.head.wants_keep_alive and not self.is_draining and not closes
        request.client.write(answer.encode(keeps_alive=keeps_alive))
        return Served(answer.status, keeps_alive)

    def _fail(self, request: Request, request_id: str) -> Served:
        """A bug of ours, which the log has the place of."""
        if request.client.has_begun:
            return Served(KvRouterError.status, keeps_alive=False, needs_reset=True)
        return self._say(request, openai.error_answer(internal_error(), request_id))

    async def _try_workers(self, work: Work) -> Outcome | None:
        """Route and relay; a worker that fails before the first byte is replaced, `retries` times at most."""
        failed: frozenset[Target] = frozenset()
        fallbacks: tuple[Target, ...] = ()
        outcome: Outcome | None = None
        if work.is_completion and self._waiting_room.is_on:
            await self._waiting_room.admitted(work.router, work.route)
        for tries in range(self._retries + 1):
            if tries > 1:
                await asyncio.sleep(RETRY_DELAY_S * 2**tries * random.random())
            try:
                placement = self._place(work, failed, fallbacks)
            except NoWorkersError:
                if outcome is None:
                    raise
                break  # nobody is left to try: the last worker's own answer says most
            outcome = None
            try:
                running = Running(work, placement, failed if tries < self._retries else None)
                outcome = await self._exchange(running)
                if isinstance(outcome, Lost) and outcome.was_idle:
                    # the worker closed an idle connection just as the request went out: that is no failure
                    outcome = None
                    outcome = await self._exchange(running, fresh=True)
            finally:
                self._end(work, placement, outcome)
            if isinstance(outcome, (Done, TimedOut)):
                break
            # all ranks of the worker: they share its server
            failed = failed.union(work.router.pool.targets_of(placement.target.worker_id))
            fallbacks = placement.fallbacks
            self._note_failure(work, placement, outcome)
        return outcome

    def _place(self, work: Work, failed: frozenset[Target], fallbacks: tuple[Target, ...]) -> Placement:
        """Choose and book, and tell the peers."""
        router, route = work.router, work.route
        placement = router.route(route, self._now(), streamed=work.stream, exclude=failed, prefer=fallbacks)
        if self._decisions.logs:
            self._decisions.log_last()
        self._publishing.flush_soon()
        if route.prompts:
            self._metrics.prompt_tokens.inc(route.isl)
            self._metrics.overlap_tokens.inc(placement.choice.overlap_blocks * router.pool.block_size)
        return placement

    def _end(self, work: Work, placement: Placement, outcome: Outcome | None) -> None:
        """An attempt has ended, and with it its booking; without an outcome its client left, or we failed."""
        router = work.router
        if router.circuits is not None:
            circuits.tell(router.circuits, placement.target, outcome)
        if outcome is not None:
            router.answered(placement.key, _status_of(outcome))
            if isinstance(outcome, Done) and outcome.status < 300 and not outcome.failure:
                router.mark_prefill_completed(placement.key, self._now())
        router.free(placement.key)
        self._publishing.flush_soon()

    async def _exchange(self, running: Running, *, fresh: bool = False) -> Outcome:
        """Send the request to the placement's worker, and its answer to the client."""
        work, placement = running.work, running.placement
        body = work.body
        if placement.wants_report and work.is_completion:
            body = with_report_mode(body, has_arguments=work.has_engine_arguments)
        is_direct = work.route.wanted is not None
        request = work.request
        head = request.head.for_worker(
            placement.url,
            work.id,
            len(body),
            rank=placement.target.rank,
            rank_header=placement.rank_header,
            keeps_rank=is_direct,
        )
        try:
            connection = None if fresh else self._upstream.idle(placement.url)
            if connection is None:
                connection = await self._upstream.connect(placement.url)
        except WorkerUnreachableError as error:
            work.router.pool.unreachable(placement.target.worker_id)
            return Lost(str(error))
        attempt = Attempt(
            request.client,
            connection,
            self._limits,
            openai.error_event,
            _response_headers(work, placement, self._replica.router_id),
            partial(self._first_data, work, placement),
            request.head.wants_keep_alive and not self.is_draining,
            work.is_completion,  # only then the path is one that every engine of the model has
        )
        self._running[attempt] = running
        try:
            attempt.send(head + body)
            outcome = await attempt.outcome
            if isinstance(outcome, Done) and outcome.status == 200 and not outcome.failure:
                self._compare(work, placement, attempt.tail)
            return outcome
        except asyncio.CancelledError:
            attempt.cancel()
            raise
        finally:
            del self._running[attempt]

    def _compare(self, work: Work, placement: Placement, tail: bytes) -> None:
        """Hold what was foretold against what the engine says in its answer, and later in its events."""
        if work.traits is not None:
            compare(work.router, work.route, placement, work.traits, audit=self._audit, tail=tail)
            expect_events(work.router, work.route, placement, work.traits, now=self._now())

    def _first_data(self, work: Work, placement: Placement) -> None:
        now = self._now()
        work.router.first_byte(placement.key, now)
        self._metrics.first_byte.observe(now - work.received_at)
        self._publishing.flush_soon()

    async def report_progress(self) -> None:
        """Book the output blocks that running answers have filled; called once a second."""
        running = list(self._running.items())
        for start in range(0, len(running), PROGRESS_SLICE):
            for attempt, one in running[start : start + PROGRESS_SLICE]:
                # one that has ended meanwhile is passed over
                one.work.router.progress(one.placement.key, attempt.events)
            self._publishing.flush_soon()
            await asyncio.sleep(0)

    def samples(self) -> Iterator[Sample]:
        """For /metrics."""
        in_flight = self._in_flight.count
        yield "kvrouter_requests_in_flight", "gauge", "Requests being served here", {}, in_flight

    def cut_off(self) -> None:
        """End what runs: answers that have begun with an error event, all other requests with 503."""
        begun = {attempt: one.work.request for attempt, one in self._running.items() if attempt.is_committed}
        self._in_flight.refuse_waiting(set(begun.values()))
        for attempt in begun:
            attempt.cut_off(cut_off_error())

    def _note_failure(self, work: Work, placement: Placement, failure: Rejected | Lost | Retried) -> None:
        match failure:
            case Rejected(status, body=body):
                reason, said = "retried" if status == UNKNOWN_MODEL else str(status), body[:200]
            case Lost(said):
                reason = "lost"
            case Retried(said):
                reason = "retried"
        self._metrics.failed_attempts.inc(reason)
        log.warning("worker.failed_request", worker=str(placement.target), reason=reason, said=said)

    def _tell(self, work: Work, outcome: Outcome | None) -> Served:
        """What the last worker came to, unless the client has it already."""
        match outcome:
            case Done(status, keeps_alive, failure, needs_reset):
                if failure:
                    self._metrics.broken.inc()
                    log.warning("request.broken_off", request=work.id, reason=failure)
                return Served(status, keeps_alive, needs_reset)
            case Rejected():
                return self._say(work.request, rejected_answer(work.id, outcome))
            case TimedOut(silent_s):
                raise WorkerSilentError(f"the worker said nothing for {silent_s:g} s")
            case Lost(reason) | Retried(reason):
                raise WorkerDiedError(reason)
            case None:
                raise NoWorkersError("no worker was tried")


def _status_of(outcome: Outcome) -> int:
    """The HTTP status that the worker has answered with, or that of its silence."""
    match outcome:
        case Done(status) | Rejected(status):
            return status
        case TimedOut():
            return WorkerSilentError.status
        case Lost() | Retried():
            return WorkerDiedError.status


def _response_headers(work: Work, placement: Placement, router_id: str) -> bytes:
    return (
        f"x-request-id: {work.id}\r\n"
        f"x-kvrouter-worker: {placement.target.worker_id}\r\n"
        f"x-kvrouter-dp-rank: {placement.target.rank}\r\n"
        f"x-kvrouter-overlap-blocks: {placement.choice.overlap_blocks}\r\n"
        f"x-kvrouter-router: {router_id}\r\n"
    ).encode()
