"""One rank of an engine: what arrives on its event socket becomes its KV feed."""

from __future__ import annotations

import time
from collections import Counter

import structlog

from kvrouter.core.events import DEVICE
from kvrouter.errors import MalformedFrameError
from kvrouter.worker.publisher import KvPublisher
from kvrouter.worker.stream import Action, Apply, Lost, Restarted
from kvrouter.worker.vllm import AllBlocksCleared, AllCacheCleared, VllmAdapter, decode_batch

log = structlog.get_logger()


class EngineRank:
    """Applies a rank's batches to its publisher, and begins a new life where they cannot be trusted.

    `capacity_blocks` bounds what may be published, 0 meaning unknown: more than the engine has
    room for means that removals were missed.
    """

    def __init__(self, publisher: KvPublisher, capacity_blocks: int = 0) -> None:
        self.publisher = publisher
        self.capacity_blocks = capacity_blocks
        self.losses: Counter[str] = Counter()
        self.is_whole = True
        """Whether everything the engine holds can be known here, as far as batches were read."""
        self.was_cleared = False
        """Whether the engine has emptied its cache since history was lost."""
        self._adapter = VllmAdapter(publisher)
        self._first_ts: float | None = None

    @property
    def skipped(self) -> Counter[str]:
        """Events that were not passed on, by reason."""
        return self._adapter.skipped

    def on_action(self, action: Action) -> None:
        """Do what the stream of batches says."""
        match action:
            case Apply():
                self._apply(action.payload)
            case Restarted():
                self._begin()
                self.publisher.cleared()
            case Lost():
                self._lose("gap")

    def is_partial(self, *, has_all_batches: bool) -> bool:
        """Whether the engine may hold blocks that are not published."""
        return not self.was_cleared and not (self.is_whole and has_all_batches)

    def is_older_than(self, engine_started_s: float) -> bool:
        """Whether the table has batches from before the engine process started."""
        return self._first_ts is not None and self._first_ts < engine_started_s

    def _apply(self, payload: bytes) -> None:
        try:
            batch = decode_batch(payload)
        except MalformedFrameError as error:
            self._lose("malformed", error=str(error))
            return
        if self._first_ts is None:
            self._first_ts = batch.ts
        known = self.skipped.keys() | ()
        self._adapter.apply(batch)
        for reason in self.skipped.keys() - known:
            log.warning("engine.event_skipped", rank=self.publisher.rank, reason=reason)
        if any(isinstance(event, AllBlocksCleared | AllCacheCleared) for event in batch.events):
            self.was_cleared = True
        if 0 < self.capacity_blocks < self.publisher.blocks.count(DEVICE):
            self._lose("overfull", capacity_blocks=self.capacity_blocks)

    def _begin(self) -> None:
        self.is_whole = True
        self.was_cleared = False
        self._first_ts = None

    def _lose(self, reason: str, **facts: object) -> None:
        """Undercount is allowed, overcount never: begin again with an empty table."""
        self._begin()
        self.is_whole = False
        self.losses[reason] += 1
        if self.losses[reason] == 1:
            log.warning("engine.history_lost", rank=self.publisher.rank, reason=reason, **facts)
        self.publisher.lose_history(time.time_ns() // 1000)
