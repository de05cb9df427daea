"""What tests of the bus observe and wait for."""

from __future__ import annotations

import asyncio
import uuid

from kvrouter.bus import Bus
from kvrouter.bus.connection import NatsClient

SOON_S = 10.0


class Inbox:
    """Messages in order of arrival."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, bytes]] = []
        self._arrived = asyncio.Event()

    def __call__(self, subject: str, payload: bytes, _reply: str) -> None:
        self.messages.append((subject, payload))
        self._arrived.set()

    @property
    def payloads(self) -> list[bytes]:
        """Without subjects."""
        return [payload for _, payload in self.messages]

    async def holds(self, count: int) -> None:
        """Wait for this many messages."""
        async with asyncio.timeout(SOON_S):
            while len(self.messages) < count:
                self._arrived.clear()
                await self._arrived.wait()


def client_of(bus: Bus) -> NatsClient:
    """The client of nats-py in it, to play what nats-py may do."""
    assert bus._client is not None
    return bus._client


async def ask(bus: Bus, subject: str, payload: bytes) -> bytes:
    """The first answer to a request; b"" if nothing has subscribed."""
    reply, inbox = f"_INBOX.{uuid.uuid4().hex}", Inbox()
    await bus.subscribe(reply, inbox)
    bus.publish(subject, payload, reply)
    await inbox.holds(1)
    return inbox.payloads[0]


class Connections:
    """Counts the calls of `on_connect`, and waits for them."""

    def __init__(self, bus: Bus) -> None:
        self.count = 0
        self._changed = asyncio.Event()
        bus.on_connect(self._connected)

    def _connected(self) -> None:
        self.count += 1
        self._changed.set()

    async def reach(self, count: int) -> None:
        """Wait for the count-th connection."""
        async with asyncio.timeout(SOON_S):
            while self.count < count:
                self._changed.clear()
                await self._changed.wait()
