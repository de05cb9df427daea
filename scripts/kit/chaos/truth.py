"""What the owners hold: the engine by its own events, the agent by its own snapshot.

    engine ──events──> EngineWatch ─┐
    agent  ──snapshot──> hashes ────┴─> compared with each other, and with what replicas show

The watch reads the engine's events from the first one on, with a bookkeeping of its own: what an
agent lost while it was dead is not lost here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import zmq
import zmq.asyncio

from kvrouter.bus import Bus, Subjects
from kvrouter.core.wire.hashes import block_hashes, sequence_hashes
from kvrouter.core.wire.ids import SequenceHash, WorkerId
from kvrouter.core.wire.ops import DISK, ReplayRequest, encode
from kvrouter.verify.agents import RankFeed
from kvrouter.worker.blocks.engine_blocks import EngineHash
from kvrouter.worker.engines.vllm import BlockRemoved, BlockStored, decode_batch

_ANSWER_TIMEOUT_S = 5.0


class EngineWatch:
    """The blocks of one engine, counted like its physical blocks: a hash may be stored twice.

    After an agent asked for reports (`partial`, docs/concepts/design.md#agent-state)
    known blocks are announced again; each
    counts as one more here, so that a block may be thought held that is gone, but none missed.
    """

    def __init__(self) -> None:
        self.is_complete = True
        """False once an event was missed: then this is no truth any longer."""
        self._next_seq = 0
        self._names: dict[EngineHash, SequenceHash] = {}
        self._references: Counter[EngineHash] = Counter()

    def held(self) -> set[int]:
        """The sequence hashes that the engine holds now."""
        return {self._names[hash_] for hash_, count in self._references.items() if count > 0}

    @property
    def batches(self) -> int:
        """How many this process of the engine has sent."""
        return self._next_seq

    def batch(self, seq: int, payload: bytes) -> None:
        """One message of the engine; number 0 is the first of a new process."""
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


async def agent_blocks(bus: Bus, namespace: str, worker_id: str) -> set[int]:
    """The sequence hashes that a worker's agent publishes now: a snapshot of it, and what came after."""
    subject = Subjects(namespace).kv_replay(WorkerId(worker_id))

    async def ask(request: ReplayRequest) -> bytes:
        return await bus.request(subject, encode(request), timeout_s=_ANSWER_TIMEOUT_S)

    feed = RankFeed(0)
    *_, last = await feed.look(ask)
    if last.trouble:
        raise RuntimeError(f"agent {worker_id}: {last.trouble}")
    return feed.blocks.of(DISK)


def phantom_blocks(target: dict[str, Any], agent: set[int], engine: EngineWatch) -> int:
    """Blocks that a replica's row of /workers has too many, or holds otherwise than its owner."""
    digest = f"{sum(agent) % (1 << 64):016x}"
    beyond = len(agent - engine.held()) if engine.is_complete else 0
    held: int = target["device_blocks"]
    if (held, target["digest"]) == (len(agent), digest):
        return beyond
    return beyond + max(1, abs(held - len(agent)))
