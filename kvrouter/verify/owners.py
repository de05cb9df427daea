"""The owners of blocks: agents by their own answers, engines by their own events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import zmq.asyncio

from kvrouter.bus import NatsOptions, Subjects
from kvrouter.config import open_bus
from kvrouter.verify.agents import Agents
from kvrouter.verify.comparison import OwnersView, VerifyError
from kvrouter.verify.engines import EngineAccess, Engines

CONNECT_TIMEOUT_S = 5.0
HELLO_S = 0.3
"""Agents answer a hello within 50 ms. One that takes longer is met at a later look."""


class Owners:
    """Agents and engines of a namespace. Open it with `async with`."""

    def __init__(self, agents: Agents, engines: Engines) -> None:
        self._agents = agents
        self._engines = engines

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, nats: NatsOptions, namespace: str, access: EngineAccess) -> AsyncIterator[Owners]:
        """Connect and have the agents announce themselves. Raises VerifyError where NATS is away."""
        async with open_bus(nats, name="verify") as bus:
            connected = asyncio.Event()
            agents = Agents(bus, Subjects(namespace))
            await agents.begin()
            bus.on_connect(connected.set)
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await connected.wait()
            except TimeoutError:
                raise VerifyError(
                    f"--nats {nats.shown()}: {bus.outage_reason or 'it does not answer'}"
                ) from None
            await asyncio.sleep(HELLO_S)
            with zmq.asyncio.Context() as context:
                yield cls(agents, Engines(access, context))

    async def look(self) -> OwnersView:
        """What they hold now, and agents held since the look before."""
        asked_at = asyncio.get_running_loop().time()
        copies = await self._agents.look()
        checks = await self._engines.look(self._agents, asked_at)
        return OwnersView(copies, checks, tuple(self._agents.errors()))
