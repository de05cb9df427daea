"""The inbox applies what arrives, also garbage, and holds no more than its bound."""

from __future__ import annotations

import os
import random

import pytest

from kvrouter.core.feeds.sinks import KvSink
from kvrouter.core.feeds.source import FeedSource
from kvrouter.core.feeds.trust import FeedState
from kvrouter.core.wire.hashes import pack_hashes
from kvrouter.core.wire.heartbeats import RankBeat, RouterBeat, WorkerBeat, encode
from kvrouter.core.wire.ids import RouterId, WorkerId
from kvrouter.core.wire.ops import VERSION, Stored
from kvrouter.replica.inbox import INBOX_BYTES, MESSAGE_BYTES
from tests.frontend.fleet import POOL, FleetOf
from tests.frontend.workers import (
    OK,
    until,
)
from tests.replica.agents import HASHES, Agent, blocks, first_reader

SYNCED = ("--router-mode", "kv", "--router-replica-sync")


async def test_frames_reach_the_index(fleet_of: FleetOf) -> None:
    """The next request finds the blocks that an agent has published."""
    async with fleet_of("--router-mode", "kv", publishes_events=True) as fleet:
        agent = Agent(fleet)
        agent.beat()
        agent.publish(Stored(0, None, pack_hashes(HASHES[:3])))
        await until(lambda: blocks(fleet) == 3, "the frame is applied")

        assert "3" == (await fleet.ask()).header("x-kvrouter-overlap-blocks")


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


async def test_bug_behind_a_feed(fleet_of: FleetOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a feed that raises is logged once with its traceback; requests are served."""
    async with fleet_of(publishes_events=True) as fleet:
        agent = Agent(fleet)
        agent.beat()
        reader = await first_reader(fleet)
        monkeypatch.setattr(KvSink, "apply", lambda *_: 1 / 0)
        for _ in range(3):
            agent.publish(Stored(1, None, pack_hashes(HASHES[:3])))
        await until(lambda: fleet.frontend.replica_loop.log.errors, "it is counted")

        assert FeedState.BROKEN is reader.state
        (logged,) = fleet.logged("feed.error")
        assert "kv w0/0" == logged["about"]
        assert 200 == (await fleet.ask()).status
        fleet.trouble.logs.clear()


async def test_full_inbox(fleet_of: FleetOf) -> None:
    """Messages beyond the inbox's bound are dropped and counted."""
    data = bytes(INBOX_BYTES // 10 - MESSAGE_BYTES)
    async with fleet_of(scripts=(OK,)) as fleet:
        inbox = fleet.frontend.replica_loop.inbox
        subject = fleet.subjects.live_kv(POOL, WorkerId("w0"), 0)
        for drops in (10, 20):
            for _ in range(20):
                inbox.receive([(subject, data, "")])

            assert (10, drops) == (inbox.messages, inbox.drops)
            await until(lambda: not inbox.messages, "it is drained")


async def test_backlog(fleet_of: FleetOf) -> None:
    """Messages beyond one slice are applied in the next turns, without any further message."""
    async with fleet_of("--heartbeat-s", "10", "--lease-s", "300") as fleet:
        inbox = fleet.frontend.replica_loop.inbox
        for _ in range(20_000):
            inbox.receive([("kvrouter.x.live.nothing", b"", "")])
        assert 20_000 == inbox.messages
        assert inbox.age_s > 0

        await until(lambda: not inbox.messages, "all are applied")
        assert (0, 0.0) == (inbox.messages, inbox.age_s)
