"""The KV feed of a worker as its agent keeps it, for tests of the replica's shell."""

from __future__ import annotations

from kvrouter.core.feeds.reader import FeedReader
from kvrouter.core.feeds.source import FeedSource
from kvrouter.core.wire.hashes import block_hashes, pack_hashes, sequence_hashes
from kvrouter.core.wire.heartbeats import RankBeat, WorkerBeat, encode
from kvrouter.core.wire.ids import WorkerId
from kvrouter.core.wire.ops import VERSION, Op, Stored, decode_request
from tests.frontend.fleet import POOL, Fleet
from tests.frontend.workers import (
    until,
)

HASHES = sequence_hashes(block_hashes(list(range(64)), 16))


class Agent:
    """The KV feed of worker w0 as its agent keeps it; it answers replay requests if `answers`."""

    def __init__(self, fleet: Fleet, *, answers: bool = True) -> None:
        self.source = FeedSource(5, lambda _now: [self._all()])
        self.asked = 0
        self._fleet = fleet
        self.answers = answers

    def _all(self) -> Op:
        return Stored(0, None, pack_hashes(HASHES[:3]))

    async def listen(self) -> None:
        """Receive replay requests."""
        await self._fleet.bus.subscribe(self._fleet.subjects.kv_replay(WorkerId("w0")), self.answer)

    def answer(self, _subject: str, data: bytes, reply: str) -> None:
        self.asked += 1
        if self.answers:
            self._fleet.bus.publish(reply, self.source.answer(decode_request(data), 2**20, 0.0))

    def publish(self, *ops: Op, lost: bool = False) -> None:
        """Send a frame, or lose it."""
        for frame in self.source.append(ops):
            if not lost:
                self._fleet.bus.publish(self._fleet.subjects.live_kv(POOL, WorkerId("w0"), 0), frame)

    def beat(self) -> None:
        """Publish a heartbeat with the feed's seq."""
        beat = WorkerBeat(VERSION, 1, "up", POOL, [RankBeat(0, 5, self.source.seq)], 1)
        self._fleet.bus.publish(self._fleet.subjects.live_worker(WorkerId("w0")), encode(beat))


def blocks(fleet: Fleet) -> int:
    """Blocks in the frontend's index."""
    return len(fleet.frontend.replica.routers[POOL].pool.index)


async def first_reader(fleet: Fleet) -> FeedReader:
    """The first feed that the frontend follows."""
    await until(lambda: fleet.frontend.replica.readers, "a feed is followed")
    return next(iter(fleet.frontend.replica.readers.values()))
