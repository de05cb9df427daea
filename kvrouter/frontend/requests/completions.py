"""The request path, top to bottom: accept, wait in the queue, place, relay, free, read the record.

accept.py ──> Work ──> admission_queue.py ──> Router.route ──> relay ──> readers.py
                                              ^                  │
                                              └─ another worker ─┘ failed before the first byte
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Container, Iterator
from functools import lru_cache, partial
from itertools import cycle, repeat
from typing import Any

import structlog

from kvrouter.bodies import responses
from kvrouter.bodies.apis import Api
from kvrouter.bodies.edits import with_field, with_report_mode
from kvrouter.connectors import decode_body, prefill_body
from kvrouter.connectors.names import SERVED
from kvrouter.core.fleet.router import Placement
from kvrouter.core.wire.heartbeats import DECODE
from kvrouter.core.wire.ids import Target
from kvrouter.errors import (
    KvRouterError,
    NoWorkersError,
    ShuttingDownError,
    WorkerDiedError,
    WorkerRejectedError,
    WorkerSilentError,
)
from kvrouter.frontend.operators.rights import Rights
from kvrouter.frontend.operators.state_metrics import target_samples
from kvrouter.frontend.records.readers import Readers
from kvrouter.frontend.records.record import AttemptRecord, Record, Work, clock
from kvrouter.frontend.records.traces import begin_upstream
from kvrouter.frontend.requests import engine_routes
from kvrouter.frontend.requests.accept import Accept
from kvrouter.frontend.requests.admission_queue import WaitingRoom
from kvrouter.frontend.requests.lost_requests import Case, LostRequests
from kvrouter.frontend.requests.rules import record_busy, record_outcome, record_refusal
from kvrouter.relay.answer import Answer, Served, internal_error, rejected_answer
from kvrouter.relay.begun import KeepAlive, begin_unplaced
from kvrouter.relay.collected import Collected
from kvrouter.relay.events import message_in
from kvrouter.relay.exchange import (
    Attempt,
    ClientSide,
    Done,
    Limits,
    Lost,
    Outcome,
    Rejected,
    Retried,
    TimedOut,
)
from kvrouter.relay.hops import check_hops
from kvrouter.relay.request import Request, request_id_of
from kvrouter.relay.routes import Routes
from kvrouter.relay.upstream import Upstream, WorkerUnreachableError
from kvrouter.replica.publishing import Publishing
from kvrouter.telemetry.metrics import Sample

log = structlog.get_logger()

# The first retry comes at once, later ones after up to 4, 8, … times this: a fleet that is down for a moment
# must not get every request `--retries` times in the same millisecond.
RETRY_DELAY_S = 0.05
# One attempt of this many is measured for kvrouter_decide_seconds: to measure each would cost 1 % of it.
DECISION_TIMED_EVERY = 16
# Connections of a request that may be refused beside `--retries`, each within this time: a few dead addresses
# must not use up the tries of a request that a living worker could take.
MOST_REFUSALS, REFUSED_S = 16, 0.5
# With these a worker may say how long it wants to be left alone (Retry-After).
_BUSY = frozenset({429, 503})


class Completions:
    """Serves and passes on the routes of engine_routes.py.

    `limits`: of requests that begin from now on; a reload sets them again.
    """

    def __init__(
        self,
        publishing: Publishing,
        accept: Accept,
        *,
        waiting_room: WaitingRoom,
        upstream: Upstream,
        lost: LostRequests,
        readers: Readers,
        limits: Limits,
    ) -> None:
        self.in_flight = InFlight()
        self.limits = limits
        self.lost = lost
        self.readers = readers
        self._publishing = publishing
        self._replica = publishing.replica
        self._accept = accept
        self._waiting_room = waiting_room
        self._upstream = upstream
        self._metrics = readers.metrics
        self._now = asyncio.get_running_loop().time
        self._times_decision = cycle((True, *repeat(False, DECISION_TIMED_EVERY - 1)))

    def add_routes(self, routes: Routes, rights: Rights) -> None:
        """Add what is served here. `rights`: of the port's clients."""
        # Without HEAD: a worker's answer to it has a length and no body, and would never end.
        for method, path, api in engine_routes.relayed():
            serve = self._serve_limited if rights.are_limited else self.serve
            routes.add(method, path, partial(serve, api, rights))

    async def _serve_limited(self, api: Api, rights: Rights, request: Request) -> Served:
        return await self.serve(rights.form(api, request), rights, request)

    async def serve(self, api: Api, rights: Rights, request: Request) -> Served:
        """Serve one request to its end. Every error becomes a body of the API.

        If the client disconnects, the task is cancelled, and the booking is freed on the way out.
        """
        record = Record(request, request_id_of(request.headers), self._now(), clock(), self.limits)
        if self.readers.access.is_on:
            self.readers.access.begin(record)
        try:
            self.in_flight.begin(request)
            served = record.served = await self._answer(record, api, rights)
        except asyncio.CancelledError:
            rejection = self.in_flight.take_rejection(request)
            if rejection is None:  # the client left; else cut_off cancelled the request
                raise
            served = record.served = self._failed(record, api, rejection)
        except Exception as error:
            served = record.served = self._failed(record, api, error)
        finally:
            self.in_flight.end(request)
            self.readers.ended(record)
            record.error = None  # its traceback leads back here, and would hold the body in a ring
        return served

    async def _answer(self, record: Record, api: Api, rights: Rights) -> Served:
        request = record.request
        if request.head.hops:
            check_hops(request.head.hops, self._replica.peers.is_replica)
        record.work = work = await self._accept.work(record, api, rights)
        record.accepted_at = clock()
        if work.is_dry_run:
            rights.gate("a dry run", request.headers)
            return self._reply(request, self.readers.decisions.preview(work))
        keeps_alive = record.limits.keep_alive_s and work.stream and api.streams
        relay = self._kept_alive if keeps_alive else self._try_workers
        return self._finish(work, await relay(record, work))

    def _failed(self, record: Record, api: Api, error: Exception) -> Served:
        """Answer in place of a worker."""
        record.error, request = error, record.request
        if isinstance(error, KvRouterError):
            return self._reply_error(api, request, record.id, error)
        return self._fail(api, request, record.id)

    def _reply(self, request: Request, answer: Answer, *, closes: bool = False) -> Served:
        """Write an answer that no worker made."""
        return request.reply(answer, closes=closes or self.in_flight.is_draining)

    def _reply_error(self, api: Api, request: Request, request_id: str, error: KvRouterError) -> Served:
        """Reply with an error: as an event, if the stream has begun."""
        client, begun = request.client, request.client.begun
        if begun is None:
            return self._reply(request, api.error_answer(error, request_id), closes=error.is_body_left)
        if begun.has_output or not begun.ends_event:
            return Served(error.status, keeps_alive=False, needs_reset=True)
        client.write(begun.frame(api.error_event(error)) + begun.end)
        keeps_alive = begun.keeps_alive and not self.in_flight.is_draining
        return Served(200, keeps_alive, failure=str(error))

    def _fail(self, api: Api, request: Request, request_id: str) -> Served:
        """Reply to a request that raised an unexpected error. The access log has its traceback."""
        if request.client.has_begun and request.client.begun is None:
            return Served(KvRouterError.status, keeps_alive=False, needs_reset=True)
        return self._reply_error(api, request, request_id, internal_error())

    async def _kept_alive(self, record: Record, work: Work) -> Outcome | None:
        """`_try_workers`, with comments for a client that waits for its stream (--sse-keep-alive-s)."""
        request = work.request
        headers = f"x-request-id: {work.id}\r\nx-kvrouter-router: {self._replica.router_id}\r\n".encode()
        may_stay = request.head.wants_keep_alive and not self.in_flight.is_draining
        start = partial(begin_unplaced, request.client, headers, may_stay=may_stay)
        keep_alive = KeepAlive(request.client, start, record.limits.keep_alive_s)
        try:
            return await self._try_workers(record, work)
        finally:
            keep_alive.stop()

    async def _try_workers(self, record: Record, work: Work) -> Outcome | None:
        """Route and relay. If a worker fails before the first byte, try another (MOST_REFUSALS, retries)."""
        failed: frozenset[Target] = frozenset()
        fallbacks: tuple[Target, ...] = ()
        outcome: Outcome | None = None
        # Once, not before each retry: a retry replaces a booking of this request that has just been freed.
        if work.api.parse is not None and self._waiting_room.is_on:
            try:
                await self._waiting_room.admitted(work.router, work.route)
            finally:
                record.queued_at = clock()
        prompts, limits = self.lost.prompts, record.limits
        case: Case | None = None
        tries = refusals = 0
        while tries <= limits.retries:
            if tries > 1:
                await asyncio.sleep(RETRY_DELAY_S * 2**tries * random.random())
            is_watched = prompts.suspected or prompts.condemned
            case = case or (await self.lost.case(work) if is_watched else None)
            place = partial(self._place, record, work, failed, fallbacks, is_last=tries == limits.retries)
            try:
                running = place() if case is None else await self.lost.place(case, place)
            except NoWorkersError:
                if outcome is None:
                    raise
                break  # no worker is left: the client gets the answer of the last one
            outcome = None  # stays None if this attempt is cancelled: `_end` then knows that the client left
            outcome, case = await self._attempt(record, running, case)
            if isinstance(outcome, (Done, TimedOut)):
                break
            leg = running.reached
            # Exclude all ranks of the worker: they share its HTTP server.
            failed = failed.union(work.router.pool.targets_of(leg.placement.target.worker_id))
            fallbacks = leg.placement.fallbacks
            refusals += leg.is_refused
            tries = len(record.attempts) - min(refusals, MOST_REFUSALS if limits.retries else 0)
            reason = self.readers.attempt_failed(leg, outcome)
            if leg.is_lost and case is not None:
                await self.lost.settle(case, leg, reason, limits.retries_after_death)
        return outcome

    def _place(
        self,
        record: Record,
        work: Work,
        failed: frozenset[Target],
        fallbacks: tuple[Target, ...],
        avoided: frozenset[Target] = frozenset(),
        *,
        is_last: bool,
    ) -> AttemptRecord:
        """Choose and book: an attempt begins. The AddRequest goes to the peers at the end of this turn.

        `is_last`: no retry is left.
        """
        metrics, now, began = self._metrics, self._now(), clock()
        placement, _ = work.router.route_among(
            work.route, now, streamed=work.stream, exclude=failed, prefer=fallbacks, avoid=avoided
        )
        ended = clock()
        if next(self._times_decision):
            metrics.decide.observe(ended - began)

        def begun(placement: Placement) -> AttemptRecord:
            return AttemptRecord(
                work=work,
                placement=placement,
                excluded=None if is_last else failed,
                model=metrics.models[work.router.pool.model],
                counts=metrics.targets.get(placement.target) or metrics.new_target(placement.target),
                decided=(began, ended),
                sent_at=now,
            )

        running = begun(placement)
        if placement.prefill is not None:
            running.prefill = begun(placement.prefill)
        elif work.router.pool.split.whole is not None:
            self._count_whole(running)
        record.attempts.append(running)
        if work.route.prompts:
            self._count_placed(running)
        decisions = self.readers.decisions
        if record.trace is not None:
            running.terms = decisions.last_terms()
        if decisions.logs:
            decisions.log_last()
        self._publishing.flush_soon()
        return running

    def _count_placed(self, running: AttemptRecord) -> None:
        first = running.prefill or running
        work, counts, tokens = running.work, first.counts, running.work.route.isl
        overlap_tokens = first.placement.choice.overlap_blocks * work.router.pool.block_size
        running.prompt_tokens, running.overlap_tokens = tokens, overlap_tokens
        self._metrics.prompt_tokens.inc(running.model, tokens)
        self._metrics.overlap_tokens.inc(running.model, overlap_tokens)
        counts.prompt_tokens += tokens
        counts.overlap_tokens += overlap_tokens

    async def _attempt(
        self, record: Record, running: AttemptRecord, case: Case | None
    ) -> tuple[Outcome, Case | None]:
        """One worker's try. Returns the case of the request, which a loss begins."""
        try:
            if running.prefill is not None:
                failure, case = await self._prefill(record, running, running.prefill, case)
                if failure is not None:
                    return failure, case
            outcome = await self._exchange(record, running, running.work.request.client)
            # nearly all need no call
            if not isinstance(outcome, Done) or outcome.failure or self.lost.prompts.suspected:
                case = await self.lost.ended(case, running, outcome)
            return outcome, case
        finally:
            if case is not None:
                self.lost.end_trial(case)
            self._end(running)

    async def _prefill(
        self, record: Record, running: AttemptRecord, first: AttemptRecord, case: Case | None
    ) -> tuple[Outcome | None, Case | None]:
        """Have the prompt of a request computed by the other worker of its pair; returns why it was not.

        Raises WorkerRejectedError if the request is at fault.
        """
        work, connector, collected = running.work, SERVED[first.placement.connector], Collected()
        first.body = prefill_body(work.body, connector.asking)
        try:
            outcome = await self._exchange(record, first, collected)
            if not first.is_good:
                case = await self.lost.ended(case, first, outcome)
        finally:
            first.body = None
            if first.is_good:  # the end of this answer is the end of its prefill
                work.router.bookings.first_byte(first.placement.key, self._now())
            self._end(first)
        if isinstance(outcome, Done) and outcome.status >= 300:
            raise WorkerRejectedError(outcome.status, *message_in(collected.body))
        if not first.is_good:
            return Lost(outcome.failure) if isinstance(outcome, Done) else outcome, case
        handed = connector.handed_over(collected.body, first.placement.url)
        running.is_handed_over = handed is not None or connector.asking is None
        running.body = decode_body(work.body, handed)
        self._metrics.pd_requests.inc("pair" if running.is_handed_over else "fallback")
        return None, case

    def _count_whole(self, running: AttemptRecord) -> None:
        """Count a request that one worker of a pool with roles serves."""
        pool = running.work.router.pool
        worker = pool.workers.get(running.placement.target.worker_id)
        if worker is not None and worker.card.role == DECODE:
            self._metrics.pd_requests.inc("decode" if pool.split.islands else "fallback")

    def _handed_over(self, running: AttemptRecord, outcome: Outcome, now: float) -> None:
        """What has become of a pair."""
        first = running.prefill
        if first is None or not running.is_handed_over:
            return
        pair = first.placement.target.worker_id, running.placement.target.worker_id
        if running.is_good:
            running.work.router.tables.transfers.worked(*pair)
        elif not isinstance(outcome, Done) or outcome.status >= 500 or outcome.failure:
            self._metrics.pd_pair_failures.inc()
            running.work.router.tables.transfers.failed(*pair, now)

    def _end(self, running: AttemptRecord) -> None:
        """Free the booking of an attempt. It has no outcome if the client left or an error was raised."""
        router, placement, outcome, now = running.work.router, running.placement, running.outcome, self._now()
        running.ended_at = clock()
        if running.reached is not running:  # the other half of its pair failed: its own worker got nothing
            router.bookings.free(placement.key, now)
            self._publishing.flush_soon()
            return
        if outcome is not None:
            self._handed_over(running, outcome, now)
        if router.circuits is not None:
            record_outcome(router.circuits, placement.target, outcome)
        # Nearly all are good: asked first, and without a `match`, which takes 0.5 µs.
        if isinstance(outcome, Done) and outcome.status < 300 and not outcome.failure:
            running.counts.answers["ok"] += 1
            router.tables.rests.accepted(placement.target)
            # before `free`, which reports 499 to the policy otherwise
            router.bookings.answered(placement.key, outcome.status)
            # Only a good answer proves that the target computed the prompt, and so may hold its blocks.
            router.bookings.mark_prefill_completed(placement.key, now)
        else:
            running.counts.answers[_ending_of(outcome)] += 1
            if outcome is not None:
                router.bookings.answered(placement.key, _status_of(outcome))
            if isinstance(outcome, Rejected) and outcome.status in _BUSY:
                record_busy(router, placement.target, outcome, now)
        worker = router.pool.workers.get(placement.target.worker_id)
        if outcome is not None and running.work.api.is_native and worker is not None:
            worker.first_answers.note(_status_of(outcome))
        router.bookings.free(placement.key, now, running.output_tokens)
        self._publishing.flush_soon()

    async def _exchange(self, record: Record, running: AttemptRecord, client: ClientSide) -> Outcome:
        """Send the request to the placement's worker, and its answer to the client."""
        outcome = await self._exchange_once(record, running, client)
        if isinstance(outcome, Lost) and outcome.was_idle:
            # The worker closed an idle connection meanwhile, as HTTP/1.1 allows: it has not failed.
            running.outcome = None
            outcome = await self._exchange_once(record, running, client, fresh=True)
        return outcome

    async def _exchange_once(
        self, record: Record, running: AttemptRecord, client: ClientSide, *, fresh: bool = False
    ) -> Outcome:
        work, placement, request = running.work, running.placement, running.work.request
        if record.trace is not None and not fresh:
            begin_upstream(record.trace, running, len(record.attempts))
        try:
            connection = None if fresh else self._upstream.idle(placement.url)
            if connection is None:
                connection = await self._upstream.connect(placement.url)
        except WorkerUnreachableError as error:
            now = self._now()
            record_refusal(work.router, placement.target, now, random.random())
            running.is_refused = not fresh and now < running.sent_at + REFUSED_S
            # `fresh`: a connection has just broken with the request
            lost = running.outcome = Lost(str(error), is_cut=fresh)
            return lost
        is_clients = client is request.client
        attempt = Attempt(
            client,
            connection,
            record.limits,
            work.api,
            _response_headers(work, placement, self._replica.router_id),
            partial(self._first_output, running),
            is_clients and request.head.wants_keep_alive and not self.in_flight.is_draining,
            work.response is not None or not is_clients,
        )
        self.in_flight.running[attempt] = running
        try:
            attempt.send(self._bytes_for(running))
            running.outcome = outcome = await attempt.outcome
            if running.is_good and is_clients:
                self._good_answer(running, attempt)
            return outcome
        except asyncio.CancelledError:
            attempt.cancel()
            raise
        finally:
            del self.in_flight.running[attempt]
            self.readers.attempt_ended(record, running, attempt)

    def _bytes_for(self, running: AttemptRecord) -> bytes:
        """The request as its worker gets it, head and body."""
        work, placement = running.work, running.placement
        body = work.body if running.body is None else running.body
        if work.ids is not None and running.body is None and placement.sends_token_ids:
            worker = work.router.pool.workers.get(placement.target.worker_id)
            if work.ids.may_go_to(worker):
                body = with_field(body, work.ids.field)
                self._metrics.token_ids_sent.inc(running.model)
        if placement.wants_report and work.api.parse is not None:
            body = with_report_mode(body, has_arguments=work.has_engine_arguments)
        head = work.request.head.for_worker(
            placement.url,
            work.id,
            len(body),
            rank=placement.target.rank,
            rank_header=placement.rank_header,
            keeps_rank=work.route.wanted is not None,
            trace=work.request.trace,
            router_id=self._replica.router_id,
        )
        return head + body

    def _good_answer(self, running: AttemptRecord, attempt: Attempt) -> None:
        """Keep what a later request may continue."""
        work, target = running.work, running.placement.target
        worker = work.router.pool.workers.get(target.worker_id)
        if worker is not None and not worker.is_engine:
            worker.is_engine = not attempt.is_of_router
        if work.response is not None:
            self._accept.kept.keep(work.response, target, responses.find_answer(attempt.tail))
            for session in work.response.sessions():
                work.router.bookings.bind(session, target, self._now())
            self._publishing.flush_soon()

    def _first_output(self, running: AttemptRecord) -> None:
        work, now = running.work, self._now()
        ttft_s = work.router.bookings.first_byte(running.placement.key, now)
        running.first_at = clock()
        if work.ids is not None:
            work.ids.release()
        if running.prefill is not None:
            running.body = None
            self._first_transferred(running, running.prefill)
        self._metrics.first_byte.observe(now - work.received_at, running.model)
        if ttft_s is not None:
            running.counts.first_byte_s += ttft_s
            running.counts.first_bytes += 1
        self._publishing.flush_soon()

    def _first_transferred(self, running: AttemptRecord, first: AttemptRecord) -> None:
        """Learn how long it took to hand a prompt over."""
        tokens, seconds = running.placement.choice.own_prefill_tokens, running.first_at - first.ended_at
        if running.is_handed_over:
            running.work.router.tables.transfers.observe(seconds, tokens)
            self._metrics.kv_transfer.observe(seconds)

    def samples(self) -> Iterator[Sample]:
        yield "kvrouter_requests_in_flight", {}, self.in_flight.count
        yield from target_samples(self._metrics.targets, list(self._replica.routers.values()))

    def _finish(self, work: Work, outcome: Outcome | None) -> Served:
        """Reply with the last outcome, unless the client has the worker's answer already."""
        if isinstance(outcome, Done):
            return Served(outcome.status, outcome.keeps_alive, outcome.needs_reset, outcome.failure)
        match outcome:
            case Rejected() if work.request.client.begun is not None:
                raise WorkerRejectedError(outcome.status, *message_in(outcome.body))
            case Rejected():
                return self._reply(work.request, rejected_answer(work.id, outcome))
            case TimedOut(silent_s):
                raise WorkerSilentError(f"the worker sent no output for {silent_s:g} s")
            case Lost(reason) | Retried(reason):
                raise WorkerDiedError(reason)
            case None:
                raise NoWorkersError("no worker was tried")


