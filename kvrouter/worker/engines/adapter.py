"""What an engine adapter is: it reads one engine's events, and says what they mean.

    payload ──decode──> Batch ──tell──> Sink (a KvPublisher)

An adapter knows its engine's wire and nothing else. The order of batches, gaps and restarts are the
stream's; references and prefix closure the publisher's; lost history the rank's: the same for all engines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from kvrouter.worker.blocks.engine_blocks import BlockIds, EngineHash

MAX_REASONS = 32
OTHER_REASONS = "other reasons"

Event = TypeVar("Event")


class Reasons(Counter[str]):
    """How often something was not passed on, by reason: a bounded number of them, the rest is one."""

    def note(self, reason: str, times: int = 1) -> None:
        """Count a reason."""
        is_new = reason not in self and len(self) >= MAX_REASONS
        self[OTHER_REASONS if is_new else reason] += times


@dataclass(frozen=True, slots=True)
class Batch(Generic[Event]):
    """What an engine published at once; `ts` in seconds since the epoch. `skipped` counts by reason.

    `rank`: the engine's own number of the rank, None if it does not say. `clears`: whether it empties the
    cache. `can_report`: whether the engine is one of those that announce reused blocks on demand.
    """

    ts: float
    rank: int | None
    events: Sequence[Event]
    skipped: Counter[str] = field(default_factory=Counter)
    clears: bool = False
    can_report: bool = False


class Sink(Protocol):
    """Where events go: a KvPublisher."""

    def stored(  # noqa: PLR0917  # KvPublisher's
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
        """Blocks were stored."""

    def removed(self, engine_hashes: Sequence[EngineHash], tier: str = "device") -> None:
        """Blocks were removed."""

    def cleared(self) -> None:
        """Everything was removed."""


class Adapter(Protocol[Event]):
    """One engine's event wire.

    `skipped` counts what was not passed on, by a reason that says what to change if anything can be.
    `group` is the KV group that is followed, None until events have shown it; a restarted agent restores it.
    `notes` says what an operator is to know about these events: it goes on the worker's card.
    """

    skipped: Reasons
    group: int | None

    @property
    def notes(self) -> list[str]:
        """A few short sentences, of which there can only be few."""

    def forget(self) -> None:
        """What comes may be of another life of the engine: forget what its events have shown."""

    def decode(self, payload: bytes) -> Batch[Event]:
        """Read what the engine published. Raises MalformedFrameError if a removal may be lost in it."""

    def tell(self, batch: Batch[Event], sink: Sink) -> None:
        """Pass on a batch, in order."""
