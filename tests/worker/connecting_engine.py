"""An engine's publisher that connects, as vLLM's does if its endpoint contains a host."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import zmq
import zmq.asyncio


class Connecting:
    """Numbers its batches from 0."""

    def __init__(self, pub: zmq.asyncio.Socket, topic: str) -> None:
        self._pub = pub
        self._topic = topic.encode()
        self._seq = 0

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, endpoint: str, topic: str) -> AsyncIterator[Connecting]:
        """Connect, and wait for the subscription: messages sent before it are lost."""
        context = zmq.asyncio.Context()
        pub = context.socket(zmq.XPUB)
        pub.connect(endpoint)
        try:
            async with asyncio.timeout(10):
                await pub.recv()
            yield cls(pub, topic)
        finally:
            context.destroy(linger=0)

    async def send(self, payload: bytes) -> None:
        """Publish the next batch."""
        await self.send_raw([self._topic, self._seq.to_bytes(8, "big"), payload])
        self._seq += 1

    async def send_raw(self, frames: list[bytes]) -> None:
        """Publish any frames."""
        await self._pub.send_multipart(frames)
