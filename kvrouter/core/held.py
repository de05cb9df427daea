"""Live frames that arrive during a recovery: kept in order of arrival until they can be applied."""

from __future__ import annotations

from collections import deque

from kvrouter.core.events import Decoded

HELD_BYTES = 32 * 1024 * 1024


class HeldFrames:
    """A bounded queue. `question` counts what the reader has asked, to tell what came before which."""

    def __init__(self) -> None:
        self._frames: deque[tuple[Decoded, int]] = deque()
        self._bytes = 0

    def __bool__(self) -> bool:
        return bool(self._frames)

    @property
    def first(self) -> Decoded:
        """The oldest."""
        return self._frames[0][0]

    def hold(self, frame: Decoded, size: int, question: int) -> bool:
        """Keep a frame; False if that is more than there is room for."""
        self._frames.append((frame, question))
        self._bytes += size
        return self._bytes <= HELD_BYTES

    def pop(self) -> Decoded:
        """Take the oldest."""
        frame, _ = self._frames.popleft()
        if not self._frames:
            self._bytes = 0
        return frame

    def drop_unsent(self, seq: int, question: int) -> int:
        """The source had sent `seq` frames when it answered this question; returns how many were dropped.

        What was there before the question and counts more is not the source's own.
        """
        kept = deque(held for held in self._frames if held[0].seq <= seq or held[1] >= question)
        dropped, self._frames = len(self._frames) - len(kept), kept
        return dropped

    def clear(self) -> None:
        """Keep none."""
        self._frames.clear()
        self._bytes = 0
