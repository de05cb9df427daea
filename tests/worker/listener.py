"""Another process on the bus, which receives an agent's frames and requests missing ones."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from kvrouter.bus import Bus, NatsOptions, Subjects
from kvrouter.core.wire.hashes import pool_token
from kvrouter.core.wire.heartbeats import WorkerBeat, decode_worker_beat
from kvrouter.core.wire.ids import PoolId, WorkerId
from kvrouter.core.wire.ops import (
    VERSION,
    Answer,
    Op,
    ReplayRequest,
    SnapshotChunk,
    decode_answer,
    decode_frame,
)
from kvrouter.core.wire.ops import encode as encode_op
from kvrouter.errors import MalformedFrameError
from tests.bus.watching import ask
from tests.worker.closed_sets import ClosedSets


class Listener:
    """Receives the heartbeats and frames of one worker, and reads its feed."""

    def __init__(self, bus: Bus, namespace: str, worker_id: WorkerId) -> None:
        self.bus = bus
        self._worker_id = worker_id
        self.subjects = Subjects(namespace)
        self.beats: asyncio.Queue[WorkerBeat] = asyncio.Queue()
        self.live_ops: list[Op] = []
        self._reader = ClosedSets()
        self._life = (0, 0)  # incarnation, and the last frame of it that is applied
        self._sent = (0, 0)
        self._has_heard = asyncio.Event()

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls, nats_url: str, namespace: str, model: str, worker: str = "w"
    ) -> AsyncIterator[Listener]:
        """Connect and subscribe."""
        async with Bus.open(NatsOptions((nats_url,)), name="listener") as bus:
            worker_id = WorkerId(worker)
            listener = cls(bus, namespace, worker_id)
            kv_subject = listener.subjects.live_kv(PoolId(pool_token(model)), worker_id, 0)
            await bus.subscribe(listener.subjects.live_worker(worker_id), listener.on_beat)
            await bus.subscribe(kv_subject, listener.on_frame)
            connected = asyncio.Event()
            bus.on_connect(connected.set)
            await connected.wait()
            yield listener

    def on_beat(self, subject: str, payload: bytes, reply: str) -> None:
        """Take a heartbeat, which has the number of the last frame."""
        beat = decode_worker_beat(payload, WorkerId(subject.rpartition(".")[2]))
        self.beats.put_nowait(beat)
        self._sent = max([self._sent, *((rank.incarnation, rank.seq) for rank in beat.ranks)])
        self._has_heard.set()

    def on_frame(self, subject: str, payload: bytes, reply: str) -> None:
        """Take a frame: apply it if it is the next one. The first frame of a new life empties the sets."""
        frame = decode_frame(payload)
        if frame.incarnation > self._life[0] and frame.seq == 1:
            self._reader, self._life = ClosedSets(), (frame.incarnation, 0)
        self._take(payload)
        self._sent = max(self._sent, (frame.incarnation, frame.seq))
        self._has_heard.set()

    async def beat(self, is_wanted: Callable[[WorkerBeat], bool]) -> WorkerBeat:
        """The next heartbeat that fits."""
        async with asyncio.timeout(10):
            while not is_wanted(beat := await self.beats.get()):
                pass
        return beat

    @property
    def held(self) -> set[int]:
        """The blocks in the device set."""
        return self._reader.tiers[0]

    async def until_held(self, hashes: set[int]) -> None:
        """Return when the device set has these blocks."""
        await self.until(lambda: self.held == hashes)

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Return when `is_so` holds at the newest known frame."""
        async with asyncio.timeout(10):
            while self._life < self._sent or not is_so():
                if self._life < self._sent:
                    await self._recover()
                else:
                    self._has_heard.clear()
                    await self._has_heard.wait()

    async def usurp(self, later: WorkerBeat) -> None:
        """Send heartbeats of a later agent with the same worker id, between the agent's heartbeats."""
        subject = self.subjects.live_worker(self._worker_id)
        self.bus.publish(subject, encode_op(later))
        await self.beat(lambda beat: beat == later)
        for _ in range(2):
            await self.beat(lambda beat: beat != later)
        self.bus.publish(subject, encode_op(later))

    async def snapshot(self) -> SnapshotChunk:
        """Request everything from the agent."""
        answer = await self._ask(0, 0)
        assert isinstance(answer, SnapshotChunk)
        return answer

    async def _ask(self, incarnation: int, from_seq: int) -> Answer:
        request = encode_op(ReplayRequest(VERSION, 0, incarnation, from_seq))
        subject = self.subjects.kv_replay(self._worker_id)
        return decode_answer(await ask(self.bus, subject, request))

    async def _recover(self) -> None:
        """Request frames, or a snapshot if the agent no longer has them; one that ends may not answer."""
        incarnation, seq = self._life
        try:
            async with asyncio.timeout(1):
                answer = await self._ask(incarnation, seq + 1)
        except (TimeoutError, MalformedFrameError):  # no answer; an empty one: nothing has subscribed
            await asyncio.sleep(0.05)
            return
        if isinstance(answer, SnapshotChunk):
            self._reader = ClosedSets().apply(answer.ops)
            self._life = (answer.incarnation, answer.as_of_seq)
            return
        for frame in answer.frames:
            self._take(frame)

    def _take(self, payload: bytes) -> None:
        frame = decode_frame(payload)
        if (frame.incarnation, frame.seq - 1) == self._life:
            self._reader.apply(frame.ops or ())
            self.live_ops += frame.ops or ()
            self._life = (frame.incarnation, frame.seq)
