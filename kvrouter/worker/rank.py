"""One rank of an engine: the events of its socket become its KV feed.

    whole ──gap, malformed, overfull, no beginning──> partial ──engine empties its cache, restarts──> whole

After lost history the table begins empty. A block that the engine holds from before stays unknown, with all
blocks below it, until the engine has evicted it and stores it again. No event marks the end of that, so the
rank is announced as `partial` until the engine has emptied its cache or has restarted. A saved state
(blocks/state.py) continues the history of the agent before.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import structlog

from kvrouter.core.wire.ops import DEVICE
from kvrouter.errors import MalformedFrameError
from kvrouter.worker.blocks.state import RankHead, RankState
from kvrouter.worker.engines.adapter import Adapter, Batch, Reasons
from kvrouter.worker.publisher import KvPublisher
from kvrouter.worker.zmq.ordering import (
    Action,
    Apply,
    Continued,
    EngineStream,
    LostBatches,
    Restarted,
    digest_of,
)

log = structlog.get_logger()

# Seconds between events that cannot be followed and the next attempt to read the rank's history. The pause
# doubles while such events recur, because each attempt reads up to 10,000 batches.
READ_AGAIN_S = 5.0
MOST_READ_AGAIN_S = 40.0
# For this time after its start an agent expects what its predecessor of the release before may have asked
# for: vLLM announces reused blocks again. It stands in the history that is replayed, and comes from requests
# that still wait in the engine.
OLD_REPORTS_S = 600.0
CHUNKS = (
    "chunks of LMCache count where their blocks were on the device when they were stored, without salt or "
    "adapter: hits that only LMCache has for other prompts are not predicted"
)
TABLE_FULL = "the agent's table is full: further blocks are not indexed"


class RankEvents(Protocol):
    """Where a rank's batches come from: EngineEvents (ZMQ), PolledEvents (HTTP)."""

    stream: EngineStream
    # Set once it is known where the engine's history begins, and that history has been passed on.
    settled: asyncio.Event

    @property
    def notes(self) -> Sequence[str]:
        """What an operator should know about the source."""
        ...

    def learn_replay(self, endpoint: str | None) -> None: ...
    def resume(self, seq: int, digest: bytes, *, was_complete: bool) -> None: ...
    def restart(self) -> None: ...
    async def run(self, on_action: Callable[[Action], None]) -> None: ...


