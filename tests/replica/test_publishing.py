"""A replica publishes its bookings, heartbeats and answers to hellos."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from unittest.mock import Mock

import pytest

from kvrouter.core.wire.heartbeats import RouterBeat, decode_router_beat
from kvrouter.core.wire.ids import RouterId
from kvrouter.replica.publishing import SPACED_S
from tests.frontend.fleet import STREAM, FleetOf
from tests.frontend.workers import (
    SSE_HEAD,
    chunk,
    event,
    says_and_stalls,
    until,
)

SYNCED = ("--router-mode", "kv", "--router-replica-sync")
ONE = SSE_HEAD + chunk(event("a"))


async def test_hello_is_answered(fleet_of: FleetOf) -> None:
    """A hello is answered with a heartbeat, without waiting for the next one."""
    received: list[RouterBeat] = []
    async with fleet_of("--heartbeat-s", "10", "--lease-s", "600") as fleet:
        subject = fleet.subjects.live_router(fleet.frontend.replica.router_id)
        await fleet.bus.subscribe(subject, lambda _s, data, _r: received.append(decode_router_beat(data)))
        fleet.bus.publish(fleet.subjects.hello, b"")
        await until(lambda: received, "the answer")

        assert ("up", fleet.frontend.admin_url) == (received[0].state, received[0].address)


async def test_flood_of_hellos(fleet_of: FleetOf) -> None:
    """Hellos that arrive together get few answers, because an answer names all workers and is costly."""
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


async def test_spaced_frames(fleet_of: FleetOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """What happens within SPACED_S of a frame is told in one more, after that time."""
    async with fleet_of(*SYNCED) as fleet:
        publishing = fleet.frontend.replica_loop.publishing
        publishing.flush()
        loop = Mock(**{"time.return_value": asyncio.get_running_loop().time() + 2 * SPACED_S})
        with monkeypatch.context() as patch:  # nothing else runs in between
            patch.setattr(publishing, "_loop", loop)
            publishing.flush_spaced()
            loop.call_soon.assert_called_once_with(publishing.flush)
            publishing.flush()
            loop.time.return_value += SPACED_S / 4
            for _ in range(3):
                publishing.flush_spaced()
            ((after_s, flush),) = [call.args for call in loop.call_later.call_args_list]
            assert (pytest.approx(0.75 * SPACED_S), publishing.flush) == (after_s, flush)
        publishing.flush()


async def test_without_sync(fleet_of: FleetOf) -> None:
    """Without sync a replica publishes no bookings."""
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
