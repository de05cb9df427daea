"""The two halves of a request, and what is handed over from one to the other.

begin ──> the prefill worker's answer ──> prefilled ──> finish ──> the decode worker's body
│          ├── first_output: the transfer's time
└─ failed  └── ended: whether the pair works

From a peer: pull ──> the only worker's body ──> ended: whether the pair works

At once (SGLang): begin ──> both workers' bodies ──> joined: what fails first ends the other half.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from kvrouter.connectors import SERVED, bodies_at_once, decode_body, p2p, prefill_body
from kvrouter.connectors.source import source_at
from kvrouter.core.fleet.router import Placement
from kvrouter.core.routing.policy import RouteRequest
from kvrouter.core.tables.transfers import Pull
from kvrouter.errors import WorkerRejectedError
from kvrouter.frontend.records.record import AttemptRecord
from kvrouter.relay.collected import Collected
from kvrouter.relay.events import message_in
from kvrouter.relay.outcomes import Done, Lost, Outcome
from kvrouter.telemetry.metrics import RequestMetrics

# When the client has its answer, the prefill worker's is still read for so long: for its count of cached
# tokens, and since an engine may take a request that is cut off for one that failed.
DRAIN_S = 1.0

Leg = TypeVar("Leg")


class HandOvers:
    def __init__(self, metrics: RequestMetrics) -> None:
        self._metrics = metrics

    def next_try(
        self, tried: Sequence[AttemptRecord], route: RouteRequest, *, is_last: bool
    ) -> tuple[RouteRequest, AttemptRecord | None]:
        """What to route after these; and the last, if what was computed for it never reached its worker."""
        last = tried[-1]
        if not route.may_split:
            return route, None
        if [one for one in tried if one.placement.pull is not None]:
            return replace(route, may_split=False), None  # blocks of a peer may be why it failed
        if last.is_refused and last.is_handed_over and not last.is_at_once:
            return route, last
        pool = last.work.router.pool
        if is_last and not pool.settings.refuses_whole and pool.split.whole:
            route = replace(route, may_split=False)  # hand-overs have failed: the last try needs none
        return route, None

    def add_prefill(self, running: AttemptRecord, first: Placement, unread: AttemptRecord | None) -> None:
        """Add the half at the prefill worker: that of `unread`, if it is the same."""
        if unread is not None and unread.placement.prefill is first:
            running.prefill, running.body, running.is_handed_over = unread.prefill, unread.body, True
            return
        running.prefill = replace(running, placement=first, counts=self._metrics.targets[first.target])

    def pull(self, running: AttemptRecord, pull: Pull) -> None:
        """The worker's body says from which peer it reads."""
        worker = running.work.router.pool.workers.get(pull.source.worker_id)
        if worker is not None:
            source = source_at(worker.card.url, worker.card, pull.source.rank)
            running.body = decode_body(running.work.body, p2p.pulling(source))

    def begin(self, running: AttemptRecord) -> Collected:
        """The prefill half is sent with this body; what takes its answer. At once: the other half, too."""
        first, work = running.prefill, running.work
        assert first is not None
        placement = first.placement
        worker = work.router.pool.workers.get(placement.target.worker_id)
        card = None if worker is None else worker.card
        first.source = source = source_at(placement.url, card, placement.target.rank)
        asking = SERVED[placement.connector].asking(source)
        if running.is_at_once and asking is not None:
            first.body, running.body = bodies_at_once(work.body, asking)
            running.is_handed_over = True
        else:
            first.body = prefill_body(work.body, asking)
        return Collected()

    def prefilled(self, first: AttemptRecord, now: float) -> None:
        """The prefill worker's answer is over: if it is good, that is the end of the prefill."""
        first.body = None
        if first.is_good:
            first.work.router.bookings.first_byte(first.placement.key, now)

    def finish(self, running: AttemptRecord, outcome: Outcome, kept: Collected, now: float) -> Outcome | None:
        """Hand over what the prefill worker answered; returns why nothing was computed.

        Raises WorkerRejectedError if the request is at fault.
        """
        first, work, answer = running.prefill, running.work, kept.body
        assert first is not None
        assert first.source is not None
        if isinstance(outcome, Done) and outcome.status >= 300:
            raise WorkerRejectedError(outcome.status, *message_in(answer))
        if not first.is_good:
            return Lost(outcome.failure) if isinstance(outcome, Done) else outcome
        if running.is_at_once:
            return None
        connector = SERVED[first.placement.connector]
        lease_s = connector.lease_s
        # Its clock may be wrong, but it did not answer before it was asked.
        is_late = now - first.sent_at >= lease_s and kept.age_s(time.time()) >= lease_s
        handed = None if is_late else connector.handed_over(answer, first.source)
        running.is_handed_over = handed is not None or not connector.has_parameters
        running.body = decode_body(work.body, handed)
        pool = work.router.pool
        # a prompt of less than a block leaves nothing to hand over
        if not running.is_handed_over and pool.settings.refuses_whole and work.route.isl > pool.block_size:
            first.outcome = Lost("the prefill worker has handed nothing over (--pd-fallback refuse)")
            return first.outcome
        return None

    def first_output(self, running: AttemptRecord, first: AttemptRecord, now: float) -> None:
        """Learn how long it took to hand the prompt over. At once: as a part of the prefill, which ends."""
        if running.is_at_once:
            running.work.router.bookings.first_byte(first.placement.key, now)
            return
        tokens = running.placement.choice.own_prefill_tokens
        seconds = running.first_at - max(first.ended_at, running.decided[1])
        if running.is_handed_over:
            running.work.router.tables.transfers.observe(seconds, tokens, now)
            self._metrics.kv_transfer.observe(seconds)

    def ended(self, running: AttemptRecord, outcome: Outcome, now: float) -> None:
        """What has become of a pair, or of a pull."""
        transfers, pull = running.work.router.tables.transfers, running.placement.pull
        first = running.prefill
        source = None if first is None else first.placement.target
        source = source if pull is None else pull.source
        assert source is not None
        pair = source.worker_id, running.placement.target.worker_id
        if running.is_good and not _computed_itself(running):
            transfers.worked(*pair)
        elif running.is_good:
            transfers.failed(*pair, now)
        elif not isinstance(outcome, Done) or outcome.status >= 500 or outcome.failure:
            self._metrics.pd_pair_failures.inc()
            transfers.failed(*pair, now)


