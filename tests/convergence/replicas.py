"""A replica on the simulated bus: the real Replica, driven as `replica/loop.py` drives it."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

from kvrouter.bus.subjects import Subjects
from kvrouter.core.feeds.reader import FeedReader
from kvrouter.core.feeds.sinks import FeedSink
from kvrouter.core.fleet.replica import Replica, ReplicaSettings
from kvrouter.core.fleet.router import Router, RouterRules
from kvrouter.core.routing.policy import Prompt, RouteRequest
from kvrouter.core.tables.bookings import BookingTable
from kvrouter.core.wire.heartbeats import State
from kvrouter.core.wire.heartbeats import encode as encode_beat
from kvrouter.core.wire.ids import BookingKey, PoolId, RouterId
from kvrouter.core.wire.ops import (
    AddRequest,
    Free,
    MarkPrefillCompleted,
    Op,
    Progress,
    ReplayRequest,
    decode_request,
)
from kvrouter.core.wire.ops import encode as encode_request
from kvrouter.core.wire.senders import Feed, KvSource, RouterSource, SyncSource, WorkerSource
from kvrouter.errors import MalformedFrameError
from kvrouter.policies.kv import Kv
from kvrouter.replica.loop import TICK_S
from kvrouter.replica.recovery import ANSWER_TIMEOUT_S, RECOVERIES
from tests.convergence.bus import Agenda, Line, Net, Process
from tests.convergence.engines import BLOCK_SIZE, HEARTBEAT_S, LIBRARY, LIBRARY_SIZE, NAMESPACE
from tests.convergence.truth import Histories, booking_facts, check_live_copies

SWEEPS = 600
"""Steps of sweeping at a time: two slots' worth."""


Running = tuple[PoolId, BookingKey]
"""A request in flight; booking numbers are per pool."""


class WatchedSink:
    """A peer's sync feed. It raises if a moment of a booking precedes its AddRequest or follows its Free."""

    def __init__(self, sink: FeedSink, active: BookingTable, owner: RouterId) -> None:
        self._sink = sink
        self._active = active
        self._owner = owner
        self.reset, self.agrees, self.has_room_again = sink.reset, sink.agrees, sink.has_room_again
        self.begin_load, self.load, self.plain = sink.begin_load, sink.load, sink.plain
        self.finish_load, self.abandon_load = sink.finish_load, sink.abandon_load

    def apply(self, op: Op, now: float) -> str:
        """Check the order, then apply."""
        if isinstance(op, AddRequest | MarkPrefillCompleted | Progress | Free):
            is_known = self._active.booking(BookingKey(self._owner, op.number)) is not None
            assert is_known is not isinstance(op, AddRequest), f"{op} of {self._owner}: known {is_known}"
        return self._sink.apply(op, now)


class WatchedReplica(Replica):
    """A replica with small rings whose copies of bookings are checked."""

    ring_frames = 4096
    is_watched = True

    def router(self, pool_id: PoolId) -> Router:
        """The router of a pool."""
        router = super().router(pool_id)
        router.feed.source._ring_frames = self.ring_frames
        return router

    def _new_reader(self, source: Feed) -> FeedReader:
        reader = super()._new_reader(source)
        if isinstance(source, SyncSource) and self.is_watched:
            active = self.router(source.pool).pool.active
            reader._sink = WatchedSink(reader._sink, active, source.router_id)
        return reader


