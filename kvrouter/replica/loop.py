"""A replica on the bus: the shell around core/fleet/replica.py, used by the frontend and the library.

bus ──> Inbox ──> Replica          live messages, in slices
bus <──> Recovery <── Replica      replay requests for what feeds lack
bus <── Publishing <── Replica     own bookings, heartbeats, hellos; answers to those of others
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
import uuid
from collections.abc import Callable, Collection
from dataclasses import replace

from kvrouter.bus import Bus, Subjects
from kvrouter.core.fleet.replica import Replica, ReplicaSettings
from kvrouter.core.fleet.router import RouterRules
from kvrouter.core.wire.heartbeats import Traffic
from kvrouter.core.wire.ids import PoolId, RouterId
from kvrouter.replica.awaited import AwaitedWorkers
from kvrouter.replica.feed_log import FeedLog
from kvrouter.replica.inbox import Inbox
from kvrouter.replica.members import Members
from kvrouter.replica.publishing import Publishing
from kvrouter.replica.recovery import Recovery

TICK_S = 0.1


def empty_replica(
    settings: ReplicaSettings,
    new_rules: Callable[[PoolId], RouterRules],
    replica_id: str = "",
) -> Replica:
    """A replica without any state: a random id, an incarnation from the clock, a random placement secret.

    `replica_id`: use this id instead of a random one.
    """
    # clients choose prompts, and so hashes: without a secret they could crowd them in a table
    settings = replace(settings, pool=replace(settings.pool, placement_secret=secrets.randbits(64)))
    return Replica(
        settings,
        RouterId(replica_id or uuid.uuid4().hex[:12]),
        time.time_ns() // 1000,  # greater than that of an earlier process with this id
        new_rules,
        chance=random.random,
    )


def first_turn(chance: Callable[[], float] = random.random) -> int:
    """Where a policy that takes targets in turn begins: not all replicas should begin with the same one."""
    return int(chance() * 1_000_000)


class ReplicaLoop:
    """Keeps a replica in step with the bus while `run` runs, after `subscribe`.

    `on_change` is called when bookings or workers may have changed, here or at a peer. `traffic` returns what
    the replica has served, for its heartbeats. `address`, `clients_url`, `own_urls`: see Publishing.
    """

    def __init__(
        self,
        replica: Replica,
        bus: Bus,
        subjects: Subjects,
        *,
        heartbeat_s: float,
        address: str = "",
        clients_url: str = "",
        own_urls: Collection[str] = (),
        on_change: Callable[[], None] | None = None,
        traffic: Callable[[], Traffic] | None = None,
    ) -> None:
        self.log = FeedLog()
        self.members = Members(replica)
        self.recovery = Recovery(replica, bus, subjects, self.log)
        self.inbox = Inbox(replica, subjects, self.members, self.recovery, self.log, on_change=on_change)
        self.publishing = Publishing(
            replica,
            bus,
            subjects,
            self.log,
            address=address,
            clients_url=clients_url,
            own_urls=own_urls,
            on_change=on_change,
            traffic=traffic,
        )
        self.awaited = AwaitedWorkers(replica, bus, subjects.namespace)
        self._replica = replica
        self._bus = bus
        self._subjects = subjects
        self._heartbeat_s = heartbeat_s

    async def subscribe(self) -> None:
        """Receive from the bus; called once, before `run`."""
        await self.recovery.subscribe()
        await self._bus.subscribe_all(self._subjects.live, self.inbox.receive)
        await self._bus.subscribe(self._subjects.hello, self.publishing.answer_hello)
        subject = self._subjects.sync_replay(self._replica.router_id)
        await self._bus.subscribe(subject, self.publishing.answer_replay)
        self._bus.on_connect(self.publishing.hello)  # last: the answers to the hello need the rest

    async def run(self) -> None:
        """Apply, publish and repair until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.inbox.run(), name="inbox")
                tasks.create_task(self._beat_forever(), name="heartbeat")
                tasks.create_task(self._tick_forever(), name="tick")
        finally:
            self.recovery.close()

    async def _beat_forever(self) -> None:
        while True:
            self.publishing.begin_round()
            await asyncio.sleep(self._heartbeat_s)

    async def _tick_forever(self) -> None:
        """What the clock brings: readiness, long waits, predicted ends of prefill, requests to repeat."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TICK_S)
            now = loop.time()
            self._replica.readiness.not_ready(now)
            self.awaited.look(now)
            for router in self._replica.routers.values():
                for key in router.bookings.due(now):
                    router.bookings.mark_prefill_completed(key, now)
                    self.publishing.flush_soon()
            self.recovery.request_due(now, self.inbox.drain_soon)
