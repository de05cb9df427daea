"""Streams that go on at another worker when theirs is lost (--migration-limit).

    Attempt ──Done, with `rest`──> Moves.served ──a request for what is missing──> another worker
                                        │                                            │
                                        └─ refused, failed, none left: error event   └──> the same client

A stream may move if its request is one whose answer can be continued exactly (bodies/continuation.py) and its
engine shows token ids. The rest of its answer is a request like any other: accepted, placed by what workers
hold of its prompt, booked and freed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
import structlog
from msgspec.structs import replace

from kvrouter.bodies.apis import CHAT, COMPLETION, Api
from kvrouter.bodies.continuation import (
    PATH,
    Answered,
    Continuation,
    Decode,
    NotContinuedError,
    body_after,
    last_events,
    stops_of,
    why_not,
    without_ids,
)
from kvrouter.core.fleet.pool import Pool
from kvrouter.core.routing.policy import Moved
from kvrouter.core.wire.ids import Target
from kvrouter.engine_versions import reaches, since
from kvrouter.errors import KvRouterError
from kvrouter.frontend.records.record import AttemptRecord, Record, Work, clock
from kvrouter.frontend.requests.accept import Accept
from kvrouter.frontend.settings import MigrationOptions
from kvrouter.relay.outcomes import Done, Outcome
from kvrouter.relay.request import Request
from kvrouter.relay.seam import Records, Seam
from kvrouter.telemetry.metrics import RequestMetrics

log = structlog.get_logger()

# A stream with a longer body stays at its worker: it would have to be read in steps.
MOST_BODY_BYTES = 256 * 1024
# A longer record is read by a thread.
_INLINE_BYTES = 256 * 1024

TryWorkers = Callable[[Record, Work, frozenset[Target]], Awaitable[Outcome | None]]


class Moves:
    """`decoder`: of a pool whose texts are tokenized here."""

    def __init__(
        self,
        options: MigrationOptions,
        accept: Accept,
        metrics: RequestMetrics,
        decoder: Callable[[Pool], Decode | None],
    ) -> None:
        self.is_on = bool(options.limit)
        self._options = options
        self._accept = accept
        self._metrics = metrics
        self._decoder = decoder
        self._records = Records()

    def may_move(self, work: Work) -> bool:
        """Whether the answer to this request is one that can be continued exactly."""
        if not work.stream or len(work.body) > MOST_BODY_BYTES:
            return False
        if not _is_plain(work.api) or work.response is not None:
            return False
        try:
            body = _body(work)
        except msgspec.DecodeError:  # what only lax.py can read
            return False
        is_chat = work.api.parse is CHAT.parse
        reason = why_not(body, is_chat=is_chat, is_inexact=self._options.inexact)
        if reason:
            self._metrics.migrations.inc("request", "refused")
        return not reason

    def may_leave(self, running: AttemptRecord) -> bool:
        """Whether the engine of this attempt shows the token ids of such a stream."""
        worker = running.work.router.pool.workers.get(running.placement.target.worker_id)
        if worker is None or running.source is not None:  # that half streams nothing
            return False
        shows = since(worker.card.engine)
        first = shows.shows_ids_of_chats if running.work.api.parse is CHAT.parse else shows.shows_ids
        return bool(reaches(worker.card.engine_version, first))

    def seam(self, running: AttemptRecord) -> Seam | None:
        """What becomes of the stream of this attempt."""
        begun = running.work.request.client.begun
        if isinstance(begun, Seam):
            return begun
        if not self.may_leave(running):
            return None
        strips = without_ids if self._strips(running.work) else None
        return Seam(True, True, set(), records=self._records, moves=self._options.limit, rewrite=strips)

    def _strips(self, work: Work) -> bool:
        """Whether its client gets no token ids."""
        return self._options.strip and not _body(work).get("return_token_ids")

    async def served(
        self, record: Record, work: Work, relay: Awaitable[Outcome | None], try_workers: TryWorkers
    ) -> Outcome | None:
        """Relay a stream, and have other workers finish it if its own is lost.

        Its client gets the error event if none does.
        """
        cut = await relay
        if not isinstance(cut, Done) or cut.rest is None:
            return cut
        charge = work.route.charge
        prompt_tokens = 0 if charge is None else charge.prompt_tokens
        try:
            return await self._go_on(record, work, cut, try_workers)
        finally:
            if charge is not None and not charge.used:  # no further attempt counts what the client has
                charge.used = prompt_tokens + record.output_tokens
                self._accept.limits.count(charge)

    async def _go_on(self, record: Record, work: Work, cut: Done, try_workers: TryWorkers) -> Outcome:
        seam = work.request.client.begun
        assert isinstance(seam, Seam)
        is_chat, body = work.api.parse is CHAT.parse, _body(work)
        failed: frozenset[Target] = frozenset()
        outcome: Outcome | None = cut
        had = 0
        while isinstance(outcome, Done) and outcome.rest is not None:
            cut, last = outcome, record.attempts[-1]
            cause = _cause(cut)
            seam.moves -= 1
            seam.has_output = False  # no worker writes now: an error becomes an event
            failed |= frozenset(last.work.router.pool.targets_of(last.placement.target.worker_id))
            try:
                answered = await self._answered(seam, is_chat=is_chat)
                count = len(answered.output_ids)  # exact, where a stream without its end has an estimate
                last.output_tokens, had = count - had, count
                new = body_after(body, answered)
                if new is None:
                    return self._complete(work, seam, answered, cut, body)
                following = await self._following(record, work, answered, seam, old=body, new=new)
                moved = Moved(last.placement.target, cause, count)
                following = _for_the_same(work, following, moved, last.output_tokens)
                log.info(
                    "stream.moved", request=work.id, worker=str(last.placement.target), reason=cut.failure
                )
                record.moves += 1
                outcome = await try_workers(record, following, failed)
            except (NotContinuedError, KvRouterError) as error:
                log.warning("stream.not_moved", request=work.id, reason=str(error))
                outcome = None
            is_good = isinstance(outcome, Done) and not outcome.failure
            self._metrics.migrations.inc(cause, "moved" if is_good else "failed")
        if isinstance(outcome, Done):
            return outcome
        assert cut.rest is not None
        cut.rest()
        return cut

    async def _answered(self, seam: Seam, *, is_chat: bool) -> Answered:
        """What the client has. Raises NotContinuedError."""
        if isinstance(seam.rewrite, Continuation):
            return seam.rewrite.answered
        content = seam.record
        if len(content) <= _INLINE_BYTES:
            return Answered.read(content, is_chat=is_chat)
        return await asyncio.to_thread(Answered.read, content, is_chat=is_chat)

    def _complete(
        self, work: Work, seam: Seam, answered: Answered, cut: Done, body: Mapping[str, Any]
    ) -> Done:
        """No token is missing: only the end is."""
        rest = last_events(answered, body)
        work.request.client.write(seam.close(rest))
        self._metrics.migrations.inc(_cause(cut), "moved")
        return Done(200, cut.keeps_alive)

    async def _following(
        self,
        record: Record,
        work: Work,
        answered: Answered,
        seam: Seam,
        *,
        old: Mapping[str, Any],
        new: bytes,
    ) -> Work:
        """The request for what is missing, whose body is `new`. Raises NotContinuedError, KvRouterError."""
        tokens = len(answered.prompt_ids) + len(answered.output_ids)
        if tokens > self._options.max_tokens:
            raise NotContinuedError(f"{tokens:,} tokens are more than --migration-max-tokens")
        decode = self._decoder(work.router.pool)
        gap, unshown = answered.seam(stops_of(old), decode)
        request = Request(work.request.head.at("POST", PATH), work.request.client, new)
        request.trace = work.request.trace
        again = Record(request, record.id, work.received_at, clock(), record.limits)
        following = await self._accept.work(again, COMPLETION, None)
        seam.rewrite = Continuation(answered, gap, unshown, decode, strips=self._strips(work))
        seam.release()  # from here on the events count as they are rewritten
        return following


def _for_the_same(work: Work, following: Work, moved: Moved, more_tokens: int) -> Work:
    """The request for what is missing is the same client's, and one for its limits."""
    charge = work.route.charge
    if charge is not None:  # its prompt has become longer, and its answer shorter
        charge.prompt_tokens += more_tokens
        charge.tokens = max(charge.tokens, charge.prompt_tokens)
    return replace(
        following,
        route=replace(following.route, charge=charge, moved=moved),
        shows_worker=work.shows_worker,
        key=work.key,
        limits=work.limits,
        movable=True,
        origin=work,
    )


def _body(work: Work) -> dict[str, Any]:
    """Decoded anew each time: as objects it takes ten times the memory, for as long as a stream lasts."""
    return msgspec.json.decode(work.body, type=dict[str, Any])


def _is_plain(api: Api) -> bool:
    return api.parse is CHAT.parse or api.parse is COMPLETION.parse


def _cause(cut: Done) -> str:
    """Why a worker sends no more."""
    if cut.is_cut:
        return "lost"
    return "silent" if cut.is_silent else "failed"
