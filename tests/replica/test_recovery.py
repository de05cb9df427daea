"""Frames that a feed lacks are requested from its source."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from kvrouter.core.feeds.source import FeedSource
from kvrouter.core.feeds.trust import FeedState
from kvrouter.core.wire.hashes import pack_hashes
from kvrouter.core.wire.heartbeats import RankBeat, WorkerBeat, encode
from kvrouter.core.wire.ids import WorkerId
from kvrouter.core.wire.ops import VERSION, Stored, decode_request
from tests.frontend.fleet import POOL, FleetOf
from tests.frontend.workers import (
    until,
)
from tests.replica.agents import HASHES, Agent, blocks, first_reader


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
        tasks = fleet.frontend.replica_loop.recovery._tasks
        (task,) = tasks.values()

        fleet.announce(fleet.workers[0], state="leave")
        await until(task.done, "its recovery is cancelled")

        assert task.cancelled()
        assert {} == tasks


async def test_answer_on_the_subject_of_another_worker(fleet_of: FleetOf) -> None:
    """Whoever may answer in another name only, because of its NATS user, cannot answer this request."""
    async with fleet_of(publishes_events=True) as fleet:
        agent = Agent(fleet)

        def answer(subject: str, data: bytes, reply: str) -> None:
            assert ".answer.kv.w0." in reply
            fleet.bus.publish(reply.replace(".w0.", ".w9."), b"garbage")
            agent.answer(subject, data, reply)

        await fleet.bus.subscribe(fleet.subjects.kv_replay(WorkerId("w0")), answer)
        agent.publish(Stored(0, None, pack_hashes(HASHES[:3])), lost=True)
        agent.beat()
        await until(lambda: blocks(fleet) == 3, "the snapshot is loaded")

        assert [] == fleet.logged("feed.malformed")


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
                agent.answer(_subject, data, reply)

        agent.answers = True
        await fleet.bus.subscribe(fleet.subjects.kv_replay(WorkerId("w0")), answer)
        agent.publish(Stored(0, None, pack_hashes(HASHES[:3])), lost=True)
        agent.beat()
        await until(lambda: blocks(fleet) == 3, "the snapshot is loaded")

        assert not answers
        (logged,) = fleet.logged("feed.malformed")
        assert ">= 0" in logged["error"]
        assert 0 == fleet.frontend.replica_loop.log.errors


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
