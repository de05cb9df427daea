"""When each target last got a request that nobody had cached (scorer no-hit-lru).

A cold request makes a cache grow; spreading them by least recent use makes the caches grow alike.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvrouter.core.wire.ids import Target


class ColdOrder:
    """Targets in the order of their last cold request. Bounded: `forget` goes with the worker."""

    def __init__(self) -> None:
        self._last: dict[Target, int] = {}
        self._tick = 0

    def used(self, target: Target) -> None:
        """It got a cold request just now."""
        self._tick += 1
        self._last[target] = self._tick

    def forget(self, target: Target) -> None:
        """The target is gone."""
        self._last.pop(target, None)

    def ranks(self, targets: Sequence[Target]) -> list[int]:
        """Each target's place, 0 for the least recently used; those never used share the first place."""
        ticks = [self._last.get(target, 0) for target in targets]
        places = {tick: place for place, tick in reversed(list(enumerate(sorted(ticks))))}
        return [places[tick] for tick in ticks]
