"""The request path, top to bottom: accept, wait in the queue, place, relay, free, read the record.

accept.py ──> Work ──> admission_queue.py ──> Router.route ──> relay ──> readers.py
                                              ^                  │
                                              └─ another worker ─┘ failed before the first byte
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Iterator
from functools import partial

import structlog
from msgspec.structs import replace

from kvrouter.bodies.apis import Api
from kvrouter.core.tables.tenants import Charge
from kvrouter.core.wire.ids import Target
from kvrouter.errors import (
    KvRouterError,
    NoWorkersError,
    WorkerDiedError,
    WorkerRejectedError,
    WorkerSilentError,
)
from kvrouter.frontend.keys.limits import TenantLimits
from kvrouter.frontend.operators.rights import Rights
from kvrouter.frontend.operators.state_metrics import target_samples
from kvrouter.frontend.records.readers import Readers
from kvrouter.frontend.records.record import AttemptRecord, Record, Work, clock
from kvrouter.frontend.requests import engine_routes
from kvrouter.frontend.requests.accept import Accept
from kvrouter.frontend.requests.admission_queue import WaitingRoom
from kvrouter.frontend.requests.exchanges import Exchanges, InFlight
from kvrouter.frontend.requests.hand_overs import HandOvers, joined
from kvrouter.frontend.requests.lost_requests import Case, LostRequests
from kvrouter.frontend.requests.moves import Moves
from kvrouter.frontend.requests.rules import record_busy, record_outcome
from kvrouter.relay.answer import Answer, Served, internal_error, rejected_answer
from kvrouter.relay.begun import KeepAlive, begin_unplaced
from kvrouter.relay.collected import Collected
from kvrouter.relay.events import message_in
from kvrouter.relay.hops import check_hops
from kvrouter.relay.outcomes import Done, Limits, Lost, Outcome, Rejected, Retried, TimedOut
from kvrouter.relay.request import Request, request_id_of
from kvrouter.relay.routes import Routes
from kvrouter.relay.seam import Seam
from kvrouter.relay.upstream import Upstream
from kvrouter.replica.publishing import Publishing
from kvrouter.telemetry.metrics import Sample

log = structlog.get_logger()

# The first retry comes at once, later ones after up to 4, 8, … times this: a fleet that is down for a moment
# must not get every request `--retries` times in the same millisecond.
RETRY_DELAY_S = 0.05
# Connections of a request that may be refused beside `--retries`, each within REFUSED_S: a few dead addresses
# must not use up the tries of a request that a living worker could take.
MOST_REFUSALS = 16
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
        moves: Moves,
        limits: Limits,
    ) -> None:
        self.in_flight = in_flight = InFlight()
        self.limits = limits
        self.lost = lost
        self.readers = readers
        self.publishing = publishing
        self._replica = publishing.replica
        self.accept = accept
        self._waiting_room = waiting_room
        self._metrics = readers.metrics
        self._hand_overs = HandOvers(readers.metrics)
        self._moves = moves
        self._exchanges = Exchanges(
            publishing,
            upstream=upstream,
            readers=readers,
            in_flight=in_flight,
            kept=accept.kept,
            hand_overs=self._hand_overs,
            moves=moves,
        )
        self._now = asyncio.get_running_loop().time

    def add_routes(self, routes: Routes, rights: Rights) -> None:
        """Add what is served here. `rights`: of the port's clients."""
        # Without HEAD: a worker's answer to it has a length and no body, and would never end.
        for method, path, api in engine_routes.relayed():
            routes.add(method, path, partial(self.serve, api, rights))

    async def serve(self, api: Api, rights: Rights, request: Request) -> Served:
        """Serve a request to its end. Errors become bodies of the API. A client that leaves cancels it."""
        record = Record(request, request_id_of(request.headers), self._now(), clock(), self.limits)
        if self.readers.access.is_on:
            self.readers.access.begin(record)
        try:
            self.in_flight.begin(request)
            if request.head.hops:
                check_hops(request.head.hops, self._replica.peers.is_replica)
            work = record.work = await self.accept.work(record, api, rights)
            record.accepted_at = clock()
            if work.is_dry_run:
                served = record.served = self._preview(work, rights)
            else:
                served = record.served = self._finish(work, await self._relayed(record, work))
        except asyncio.CancelledError:
            rejection = self.in_flight.take_rejection(request)
            if rejection is None:  # the client left; else cut_off cancelled the request
                raise
            served = record.served = self._failed(record, rights.form(api, request), rejection)
        except Exception as error:
            served = record.served = self._failed(record, rights.form(api, request), error)
        finally:
            self._ended(record)
        return served

    def _ended(self, record: Record) -> None:
        self.in_flight.end(record.request)
        if isinstance(record.request.client.begun, Seam):
            record.request.client.begun.release()
        if record.work is not None and record.work.route.charge is not None:
            self.accept.limits.ended(record.work.route.charge)
        self.readers.ended(record)
        record.error = None  # its traceback leads back here, and would hold the body in a ring

    def _preview(self, work: Work, rights: Rights) -> Served:
        if work.key is None:  # a key that may not is refused already
            rights.gate("a dry run", work.request.headers)
        return self._reply(work.request, self.readers.decisions.preview(work))

    def _relayed(self, record: Record, work: Work) -> Awaitable[Outcome | None]:
        """What serves the request: for most `_try_workers` itself, as each coroutine around it takes 1 %."""
        keeps_alive = record.limits.keep_alive_s and work.stream and work.api.streams
        relay = self._kept_alive if keeps_alive else self._try_workers
        if self._moves.is_on and self._moves.may_move(work):
            record.work = work = replace(work, movable=True)
            return self._moves.served(record, work, relay(record, work), self._try_workers)
        return relay(record, work)

    def _failed(self, record: Record, api: Api, error: Exception) -> Served:
        """Answer in place of a worker."""
        record.error, client = error, record.request.client
        if not isinstance(error, KvRouterError):  # the access log has its traceback
            if client.has_begun and client.begun is None:
                return Served(KvRouterError.status, keeps_alive=False, needs_reset=True)
            error = internal_error()
        return self._reply_error(api, record.request, record.id, error)

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
        client.write(begun.close(api.error_event(error)))
        keeps_alive = begun.keeps_alive and not self.in_flight.is_draining
        return Served(200, keeps_alive, failure=str(error))

    async def _kept_alive(self, record: Record, work: Work) -> Outcome | None:
        """`_try_workers`, with comments for a client that waits for its stream (--sse-keep-alive-s)."""
        request = work.request
        own = f"x-request-id: {work.id}\r\nx-kvrouter-router: {self._replica.router_id}\r\n"
        headers = (own + work.limits).encode()
        may_stay = request.head.wants_keep_alive and not self.in_flight.is_draining
        start = partial(begin_unplaced, request.client, headers, may_stay=may_stay)
        keep_alive = KeepAlive(request.client, start, record.limits.keep_alive_s)
        try:
            return await self._try_workers(record, work)
        finally:
            keep_alive.stop()

    async def _try_workers(
        self, record: Record, work: Work, failed: frozenset[Target] = frozenset()
    ) -> Outcome | None:
        """Route and relay. If a worker fails before the first byte, try another (MOST_REFUSALS, retries).

        `failed`: those that a stream has left.
        """
        spared: frozenset[Target] = frozenset()
        blamed, before = spared, len(record.attempts)
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
            place = partial(self._place, record, work, failed, fallbacks, tries == limits.retries)
            try:
                running = place() if case is None else await self.lost.place(case, place)
            except NoWorkersError:
                if outcome is None:
                    raise
                if not spared:
                    break  # no worker is left: the client gets the answer of the last one
                failed, spared = failed - spared | blamed, frozenset()
                continue
            outcome = None  # stays None if this attempt is cancelled: `_end` then knows that the client left
            outcome, case = await self._attempt(record, running, case)
            if isinstance(outcome, (Done, TimedOut)):
                break
            leg = running.reached
            # Exclude all ranks of the worker: they share its HTTP server.
            excluded = work.router.pool.targets_of(leg.placement.target.worker_id)
            failed = failed.union(excluded)
            if leg.is_handed_over and not isinstance(outcome, Lost):
                # The other half may be gone: without another decode worker, try this one alone, or again.
                spared, blamed = spared.union(excluded), blamed.union(leg.sources())
            fallbacks = leg.placement.fallbacks
            refusals += leg.is_refused
            tries = len(record.attempts) - before - min(refusals, MOST_REFUSALS if limits.retries else 0)
            reason = self.readers.attempt_failed(leg, outcome)
            if leg.is_lost and case is not None:
                await self.lost.settle(case, leg, reason, limits.retries_after_death)
        return outcome

    def _place(  # noqa: PLR0917  (a partial with keywords takes 1 % of a request)
        self,
        record: Record,
        work: Work,
        failed: frozenset[Target],
        fallbacks: tuple[Target, ...],
        is_last: bool,
        avoided: frozenset[Target] = frozenset(),
    ) -> AttemptRecord:
        """Choose and book: an attempt begins. The AddRequest goes to the peers at the end of this turn.

        `is_last`: no retry is left.
        """
        metrics, now, began = self._metrics, self._now(), clock()
        route, unread = work.route, None
        if record.attempts and record.attempts[-1].work is work:  # else its stream has left its worker
            route, unread = self._hand_overs.next_try(record.attempts, route, is_last=is_last)
        placement, _ = work.router.route_among(
            route,
            now,
            streamed=work.stream,
            exclude=failed,
            prefer=fallbacks,
            avoid=avoided,
            computed=None if unread is None else unread.placement.prefill,
        )
        ended = clock()
        running = AttemptRecord(
            work=work,
            placement=placement,
            excluded=None if is_last else failed,
            model=metrics.models[work.router.pool.model],
            counts=metrics.targets[placement.target],
            decided=(began, ended),
            sent_at=now,
        )
        if placement.prefill is not None:
            self._hand_overs.add_prefill(running, placement.prefill, unread)
        elif placement.pull is not None:
            self._hand_overs.pull(running, placement.pull)
        record.attempts.append(running)
        self.readers.placed(running)
        decisions = self.readers.decisions
        if record.trace is not None:
            running.terms = decisions.last_terms()
        if decisions.logs:
            decisions.log_last()
        self.publishing.flush_soon()
        return running

    async def _attempt(
        self, record: Record, running: AttemptRecord, case: Case | None
    ) -> tuple[Outcome, Case | None]:
        """One worker's try. Returns the case of the request, which a loss begins."""
        exchange, client = self._exchanges.exchange, running.work.request.client
        try:
            outcome: Outcome | None = None
            if running.prefill is not None and running.prefill.outcome is None:
                prefill = self._prefill(record, running, self._hand_overs.begin(running), case)
                if running.is_at_once:
                    decode = exchange(record, running, client)
                    failure, case, outcome = await joined(running, prefill, decode, case)
                else:
                    failure, case = await prefill
                if failure is not None:
                    return failure, case
            if outcome is None:
                outcome = await exchange(record, running, client)
            # nearly all need no call
            if not isinstance(outcome, Done) or outcome.failure or self.lost.prompts.suspected:
                case = await self.lost.ended(case, running, outcome)
            return outcome, case
        finally:
            if case is not None:
                self.lost.end_trial(case)
            self._end(running)

    async def _prefill(
        self, record: Record, running: AttemptRecord, collected: Collected, case: Case | None
    ) -> tuple[Outcome | None, Case | None]:
        """Have the prompt of a request computed by the other worker of its pair; returns why it was not.

        Raises WorkerRejectedError if the request is at fault.
        """
        first = running.prefill
        assert first is not None
        try:
            outcome = await self._exchanges.exchange(record, first, collected)
            if not first.is_good:
                case = await self.lost.ended(case, first, outcome)
        finally:
            self._hand_overs.prefilled(first, self._now())
            self._end(first)
        return self._hand_overs.finish(running, outcome, collected, self._now()), case

    def _end(self, running: AttemptRecord) -> None:
        """Free the booking of an attempt. It has no outcome if the client left or an error was raised."""
        router, placement, outcome, now = running.work.router, running.placement, running.outcome, self._now()
        running.ended_at = clock()
        if running.prefill is not None:
            if outcome is None and not running.prefill.is_good:  # its worker got nothing, or is not at fault
                router.bookings.free(placement.key, now)
                self.publishing.flush_soon()
                return
            if outcome is not None and running.is_handed_over and not running.is_refused:
                self._hand_overs.ended(running, outcome, now)
        elif placement.pull is not None and outcome is not None and not running.is_refused:
            self._hand_overs.ended(running, outcome, now)
        if router.circuits is not None:
            record_outcome(router.circuits, placement.target, outcome)
        status = outcome.status if isinstance(outcome, Done) else _status_of(outcome)
        if status:
            # before `free`, which reports 499 to the policy otherwise
            router.bookings.answered(placement.key, status)
            worker = router.pool.workers.get(placement.target.worker_id)
            if worker is not None and running.work.api.is_native:
                worker.first_answers.note(status)
        # Nearly all are good: asked first, and without a `match`, which takes 0.5 µs.
        if isinstance(outcome, Done) and status < 300 and not outcome.failure:
            self.readers.attempt_freed(running, "ok")
            if router.tables.rests.refusals:
                router.tables.rests.accepted(placement.target)
            # Only a good answer proves that the target computed the prompt, and so may hold its blocks.
            router.bookings.mark_prefill_completed(placement.key, now)
        else:
            self.readers.attempt_freed(running, running.ending)
            if isinstance(outcome, Rejected) and status in _BUSY:
                record_busy(router, placement.target, outcome, now)
        charge = running.work.route.charge
        if charge is not None:
            charge.used = _used(charge, running, self.accept.limits)
        router.bookings.free(placement.key, now, running.output_tokens)
        self.publishing.flush_soon()

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


