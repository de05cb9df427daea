"""The request path, top to bottom: parse, tokens, hashes, route, relay, free."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

import structlog
from aiohttp import web

from kvrouter.core.ids import BookingKey, Target
from kvrouter.core.replica import Replica
from kvrouter.core.router import Placement, Router
from kvrouter.core.watch import Watch
from kvrouter.errors import (
    KvRouterError,
    NoRouteError,
    NoWorkersError,
    WorkerDiedError,
    WorkerSilentError,
    WrongMethodError,
)
from kvrouter.frontend import openai, passthrough
from kvrouter.frontend.accept import Accept, Parse, Work
from kvrouter.frontend.circuits import judge
from kvrouter.frontend.client import AiohttpClient, AlreadyWritten
from kvrouter.frontend.compare import compare, expect_events
from kvrouter.frontend.decision_views import DecisionViews
from kvrouter.frontend.feeds import Feeds
from kvrouter.frontend.in_flight import InFlight, RequestTask, current_task, cut_off_error
from kvrouter.frontend.incoming import request_id_of
from kvrouter.frontend.queue import WaitingRoom
from kvrouter.frontend.relay import (
    Attempt,
    Done,
    Limits,
    Lost,
    Outcome,
    Rejected,
    TimedOut,
)
from kvrouter.frontend.request_head import request_head, with_report_mode
from kvrouter.frontend.upstream import Upstream, WorkerUnreachableError
from kvrouter.telemetry.metrics import RequestMetrics

log = structlog.get_logger()

RETRY_DELAY_S = 0.05


class Completions:
    """Serves /v1/chat/completions and /v1/completions, and passes on the routes of passthrough.py."""

    def __init__(
        self,
        replica: Replica,
        feeds: Feeds,
        watch: Watch,
        accept: Accept,
        decisions: DecisionViews,
        *,
        upstream: Upstream,
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
        self._running: dict[Attempt, tuple[Router, BookingKey, RequestTask]] = {}
        self._replica = replica
        self._feeds = feeds
        self._watch = watch
        self._accept = accept
        self._decisions = decisions
        self._waiting_room = waiting_room
        self._upstream = upstream
        self._metrics = metrics
        self._limits = limits
        self._retries = retries

    async def chat(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        return await self._answer(http, openai.parse_chat)

    async def completion(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        return await self._answer(http, openai.parse_completion)

    async def passed(self, http: web.Request) -> web.StreamResponse:
        """Any route of passthrough.py: nothing is known of its tokens, so it goes by load."""
        return await self._answer(http, partial(passthrough.parse, http), is_passed=True)

    async def _answer(
        self, http: web.Request, parse: Parse, *, is_passed: bool = False
    ) -> web.StreamResponse:
        """Serve one request; every error becomes an OpenAI body, a client that leaves frees everything."""
        received_at = asyncio.get_running_loop().time()
        request_id = request_id_of(http)
        try:
            with self._in_flight.one(), self._metrics.in_flight.track_inprogress():
                work = await self._accept.work(http, parse, request_id, received_at, is_passed=is_passed)
                response = self._decisions.foretold(work) if work.is_dry_run else await self._complete(work)
        except KvRouterError as error:
            response = error_response(error, request_id)
        except asyncio.CancelledError:
            self._metrics.cancelled.inc()
            raise
        if self.is_draining:
            response.force_close()
        self._metrics.requests.labels(str(response.status)).inc()
        self._metrics.duration.observe(asyncio.get_running_loop().time() - received_at)
        return response

    async def _complete(self, work: Work) -> web.StreamResponse:
        response = await self._try_workers(work)
        self._in_flight.answered()
        if response.keep_alive:
            # else a client that sends requests and reads no answers would fill our memory
            with contextlib.suppress(ConnectionError):
                await AiohttpClient(work.http).drained()
        return response

    async def _try_workers(self, work: Work) -> web.StreamResponse:
        """Route and relay; a worker that fails before the first byte is replaced, `retries` times at most."""
        failed: set[Target] = set()
        fallbacks: tuple[Target, ...] = ()
        outcome: Outcome | None = None
        if work.may_report:  # no route of passthrough.py: nothing is known of their tokens
            await self._waiting_room.admitted(work.router, work.route)
        for tries in range(self._retries + 1):
            if tries > 1:
                await asyncio.sleep(RETRY_DELAY_S * 2**tries * random.random())
            try:
                with self._placed(work, frozenset(failed), fallbacks) as placement:
                    outcome = await self._attempt(work, placement)
            except NoWorkersError:
                if outcome is None:
                    raise
                break  # nobody is left to try: the last worker's own answer says most
            if isinstance(outcome, Done | TimedOut):
                break
            failed.update(_targets_of(work, placement))
            fallbacks = placement.fallbacks
            self._note_failure(work, placement, outcome)
        return self._response(work, outcome)

    @contextlib.contextmanager
    def _placed(
        self, work: Work, failed: frozenset[Target], fallbacks: tuple[Target, ...]
    ) -> Iterator[Placement]:
        """A booking that lasts exactly as long as its attempt."""
        now = asyncio.get_running_loop().time()
        placement = work.router.route(work.route, now, streamed=work.stream, exclude=failed, prefer=fallbacks)
        self._decisions.log_last()
        self._feeds.flush_soon()
        self._metrics.prompt_tokens.inc(work.route.isl)
        self._metrics.overlap_tokens.inc(placement.choice.overlap_blocks * work.router.pool.block_size)
        try:
            yield placement
        finally:
            work.router.free(placement.key)
            self._feeds.flush_soon()

    async def _attempt(self, work: Work, placement: Placement) -> Outcome:
        """Send the request to the placement's worker, and its answer to the client."""
        with judge(work.router.circuits, placement.target) as verdict:
            outcome = await self._exchange(work, placement, fresh=False)
            if isinstance(outcome, Lost) and outcome.was_idle:
                # the worker closed an idle connection just as the request went out: that is no failure
                outcome = await self._exchange(work, placement, fresh=True)
            verdict.outcome = outcome
        work.router.answered(placement.key, _status_of(outcome))
        if isinstance(outcome, Done) and outcome.status < 300 and not outcome.failure:
            now = asyncio.get_running_loop().time()
            work.router.mark_prefill_completed(placement.key, now)
        return outcome

    async def _exchange(self, work: Work, placement: Placement, *, fresh: bool) -> Outcome:
        asks_report = placement.wants_report and work.may_report
        body = with_report_mode(work.body) if asks_report else work.body
        is_direct = work.route.wanted is not None
        head = request_head(work.http, work.id, placement, len(body), keeps_rank=is_direct)
        try:
            connection = await self._upstream.connect(placement.url, fresh=fresh)
        except WorkerUnreachableError as error:
            work.router.pool.unreachable(placement.target.worker_id)
            return Lost(str(error))
        attempt = Attempt(
            AiohttpClient(work.http, may_stay=not self.is_draining),
            connection,
            self._limits,
            _response_headers(work, placement, self._replica.router_id),
            lambda: self._first_data(work, placement),
        )
        self._running[attempt] = (work.router, placement.key, current_task())
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
        now = asyncio.get_running_loop().time()
        compare(work.router, work.route, placement, work.traits, watch=self._watch, tail=tail)
        expect_events(work.router, work.route, placement, work.traits, now=now)

    def _first_data(self, work: Work, placement: Placement) -> None:
        now = asyncio.get_running_loop().time()
        work.router.first_byte(placement.key, now)
        self._metrics.first_byte.observe(now - work.received_at)
        self._feeds.flush_soon()

    def report_progress(self) -> None:
        """Book the output blocks that running answers have filled; called once a second."""
        for attempt, (router, key, _) in self._running.items():
            router.progress(key, attempt.events)
        self._feeds.flush_soon()

    def cut_off(self) -> None:
        """End what runs: answers that have begun with an error event, all other requests with 503."""
        begun = {attempt: task for attempt, (_, _, task) in self._running.items() if attempt.is_committed}
        self._in_flight.refuse_waiting(set(begun.values()))
        for attempt in begun:
            attempt.cut_off(cut_off_error())

    def _note_failure(self, work: Work, placement: Placement, failure: Rejected | Lost) -> None:
        reason = str(failure.status) if isinstance(failure, Rejected) else "lost"
        self._metrics.failed_attempts.labels(reason).inc()
        said = failure.body[:200] if isinstance(failure, Rejected) else failure.reason
        log.warning("worker.failed_request", worker=str(placement.target), reason=reason, said=said)

    def _response(self, work: Work, outcome: Outcome | None) -> web.StreamResponse:
        match outcome:
            case Done(status, keeps_alive, failure, is_torn):
                if failure:
                    self._metrics.broken.inc()
                    log.warning("request.broken_off", request=work.id, reason=failure)
                return AlreadyWritten(status, keeps_alive=keeps_alive, is_torn=is_torn)
            case Rejected():
                return _held_answer(work.id, outcome)
            case TimedOut(silent_s):
                raise WorkerSilentError(f"the worker said nothing for {silent_s:g} s")
            case Lost(reason):
                raise WorkerDiedError(reason)
            case None:
                raise NoWorkersError("no worker was tried")