def _ending_of(outcome: Outcome | None) -> str:
    """What the metrics call the end of an attempt; None: the client left, or the replica ended it."""
    match outcome:
        case None:
            return "left"
        case Done(failure=failure) if failure:
            return "broken"
        case Done(status) | Rejected(status) if status < 500:
            return "ok" if status < 400 else "refused"
    return "failed"


def _status_of(outcome: Outcome) -> int:
    """The status that policies get: the worker's own, 504 for its silence, 502 for its loss."""
    match outcome:
        case Done(status) | Rejected(status):
            return status
        case TimedOut():
            return WorkerSilentError.status
        case Lost() | Retried():
            return WorkerDiedError.status


def _response_headers(work: Work, placement: Placement, router_id: str) -> bytes:
    if not work.shows_worker:
        return f"x-request-id: {work.id}\r\nx-kvrouter-router: {router_id}\r\n".encode()
    lines, first = _target_lines(placement.target, router_id), placement.prefill
    if first is not None:
        lines += f"x-kvrouter-prefill-worker: {first.target.worker_id}\r\n"
    blocks = (first or placement).choice.overlap_blocks
    return f"x-request-id: {work.id}\r\n{lines}x-kvrouter-overlap-blocks: {blocks}\r\n".encode()


@lru_cache(maxsize=4096)
def _target_lines(target: Target, router_id: str) -> str:
    return (
        f"x-kvrouter-worker: {target.worker_id}\r\n"
        f"x-kvrouter-dp-rank: {target.rank}\r\n"
        f"x-kvrouter-router: {router_id}\r\n"
    )


