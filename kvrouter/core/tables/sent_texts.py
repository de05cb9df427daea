"""What peers are told of texts (mode prefix-affinity): each as it is sent, joiners the last ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from kvrouter.core.wire.ids import Target
from kvrouter.core.wire.ops import MAX_SENT_CHARS, SentText

KEPT_CHARS = 1_000_000
"""Of all texts kept for joiners, about two targets' worth at Ray's threshold for eviction."""


class SentTexts:
    """The texts of own requests that were sent last. Invariant: no more than `KEPT_CHARS` in all."""

    def __init__(self) -> None:
        self._kept: deque[SentText] = deque()
        self._chars = 0

    def add(self, target: Target, text: str) -> SentText:
        """The target has computed this text; returns what the peers are to be told."""
        told = SentText(target.worker_id, target.rank, _sendable(text[:MAX_SENT_CHARS]))
        self._kept.append(told)
        self._chars += len(told.text)
        while self._chars > KEPT_CHARS:
            self._chars -= len(self._kept.popleft().text)
        return told

    def __iter__(self) -> Iterator[SentText]:
        """The oldest first."""
        return iter(self._kept)


def _sendable(text: str) -> str:
    """Without halves of surrogate pairs, which a Python program's text may have and UTF-8 has not."""
    return text.encode(errors="replace").decode()