class SimReplica(Process):
    """A frontend, from start to end."""

    def __init__(
        self,
        agenda: Agenda,
        net: Net,
        rng: random.Random,
        number: int,
        *,
        incarnation: int,
        histories: Histories,
        ring: int,
        is_watched: bool = True,
    ) -> None:
        super().__init__(agenda, skew_s=rng.uniform(-1e4, 1e6))
        self.line = Line(net, self, number)
        self.state: State = "up"
        self.replica = WatchedReplica(
            ReplicaSettings(synced=True), RouterId(f"r{number}"), incarnation, self._new_rules,
            chance=rng.random,
        )  # fmt: skip
        self.replica.ring_frames = ring
        self.replica.is_watched = is_watched
        self.running: dict[Running, int] = {}
        """The ledger: own requests in flight, with the tokens of their answers so far."""
        self._rng = rng
        self._histories = histories
        self._subjects = Subjects(NAMESPACE)
        self._inbox: deque[tuple[str, bytes, float]] = deque()
        self._is_drain_due = False
        self._is_flush_due = False
        self._requests: dict[Feed, ReplayRequest] = {}
        self._was_ready = False

    def _new_rules(self, _pool: PoolId) -> RouterRules:
        return RouterRules(Kv(), self._rng.random)

    def start(self) -> None:
        """Subscribe, connect, publish heartbeats."""
        subjects = self._subjects
        self.line.listen(subjects.live, self._receive)
        self.line.listen(subjects.hello, lambda *_: self._answer_hello())
        self.line.listen(subjects.sync_replay(self.replica.router_id), self._answer_replay)
        self.line.on_connect(self._say_hello)
        self.line.connect()
        self._beat()
        self._tick()

    def leave(self) -> None:
        """Finish the running requests, then leave."""
        self.drain_requests()
        self._flush()
        self.state = "leave"
        self._publish_heartbeat()
        self.kill()

    # Requests

    def act(self, rng: random.Random) -> None:
        """A client's request begins, continues or ends."""
        if not self.running or (len(self.running) < 12 and rng.random() < 0.4):
            self.place(rng)
            return
        running = rng.choice(sorted(self.running))
        router, key = self.replica.router(running[0]), running[1]
        match rng.choice(("first byte", "progress", "free", "retry")):
            case "first byte":
                router.bookings.first_byte(key, self.now())
            case "progress":
                self.running[running] += rng.randrange(1, 6)
                router.bookings.progress(key, self.running[running])
            case "free":
                self.free(running)
            case "retry":
                self.free(running)
                self.place(rng)
        self._flush_soon()

    def drain_requests(self) -> None:
        """Finish all requests."""
        for running in list(self.running):
            self.free(running)
        self._flush_soon()

    def place(self, rng: random.Random) -> None:
        """A request begins, if a target serves whole requests: a forged card may have another role."""
        routers = [router for _, router in sorted(self.replica.routers.items())]
        pools = [r for r in routers if r.pool.targets.keys() - r.pool.split.others]
        if not pools:
            return
        hashes = LIBRARY.hashes(rng.randrange(LIBRARY_SIZE))
        isl = BLOCK_SIZE * len(hashes) + rng.randrange(2)
        request = RouteRequest("req", (Prompt(hashes, isl, block_size=BLOCK_SIZE),))
        router = rng.choice(pools)
        placement = router.route(request, self.now(), streamed=rng.random() < 0.7)
        self.running[router.pool.id, placement.key] = 0
        self._flush_soon()

    def free(self, running: Running) -> None:
        """The request ends."""
        del self.running[running]
        self.replica.router(running[0]).bookings.free(running[1])

    # As ReplicaLoop does it

    def _receive(self, subject: str, data: bytes, _reply: str) -> None:
        self._inbox.append((subject, data, self.now()))
        self._drain_soon()

    def _drain_soon(self) -> None:
        if not self._is_drain_due:
            self._is_drain_due = True
            self.after(self._rng.uniform(0.0, 0.002), self._drain_slice)

    def _drain_slice(self) -> None:
        self._is_drain_due = False
        now = self.now()
        for _ in range(min(len(self._inbox), self._rng.randrange(1, 8))):
            self._dispatch(*self._inbox.popleft(), now)
        self.replica.settle()
        self._ask()
        has_work = self._work(now)
        if not has_work:
            self._ask()
        self.look()
        if self._inbox or has_work:
            self._drain_soon()

    def _work(self, now: float) -> bool:
        """Load one slice of a snapshot, or sweep; returns whether there is more."""
        is_loading = any(reader.is_loading for reader in self.replica.readers.values())
        return all(self.replica.work(now) for _ in range(1 if is_loading else SWEEPS))

    def _dispatch(self, subject: str, data: bytes, arrived: float, now: float) -> None:
        match self._subjects.parse_live(subject):
            case KvSource() as source:
                self.replica.feeds.kv_frame(source, data, now)
            case SyncSource() as source:
                self.replica.sync_frame(source, data, now)
            case WorkerSource(worker_id):
                self.replica.worker_heartbeat(worker_id, data, arrived, settles=False)
            case RouterSource(router_id):
                self.replica.router_heartbeat(router_id, data, arrived)
            case None:
                assert not self.replica.is_watched, f"who sends on {subject}?"

    def look(self) -> None:
        """At every moment live copies are exact, and a ready replica stays ready."""
        if self.replica.is_watched:
            check_live_copies(self.replica, self._histories)
        is_ready = not self.replica.readiness.not_ready(self.now())
        assert is_ready or not self._was_ready, "it was ready, and no longer is"
        self._was_ready = is_ready

    def _ask(self) -> None:
        for source in self.replica.feeds.take_cancelled():
            self._requests.pop(source, None)
        for source, request in self.replica.feeds.due(self.now(), RECOVERIES - len(self._requests)):
            self._recover(source, request)

    def _recover(self, source: Feed, request: ReplayRequest) -> None:
        def ends() -> bool:
            """Whether the request is still awaited: not if its feed has ended, even if that began again."""
            if self._requests.get(source) is not request:
                return False
            del self._requests[source]
            return True

        def answered(data: bytes) -> None:
            if not ends():
                return
            self.replica.feeds.answered(source, data, self.now())
            self.look()
            self._drain_soon()

        def failed() -> None:
            if ends():
                self.replica.feeds.failed(source, self.now())

        self._requests[source] = request
        subject, payload = self._subjects.replay(source), encode_request(request)
        self.line.request(subject, payload, ANSWER_TIMEOUT_S, answered, failed)

    def _answer_replay(self, _subject: str, data: bytes, reply: str) -> None:
        try:
            request = decode_request(data)
        except MalformedFrameError:
            return
        router = self.replica.routers.get(PoolId(str(request.part)))
        if router is not None:
            self._flush()
            self.line.publish(reply, router.feed.source.answer(request, self.line.max_payload, self.now()))

    def _flush_soon(self) -> None:
        if not self._is_flush_due:
            self._is_flush_due = True
            self.after(0.0, self._flush)

    def _flush(self) -> None:
        self._is_flush_due = False
        self._publish(lambda router: router.feed.frames())

    def _publish(self, frames_of: Callable[[Router], list[bytes]]) -> None:
        router_id = self.replica.router_id
        for pool_id, router in self.replica.routers.items():
            frames = frames_of(router)
            source = SyncSource(pool_id, router_id)
            facts = booking_facts(self.replica, pool_id, router_id)
            self._histories.note(source, self.replica.incarnation, router.feed.source.seq, facts)
            for frame in frames:
                self.line.publish(self._subjects.live_sync(pool_id, router_id), frame)

    def _publish_heartbeat(self, *, names_workers: bool = False) -> None:
        beat = self.replica.heartbeat(self.state, "", names_workers=names_workers)
        self.line.publish(self._subjects.live_router(self.replica.router_id), encode_beat(beat))

    def _say_hello(self) -> None:
        self.line.publish(self._subjects.hello, b"")
        self.replica.hello_sent(self.now())
        self._publish_heartbeat()

    def _answer_hello(self) -> None:
        self._flush()
        self._publish_heartbeat(names_workers=True)

    def _beat(self) -> None:
        self.replica.next_round(self.now())
        self._publish(lambda router: router.feed.check_frames(self.now()))
        if self.replica.hello() is not None:
            self.line.publish(self._subjects.hello, b"")
        self._publish_heartbeat()
        self.after(HEARTBEAT_S, self._beat)

    def _tick(self) -> None:
        now = self.now()
        for router in self.replica.routers.values():
            for key in router.bookings.due(now):
                router.bookings.mark_prefill_completed(key, now)
                self._flush_soon()
        self._ask()
        self.after(TICK_S, self._tick)
