"""The replica on the bus: the shell around core/fleet/replica.py.

one subscription ──> inbox ──> drainer: 1 ms at a time, or as long as all else took ──> Replica
Replica.due ──> replay requests, at most 16 at once ──> Replica.answered
Router.frames ──> published at the end of the loop turn
heartbeat, hello, replay answers
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from time import perf_counter

import structlog

from kvrouter.bus import Bus, Subjects
from kvrouter.core.feeds.trust import ANSWERS_A_SECOND, PerSecond
from kvrouter.core.fleet.replica import Replica
from kvrouter.core.wire.heartbeats import State, decode_router_beat, decode_worker_beat
from kvrouter.core.wire.heartbeats import encode as encode_beat
from kvrouter.core.wire.ids import PoolId, RouterId
from kvrouter.core.wire.ops import ReplayRequest, decode_answer, decode_frame, decode_request
from kvrouter.core.wire.ops import encode as encode_request
from kvrouter.core.wire.senders import Feed, KvSource, RouterSource, Source, SyncSource, WorkerSource, name
from kvrouter.errors import MalformedFrameError
from kvrouter.replica.members import Members

log = structlog.get_logger()

INBOX_BYTES = 128 * 1024 * 1024
INBOX_MESSAGES = 512 * 1024
"""What may wait to be applied; beyond either, messages are dropped, which readers notice and repair."""
SAY_FULL_S = 10.0
"""Between two lines that say so."""
SLICE_S, LONGEST_SLICE_S = 0.001, 0.003
BEHIND_S, LONGEST_SLICE_BEHIND_S = 0.2, 0.05
"""A slice of applying what has come is as long as the loop's turn before it was without, within these bounds:
on a busy loop events get as much of the time as requests. If the oldest has waited for `BEHIND_S`, keeping up
comes before keeping slices short: an inbox that overflows would cost far more."""
TICK_S = 0.1
HELLO_DELAY_S = 0.03
"""Everyone answers a hello within 50 ms."""
RECOVERIES = 16
ANSWER_TIMEOUT_S = 2.0
SUBJECTS_KEPT = 16_384
"""What so many subjects are about is kept; beyond that it is read anew."""
MOST_NAMED = 1000
"""Of so many subjects at most it is logged, once each, that what came there cannot be read."""


class Feeds:
    """Keeps a Replica in step with the bus. Open it with `run` in a task group."""

    def __init__(self, replica: Replica, bus: Bus, subjects: Subjects, *, heartbeat_s: float) -> None:
        self.state: State = "up"
        self.address = ""
        self.on_change: Callable[[], None] = lambda: None
        """Called when bookings or workers may have changed, one's own or a peer's."""
        self.inbox_drops = 0
        self.errors = 0
        """Messages that raised: each is a bug, of which the log has the place."""
        self._replica = replica
        self._bus = bus
        self._subjects = subjects
        self._heartbeat_s = heartbeat_s
        self._inbox: deque[tuple[str, bytes, float]] = deque()
        self._inbox_bytes = 0
        self._sources: dict[str, Source] = {}
        self._loop = asyncio.get_running_loop()
        self._failure: asyncio.Future[None] = self._loop.create_future()
        self._is_drain_due = self._has_more = False
        self._drained_at = self._say_full_at = 0.0
        self._recoveries: dict[Feed, asyncio.Task[None]] = {}
        self._flush_is_due = self._is_hello_due = False
        self.members = Members(replica)
        self._named: set[str] = set()
        self._failed: set[str] = set()
        self._answers = PerSecond(ANSWERS_A_SECOND)

    async def subscribe(self) -> None:
        """Listen; called once, before `run`."""
        await self._bus.subscribe(self._subjects.live, self._receive)
        await self._bus.subscribe(self._subjects.hello, self._answer_hello)
        await self._bus.subscribe(self._subjects.sync_replay(self._replica.router_id), self._answer_replay)
        self._bus.on_connect(self._say_hello)

    async def run(self) -> None:
        """Drain, beat and repair until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._drain_forever(), name="drain")
                tasks.create_task(self._beat_forever(), name="heartbeat")
                tasks.create_task(self._tick_forever(), name="tick")
        finally:
            self._failure.cancel()
            for recovery in self._recoveries.values():
                recovery.cancel()

    def flush_soon(self) -> None:
        """Something was booked, marked or freed: tell the peers at the end of this loop turn."""
        if not self._flush_is_due:
            self._flush_is_due = True
            asyncio.get_running_loop().call_soon(self.flush)

    def leave(self) -> None:
        """Say goodbye; the peers drop this replica's bookings at once."""
        self.flush()
        self.state = "leave"
        self._publish_heartbeat()

    # What arrives

    def _receive(self, subject: str, data: bytes, _reply: str) -> None:
        if self._inbox_bytes + len(data) > INBOX_BYTES or len(self._inbox) >= INBOX_MESSAGES:
            self._drop()
            return
        self._inbox.append((subject, data, self._loop.time()))
        self._inbox_bytes += len(data)
        self._drain_soon()

    def _drop(self) -> None:
        self.inbox_drops += 1
        now = self._loop.time()
        if now >= self._say_full_at:
            self._say_full_at = now + SAY_FULL_S
            log.warning("feed.inbox_full", effect="messages dropped; feeds repair what is missing")

    @property
    def inbox_messages(self) -> int:
        """What has come and is not applied yet."""
        return len(self._inbox)

    @property
    def inbox_age_s(self) -> float:
        """How long the oldest of it has waited."""
        return self._loop.time() - self._inbox[0][2] if self._inbox else 0.0

    async def _drain_forever(self) -> None:
        """Wait for a failure: a bug in what follows ends the service, not just the draining."""
        await self._failure

    def _drain(self) -> None:
        """One slice; what is left comes in the next turn of the loop, after the requests of this one."""
        others_s = perf_counter() - self._drained_at
        longest_s = LONGEST_SLICE_BEHIND_S if self.inbox_age_s > BEHIND_S else LONGEST_SLICE_S
        slice_s = min(max(SLICE_S, others_s if self._has_more else 0.0), longest_s)
        self._is_drain_due = False
        try:
            self._has_more = self._drain_slice(slice_s)
        except Exception as error:
            if not self._failure.done():
                self._failure.set_exception(error)
            return
        if self._has_more:
            self._drain_soon()
        self._drained_at = perf_counter()

    def _drain_soon(self) -> None:
        if not self._is_drain_due and not self._failure.done():
            self._is_drain_due = True
            self._loop.call_soon(self._drain)

    def _drain_slice(self, slice_s: float = SLICE_S) -> bool:
        """Apply what has arrived, load and sweep, for about so long; returns whether there is more."""
        now, end = asyncio.get_running_loop().time(), perf_counter() + slice_s
        inbox = self._inbox
        with self._replica.batch():
            while inbox and perf_counter() < end:
                subject, data, arrived = inbox.popleft()
                self._inbox_bytes -= len(data)
                self._apply(subject, data, arrived, now)
        self._ask(now)
        has_work = self._replica.work(now)  # also where events alone fill every slice
        while has_work and perf_counter() < end:
            has_work = self._replica.work(now)
        self._log_failures()
        if not has_work:
            self._ask(now)
        self.on_change()
        return bool(inbox) or has_work

    def _apply(self, subject: str, data: bytes, arrived: float, now: float) -> None:
        """Nothing that is received ends the replica. It counts what is malformed itself."""
        try:
            self._dispatch(subject, data, arrived, now)
        except Exception as error:
            self._log_failure(subject, error)
        self._log_failures()

    def _dispatch(self, subject: str, data: bytes, arrived: float, now: float) -> None:
        source = self._source_of(subject)
        malformed = self._malformed(source)
        match source:
            case KvSource():
                self._replica.kv_frame(source, data, now)
            case SyncSource():
                self._replica.sync_frame(source, data, now)
            case WorkerSource(worker_id):
                self._replica.worker_heard(worker_id, data, arrived)
                self.members.worker_heard(worker_id)
            case RouterSource(router_id):
                self._router_heard(router_id, data, arrived)
            case None:
                self._replica.counters.unknown_messages += 1
                self._name_once(subject, "not a subject of this version")
        if self._malformed(source) > malformed:
            self._name_once(subject, _why_malformed(source, data))

    def _log_failures(self) -> None:
        for source, error in self._replica.take_failures():
            self._log_failure(name(source), error)

    def _log_failure(self, about: str, error: Exception) -> None:
        """A bug: with its place once for each subject or feed; counted every time."""
        self.errors += 1
        if about not in self._failed and len(self._failed) < MOST_NAMED:
            self._failed.add(about)
            log.error("feed.error", about=about, exc_info=error)

    def _source_of(self, subject: str) -> Source | None:
        """What a subject is about. The same ones come again and again: they are read once."""
        source = self._sources.get(subject)
        if source is None:
            source = self._subjects.parse_live(subject)
            if len(self._sources) >= SUBJECTS_KEPT:
                self._sources.clear()
            if source is not None:
                self._sources[subject] = source
        return source

    def _router_heard(self, router_id: RouterId, data: bytes, now: float) -> None:
        self._replica.router_heard(router_id, data, now)
        if router_id == self._replica.router_id:
            self.members.round_ended()
        else:
            self.members.replica_heard(router_id)

    def _malformed(self, source: Source | None) -> int:
        """How much of what came from there could not be read."""
        if isinstance(source, KvSource | SyncSource):
            reader = self._replica.readers.get(source)
            return reader.counters.malformed if reader else 0
        return self._replica.counters.malformed_heartbeats

    def _name_once(self, subject: str, reason: str) -> None:
        """It is counted every time."""
        if subject not in self._named and len(self._named) < MOST_NAMED:
            self._named.add(subject)
            log.warning("feed.malformed", subject=subject, error=reason[:300])

    # Repair

    def _ask(self, now: float) -> None:
        for source in self._replica.cancelled():
            recovery = self._recoveries.pop(source, None)
            if recovery is not None:
                recovery.cancel()
        for source, request in self._replica.due(now, RECOVERIES - len(self._recoveries)):
            task = self._recoveries[source] = asyncio.create_task(self._recover(source, request))
            task.add_done_callback(partial(self._forget_recovery, source))

    def _forget_recovery(self, source: Feed, task: asyncio.Task[None]) -> None:
        if self._recoveries.get(source) is task:
            del self._recoveries[source]

    async def _recover(self, source: Feed, request: ReplayRequest) -> None:
        loop = asyncio.get_running_loop()
        try:
            data = await self._bus.request(
                self._subjects.replay(source), encode_request(request), timeout_s=ANSWER_TIMEOUT_S
            )
        except Exception as error:  # also of encoding it: the reader must hear of it, or it waits for ever
            log.info("feed.no_answer", source=name(source), error=str(error))
            self._replica.failed(source, loop.time())
            return
        malformed = self._malformed(source)
        self._replica.answered(source, data, loop.time())
        self._log_failures()
        if self._malformed(source) > malformed:
            self._name_once(f"answer of {name(source)}", _why_bad_answer(data))
        self._drain_soon()

    def _answer_replay(self, _subject: str, data: bytes, reply: str) -> None:
        """A peer asks for frames or a snapshot of our bookings."""
        try:
            request = decode_request(data)
        except MalformedFrameError as error:
            self._name_once("a replay request", str(error))
            return
        router = self._replica.routers.get(PoolId(str(request.part)))
        now = self._loop.time()
        if router is None or not reply or not self._answers.allows(now):
            return
        self.flush()  # so that the answer is as of everything that has happened
        self._bus.publish(reply, router.source.answer(request, self._bus.max_payload, now))

    # What is sent

    def flush(self) -> None:
        """Publish, numbered, what has happened to own bookings: afterwards they are as of the feed's seq."""
        self._flush_is_due = False
        for pool_id, router in self._replica.routers.items():
            self._publish_frames(pool_id, router.frames())
        self.on_change()

    def _publish_frames(self, pool_id: PoolId, frames: list[bytes]) -> None:
        subject = self._subjects.live_sync(pool_id, self._replica.router_id)
        for frame in frames:
            self._bus.publish(subject, frame)

    def _publish_heartbeat(self, *, names_workers: bool = False) -> None:
        beat = self._replica.heartbeat(self.state, self.address, names_workers=names_workers)
        self._bus.publish(self._subjects.live_router(self._replica.router_id), encode_beat(beat))

    def _say_hello(self) -> None:
        self._bus.publish(self._subjects.hello, b"")
        self._replica.said_hello(asyncio.get_running_loop().time())
        self._publish_heartbeat()

    def _answer_hello(self, _subject: str, _data: bytes, _reply: str) -> None:
        """One answer for the hellos that come together: it names every worker, so a flood would cost much."""
        if not self._is_hello_due:
            self._is_hello_due = True
            self._loop.call_later(HELLO_DELAY_S, self._answer_hellos)

    def _answer_hellos(self) -> None:
        self._is_hello_due = False
        if self.state == "leave":
            return  # it has said so
        self.flush()
        self._publish_heartbeat(names_workers=True)

    async def _beat_forever(self) -> None:
        while True:
            now = self._loop.time()
            self._replica.next_round(now)
            for pool_id, router in self._replica.routers.items():
                self._publish_frames(pool_id, router.check_frames(now))
            if self._replica.wants_hello():
                self._bus.publish(self._subjects.hello, b"")
            self._publish_heartbeat()
            await asyncio.sleep(self._heartbeat_s)

    async def _tick_forever(self) -> None:
        """What happens by the clock: predicted ends of prefill, requests that are tried again."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TICK_S)
            now = loop.time()
            self._replica.latch_ready(now)
            for router in self._replica.routers.values():
                for key in router.due(now):
                    router.mark_prefill_completed(key, now)
                    self.flush_soon()
            self._ask(now)


def _why_malformed(source: Source | None, data: bytes) -> str:
    """The reader only counts; read it once more for the reason."""
    try:
        match source:
            case WorkerSource(worker_id):
                decode_worker_beat(data, worker_id)
            case RouterSource():
                decode_router_beat(data)
            case _:
                return decode_frame(data).trouble
    except MalformedFrameError as error:
        return str(error)
    return ""


def _why_bad_answer(data: bytes) -> str:
    try:
        decode_answer(data)
    except MalformedFrameError as error:
        return str(error)
    return "a frame in it cannot be read, or it contradicts itself"
