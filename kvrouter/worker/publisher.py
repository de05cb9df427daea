"""The KV feed of one rank: engine events become numbered frames (docs/concepts/design.md#feeds)."""

from __future__ import annotations

import asyncio
import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import structlog

from kvrouter.bus.subjects import Subjects
from kvrouter.core.feeds.source import FeedSource
from kvrouter.core.feeds.trust import ANSWERS_A_SECOND, PerSecond
from kvrouter.core.wire.hashes import pool_token
from kvrouter.core.wire.ids import PoolId, WorkerId, check_worker_id
from kvrouter.core.wire.ops import (
    DEVICE,
    MAX_FRAME_HASHES,
    TIERS,
    NotResumable,
    Op,
    Removed,
    ReplayRequest,
    Resumable,
    Stored,
    decode_request,
)
from kvrouter.errors import ConfigError, MalformedFrameError
from kvrouter.worker.blocks.engine_blocks import (
    MAX_HELD_BLOCKS,
    BlockIds,
    BlocksImage,
    EngineBlocks,
    EngineHash,
)

# Between two digests of a feed. In quiet times it is sent less often, but it is sent: a reader with a wrong
# copy would otherwise not notice before the next change.
CHECK_EVERY_S = 1.0
QUIET_CHECK_S = 10.0


log = structlog.get_logger()


class Outlet(Protocol):
    """The part of a Bus that a feed uses."""

    def publish(self, subject: str, payload: bytes) -> bool:
        """Send in order. Returns False, and sends nothing, while NATS is away."""


class ReplayOutlet(Outlet, Protocol):
    """The part of a Bus that answers to replay requests use."""

    @property
    def max_payload(self) -> int:
        """The server's limit for one message, in bytes."""


class Sink(ABC):
    """What adapters call: an engine's stores and removals become ops of one rank's blocks.

    A KvPublisher publishes the ops; `kvrouter verify` compares with them.
    """

    def __init__(self, blocks: EngineBlocks, block_size: int) -> None:
        self.blocks = blocks
        self.block_size = block_size
        # The largest block size of a store on the device in this life of the engine; 0: none yet.
        self.event_block_size = 0

    @abstractmethod
    def _collect(self, ops: list[Op]) -> None:
        """Take what has changed."""

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
        """The engine stored a chain of blocks; the parent of the first one is `parent`.

        Hashes are the engine's own names: any integers or bytes. `token_ids` has the tokens of all blocks in
        order; if it is empty, only hashes that are known already count (a copy in another tier). `lora_name`
        and `salt` matter at a root, and hold for all blocks below it. `ids`: per block, the 64-bit ids of the
        multimodal items that touch it; None for a block that cannot be named. `block_size`: the size of these
        blocks, if it may differ from the publisher's. Raises ValueError if the arguments do not fit together.
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

    def stored_chunks(
        self,
        chunk_hashes: Sequence[EngineHash],
        token_ids: Sequence[int],
        parent: EngineHash | None,
        tier: str,
    ) -> None:
        """A tier outside the engine stored chunks of whole blocks under hashes of its own.

        A chunk whose size is not a multiple of the block size is ignored. See EngineBlocks.stored_chunks.
        """
        block_size = self.event_block_size or self.block_size
        ops = self.blocks.stored_chunks(
            chunk_hashes, token_ids, block_size=block_size, parent=parent, tier=_tier_number(tier)
        )
        self._collect(ops)

    def removed(self, engine_hashes: Sequence[EngineHash], tier: str = "device") -> None:
        """The engine removed one copy of each of these blocks from a tier."""
        self._collect(self.blocks.removed(engine_hashes, _tier_number(tier)))

    def group_stored(
        self, group: int, needed: int, engine_hashes: Sequence[EngineHash], *, is_root: bool
    ) -> None:
        """The engine stored blocks in a KV group besides the one whose blocks `stored` names.

        The engine resumes a prompt only where the group has the last `needed` blocks before (0: all of them).
        `is_root`: the first block begins a prompt.
        """
        self._collect(self.blocks.group_stored(group, needed, engine_hashes, is_root=is_root))

    def group_removed(self, group: int, engine_hashes: Sequence[EngineHash]) -> None:
        """The engine removed one copy of each of these blocks from such a group."""
        self._collect(self.blocks.group_removed(group, engine_hashes))

    def cleared(self) -> None:
        """The engine removed all blocks from all tiers."""
        self._collect(self.blocks.cleared())

    def begin_life(self) -> None:
        """The engine is another process: forget the blocks of the former one, and their size."""
        self.event_block_size = 0
        self.cleared()


class KvPublisher(Sink):
    """One rank's blocks and their feed. Call it from one thread; `run` it in a task to send.

    Changes are collected and sent in one frame per `flush_s` (in more frames only if one would contain more
    than 4,096 hashes). While the bus is disconnected nothing is sent; frames are numbered all the same, and
    replicas request them later.

    Replicas ignore the frames of a worker that is not announced: `announce` announces and runs it. Until then
    `model` and `namespace`, and so the subject, may be missing. Raises ConfigError.
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
        super().__init__(EngineBlocks(max_held_blocks), block_size)
        self.worker_id = worker_id
        self.rank = rank
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
        """Set the pool, and so the subject of the frames."""
        pool = PoolId(pool_token(model))
        self._subject = Subjects(namespace).live_kv(pool, WorkerId(self.worker_id), self.rank)

    @property
    def incarnation(self) -> int:
        """The start of this life of the feed, in µs since the epoch."""
        return self._feed.incarnation

    @property
    def seq(self) -> int:
        """The number of the last frame."""
        return self._feed.seq

    def lose_history(self, incarnation: int) -> None:
        """Begin a new life with an empty table: published blocks may no longer exist."""
        self.blocks.cleared()
        self._pending.clear()
        self._is_unchecked = False
        if self.seq:  # otherwise no frame has been sent that could be wrong
            # greater also if the clock was set back: replicas ignore a lower incarnation
            self._feed = self._new_feed(max(incarnation, self.incarnation + 1))

    def restore(self, image: BlocksImage, event_block_size: int) -> None:
        """Continue with the table of a former agent, in this feed's new life.

        The former life cannot be continued: its ring is lost, and frames sent after the table was saved have
        used its next numbers. The restored table counts as frame 1, which no ring contains, so readers take a
        snapshot. They keep their copy of the former life until the snapshot is loaded.
        """
        self.event_block_size = event_block_size
        self.blocks.restore(image)
        self._feed.seq = max(1, self._feed.seq)
        self._is_unchecked = True
        self._filled.set()

    def answer(self, request: ReplayRequest, max_bytes: int, now: float) -> bytes:
        """Encoded frames, or a chunk of a snapshot."""
        self.flush(now)  # first: a snapshot is as of a frame, so no op may be pending
        return self._feed.answer(request, max_bytes, now)

    def flush(self, now: float) -> None:
        """Send pending changes, and the digest if it is due."""
        if self._subject is None:
            raise ConfigError(f"worker {self.worker_id}: announce it, or give the publisher a model")
        ops, self._pending = self._pending, []
        self._is_unchecked = self._is_unchecked or bool(ops)
        # no digest before the first frame: no reader follows a feed without frames
        if self.seq + len(ops) and now - self._checked_at >= self._check_every_s:
            ops += self.blocks.check_ops()
            self._checked_at, self._is_unchecked = now, False
        for part in _frames_of(ops):
            for frame in self._feed.append(part):
                self._bus.publish(self._subject, frame)

    async def run(self) -> None:
        """Flush until cancelled."""
        while True:
            await self._wait_until_due()
            self._filled.clear()
            self.flush(time.monotonic())
            await asyncio.sleep(self._flush_s)  # after the flush: a single change is sent without a delay

    @property
    def _check_every_s(self) -> float:
        return CHECK_EVERY_S if self._is_unchecked else QUIET_CHECK_S

    async def _wait_until_due(self) -> None:
        """Wait until a change is pending or a digest is due."""
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


