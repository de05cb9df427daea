"""Messages from the bus wait here until they are applied to the replica, in slices between requests.

receive ──> inbox (bounded) ──> one slice per turn of the event loop ──> Replica
            what one read brought    └── runs of plain KV frames: take_run (core/feeds/position.py)
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import structlog

from kvrouter.bus import Subjects
from kvrouter.core.feeds.position import Position, take_run
from kvrouter.core.feeds.receipt import TAKEN, FrameVerdict, Receipt
from kvrouter.core.fleet.replica import Replica
from kvrouter.core.wire.ids import RouterId
from kvrouter.core.wire.senders import (
    KvSource,
    Message,
    RouterSource,
    Source,
    SyncSource,
    WorkerSource,
    name,
)
from kvrouter.replica.feed_log import FeedLog
from kvrouter.replica.members import Members
from kvrouter.replica.recovery import Recovery

log = structlog.get_logger()

# Beyond this messages are dropped. Their feeds notice the gap and ask for what is missing.
INBOX_BYTES = 256 * 1024 * 1024
MESSAGE_BYTES = 256  # that a message takes besides its payload
LOG_FULL_S = 10.0
# A slice lasts as long as the rest of the loop's turn before it, within these bounds: on a busy loop events
# get as much time as requests. When the oldest message has waited BEHIND_S, slices may be longer: they delay
# requests, but an inbox that overflows costs far more, as every feed then needs a replay.
SLICE_S, LONGEST_SLICE_S = 0.001, 0.003
BEHIND_S, LONGEST_SLICE_BEHIND_S = 0.2, 0.05
# A worker has a few subjects and each is parsed once. When the cache is full, it is emptied and fills again.
SUBJECTS_KEPT = 16_384
# Messages that C applies in one call, if they are short (RUN_BYTES): some 50 µs.
RUN_MESSAGES = 64
_NO_SUBJECT = Receipt(FrameVerdict.UNKNOWN, "not a subject of this version")


@dataclass(slots=True)
class _Arrived:
    """What one read of the socket brought."""

    messages: list[Message]
    arrived: float
    bytes: int
    next: int = 0


class Inbox:
    """Receives all live messages and applies them. `on_change` runs after each slice."""

    def __init__(
        self,
        replica: Replica,
        subjects: Subjects,
        members: Members,
        recovery: Recovery,
        feed_log: FeedLog,
        *,
        on_change: Callable[[], None] | None,
    ) -> None:
        self.drops = 0
        self._replica = replica
        self._subjects = subjects
        self._members = members
        self._recovery = recovery
        self._log = feed_log
        self._on_change = on_change
        self.on_routing: Callable[[], None] = lambda: None
        """Called when the replica follows another change of routing."""
        self._routing = replica.routing
        self._batches: deque[_Arrived] = deque()
        self._bytes = 0
        self._sources: dict[str, Source] = {}
        # Of feeds of KV events, by subject. One that has ended takes nothing, and is replaced.
        self._positions: dict[str, Position] = {}
        self._loop = asyncio.get_running_loop()
        self._failure: asyncio.Future[None] = self._loop.create_future()
        self._is_drain_due = self._has_more = False
        self._drained_at = self._log_full_at = 0.0

    @property
    def messages(self) -> int:
        """Messages that wait."""
        return sum(len(batch.messages) - batch.next for batch in self._batches)

    @property
    def age_s(self) -> float:
        """How long the oldest message has waited."""
        return self._loop.time() - self._batches[0].arrived if self._batches else 0.0

    def receive(self, messages: list[Message]) -> None:
        """Take messages from the bus, and drop those for which there is no room."""
        size = sum([len(data) + MESSAGE_BYTES for _, data, _ in messages])
        if self._bytes + size > INBOX_BYTES:
            messages, size = self._with_room(messages)
        if messages:
            self._batches.append(_Arrived(messages, self._loop.time(), size))
            self._bytes += size
            self.drain_soon()

    def _with_room(self, messages: list[Message]) -> tuple[list[Message], int]:
        """Those for which there is room, and what they take."""
        kept, taken = [], 0
        for message in messages:
            size = len(message[1]) + MESSAGE_BYTES
            if self._bytes + taken + size <= INBOX_BYTES:
                kept.append(message)
                taken += size
        self._drop(len(messages) - len(kept))
        return kept, taken

    async def run(self) -> None:
        """Raise what a slice has raised: slices run as callbacks, and a bug in one must end the service."""
        try:
            await self._failure
        finally:
            self._failure.cancel()

    def drain_soon(self) -> None:
        """Run a slice in the next turn of the loop: messages or loading may wait."""
        if not self._is_drain_due and not self._failure.done():
            self._is_drain_due = True
            self._loop.call_soon(self._drain)

    def _drop(self, count: int) -> None:
        self.drops += count
        now = self._loop.time()
        if now >= self._log_full_at:
            self._log_full_at = now + LOG_FULL_S
            log.warning("feed.inbox_full", effect="messages dropped; feeds repair what is missing")

    # Slices

    def _drain(self) -> None:
        others_s = perf_counter() - self._drained_at
        longest_s = LONGEST_SLICE_BEHIND_S if self.age_s > BEHIND_S else LONGEST_SLICE_S
        slice_s = min(max(SLICE_S, others_s if self._has_more else 0.0), longest_s)
        self._is_drain_due = False
        try:
            self._has_more = self._drain_slice(slice_s)
        except Exception as error:
            if not self._failure.done():
                self._failure.set_exception(error)
            return
        if self._has_more:
            self.drain_soon()
        self._drained_at = perf_counter()

    def _drain_slice(self, slice_s: float) -> bool:
        """Apply messages, load snapshots and sweep for about `slice_s`; returns whether there is more."""
        now, end = self._loop.time(), perf_counter() + slice_s
        while self._batches and perf_counter() < end:
            self._apply_some(self._batches[0], now)
        self._replica.settle()
        self._recovery.request_due(now, self.drain_soon)
        has_work = self._replica.work(now)  # at least one step, even where messages fill every slice
        while has_work and perf_counter() < end:
            has_work = self._replica.work(now)
        self._log_failures()
        if not has_work:
            self._recovery.request_due(now, self.drain_soon)  # a snapshot is loaded: another may be requested
        if self._on_change is not None:
            self._on_change()
        return bool(self._batches) or has_work

    def _apply_some(self, batch: _Arrived, now: float) -> None:
        """Apply the next messages of a batch: a run of plain frames, or the first one that is none."""
        messages, at = batch.messages, batch.next
        subject, data, _ = messages[at]
        if subject in self._positions:
            batch.next = take_run(messages, at, min(len(messages), at + RUN_MESSAGES), self._positions, now)
        if batch.next == at:
            batch.next += 1
            self._apply(subject, data, batch.arrived, now)
        if batch.next == len(messages):
            self._batches.popleft()
            self._bytes -= batch.bytes

    # One message

    def _apply(self, subject: str, data: bytes, arrived: float, now: float) -> None:
        """Apply a message. Nothing that arrives may end the replica, so a bug is logged and counted."""
        try:
            self._dispatch(subject, data, arrived, now)
        except Exception as error:
            self._log.failed(subject, error)
        self._log_failures()

    def _dispatch(self, subject: str, data: bytes, arrived: float, now: float) -> None:
        source = self._sources.get(subject) or self._source_of(subject)
        match source:
            case KvSource():
                receipt = self._replica.feeds.kv_frame(source, data, now)
                reader = self._replica.feeds.readers.get(source)
                if reader is not None:
                    self._positions[subject] = reader.position
            case SyncSource():
                receipt = self._replica.sync_frame(source, data, now)
            case WorkerSource(worker_id):
                # Leases count from when a heartbeat arrived: a backlog here must not prolong them.
                receipt = self._replica.worker_heartbeat(worker_id, data, arrived, settles=False)
                self._members.worker_heartbeat(worker_id)
            case RouterSource(router_id):
                receipt = self._router_heartbeat(router_id, data, arrived)
            case None:
                receipt = _NO_SUBJECT
        if receipt is TAKEN:
            return
        if receipt.verdict is FrameVerdict.UNKNOWN:
            self._replica.counters.unknown_messages += 1
        if receipt.trouble:
            self._log.malformed(subject, receipt.trouble)

    def _router_heartbeat(self, router_id: RouterId, data: bytes, arrived: float) -> Receipt:
        receipt = self._replica.router_heartbeat(router_id, data, arrived, settles=False)
        if router_id == self._replica.router_id:
            self._members.round_ended()
        else:
            self._members.replica_heartbeat(router_id)
            peer = self._replica.peers.get(router_id)
            if peer is not None and peer.routing is not None and peer.routing.is_later(self._replica.routing):
                self._log.refused_routing(router_id, peer.routing)
        if self._replica.routing is not self._routing:
            self._routing = self._replica.routing
            self.on_routing()
        return receipt

    def _source_of(self, subject: str) -> Source | None:
        source = self._sources.get(subject)
        if source is None:
            source = self._subjects.parse_live(subject)
            if len(self._sources) >= SUBJECTS_KEPT:
                self._sources.clear()
                self._positions.clear()
            if source is not None:
                self._sources[subject] = source
        return source

    def _log_failures(self) -> None:
        if self._replica.feeds.has_failed:
            for source, error in self._replica.feeds.take_failures():
                self._log.failed(name(source), error)