@web.middleware
async def openai_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Unknown routes and our own bugs are answered in OpenAI's form too."""
    try:
        return await handler(request)
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        wrong = WrongMethodError(f"{request.method} {request.path}: use {allowed}")
        response = error_response(wrong, request_id_of(request))
        response.headers["allow"] = allowed
        return response
    except web.HTTPException as error:
        kind = NoRouteError if error.status == 404 else KvRouterError
        answer = kind(f"{request.method} {request.path}: {error.reason}")
    except KvRouterError as error:
        answer = error
    except Exception:
        log.exception("request.failed", path=request.path)
        answer = KvRouterError("internal error; the log of this replica has the details")
    return error_response(answer, request_id_of(request))


def error_response(error: KvRouterError, request_id: str) -> web.Response:
    """An error of our own, in OpenAI's form."""
    headers = {"x-request-id": request_id}
    if error.status == 503:
        headers["retry-after"] = str(error.retry_after_s)
    return web.Response(
        status=error.status,
        body=openai.error_body(error),
        content_type="application/json",
        headers=headers,
    )


def _held_answer(request_id: str, refusal: Rejected) -> web.Response:
    """The last worker's own refusal, passed on."""
    headers = {"x-request-id": request_id, "content-type": refusal.content_type.decode("latin-1")}
    if refusal.retry_after or refusal.status == 503:
        headers["retry-after"] = refusal.retry_after.decode("latin-1") or str(KvRouterError.retry_after_s)
    return web.Response(status=refusal.status, body=refusal.body, headers=headers)


def _targets_of(work: Work, placement: Placement) -> list[Target]:
    """All ranks of the worker: they share its server, so another worker is tried."""
    worker_id = placement.target.worker_id
    return [target for target in work.router.pool.targets if target.worker_id == worker_id]


def _status_of(outcome: Outcome) -> int:
    """The HTTP status that the worker has answered with, or that of its silence."""
    match outcome:
        case Done(status) | Rejected(status):
            return status
        case TimedOut():
            return WorkerSilentError.status
        case Lost():
            return WorkerDiedError.status


def _response_headers(work: Work, placement: Placement, router_id: str) -> bytes:
    return (
        f"x-request-id: {work.id}\r\n"
        f"x-kvrouter-worker: {placement.target.worker_id}\r\n"
        f"x-kvrouter-dp-rank: {placement.target.rank}\r\n"
        f"x-kvrouter-overlap-blocks: {placement.choice.overlap_blocks}\r\n"
        f"x-kvrouter-router: {router_id}\r\n"
    ).encode()
