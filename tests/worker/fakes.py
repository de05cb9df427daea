"""A bus that records messages, in place of NATS."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

OnMessage = Callable[[str, bytes, str], None]


class FakeBus:
    """Keeps what is published while it is `connected`."""

    def __init__(self) -> None:
        self.connected = True
        self.local_host = ""
        self.max_payload = 1024 * 1024
        self.sent: list[tuple[str, bytes]] = []
        self.callbacks: dict[str, OnMessage] = {}
        self.connect_callbacks: list[Callable[[], None]] = []
        self._published = asyncio.Event()

    def publish(self, subject: str, payload: bytes) -> bool:
        """Record a message."""
        if self.connected:
            self.sent.append((subject, payload))
            self._published.set()
        return self.connected

    async def subscribe(self, subject: str, on_message: OnMessage) -> None:
        """Record the callback; a test calls `deliver`."""
        self.callbacks[subject] = on_message

    def on_connect(self, callback: Callable[[], None]) -> None:
        """Record the callback."""
        self.connect_callbacks.append(callback)

    def deliver(self, subject: str, payload: bytes = b"") -> None:
        """Deliver a message to its subscribers."""
        self.callbacks[subject](subject, payload, "")

    async def until_sent(self, count: int) -> None:
        """Return when this many messages wait to be taken."""
        async with asyncio.timeout(5):
            while len(self.sent) < count:
                self._published.clear()
                await self._published.wait()

    def take(self) -> list[tuple[str, bytes]]:
        """The messages published since the last call."""
        sent, self.sent = self.sent, []
        return sent
