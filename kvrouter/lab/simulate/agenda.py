"""Virtual time: what is to happen when. Nothing waits; time jumps to the next entry."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Agenda:
    """Functions to call at their times, in order; entries of one time in the order they were made."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Callable[[float], None]]] = []
        self._made = 0
        self.now = 0.0
        """The time of the entry that is acted on."""

    def at(self, when: float, act: Callable[[float], None]) -> None:
        """Call `act(when)` at that time."""
        self._made += 1
        # the number keeps entries of one time in order, and functions from being compared
        heapq.heappush(self._entries, (when, self._made, act))

    def run(self) -> None:
        """Until nothing is left."""
        entries = self._entries
        while entries:
            self.now, _, act = heapq.heappop(entries)
            act(self.now)