def _used(charge: Charge, running: AttemptRecord, limits: TenantLimits) -> int:
    """The tokens that an attempt has used for the tenant; 0: none, as its worker failed."""
    outcome, output = running.outcome, running.output_tokens
    is_good = running.is_good
    if isinstance(outcome, Done) and outcome.rest is not None:
        return 0  # the next worker's attempt counts for both
    if not is_good:
        if isinstance(outcome, (Lost, Retried)) or (isinstance(outcome, Rejected) and outcome.status >= 429):
            return 0
        if isinstance(outcome, (Rejected, Done)) and outcome.status >= 400:
            return 1  # the request is at fault, and counts
    elif output:
        limits.answered(running.work.router.pool.model, output)
    usage = (running.prefill or running).usage
    prompt_tokens = (usage.prompt_tokens if usage is not None else None) or charge.prompt_tokens
    return max(prompt_tokens + (output or 0), charge.tokens if charge.goes_on else 0)


def _status_of(outcome: Outcome | None) -> int:
    """The status that policies get: the worker's own, 504 for its silence, 502 for its loss; 0: none."""
    match outcome:
        case Done(status) | Rejected(status):
            return status
        case TimedOut():
            return WorkerSilentError.status
        case Lost() | Retried():
            return WorkerDiedError.status
        case None:
            return 0
