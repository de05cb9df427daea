"""The replica on the bus: it receives, publishes and repairs."""

from __future__ import annotations

import asyncio
import os
import random
from contextlib import AsyncExitStack
from functools import partial

import pytest

from kvrouter.core.feeds.reader import FeedReader
from kvrouter.core.feeds.source import FeedSource
from kvrouter.core.feeds.trust import FeedState
from kvrouter.core.wire.hashes import block_hashes, pack_hashes, sequence_hashes
from kvrouter.core.wire.heartbeats import RankBeat, RouterBeat, WorkerBeat, decode_router_beat, encode
from kvrouter.core.wire.ids import RouterId, WorkerId
from kvrouter.core.wire.ops import VERSION, Op, Stored, decode_request
from tests.frontend.fleet import BODY, POOL, STREAM, Fleet, FleetOf
from tests.frontend.workers import (
    OK,
    SSE_HEAD,
    answer,
    chunk,
    event,
    says_and_stalls,
    until,
)

SYNCED = ("--router-mode", "kv", "--router-replica-sync")
HASHES = sequence_hashes(block_hashes(list(range(64)), 16))
ONE = SSE_HEAD + chunk(event("a"))


class Agent:
    """The KV feed of worker w0 as its agent keeps it; it answers replay requests if `answers`."""

    def __init__(self, fleet: Fleet, *, answers: bool = True) -> None:
        self.source = FeedSource(5, lambda _now: [self._all()])
        self.asked = 0
        self._fleet = fleet
        self._answers = answers

    def _all(self) -> Op:
        return Stored(0, None, pack_hashes(HASHES[:3]))

    async def listen(self) -> None:
        """Receive replay requests."""
        await self._fleet.bus.subscribe(self._fleet.subjects.kv_replay(WorkerId("w0")), self._answer)

    def _answer(self, _subject: str, data: bytes, reply: str) -> None:
        self.asked += 1
        if self._answers:
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


async def test_frames_reach_the_index(fleet_of: FleetOf) -> None:
    """The next request finds the blocks that an agent has published."""
    async with fleet_of("--router-mode", "kv", publishes_events=True) as fleet:
        agent = Agent(fleet)
        agent.beat()
        agent.publish(Stored(0, None, pack_hashes(HASHES[:3])))
        await until(lambda: blocks(fleet) == 3, "the frame is applied")

        assert "3" == (await fleet.ask()).header("x-kvrouter-overlap-blocks")


async def test_lost_frame_is_repaired(fleet_of: FleetOf) -> None:
    """The next heartbeat shows that a frame was lost, and the frame is replayed."""
    async with fleet_of(publishes_events=True) as fleet:
        agent = Agent(fleet)
        await agent.listen()
        agent.beat()
        agent.publish(Stored(0, None, pack_hashes(HASHES[:2])), lost=True)
        agent.beat()
        await until(lambda: blocks(fleet) == 2, "the frame is replayed")

        assert 1 == agent.asked


async def test_snapshot(fleet_of: FleetOf) -> None:
    """A replica that missed all frames gets a snapshot."""
    async with fleet_of(publishes_events=True) as fleet:
        agent = Agent(fleet)
        await agent.listen()
        agent.publish(Stored(0, None, pack_hashes(HASHES[:3])), lost=True)
        agent.beat()

        await until(lambda: blocks(fleet) == 3, "the snapshot is loaded")


async def test_no_answer(fleet_of: FleetOf) -> None:
    """An agent that does not answer is asked again. Leaving does not wait for its answer."""
    async with fleet_of(publishes_events=True) as fleet:
        agent = Agent(fleet, answers=False)
        agent.publish(Stored(0, None, pack_hashes(HASHES[:3])), lost=True)
        agent.beat()
        reader = await first_reader(fleet)
        await until(lambda: reader.counters.failures >= 2, "asked again")
        await agent.listen()
        await until(lambda: agent.asked, "asked, and it does not answer")
        started_at = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - started_at < 1.5


async def test_sixteen_recoveries_at_once(fleet_of: FleetOf) -> None:
    """Of forty feeds to be repaired sixteen are requested at a time, the next after each answer."""
    asked: list[tuple[bytes, str]] = []
    async with fleet_of(publishes_events=True, ranks=40) as fleet:
        subject = fleet.subjects.kv_replay(WorkerId("w0"))
        await fleet.bus.subscribe(subject, lambda _s, data, reply: asked.append((data, reply)))
        beat = WorkerBeat(VERSION, 1, "up", POOL, [RankBeat(rank, 5, 1) for rank in range(40)], 1)
        fleet.bus.publish(fleet.subjects.live_worker(WorkerId("w0")), encode(beat))
        await until(lambda: len(asked) == 16, "the first are asked")
        for turn in range(40):
            await until(partial(lambda turn: turn < len(asked), turn), "one more is asked")
            assert len(asked) <= 16 + turn
            data, reply = asked[turn]
            source = FeedSource(5, lambda _now: [Stored(0, None, pack_hashes(HASHES[:1]))])
            source.append([Stored(0, None, pack_hashes(HASHES[:1]))])
            fleet.bus.publish(reply, source.answer(decode_request(data), 2**20, 0.0))
        readers = fleet.frontend.replica.readers.values()
        await until(lambda: all(reader.state is FeedState.LIVE for reader in readers), "all are repaired")