async def joined(
    running: AttemptRecord,
    prefill: Coroutine[Any, Any, tuple[Outcome | None, Leg]],
    decode: Coroutine[Any, Any, Outcome],
    case: Leg,
) -> tuple[Outcome | None, Leg, Outcome | None]:
    """Both halves at the same time; the one that fails ends the other, which would wait for it.

    Returns the failure of the first half with its case, or `case` and the outcome of the second one.
    Once the client has output the decode worker has all blocks, and needs the other no more.
    """
    legs = first, second = asyncio.ensure_future(prefill), asyncio.ensure_future(decode)
    try:
        await asyncio.wait(legs, return_when=asyncio.FIRST_COMPLETED)
        if not second.done() and not _has_output(running):
            failure, case_then = first.result()
            if failure is not None:
                return failure, case_then, None
        outcome = await second
        if running.is_good:
            await asyncio.wait((first,), timeout=DRAIN_S)
        return None, case, outcome
    finally:
        first.cancel()
        second.cancel()
        await asyncio.gather(*legs, return_exceptions=True)


def _computed_itself(running: AttemptRecord) -> bool:
    """Whether its worker got no block of those that it should have read from a peer, as far as it tells."""
    usage, placement = running.usage, running.placement
    if placement.pull is None or usage is None or usage.cached_tokens is None:
        return False
    return usage.cached_tokens <= placement.choice.widest_blocks * placement.block_size


def _has_output(running: AttemptRecord) -> bool:
    """Whether output has reached the client, so that no other pair can be tried."""
    client = running.work.request.client
    return client.has_begun and (client.begun is None or client.begun.has_output)
