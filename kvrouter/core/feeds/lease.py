"""Leases: how long a source may stay silent, counted in rounds of one's own heartbeat.

A round is one of our own heartbeats that came back through the bus. Whoever is cut off, deaf,
stopped or paused sees no rounds and so drops nobody; no clock is compared with another. A source
whose heartbeats are further apart than ours has a longer lease: what as many of its own take.

Invariant: `silent[s]` = rounds since s was last heard.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Generic, TypeVar

SourceT = TypeVar("SourceT", bound=Hashable)

DEFAULT_ROUNDS = 5
MAX_INTERVAL_MS = 10_000
"""Of a source's heartbeats, as it says itself: the most that --heartbeat-s takes. It bounds how long a forged
heartbeat counts: five of these."""


class Leases(Generic[SourceT]):
    """Who was heard, how many rounds ago. `rounds` is the shortest lease, `interval_s` a round's length."""

    def __init__(self, rounds: int = DEFAULT_ROUNDS, interval_s: float = 1.0) -> None:
        self.rounds = rounds
        self._interval_s = interval_s
        self._silent: dict[SourceT, int] = {}
        self._longer: dict[SourceT, int] = {}
        """Rounds of those that have more than `rounds`."""
        self._last_round = 0

    def heard(self, source: SourceT, interval_ms: int | None = None) -> None:
        """The source spoke; its lease begins anew. `interval_ms`: between its heartbeats, if it says so."""
        self._silent[source] = 0
        if interval_ms is None:
            return
        interval_s = min(interval_ms, MAX_INTERVAL_MS) / 1000
        rounds = math.ceil(DEFAULT_ROUNDS * interval_s / self._interval_s)
        if rounds > self.rounds:
            self._longer[source] = rounds
        else:
            self._longer.pop(source, None)

    def silent_rounds(self, source: SourceT) -> int:
        """Rounds since the source was heard; 0 if it has no lease."""
        return self._silent.get(source, 0)

    def forget(self, source: SourceT) -> None:
        """The source said goodbye."""
        self._silent.pop(source, None)
        self._longer.pop(source, None)

    def round(self, number: int) -> list[SourceT]:
        """Our heartbeat `number` came back. Drops, and returns, whoever was silent for too many."""
        if number <= self._last_round:
            return []  # repeated by the bus
        self._last_round = number
        for source in self._silent:
            self._silent[source] += 1
        lost = [
            source
            for source, silent in self._silent.items()
            if silent >= self.rounds and silent >= self._longer.get(source, 0)
        ]
        for source in lost:
            self.forget(source)
        return lost
