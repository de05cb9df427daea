"""How many blocks an engine evicts, by its own events: a run without evictions would show little."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import zmq
import zmq.asyncio

from kvrouter.worker.engines.vllm import BlockRemoved, decode_batch


@dataclass(slots=True)
class Evictions:
    """Blocks that all watched engines have removed."""

    blocks: int = 0


@contextlib.asynccontextmanager
async def counting(endpoints: Sequence[str]) -> AsyncIterator[Evictions]:
    """Count while inside."""
    evictions = Evictions()
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as socket:
        socket.subscribe(b"")
        for endpoint in endpoints:
            socket.connect(endpoint)
        task = asyncio.create_task(_count(socket, evictions))
        try:
            yield evictions
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _count(socket: zmq.asyncio.Socket, evictions: Evictions) -> None:
    while True:
        *_, payload = await socket.recv_multipart()
        removed = [event for event in decode_batch(payload).events if isinstance(event, BlockRemoved)]
        evictions.blocks += sum(len(event.block_hashes) for event in removed)
