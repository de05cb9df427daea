"""Live frames that arrive during a recovery: kept, lowest number first, until they can be applied."""

from __future__ import annotations

import heapq

from kvrouter.core.events import Decoded

HELD_BYTES = 32 * 1024 * 1024


class HeldFrames:
    """A bounded heap. `question` counts what the reader has asked, to tell what came before which.

    By number, not by arrival: one with a number far ahead must not stand before all others.
    """

    def __init__(self) -> None:
        self._frames: list[tuple[int, int, int, Decoded, int]] = []
        self._count = 0
        self._bytes = 0

    def __bool__(self) -> bool:
        return bool(self._frames)

    @property
    def first(self) -> Decoded:
        """The one with the lowest number, of the oldest life."""
        return self._frames[0][3]

    def hold(self, frame: Decoded, size: int, question: int) -> bool:
        """Keep a frame; False if that is more than there is room for."""
        self._count += 1
        heapq.heappush(self._frames, (frame.incarnation, frame.seq, self._count, frame, question))
        self._bytes += size
        return self._bytes <= HELD_BYTES

    def pop(self) -> Decoded:
        """Take the first."""
        frame = heapq.heappop(self._frames)[3]
        if not self._frames:
            self._bytes = 0
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
        return dropped

    def clear(self) -> None:
        """Keep none."""
        self._frames.clear()
        self._bytes = 0