class EngineRank:
    """Applies a rank's batches to its publisher, and begins a new life if they cannot be trusted.

    `stream` puts the batches in order. `capacity_blocks` is the engine's number of blocks, 0 if unknown: if
    more are published, removals were missed. `started_s`: when the agent started, as a Unix time. `former` is
    the rank's saved state. `has_siblings`: it is one of several ranks, so a batch that names another rank
    came to the wrong endpoint.
    """

    def __init__(
        self,
        publisher: KvPublisher,
        stream: EngineStream,
        capacity_blocks: int = 0,
        *,
        started_s: float = 0.0,
        former: RankState | None = None,
        adapter: Adapter[Any],
        has_siblings: bool = False,
    ) -> None:
        self.publisher = publisher
        self.capacity_blocks = capacity_blocks
        self.losses: Counter[str] = Counter()
        # Set after events that could not be followed, although the engine may still have its history.
        self.lost_track = asyncio.Event()
        self._stream = stream
        self._former = former
        self._adapter = adapter
        self._has_siblings = has_siblings
        self._logged: set[str] = set()
        self._was_partial = False
        self._is_down = False
        # Nothing has been missed since the first batch that was applied.
        self._is_whole = True
        # Something was missed, but the missed blocks no longer exist.
        self._is_mended = False
        self._first_ts: float | None = None
        # The last batch applied: its number, and the digest of its bytes.
        self._position: tuple[int, bytes] | None = None
        self._old_reports_end_s = started_s + OLD_REPORTS_S
        # even if the rest of the state is lost
        self._had_reports = former is not None and former.head.expects_reports

    @property
    def skipped(self) -> Reasons:
        return self._adapter.skipped

    @property
    def notes(self) -> list[str]:
        """What an operator should know about the rank's events: a bounded number of sentences."""
        notes = [*self._adapter.notes, *(f"events skipped: {reason}" for reason in self.skipped)]
        notes += [CHUNKS] if self.publisher.blocks.has_chunks else []
        return [*notes, TABLE_FULL] if self.publisher.blocks.rejected_stores else notes

    @property
    def is_settled(self) -> bool:
        """Whether the table shows the present blocks: not while the engine is down or its history is read."""
        return not (self._is_down or self._stream.is_beginning)

    @property
    def is_partial(self) -> bool:
        """Whether the engine may hold blocks that are not published."""
        return self.is_settled and not self._is_mended and not self._has_everything

    def on_action(self, action: Action) -> None:
        """Apply an action of the stream of batches."""
        if self._is_down and not isinstance(action, Restarted):
            return  # once the engine is up its history is read again
        match action:
            case Apply():
                self._apply(action)
            case Restarted():
                self._is_down = False
                self._begin()
                self.publisher.begin_life()
            case Continued():
                self._continue()
            case LostBatches():
                self._lose("gap")
        self._log_partial()

    def set_speculates(self, *, speculates: bool) -> None:
        """Set whether the engine decodes speculatively: stores from now on follow."""
        self._adapter.speculates = speculates

    @property
    def lookahead(self) -> int:
        """How many tokens behind a block are part of its name."""
        return self._adapter.lookahead

    def go_down(self) -> None:
        """The engine is gone, and its blocks with it."""
        self._is_down = True
        self._begin()
        self.publisher.begin_life()

    def give_up(self) -> None:
        """Applying an event has raised an error: the table may be wrong."""
        self._lose_track("failed")

    def is_older_than(self, engine_started_s: float) -> bool:
        """Whether the table has batches from before the engine process started."""
        return self._first_ts is not None and self._first_ts < engine_started_s

    def state(self) -> RankState | None:
        """The rank's state to save; None before the first batch. Call it only while `is_settled`."""
        if self._position is None:
            return None
        seq, digest = self._position
        head = RankHead(
            rank=self.publisher.rank,
            seq=seq,
            digest=digest,
            is_complete=self._stream.is_complete,
            is_whole=self._is_whole,
            is_mended=self._is_mended,
            expects_reports=False,
            removals=0,
            group=self._adapter.group,
            first_ts=self._first_ts,
            event_block_size=self.publisher.event_block_size,
            lookahead=self.lookahead,
        )
        return RankState(head, self.publisher.blocks.image())

    async def follow(self, events: RankEvents) -> None:
        """Apply the rank's events. An error in them stops only this rank, and only for READ_AGAIN_S."""
        while True:
            try:
                await events.run(self.on_action)
            except Exception as error:
                log.error(
                    "engine.events_failed", rank=self.publisher.rank, retry_s=READ_AGAIN_S, exc_info=error
                )
                self.give_up()
                await asyncio.sleep(READ_AGAIN_S)

    async def send(self, is_answering: asyncio.Event) -> None:
        """Send the rank's frames once `is_answering` is set."""
        await is_answering.wait()  # a replica that misses the first frame must be able to request it
        await self.publisher.run()

    async def read_again(self, events: RankEvents) -> None:
        """Read the history again after events that could not be followed."""
        clock, pause_s, read_at = asyncio.get_running_loop().time, READ_AGAIN_S, float("-inf")
        while True:
            await self.lost_track.wait()
            is_new = clock() - read_at > 2 * MOST_READ_AGAIN_S
            pause_s = READ_AGAIN_S if is_new else min(2 * pause_s, MOST_READ_AGAIN_S)
            await asyncio.sleep(pause_s)
            self.lost_track.clear()
            events.restart()
            read_at = clock()

    @property
    def _has_everything(self) -> bool:
        return self._is_whole and self._stream.is_complete

    def _apply(self, action: Apply) -> None:
        try:
            batch = self._adapter.decode(action.payload)
        except MalformedFrameError as error:
            self._lose_track("malformed", error=str(error))
            return
        if self._has_siblings and batch.rank not in {None, self.publisher.rank}:
            self._ignore(batch)
            return
        if self._first_ts is None:
            self._first_ts = batch.ts
        self._position = (action.seq, digest_of(action.payload))
        self.publisher.blocks.expects_reports = self._may_have_reports(batch)
        self._adapter.publish(batch, self.publisher)
        self._log_news()
        if self.is_partial:
            self._is_mended = batch.clears
        # more blocks than the engine has: a removal was missed, and nothing shows which
        if 0 < self.capacity_blocks < self.publisher.blocks.count(DEVICE):
            self._lose_track("overfull", capacity_blocks=self.capacity_blocks)

    def _ignore(self, batch: Batch[Any]) -> None:
        """Skip events of another rank: they name blocks of another cache."""
        reason = f"events of rank {batch.rank} on the endpoint of rank {self.publisher.rank}: "
        self.skipped.note(reason + "give the endpoints in the order of the ranks")
        self._log_news()
        self._is_whole = False

    def _log_news(self) -> None:
        """Log each reason and each note once."""
        for reason in self.skipped.keys() - self._logged:
            log.warning("engine.event_skipped", rank=self.publisher.rank, reason=reason)
        for note in set(self._adapter.notes) - self._logged:
            log.info("engine.note", rank=self.publisher.rank, note=note)
        self._logged.update(self.skipped, self._adapter.notes)

    def _may_have_reports(self, batch: Batch[Any]) -> bool:
        """Whether stores in it may be of blocks that a request reused: see OLD_REPORTS_S."""
        if batch.ts > self._old_reports_end_s:
            return False
        return self._had_reports or (batch.can_report and not self._has_everything)

    def _continue(self) -> None:
        """The engine has returned the last batch of the saved state: continue from there."""
        former = self._former
        assert former is not None, "continued without a state"
        head = former.head
        self._begin()
        self._is_whole, self._is_mended = head.is_whole, head.is_mended
        self._first_ts, self._position = head.first_ts, (head.seq, head.digest)
        self._adapter.restore(head.group, head.event_block_size, head.lookahead)
        self.publisher.restore(former.image, head.event_block_size)
        log.info("engine.history_continued", rank=head.rank, seq=head.seq, blocks=len(former.image.known))

    def _begin(self) -> None:
        self._former = None
        self._adapter.forget()
        self._is_whole = True
        self._is_mended = False
        self._first_ts = None
        self._position = None

    def _lose_track(self, reason: str, **facts: object) -> None:
        self._lose(reason, **facts)
        self.lost_track.set()

    def _lose(self, reason: str, **facts: object) -> None:
        """Begin again with an empty table: an undercount is allowed, an overcount never."""
        self._begin()
        self._is_whole = False
        self.losses[reason] += 1
        if self.losses[reason] == 1:  # a broken engine would log this every few seconds
            log.warning("engine.history_lost", rank=self.publisher.rank, reason=reason, **facts)
        self.publisher.lose_history(time.time_ns() // 1000)

    def _log_partial(self) -> None:
        if self.is_partial == self._was_partial or not self.is_settled:
            return
        self._was_partial = self.is_partial
        if self.is_partial:
            log.warning("rank.partial", rank=self.publisher.rank)
        else:
            log.info("rank.whole", rank=self.publisher.rank)
