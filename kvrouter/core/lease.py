"""Leases: how long a source may stay silent, counted in rounds of one's own heartbeat.

A round is one of our own heartbeats that came back through the bus. Whoever is cut off, deaf,
stopped or paused sees no rounds and so drops nobody; no clock is compared with another.

Invariant: `silent[s]` = rounds since s was last heard.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

SourceT = TypeVar("SourceT", bound=Hashable)

DEFAULT_ROUNDS = 5


class Leases(Generic[SourceT]):
    """Who was heard, how many rounds ago."""

    def __init__(self, rounds: int = DEFAULT_ROUNDS) -> None:
        self.rounds = rounds
        self._silent: dict[SourceT, int] = {}
        self._last_round = 0

    def heard(self, source: SourceT) -> None:
        """The source spoke; its lease begins anew."""
        self._silent[source] = 0

    def forget(self, source: SourceT) -> None:
        """The source said goodbye."""
        self._silent.pop(source, None)

    def round(self, number: int) -> list[SourceT]:
        """Our heartbeat `number` came back. Drops, and returns, whoever was silent for too many."""
        if number <= self._last_round:
            return []  # repeated by the bus
        self._last_round = number
        for source in self._silent:
            self._silent[source] += 1
        lost = [source for source, silent in self._silent.items() if silent >= self.rounds]
        for source in lost:
            del self._silent[source]
        return lost