class ReplayAnswers:
    """Answers the replay requests for a worker's KV feeds, at most ANSWERS_A_SECOND per second.

    Any program on NATS may request snapshots, and each one takes time of the event loop.
    """

    def __init__(self, bus: ReplayOutlet, publishers: Sequence[KvPublisher]) -> None:
        self._bus = bus
        self._publishers = publishers
        self._limit = PerSecond(ANSWERS_A_SECOND)

    def answer(self, payload: bytes, reply: str) -> None:
        """Answer on the subject `reply`. Requests for an unknown rank are ignored, malformed ones logged."""
        try:
            request = decode_request(payload)
        except MalformedFrameError as error:
            log.warning("replay.malformed", error=str(error))
            return
        if not reply or request.part not in range(len(self._publishers)):
            return
        publisher, now = self._publishers[int(request.part)], time.monotonic()
        if self._limit.allows(now):
            self._bus.publish(reply, publisher.answer(request, self._bus.max_payload, now))


def _check_arguments(nats: Outlet, worker_id: str, block_size: int, rank: int) -> None:
    if inspect.iscoroutinefunction(nats.publish):
        raise ConfigError(
            f"nats is a {type(nats).__module__} client: give a connection opened by kvrouter.connect"
        )
    check_worker_id("worker_id", worker_id)
    if block_size < 1 or rank < 0:
        raise ConfigError(f"block_size {block_size} and rank {rank}: at least 1 and at least 0")


def _tier_number(tier: str) -> int:
    if tier not in TIERS:
        raise ValueError(f"tier {tier!r}: use one of {', '.join(TIERS)}")
    return TIERS.index(tier)


def _frames_of(ops: Sequence[Op]) -> list[list[Op]]:
    """Cut ops into lists that name at most 4,096 hashes each."""
    frames: list[list[Op]] = []
    left = 0
    for op in ops:
        count = len(op.hashes) // 8 if isinstance(op, Stored | Removed | Resumable | NotResumable) else 0
        if not frames or count > left:
            frames.append([])
            left = MAX_FRAME_HASHES
        frames[-1].append(op)
        left -= count
    return frames
