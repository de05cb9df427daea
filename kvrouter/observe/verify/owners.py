"""The owners of blocks: agents, which answer requests, and engines, whose events are read again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import zmq.asyncio

from kvrouter.bus import NatsOptions, Subjects
from kvrouter.bus.outage import NO_ANSWER
from kvrouter.bus.rights import VERIFY
from kvrouter.config import open_bus
from kvrouter.core.wire.ids import WorkerId
from kvrouter.observe.engine import EngineAccess
from kvrouter.observe.listening import Listener
from kvrouter.observe.verify.agents import Agents
from kvrouter.observe.verify.comparison import OwnersView, VerifyError
from kvrouter.observe.verify.engines import EngineReplays

CONNECT_TIMEOUT_S = 5.0
# Agents answer a hello within 50 ms. A slower one is found by a later look.
HELLO_S = 0.3


class Owners:
    """Agents and engines of a namespace. Open it with `async with`."""

    def __init__(self, agents: Agents, engines: EngineReplays | None) -> None:
        """`engines` None: they are not asked."""
        self._agents = agents
        self._engines = engines

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, nats: NatsOptions, namespace: str, access: EngineAccess) -> AsyncIterator[Owners]:
        """Connect, and ask all agents for a heartbeat. Raises VerifyError if NATS does not answer."""
        async with open_bus(nats, name="verify", user=VERIFY) as bus:
            connected, subjects = asyncio.Event(), Subjects(namespace)
            listener, now = Listener(subjects), asyncio.get_running_loop().time
            agents = Agents(bus, subjects, listener)
            await bus.subscribe(
                subjects.live_worker(WorkerId(">")),  # NATS's wildcard: every worker, also those in groups
                lambda subject, data, _: listener.receive(subject, data, now()),
            )
            await agents.begin()
            bus.on_connect(connected.set)
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await connected.wait()
            except TimeoutError:
                reason = bus.outage_reason or f"no answer: {NO_ANSWER}"
                raise VerifyError(f"--nats {nats.shown()}: {reason}") from None
            await asyncio.sleep(HELLO_S)
            with zmq.asyncio.Context() as context:
                yield cls(agents, EngineReplays(access, context))

    async def look(self) -> OwnersView:
        """The contents of engines now, and those of agents at each frame since the look before."""
        asked_at = asyncio.get_running_loop().time()
        copies = await self._agents.look()
        checks = await self._engines.look(self._agents, asked_at) if self._engines is not None else {}
        return OwnersView(copies, checks, tuple(self._agents.errors()))
