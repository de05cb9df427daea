"""Live frames that arrive during a recovery: kept, lowest number first, until they can be applied."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from kvrouter.core.wire.ops import Decoded

HELD_BYTES = 32 * 1024 * 1024
"""Of one feed."""
HELD_BYTES_OF_ALL = 256 * 1024 * 1024


@dataclass(slots=True)
class HeldBudget:
    """What all feeds of a replica hold together."""

    used_bytes: int = 0
    most_bytes: int = HELD_BYTES_OF_ALL


class HeldFrames:
    """A bounded heap. `question` counts what the reader has asked, to tell what came before which.

    By number, not by arrival: one with a number far ahead must not stand before all others.

    Invariant: `_bytes` is the sum of the held frames' sizes, and a part of the budget's `used_bytes`.
    """

    def __init__(self, budget: HeldBudget) -> None:
        self._budget = budget
        self._frames: list[tuple[int, int, int, Decoded, int, int]] = []
        self._count = 0
        self._bytes = 0

    def __bool__(self) -> bool:
        return bool(self._frames)

    @property
    def first(self) -> Decoded:
        """The one with the lowest number, of the oldest incarnation."""
        return self._frames[0][3]

    def hold(self, frame: Decoded, size: int, question: int) -> bool:
        """Keep a frame of `size` bytes; False, and it is not kept, if there is not room for it."""
        if self._bytes + size > HELD_BYTES or self._budget.used_bytes + size > self._budget.most_bytes:
            return False
        self._count += 1
        heapq.heappush(self._frames, (frame.incarnation, frame.seq, self._count, frame, question, size))
        self._take_bytes(size)
        return True

    def pop(self) -> Decoded:
        """Take the first."""
        *_, frame, _, size = heapq.heappop(self._frames)
        self._take_bytes(-size)
        return frame

    def drop_unsent(self, seq: int, question: int) -> int:
        """The source says that it had sent `seq` frames; returns how many were dropped.

        What was there before this question and counts more is not the source's own.
        """
        kept = [held for held in self._frames if held[1] <= seq or held[4] >= question]
        dropped = len(self._frames) - len(kept)
        if dropped:
            heapq.heapify(kept)
            self._frames = kept
            self._take_bytes(sum(held[5] for held in kept) - self._bytes)
        return dropped

    def clear(self) -> None:
        """Keep none."""
        self._frames.clear()
        self._take_bytes(-self._bytes)

    def _take_bytes(self, size: int) -> None:
        self._bytes += size
        self._budget.used_bytes += size