async def test_answer_of_a_worker_that_left_is_not_awaited(fleet_of: FleetOf) -> None:
    """Its recovery is cancelled at once, without waiting for the timeout."""
    async with fleet_of(publishes_events=True) as fleet:
        agent = Agent(fleet, answers=False)
        await agent.listen()
        agent.publish(Stored(0, None, pack_hashes(HASHES[:3])), lost=True)
        agent.beat()
        await until(lambda: agent.asked, "it is asked")
        (task,) = fleet.frontend.replica_loop.recovery._tasks.values()

        fleet.announce(fleet.workers[0], state="leave")
        await until(task.done, "its recovery is cancelled")

        assert task.cancelled()
        assert {} == fleet.frontend.replica_loop.recovery._tasks


async def first_reader(fleet: Fleet) -> FeedReader:
    """The first feed that the frontend follows."""
    await until(lambda: fleet.frontend.replica.readers, "a feed is followed")
    return next(iter(fleet.frontend.replica.readers.values()))


async def test_hello_is_answered(fleet_of: FleetOf) -> None:
    """A hello is answered with a heartbeat, without waiting for the next one."""
    received: list[RouterBeat] = []
    async with fleet_of("--heartbeat-s", "10", "--lease-s", "600") as fleet:
        subject = fleet.subjects.live_router(fleet.frontend.replica.router_id)
        await fleet.bus.subscribe(subject, lambda _s, data, _r: received.append(decode_router_beat(data)))
        fleet.bus.publish(fleet.subjects.hello, b"")
        await until(lambda: received, "the answer")

        assert ("up", fleet.frontend.admin_url) == (received[0].state, received[0].address)


async def test_leave(fleet_of: FleetOf) -> None:
    """The last heartbeat of a replica states that it leaves."""
    received: list[RouterBeat] = []
    async with AsyncExitStack() as outer:
        watcher = await outer.enter_async_context(fleet_of(scripts=()))
        async with fleet_of() as fleet:
            subject = fleet.subjects.live_router(fleet.frontend.replica.router_id)
            await watcher.bus.subscribe(
                subject, lambda _s, data, _r: received.append(decode_router_beat(data))
            )
            fleet.bus.publish(fleet.subjects.hello, b"")
            await until(lambda: received, "it publishes")
        await until(lambda: received[-1].state == "leave", "it leaves")


async def test_peers_see_bookings(fleet_of: FleetOf) -> None:
    """With sync every replica counts a request of any replica, until its client leaves."""
    async with fleet_of(*SYNCED, scripts=(says_and_stalls(ONE),), replicas=2) as fleet:
        async with fleet.connected() as client:
            client.send(STREAM)
            await until(lambda: fleet.bookings() == 2, "both count it")
        await fleet.until_free()


async def test_without_sync(fleet_of: FleetOf) -> None:
    """Without sync a replica publishes no bookings and ignores those of peers."""
    script = says_and_stalls(ONE)
    async with fleet_of(scripts=(script,), replicas=2) as fleet, fleet.connected() as client:
        client.send(STREAM)
        await client.read_until(event("a"))
        await until(lambda: fleet.frontends[1].replica.peers, "the peer is known")
        counted = fleet.bookings()
        client.leave()

        assert 1 == counted


async def test_joiner_learns_of_bookings(fleet_of: FleetOf) -> None:
    """A replica that has missed the bookings of another gets them from its snapshot."""
    async with fleet_of(
        *SYNCED, "--heartbeat-s", "0.1", scripts=(says_and_stalls(ONE),), replicas=2
    ) as fleet:
        first, second = fleet.frontends
        async with fleet.connected() as client:
            client.send(STREAM)
            await until(lambda: fleet.bookings() == 2, "both count it")
            second.replica._remove_router(RouterId(first.replica.router_id))  # as if its lease had ended
            assert 1 == fleet.bookings()
            await until(lambda: fleet.bookings() == 2, "the snapshot brings it back")
        await fleet.until_free()


