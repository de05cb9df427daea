"""The blocks that the owners hold: engines by their events, agents by their snapshots.

    engine ──events──> EngineWatch ─┐
    agent  ──snapshot──> hashes ────┴─> compared with each other and with the replicas' /workers

The watch reads the engine's events from the first one, with its own bookkeeping: it keeps
events that an agent misses while it is down.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import zmq
import zmq.asyncio

from kvrouter.core.wire.hashes import block_hashes, sequence_hashes
from kvrouter.core.wire.ids import SequenceHash, WorkerId
from kvrouter.core.wire.ops import DISK, ReplayRequest, encode
from kvrouter.observe.verify.agents import RankFeed, Requests
from kvrouter.worker.blocks.engine_blocks import EngineHash
from kvrouter.worker.engines.vllm import BlockRemoved, BlockStored, decode_batch

# Blocks by which a replica may be ahead of this process in reading an engine's events.
IN_TRANSIT_BLOCKS = 256


class EngineWatch:
    """The blocks of one engine, counted like its physical blocks: a hash may be stored twice."""

    def __init__(self) -> None:
        # False once an event was missed: the blocks are then unknown.
        self.is_complete = True
        self._next_seq = 0
        self._names: dict[EngineHash, SequenceHash] = {}
        self._references: Counter[EngineHash] = Counter()

    def held(self) -> set[int]:
        """The sequence hashes that the engine holds now."""
        return {self._names[hash_] for hash_, count in self._references.items() if count > 0}

    @property
    def batches(self) -> int:
        """Number of batches sent by the engine's current process."""
        return self._next_seq

    def batch(self, seq: int, payload: bytes) -> None:
        """Apply one message of the engine; number 0 is the first one of a new process."""
        if seq == 0:
            self.__init__()  # type: ignore[misc]  # an engine that starts has nothing
        self.is_complete = self.is_complete and seq == self._next_seq
        self._next_seq = seq + 1
        for event in decode_batch(payload).events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                self._references.subtract(event.block_hashes)
            else:
                self._references.clear()

    def _store(self, event: BlockStored) -> None:
        parent = None if event.parent_block_hash is None else self._names.get(event.parent_block_hash)
        if parent is None and event.parent_block_hash is not None:
            self.is_complete = False
            return
        named = sequence_hashes(block_hashes(event.token_ids, event.block_size), parent)
        self._names.update(zip(event.block_hashes, named, strict=True))
        self._references.update(event.block_hashes)


@contextlib.asynccontextmanager
async def watching(endpoint: str) -> AsyncIterator[EngineWatch]:
    """Watch an engine's events while inside."""
    watch = EngineWatch()
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.RECONNECT_IVL, 10)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.subscribe(b"")
        socket.connect(endpoint)
        task = asyncio.create_task(_watch(socket, watch))
        try:
            yield watch
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _watch(socket: zmq.asyncio.Socket, watch: EngineWatch) -> None:
    while True:
        _, seq, payload = await socket.recv_multipart()
        watch.batch(int.from_bytes(seq, "big"), payload)


async def agent_blocks(requests: Requests, worker_id: str) -> set[int]:
    """The sequence hashes that a worker's agent publishes: its snapshot and the frames after it."""

    async def ask(request: ReplayRequest) -> bytes:
        return await requests.ask(WorkerId(worker_id), encode(request))

    feed = RankFeed(0)
    *_, last = await feed.look(ask)
    if last.problem:
        raise RuntimeError(f"agent {worker_id}: {last.problem}")
    return feed.blocks.of(DISK)


def phantom_blocks(target: dict[str, Any], agent: set[int], engine: EngineWatch) -> int:
    """Number of blocks by which a replica's row in /workers differs from their owner."""
    digest = f"{sum(agent) % (1 << 64):016x}"
    beyond = len(agent - engine.held()) if engine.is_complete else 0
    held: int = target["device_blocks"]
    if (held, target["digest"]) == (len(agent), digest):
        return beyond
    return beyond + max(1, abs(held - len(agent)))