class InFlight:
    """The requests being served, and how they end with this replica.

    begun ──> waiting: body, tokens, a worker, its first byte ──> answering ──> ended
                 │ cut_off                                           │ Attempt.cut_off
                 └──> 503                                            └──> error event
    """

    def __init__(self) -> None:
        self.count = 0
        self.idle = asyncio.Event()  # set while no request is being served
        self.idle.set()
        self.running: dict[Attempt, AttemptRecord] = {}
        """Those that are at a worker."""
        self.is_draining = False
        """Whether answers close their connections, so that clients reconnect to another replica."""
        self._waiting: dict[Request, asyncio.Task[Any]] = {}
        self._rejected: dict[Request, asyncio.Task[Any]] = {}
        self._is_closed = False
        self._loop = asyncio.get_running_loop()

    def begin(self, request: Request) -> None:
        """Count a request that the current task serves. Raises ShuttingDownError after `cut_off`."""
        task = asyncio.current_task(self._loop)  # without the loop it calls os.getpid to find it
        assert task is not None
        if not self.count:
            self.idle.clear()
        self.count += 1
        self._waiting[request] = task
        if self._is_closed:
            raise cut_off_error()

    def take_rejection(self, request: Request) -> ShuttingDownError | None:
        """The error for a request that `cut_off` cancelled, whose task goes on to answer with it.

        None if the task was cancelled because the client has left.
        """
        task = self._rejected.get(request)
        if task is None:
            return None
        task.uncancel()  # the cancellation ends here: the task answers its client
        return cut_off_error()

    def end(self, request: Request) -> None:
        self.count -= 1
        self._waiting.pop(request, None)
        if self._rejected:
            self._rejected.pop(request, None)
        if not self.count:
            self.idle.set()

    def requests(self) -> list[tuple[Request, float]]:
        """Those that workers answer now, and when they arrived."""
        return [(one.work.request, one.work.received_at) for one in self.running.values()]

    def cut_off(self) -> None:
        """End every request: answers that have begun get an error event, all others are answered with 503."""
        begun = {attempt: one.work.request for attempt, one in self.running.items() if attempt.is_committed}
        self.reject_waiting(set(begun.values()))
        for attempt in begun:
            attempt.cut_off(cut_off_error())

    def reject_waiting(self, answering: Container[Request]) -> None:
        """Answer all requests with 503, later ones too, except those in `answering`."""
        self._is_closed = True
        for request, task in self._waiting.items():
            if request not in answering:
                self._rejected[request] = task
                task.cancel()


def cut_off_error() -> ShuttingDownError:
    """The error for requests that outlive the drain."""
    return ShuttingDownError("this replica is shutting down and can wait no longer; send the request again")