async def test_output_blocks(fleet_of: FleetOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that an answer fills are booked as it grows."""
    texts = [chunk(event(str(number))) for number in range(40)]
    async with fleet_of("--router-mode", "kv", scripts=(says_and_stalls(SSE_HEAD, *texts),)) as fleet:
        pool = fleet.frontend.replica.routers[POOL].pool
        (target,) = pool.targets
        async with fleet.connected() as client:
            client.send(STREAM)
            await client.read_until(texts[-1])
            await fleet.frontend.completions.report_progress()

            assert 64 // 16 + 40 // 16 == pool.active.blocks(target)


async def test_predicted_end_of_prefill(fleet_of: FleetOf) -> None:
    """An answer that is not streamed has no first token: the end of its prefill is predicted."""
    async with fleet_of("--router-mode", "kv", scripts=(says_and_stalls(),)) as fleet:
        router = fleet.frontend.replica.routers[POOL]
        pool = router.pool
        (target,) = pool.targets
        router.tables.rates.observe(target, 64, 0.01)
        async with fleet.connected() as client:
            client.send(BODY)
            await until(lambda: pool.active.requests(target), "it runs")
            await until(lambda: pool.active.charged_tokens(target) == 0, "its prefill is over")


async def test_garbage_on_the_bus(fleet_of: FleetOf) -> None:
    """Garbage on any subject: requests are served and no error is logged."""
    chance = random.Random(7)
    async with fleet_of(*SYNCED, publishes_events=True) as fleet:
        router_id, subjects = fleet.frontend.replica.router_id, fleet.subjects
        whole = [
            encode(WorkerBeat(VERSION, 1, "up", POOL, [RankBeat(0, 1, 3)], 1)),
            encode(RouterBeat(VERSION, 1, "up", "", {POOL: 3}, 1)),
            FeedSource(1, lambda _now: []).append([Stored(0, None, pack_hashes(HASHES))])[0],
        ]
        addresses = [
            subjects.hello,
            subjects.live_worker(WorkerId("w0")),
            subjects.live_worker(WorkerId("w9")),
            subjects.live_kv(POOL, WorkerId("w0"), 0),
            subjects.live_router(RouterId("peer")),
            subjects.live_sync(POOL, RouterId("peer")),
            subjects.sync_replay(router_id),
            subjects.live.replace(">", "what.is.this"),
        ]
        for _ in range(600):
            data = bytearray(chance.choice(whole) if chance.random() < 0.7 else os.urandom(20))
            for _ in range(chance.randrange(3)):
                data[chance.randrange(len(data))] = chance.randrange(256)
            fleet.bus.publish(chance.choice(addresses), bytes(data))
        received = fleet.bus.counters.received
        await fleet.bus.subscribe(subjects.live_router(router_id), lambda *_: None)
        fleet.bus.publish(subjects.hello, b"")
        await until(lambda: fleet.bus.counters.received > received, "the frontend still answers a hello")

        assert 200 == (await fleet.ask()).status
        assert 0 == fleet.frontend.replica_loop.log.errors


async def test_bug_behind_a_message(fleet_of: FleetOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that raises is counted and logged with its traceback; later messages are applied."""
    async with fleet_of() as fleet:
        with monkeypatch.context() as patch:
            patch.setattr(fleet.frontend.replica, "worker_heartbeat", lambda *_: 1 / 0)
            fleet.announce(fleet.workers[0])
            await until(lambda: fleet.frontend.replica_loop.log.errors == 1, "it is counted")
        fleet.announce(fleet.workers[0], state="draining")
        await until(lambda: not fleet.targets(fleet.frontend), "later messages are applied")

        (logged,) = fleet.logged("feed.error")
        assert "error" == logged["log_level"]
        fleet.trouble.logs.clear()


async def test_impossible_snapshot(fleet_of: FleetOf) -> None:
    """A parent outside 64 bits, in one answer, once ended every replica. Such an answer is rejected.

    The feed is asked again and recovers with the next answer.
    """
    answers = [[1, 1, 10, 0, 1, [[1, 0, -1, bytes(8)]], 5]]
    async with fleet_of(publishes_events=True) as fleet:
        agent = Agent(fleet, answers=False)

        def answer(_subject: str, data: bytes, reply: str) -> None:
            if answers:
                fleet.bus.publish(reply, encode(answers.pop()))
            else:
                agent._answer(_subject, data, reply)

        agent._answers = True
        await fleet.bus.subscribe(fleet.subjects.kv_replay(WorkerId("w0")), answer)
        agent.publish(Stored(0, None, pack_hashes(HASHES[:3])), lost=True)
        agent.beat()
        await until(lambda: blocks(fleet) == 3, "the snapshot is loaded")

        assert not answers
        (logged,) = fleet.logged("feed.malformed")
        assert ">= 0" in logged["error"]
        assert 0 == fleet.frontend.replica_loop.log.errors


async def test_bug_behind_a_feed(fleet_of: FleetOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a feed that raises is logged once with its traceback; requests are served."""
    async with fleet_of(publishes_events=True) as fleet:
        agent = Agent(fleet)
        agent.beat()
        reader = await first_reader(fleet)
        monkeypatch.setattr(reader._sink, "apply", lambda *_: 1 / 0)
        for _ in range(3):
            agent.publish(Stored(0, None, pack_hashes(HASHES[:3])))
        await until(lambda: fleet.frontend.replica_loop.log.errors, "it is counted")

        assert FeedState.BROKEN is reader.state
        (logged,) = fleet.logged("feed.error")
        assert "kv w0/0" == logged["about"]
        assert 200 == (await fleet.ask()).status
        fleet.trouble.logs.clear()


async def test_replay_request_with_a_bug(fleet_of: FleetOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader counts a failure and asks again."""
    async with fleet_of(publishes_events=True) as fleet:
        agent = Agent(fleet)
        await agent.listen()
        with monkeypatch.context() as patch:
            patch.setattr("kvrouter.replica.recovery.encode_request", lambda _request: 1 / 0)
            agent.publish(Stored(0, None, pack_hashes(HASHES[:3])), lost=True)
            agent.beat()
            reader = await first_reader(fleet)
            await until(lambda: reader.counters.failures, "the failure is counted")

        await until(lambda: blocks(fleet) == 3, "it is asked again")


async def test_flood_of_hellos(fleet_of: FleetOf) -> None:
    """Hellos that arrive together get one answer, because it names all workers and is costly."""
    received: list[RouterBeat] = []
    async with fleet_of("--heartbeat-s", "10", "--lease-s", "600") as fleet:
        subject = fleet.subjects.live_router(fleet.frontend.replica.router_id)
        await fleet.bus.subscribe(subject, lambda _s, data, _r: received.append(decode_router_beat(data)))
        for _ in range(2000):
            fleet.bus.publish(fleet.subjects.hello, b"")
        await until(lambda: received, "the answer")
        fleet.announce(fleet.workers[0], state="leave")
        await until(lambda: not fleet.targets(fleet.frontend), "everything before this has arrived")

        assert len(received) < 100


async def test_full_inbox(fleet_of: FleetOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages beyond the inbox's bound are dropped and counted."""
    monkeypatch.setattr("kvrouter.replica.inbox.INBOX_BYTES", 1000)
    async with fleet_of(scripts=(OK,)) as fleet:
        inbox = fleet.frontend.replica_loop.inbox
        subject = fleet.subjects.live_kv(POOL, WorkerId("w0"), 0)
        for _ in range(20):
            inbox.receive(subject, b"x" * 100, "")

        assert (10, 1000) == (inbox.drops, inbox._bytes)
        await until(lambda: not inbox.messages, "it is drained")
        assert 0 == inbox._bytes


async def test_backlog(fleet_of: FleetOf) -> None:
    """Messages beyond one slice are applied in the next turns, without any further message."""
    async with fleet_of("--heartbeat-s", "10", "--lease-s", "300") as fleet:
        inbox = fleet.frontend.replica_loop.inbox
        for _ in range(20_000):
            inbox.receive("kvrouter.x.live.nothing", b"", "")
        assert 20_000 == inbox.messages
        assert inbox.age_s > 0

        await until(lambda: not inbox.messages, "all are applied")
        assert (0, 0.0) == (inbox.messages, inbox.age_s)


async def test_worker_leaves(fleet_of: FleetOf) -> None:
    """A worker that has left gets no request."""
    async with fleet_of(scripts=(OK, OK)) as fleet:
        fleet.announce(fleet.workers[0], state="leave")
        await until(lambda: len(fleet.targets(fleet.frontend)) == 1, "it is gone")
        for _ in range(3):
            await fleet.ask()

        assert ["w1"] * 3 == fleet.requests


async def test_approximate_entries(fleet_of: FleetOf) -> None:
    """Without KV events every replica assumes the blocks of a request on its worker."""
    flags = (*SYNCED, "--no-kv-events")
    async with fleet_of(*flags, scripts=(OK,), replicas=2) as fleet:
        first = await fleet.ask()
        pools = [frontend.replica.routers[POOL].pool for frontend in fleet.frontends]
        await until(lambda: [len(pool.index) for pool in pools] == [4, 4], "both assume the blocks")
        second = await fleet.ask()

        assert ["0", "3"] == [each.header("x-kvrouter-overlap-blocks") for each in (first, second)]


async def test_no_entry_of_a_failure(fleet_of: FleetOf) -> None:
    """A request that failed leaves no assumed blocks."""
    flags = ("--router-mode", "kv", "--no-kv-events")
    async with fleet_of(*flags, scripts=(says_and_stalls(answer(b"{}", 500)),)) as fleet:
        await fleet.ask()

        assert 0 == blocks(fleet)
