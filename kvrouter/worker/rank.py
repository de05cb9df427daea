"""One rank of an engine: what arrives on its event socket becomes its KV feed.

    whole ──gap, malformed, overfull, nothing to begin from──> partial ──mended──> (as good as) whole

After lost history the table begins empty: what the engine holds from before is not in it, and will
not be until it is stored, or announced, anew. Nothing marks the end of that, so a rank counts as
mended only when what was missed can hardly be there any more:

- the engine has emptied its cache, or has restarted; or
- with repair, nothing is held back and the engine has since evicted twice as many blocks as it has
  room for. It evicts what was not used for longest: a block of which we still know nothing has not
  been hit by a request that asked for a report, so it has been evicted in the first round, or in
  the second if a request held it during the first. (A request that lasts longer than both rounds, or
  one that did not come through a frontend, may leave a block unknown: an undercount.) Other tiers
  than the device keep their own order: where there are any, only an empty cache will do.

That reports may still come has its price: a block stored twice at the root for real
(by two requests at once) counts once, and is withdrawn when one copy goes. If that happens to a rank
that is not partial, it is partial again: the next request that hits the other copy announces it.

On a busy engine mending takes minutes, on a quiet one for ever; until then the rank says `partial`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import structlog

from kvrouter.core.wire.ops import DEVICE
from kvrouter.errors import MalformedFrameError
from kvrouter.worker.blocks.state import RankHead, RankState
from kvrouter.worker.engines.adapter import Adapter, Batch, Reasons
from kvrouter.worker.engines.vllm import VllmAdapter
from kvrouter.worker.publisher import KvPublisher
from kvrouter.worker.zmq.ordering import Action, Apply, Continued, EngineStream, Lost, Restarted, digest_of
from kvrouter.worker.zmq.sockets import ZmqFeed

log = structlog.get_logger()

# Seconds between events that cannot be followed and the next attempt to read the rank's history: it
# doubles while they recur, because reading 10,000 batches again and again would cost more than it mends.
READ_AGAIN_S = 5.0
MOST_READ_AGAIN_S = 40.0
TURNOVERS_UNTIL_MENDED = 2
TABLE_FULL = "the agent's table is full: blocks beyond it are not indexed"


class EngineRank:
    """Applies a rank's batches to its publisher, and begins a new life where they cannot be trusted.

    `stream` puts the batches in order. `capacity_blocks` bounds what may be published, 0 meaning
    unknown: more than the engine has room for means that removals were missed. `repairs`: whether
    frontends ask for reports while the rank is partial; None: if its events have the shape of
    vLLMs that can. `former`: what the agent before left of this rank. `has_siblings`: whether it is one
    of several, so that a batch that names another rank came to the wrong feed.
    """

    def __init__(
        self,
        publisher: KvPublisher,
        stream: EngineStream,
        capacity_blocks: int = 0,
        *,
        repairs: bool | None = False,
        former: RankState | None = None,
        adapter: Adapter[Any] | None = None,
        has_siblings: bool = False,
    ) -> None:
        self.publisher = publisher
        self.capacity_blocks = capacity_blocks
        self.repairs = repairs
        self.losses: Counter[str] = Counter()
        self.lost_track = asyncio.Event()
        """Set where the engine's history may be had, but what was read of it could not be followed."""
        self._stream = stream
        self._former = former
        self._adapter: Adapter[Any] = VllmAdapter() if adapter is None else adapter
        self._has_siblings = has_siblings
        self._said: set[str] = set()
        self._was_partial = False
        self._is_down = False
        self._is_whole = True
        """Whether nothing has been missed since the beginning, which the stream knows of."""
        self._is_mended = False
        """Whether what was missed no longer matters."""
        self._first_ts: float | None = None
        self._position: tuple[int, bytes] | None = None
        """The last batch applied: its number, and the digest of its bytes."""
        self._removals_before = publisher.blocks.device_removals
        # whatever else is lost: requests that the agent before had asked for may still be under way
        publisher.blocks.hears_reports = former is not None and former.head.hears_reports

    @property
    def skipped(self) -> Reasons:
        """Events that were not passed on, by reason."""
        return self._adapter.skipped

    @property
    def notes(self) -> list[str]:
        """What an operator is to know about the rank's events: a bounded number of sentences."""
        notes = [*self._adapter.notes, *(f"events skipped: {reason}" for reason in self.skipped)]
        return [*notes, TABLE_FULL] if self.publisher.blocks.refused_stores else notes

    @property
    def is_settled(self) -> bool:
        """Whether the table is what is known of the engine: not while it is down or looked for."""
        return not (self._is_down or self._stream.is_beginning)

    @property
    def is_partial(self) -> bool:
        """Whether the engine may hold blocks that are not published."""
        return self.is_settled and not self._is_mended and not self._has_everything

    def tell_partial(self) -> bool:
        """Whether to announce it as partial; from then on requests may ask the engine for reports."""
        if self.is_partial and self.repairs:
            self.publisher.blocks.hears_reports = True
        return self.is_partial

    def on_action(self, action: Action) -> None:
        """Do what the stream of batches says."""
        if self._is_down and not isinstance(action, Restarted):
            return  # once it is up again its history is read anew
        match action:
            case Apply():
                self._apply(action)
            case Restarted():
                self._is_down = False
                self._begin()
                self.publisher.begin_life()
            case Continued():
                self._continue()
            case Lost():
                self._lose("gap")
        self._say_if_partial()

    def set_repairs(self, repairs: bool | None) -> None:
        """Note what the engine's version says; if it says nothing, what its events showed stays."""
        if repairs is not None:
            self.repairs = repairs

    def go_down(self) -> None:
        """The engine is gone, and what it held with it."""
        self._is_down = True
        self._begin()
        self.publisher.begin_life()

    def give_up(self) -> None:
        """An event has broken something: what the table says is in doubt."""
        self._lose_track("failed")

    def is_older_than(self, engine_started_s: float) -> bool:
        """Whether the table has batches from before the engine process started."""
        return self._first_ts is not None and self._first_ts < engine_started_s

    def state(self) -> RankState | None:
        """The rank for the agent that comes next; None before the first batch. Call it when settled."""
        if self._position is None:
            return None
        seq, digest = self._position
        blocks = self.publisher.blocks
        head = RankHead(
            self.publisher.rank,
            seq,
            digest,
            self._stream.is_complete,
            self._is_whole,
            self._is_mended,
            blocks.hears_reports,
            blocks.device_removals - self._removals_before,
            self._adapter.group,
            self._first_ts,
            self.publisher.event_block_size,
        )
        return RankState(head, blocks.image())

    async def follow(self, feed: ZmqFeed) -> None:
        """Apply the rank's events. An error in them stops this rank alone, which goes on after a pause."""
        while True:
            try:
                await feed.run(self.on_action)
            except Exception as error:
                log.error(
                    "engine.feed_failed", rank=self.publisher.rank, retry_s=READ_AGAIN_S, exc_info=error
                )
                self.give_up()
                await asyncio.sleep(READ_AGAIN_S)

    async def read_again(self, feed: ZmqFeed) -> None:
        """Read the history again after events that could not be followed, less often while they recur."""
        clock, pause_s, read_at = asyncio.get_running_loop().time, READ_AGAIN_S, float("-inf")
        while True:
            await self.lost_track.wait()
            is_new = clock() - read_at > 2 * MOST_READ_AGAIN_S
            pause_s = READ_AGAIN_S if is_new else min(2 * pause_s, MOST_READ_AGAIN_S)
            await asyncio.sleep(pause_s)
            self.lost_track.clear()
            feed.restart()
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
            self._refuse(batch)
            return
        if self._first_ts is None:
            self._first_ts = batch.ts
        self._position = (action.seq, digest_of(action.payload))
        self._expect_reports(batch)
        doubts_before = self.publisher.blocks.doubtful_removals
        self._adapter.tell(batch, self.publisher)
        self._say_what_is_new()
        if self.is_partial:
            self._mend(batch)
        elif self.publisher.blocks.doubtful_removals > doubts_before:
            self._doubt()
        if 0 < self.capacity_blocks < self.publisher.blocks.count(DEVICE):
            self._lose_track("overfull", capacity_blocks=self.capacity_blocks)

    def _refuse(self, batch: Batch[Any]) -> None:
        """Another rank's events: what they name is not here, and what is here they do not name."""
        reason = f"events of rank {batch.rank} on the endpoint of rank {self.publisher.rank}: "
        self.skipped.note(reason + "give the endpoints in the order of the ranks")
        self._say_what_is_new()
        self._is_whole = False

    def _say_what_is_new(self) -> None:
        """Log each reason and each note once."""
        for reason in self.skipped.keys() - self._said:
            log.warning("engine.event_skipped", rank=self.publisher.rank, reason=reason)
        for note in set(self._adapter.notes) - self._said:
            log.info("engine.note", rank=self.publisher.rank, note=note)
        self._said.update(self.skipped, self._adapter.notes)

    def _expect_reports(self, batch: Batch[Any]) -> None:
        """While something is missing, requests may ask for reports; ours, or those of an agent before.

        It stays so even when nothing is missing any more: a request can be queued for minutes, and a
        frontend that is cut off from NATS goes on asking. The price is small, see EngineBlocks.
        """
        if self.repairs is None and batch.can_report:
            self.repairs = True
        if self.repairs and not self._has_everything:
            self.publisher.blocks.hears_reports = True

    def _mend(self, batch: Batch[Any]) -> None:
        """See whether the rank is as good as whole now."""
        self.publisher.blocks.forget_uncounted()  # they have been asked for
        self._is_mended = batch.clears or self._is_turned_over()

    def _doubt(self) -> None:
        """Something may be missing again, though nothing that is published is wrong."""
        self._is_whole = self._is_mended = False
        self._removals_before = self.publisher.blocks.device_removals

    def _is_turned_over(self) -> bool:
        blocks = self.publisher.blocks
        can_tell = self.repairs and self.capacity_blocks > 0 and blocks.widest_tier == DEVICE
        if not can_tell or blocks.held_blocks:
            return False
        evicted = blocks.device_removals - self._removals_before
        return evicted >= TURNOVERS_UNTIL_MENDED * self.capacity_blocks

    def _continue(self) -> None:
        """The engine has returned the batch that was the last of the agent before: go on from there."""
        former = self._former
        assert former is not None, "continued without a state"
        head = former.head
        self._begin()
        self._is_whole, self._is_mended = head.is_whole, head.is_mended
        self._first_ts, self._position = head.first_ts, (head.seq, head.digest)
        self._removals_before -= head.removals
        self._adapter.group = head.group
        self.publisher.restore(former.image, head.event_block_size)
        log.info("engine.history_continued", rank=head.rank, seq=head.seq, blocks=len(former.image.known))

    def _begin(self) -> None:
        self._former = None
        self._adapter.forget()
        self._is_whole = True
        self._is_mended = False
        self._first_ts = None
        self._position = None
        self._removals_before = self.publisher.blocks.device_removals

    def _lose_track(self, reason: str, **facts: object) -> None:
        self._lose(reason, **facts)
        self.lost_track.set()

    def _lose(self, reason: str, **facts: object) -> None:
        """Undercount is allowed, overcount never: begin again with an empty table."""
        self._begin()
        self._is_whole = False
        self.losses[reason] += 1
        if self.losses[reason] == 1:
            log.warning("engine.history_lost", rank=self.publisher.rank, reason=reason, **facts)
        self.publisher.lose_history(time.time_ns() // 1000)

    def _say_if_partial(self) -> None:
        if self.is_partial == self._was_partial or not self.is_settled:
            return
        self._was_partial = self.is_partial
        if self.is_partial:
            log.warning("rank.partial", rank=self.publisher.rank, repairs=bool(self.repairs))
        else:
            log.info("rank.whole", rank=self.publisher.rank)
