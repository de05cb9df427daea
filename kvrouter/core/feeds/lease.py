"""Leases: how long a source may be silent, counted in rounds.

A round is a heartbeat of this process that came back to it through NATS. A process that is cut off, stopped
or paused counts no rounds, so it expires no lease; clocks of two machines are never compared. A source whose
heartbeats come less often than ours has a longer lease: the time that five of its own take.

Invariant: `silent[s]` = rounds since the last message of s.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Generic, TypeVar

SourceT = TypeVar("SourceT", bound=Hashable)

DEFAULT_ROUNDS = 5
# The largest --heartbeat-s. A source reports its own interval, so this bounds the lease that a forged
# heartbeat begins.
MAX_INTERVAL_MS = 10_000


class Leases(Generic[SourceT]):
    """Rounds of silence of each source. `rounds`: the shortest lease; `interval_s`: length of a round."""

    def __init__(self, rounds: int = DEFAULT_ROUNDS, interval_s: float = 1.0) -> None:
        self.rounds = rounds
        self._interval_s = interval_s
        self._silent: dict[SourceT, int] = {}
        self._longer: dict[SourceT, int] = {}  # leases of more than `rounds`
        self._last_round = 0

    def renew(self, source: SourceT, interval_ms: int | None = None) -> None:
        """Begin the source's lease again. `interval_ms`: time between its heartbeats, if it reports that."""
        self._silent[source] = 0
        if interval_ms is None:
            return
        rounds = DEFAULT_ROUNDS * min(interval_ms, MAX_INTERVAL_MS) / 1000 / self._interval_s
        if rounds > self.rounds:
            self._longer[source] = math.ceil(rounds)
        elif self._longer:
            self._longer.pop(source, None)

    def silent_rounds(self, source: SourceT) -> int:
        """Rounds since the last message of the source; 0 if it has no lease."""
        return self._silent.get(source, 0)

    def forget(self, source: SourceT) -> None:
        """End the source's lease, because it left."""
        self._silent.pop(source, None)
        self._longer.pop(source, None)

    def round(self, number: int) -> list[SourceT]:
        """Our heartbeat `number` came back. Removes and returns the sources whose lease has ended."""
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
