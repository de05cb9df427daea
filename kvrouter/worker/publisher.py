"""The KV feed of one rank: engine events in, numbered frames out (docs/concepts/design.md#feeds)."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Sequence
from typing import Protocol

from kvrouter.bus.subjects import Subjects
from kvrouter.core.feeds.source import FeedSource
from kvrouter.core.wire.hashes import pool_token
from kvrouter.core.wire.ids import PoolId, WorkerId, check_identifier
from kvrouter.core.wire.ops import DEVICE, MAX_FRAME_HASHES, TIERS, Op, Removed, ReplayRequest, Stored
from kvrouter.errors import ConfigError
from kvrouter.worker.blocks.engine_blocks import (
    MAX_HELD_BLOCKS,
    BlockIds,
    BlocksImage,
    EngineBlocks,
    EngineHash,
)

CHECK_EVERY_S = 1.0
QUIET_CHECK_S = 10.0
"""The same for a feed on which nothing happens."""


class Outlet(Protocol):
    """As much of a Bus as a feed needs."""

    def publish(self, subject: str, payload: bytes) -> bool:
        """Send, in order; False, and nothing is sent, while there is no connection."""


class KvPublisher:
    """One rank's blocks and their feed. Call it from one thread; `run` it in a task to send.

    What is stored and removed is collected, and leaves in at most one frame per `flush_s` (more
    only where a frame would name more than 4,096 hashes). While the bus is away nothing is sent:
    frames are numbered all the same, and readers have them replayed.

    Nobody listens to a worker that has not been announced: see `announce`, which also runs it. Until
    then `model` and `namespace`, and so the subject, may be open. Raises ConfigError.
    """

    def __init__(
        self,
        nats: Outlet,
        worker_id: str,
        block_size: int,
        rank: int = 0,
        *,
        model: str | None = None,
        namespace: str = "default",
        incarnation: int | None = None,
        flush_s: float = 0.010,
        max_held_blocks: int = MAX_HELD_BLOCKS,
    ) -> None:
        _check_arguments(nats, worker_id, block_size, rank)
        self.worker_id = worker_id
        self.block_size = block_size
        self.event_block_size = 0
        """The largest that stores on the device have had in this life of the engine; 0: none yet."""
        self.rank = rank
        self.blocks = EngineBlocks(max_held_blocks)
        self._bus = nats
        self._subject: str | None = None
        self._flush_s = flush_s
        self._feed = self._new_feed(time.time_ns() // 1000 if incarnation is None else incarnation)
        self._pending: list[Op] = []
        self._filled = asyncio.Event()
        self._is_unchecked = False
        self._checked_at = float("-inf")
        if model is not None:
            self.address(model, namespace)

    def address(self, model: str, namespace: str) -> None:
        """Say of which pool it is: that is where its frames go."""
        pool = PoolId(pool_token(model))
        self._subject = Subjects(namespace).live_kv(pool, WorkerId(self.worker_id), self.rank)

    @property
    def incarnation(self) -> int:
        """Which life of the feed this is; µs since the epoch when it began."""
        return self._feed.incarnation

    @property
    def seq(self) -> int:
        """The number of the last frame."""
        return self._feed.seq

    def stored(  # noqa: PLR0917  # a public name: callers may pass these by position
        self,
        engine_hashes: Sequence[EngineHash],
        token_ids: Sequence[int],
        parent: EngineHash | None = None,
        lora_name: str | None = None,
        salt: str | None = None,
        tier: str = "device",
        *,
        ids: Sequence[BlockIds] = (),
        block_size: int | None = None,
    ) -> None:
        """The engine stored a chain of blocks, the first below `parent`.

        Hashes are the engine's own names: any integers or bytes. `token_ids` are those of all blocks,
        one after the other; without any, only hashes that are known count (a copy in another tier).
        `lora_name` and `salt` matter at a root, and are handed down. `ids`: per block, the 64-bit ids of
        the multimodal items that touch it; None for a block that cannot be named. `block_size`: that of
        these blocks, where it may be another than the publisher's. Raises ValueError if these do not fit
        together.
        """
        self._collect(
            self.blocks.stored(
                engine_hashes,
                token_ids,
                block_size=self.block_size if block_size is None else block_size,
                parent=parent,
                lora_name=lora_name,
                salt=salt,
                ids=ids,
                tier=_tier_number(tier),
            )
        )
        if block_size is not None and tier == TIERS[DEVICE]:
            self.event_block_size = max(self.event_block_size, block_size)

    def removed(self, engine_hashes: Sequence[EngineHash], tier: str = "device") -> None:
        """The engine dropped one copy of each of these blocks from a tier."""
        self._collect(self.blocks.removed(engine_hashes, _tier_number(tier)))

    def cleared(self) -> None:
        """The engine dropped everything."""
        self._collect(self.blocks.cleared())

    def begin_life(self) -> None:
        """The engine is another process: nothing is left of what it held, nor known of its blocks' size."""
        self.event_block_size = 0
        self.cleared()

    def lose_history(self, incarnation: int) -> None:
        """Begin a new life with an empty table: what was published may no longer be there."""
        self.blocks.cleared()
        self._pending.clear()
        self._is_unchecked = False
        if self.seq:  # else nobody has been told anything yet
            self._feed = self._new_feed(max(incarnation, self.incarnation + 1))

    def restore(self, image: BlocksImage, event_block_size: int) -> None:
        """Go on with the table of the agent before, in this feed's own life.

        Not in the former life: its ring is gone, and frames sent after the table was kept have used
        its next numbers. The restored table counts as frame 1, which is nowhere to be had: readers
        take a snapshot, and keep what they hold of the former life until that is loaded.
        """
        self.event_block_size = event_block_size
        self.blocks.restore(image)
        self._feed.seq = max(1, self._feed.seq)
        self._is_unchecked = True
        self._filled.set()

    def answer(self, request: ReplayRequest, max_bytes: int, now: float) -> bytes:
        """Frames or a piece of a snapshot. What is pending leaves first: a snapshot names a frame."""
        self.flush(now)
        return self._feed.answer(request, max_bytes, now)

    def flush(self, now: float) -> None:
        """Send what is pending, and the digest: once a second, and every 10 s while nothing happens.

        Without the latter a reader that was misled in quiet times would not learn of it.
        """
        if self._subject is None:
            raise ConfigError(f"worker {self.worker_id}: announce it, or give the publisher a model")
        ops, self._pending = self._pending, []
        self._is_unchecked = self._is_unchecked or bool(ops)
        if self.seq + len(ops) and now - self._checked_at >= self._check_every_s:
            ops += self.blocks.check_ops()
            self._checked_at, self._is_unchecked = now, False
        for part in _frames_of(ops):
            for frame in self._feed.append(part):
                self._bus.publish(self._subject, frame)

    async def run(self) -> None:
        """Flush for ever."""
        while True:
            await self._wait_until_due()
            self._filled.clear()
            self.flush(time.monotonic())
            await asyncio.sleep(self._flush_s)

    @property
    def _check_every_s(self) -> float:
        return CHECK_EVERY_S if self._is_unchecked else QUIET_CHECK_S

    async def _wait_until_due(self) -> None:
        """Until something is pending, or a digest is owed for what was sent."""
        if not self.seq and not self._is_unchecked:
            await self._filled.wait()
            return
        try:
            async with asyncio.timeout(max(0.0, self._checked_at + self._check_every_s - time.monotonic())):
                await self._filled.wait()
        except TimeoutError:
            return

    def _collect(self, ops: list[Op]) -> None:
        if ops:
            self._pending += ops
            self._filled.set()

    def _new_feed(self, incarnation: int) -> FeedSource:
        return FeedSource(incarnation, lambda _now: self.blocks.state_ops())


def _check_arguments(nats: Outlet, worker_id: str, block_size: int, rank: int) -> None:
    if inspect.iscoroutinefunction(nats.publish):
        raise ConfigError(
            f"a {type(nats).__module__} client: give the connection that kvrouter.connect opens"
        )
    check_identifier("worker_id", worker_id)
    if block_size < 1 or rank < 0:
        raise ConfigError(f"block_size {block_size} and rank {rank}: at least 1 and at least 0")


def _tier_number(tier: str) -> int:
    if tier not in TIERS:
        raise ValueError(f"tier {tier!r}: use one of {', '.join(TIERS)}")
    return TIERS.index(tier)


def _frames_of(ops: Sequence[Op]) -> list[list[Op]]:
    """Cut ops into lists that name at most 4,096 hashes each."""
    frames: list[list[Op]] = []
    room = 0
    for op in ops:
        count = len(op.hashes) // 8 if isinstance(op, Stored | Removed) else 0
        if not frames or count > room:
            frames.append([])
            room = MAX_FRAME_HASHES
        frames[-1].append(op)
        room -= count
    return frames
