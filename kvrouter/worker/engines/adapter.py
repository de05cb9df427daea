"""What an engine adapter is: it decodes one engine's events and passes on what they mean.

    payload ──decode──> Batch ──publish──> Sink (a KvPublisher)

An adapter knows only its engine's wire format. Everything else is the same for all engines: EngineStream
handles the order of batches, gaps and restarts; the publisher counts references and keeps its sets
prefix-closed; EngineRank handles lost history.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvrouter.worker.publisher import Sink

# Reasons are built from texts that the engine sends, so their number needs a limit.
MAX_REASONS = 32
OTHER_REASONS = "other reasons"

Event = TypeVar("Event")


class Reasons(Counter[str]):
    """How often something was not passed on, by reason. Beyond MAX_REASONS all others count as one."""

    def note(self, reason: str, times: int = 1) -> None:
        is_new = reason not in self and len(self) >= MAX_REASONS
        self[OTHER_REASONS if is_new else reason] += times


@dataclass(frozen=True, slots=True)
class Batch(Generic[Event]):
    """What an engine published in one message; `ts` in seconds since the epoch.

    `rank` is the engine's number of the rank, None if the batch has none. `skipped` counts events that were
    not understood, by reason. `clears`: the batch empties the cache. `can_report`: the engine can announce
    reused blocks on request.
    """

    ts: float
    rank: int | None
    events: Sequence[Event]
    skipped: Counter[str] = field(default_factory=Counter)
    clears: bool = False
    can_report: bool = False


class Adapter(ABC, Generic[Event]):
    """The wire format of one engine's events.

    `skipped` counts events that were not passed on; where an operator can do something about it, the reason
    states what. `group` is the KV group that is followed, None until an event shows it, and `lookahead` how
    many tokens behind a block are part of its name; a restarted agent restores both. `speculates`: the engine
    drops the last block that it finds (EAGLE, MTP).
    """

    def __init__(self) -> None:
        self.skipped = Reasons()
        self.group: int | None = None
        self.lookahead = 0
        self.speculates = False

    @property
    @abstractmethod
    def notes(self) -> list[str]:
        """What an operator should know about these events; goes on the worker's card. A bounded number."""

    def restore(self, group: int | None, block_size: int, lookahead: int) -> None:
        """Continue with the published group of a saved state, and the size of its blocks."""
        self.group, self.lookahead = group, lookahead

    @abstractmethod
    def forget(self) -> None:
        """Forget what events have shown so far: the next ones may be from another life of the engine."""

    @abstractmethod
    def decode(self, payload: bytes) -> Batch[Event]:
        """Decode a message. Raises MalformedFrameError if a removal may be lost in it."""

    @abstractmethod
    def publish(self, batch: Batch[Event], sink: Sink) -> None:
        """Pass on the events of a batch, in order."""
