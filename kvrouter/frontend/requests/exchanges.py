"""A request at a worker: sent on a connection, its answer passed on, its first output noted.

AttemptRecord ──bytes──> connection ──Attempt──> client, or Collected for a prefill worker's answer
└──────> InFlight, while it lasts
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Container
from functools import lru_cache, partial
from typing import Any

from kvrouter.bodies import responses
from kvrouter.bodies.continuation import SHOW_IDS
from kvrouter.bodies.edits import with_field
from kvrouter.core.fleet.router import Placement
from kvrouter.core.wire.ids import Target
from kvrouter.errors import ShuttingDownError
from kvrouter.frontend.records.readers import Readers
from kvrouter.frontend.records.record import AttemptRecord, Record, Work, clock
from kvrouter.frontend.records.traces import begin_upstream
from kvrouter.frontend.requests.hand_overs import HandOvers
from kvrouter.frontend.requests.kept_responses import KeptResponses
from kvrouter.frontend.requests.moves import Moves
from kvrouter.frontend.requests.rules import record_refusal
from kvrouter.relay.exchange import Attempt, ClientSide
from kvrouter.relay.outcomes import Lost, Outcome
from kvrouter.relay.request import Request
from kvrouter.relay.upstream import Upstream, WorkerConnection, WorkerUnreachableError
from kvrouter.replica.publishing import Publishing

# A connection that is refused within this time may be followed by another one (completions.py).
REFUSED_S = 0.5


class Exchanges:
    """One for all requests of a frontend."""

    def __init__(
        self,
        publishing: Publishing,
        *,
        upstream: Upstream,
        readers: Readers,
        in_flight: InFlight,
        kept: KeptResponses,
        hand_overs: HandOvers,
        moves: Moves,
    ) -> None:
        self._moves = moves
        self._publishing = publishing
        self._router_id = publishing.replica.router_id
        self._upstream = upstream
        self._readers = readers
        self._metrics = readers.metrics
        self._in_flight = in_flight
        self._kept = kept
        self._hand_overs = hand_overs
        self._now = asyncio.get_running_loop().time

    async def exchange(self, record: Record, running: AttemptRecord, client: ClientSide) -> Outcome:
        """Send the request to the placement's worker, and its answer to the client."""
        if record.trace is not None:
            begin_upstream(record.trace, running, len(record.attempts))
        upstream, url, is_fresh = self._upstream, running.placement.url, False
        while True:
            connection = None if is_fresh else upstream.idle(url)
            if connection is None:
                try:
                    connection = await upstream.connect(url)
                except WorkerUnreachableError as error:
                    return self._unreachable(running, error, is_fresh=is_fresh)
            attempt = self._attempt(record, running, client, connection)
            self._in_flight.running[attempt] = running
            try:
                attempt.send(self._bytes_for(running))
                running.outcome = outcome = await attempt.outcome
                if client is running.work.request.client and running.is_good:
                    self._good_answer(running, attempt)
            except asyncio.CancelledError:
                attempt.cancel()
                raise
            finally:
                del self._in_flight.running[attempt]
                self._readers.attempt_ended(record, running, attempt)
            if is_fresh or not isinstance(outcome, Lost) or not outcome.was_idle:
                return outcome
            # The worker closed an idle connection meanwhile, as HTTP/1.1 allows: it has not failed.
            running.outcome, is_fresh = None, True

    def _attempt(
        self, record: Record, running: AttemptRecord, client: ClientSide, connection: WorkerConnection
    ) -> Attempt:
        work = running.work
        is_clients = client is work.request.client
        return Attempt(
            client,
            connection,
            record.limits,
            work.api,
            _response_headers(work, running.placement, self._router_id),
            partial(self._first_output, running),
            is_clients and work.request.head.wants_keep_alive and not self._in_flight.is_draining,
            work.response is not None or not is_clients,
            self._moves.seam(running) if is_clients and work.movable else None,
        )

    def _unreachable(
        self, running: AttemptRecord, error: WorkerUnreachableError, *, is_fresh: bool
    ) -> Outcome:
        """No connection. `is_fresh`: one has just broken with the request."""
        now = self._now()
        record_refusal(running.work.router, running.placement.target, now, random.random())
        running.is_refused = not is_fresh and now < running.sent_at + REFUSED_S
        running.outcome = Lost(str(error), is_cut=is_fresh)
        return running.outcome

    def _bytes_for(self, running: AttemptRecord) -> bytes:
        """The request as its worker gets it, head and body."""
        work, placement = running.work, running.placement
        body = work.body if running.body is None else running.body
        if work.ids is not None and running.body is None and placement.sends_token_ids:
            worker = work.router.pool.workers.get(placement.target.worker_id)
            if work.ids.may_go_to(worker):
                body = with_field(body, work.ids.field)
                self._metrics.token_ids_sent.inc(running.model)
        if work.movable and SHOW_IDS not in body and self._moves.may_leave(running):
            body = with_field(body, SHOW_IDS)
        head = work.request.head.for_worker(
            placement.url,
            work.id,
            len(body),
            rank=placement.target.rank,
            rank_header=placement.rank_header,
            keeps_rank=work.route.wanted is not None,
            trace=work.request.trace,
            router_id=self._router_id,
        )
        return head + body

    def _good_answer(self, running: AttemptRecord, attempt: Attempt) -> None:
        """Keep what a later request may continue."""
        work, target = running.work, running.placement.target
        worker = work.router.pool.workers.get(target.worker_id)
        if worker is not None and not worker.is_engine:
            worker.is_engine = not attempt.is_of_router
        if work.response is not None:
            self._kept.keep(work.response, target, responses.find_answer(attempt.tail))
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
            self._hand_overs.first_output(running, running.prefill, now)
        running.body = None
        self._readers.first_byte(running, now, ttft_s)
        self._publishing.flush_soon()


def _response_headers(work: Work, placement: Placement, router_id: str) -> bytes:
    if not work.shows_worker:
        return f"x-request-id: {work.id}\r\nx-kvrouter-router: {router_id}\r\n{work.limits}".encode()
    lines, first = _target_lines(placement.target, router_id), placement.prefill
    if first is not None:
        lines += f"x-kvrouter-prefill-worker: {first.target.worker_id}\r\n"
    if placement.pull is not None:
        lines += f"x-kvrouter-kv-source: {placement.pull.source.worker_id}\r\n"
    blocks = (first or placement).choice.overlap_blocks
    return f"x-request-id: {work.id}\r\n{lines}x-kvrouter-overlap-blocks: {blocks}\r\n{work.limits}".encode()


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
        begun = {
            attempt: one.work.request.client for attempt, one in self.running.items() if attempt.is_committed
        }
        self.reject_waiting(set(begun.values()))
        for attempt in begun:
            attempt.cut_off(cut_off_error())

    def reject_waiting(self, answering: Container[ClientSide]) -> None:
        """Answer all requests with 503, later ones too, except those of the clients in `answering`."""
        self._is_closed = True
        for request, task in self._waiting.items():
            if request.client not in answering:
                self._rejected[request] = task
                task.cancel()


def cut_off_error() -> ShuttingDownError:
    """The error for requests that outlive the drain."""
    return ShuttingDownError("this replica is shutting down and can wait no longer; send the request again")
