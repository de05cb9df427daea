"""When each target last got a request of which no worker had a block cached (scorer no-hit-lru).

Such a request makes a cache grow; sending each to the least recently used target makes the caches grow alike.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvrouter.core.wire.ids import Target


class NoHitLru:
    """Targets by their last uncached request. Bounded by the workers: the pool calls `forget`."""

    def __init__(self) -> None:
        self._last: dict[Target, int] = {}
        self._tick = 0

    def used(self, target: Target) -> None:
        """The target got an uncached request just now."""
        self._tick += 1
        self._last[target] = self._tick

    def forget(self, target: Target) -> None:
        self._last.pop(target, None)

    def ranks(self, targets: Sequence[Target]) -> list[int]:
        """Each target's place, 0 for the least recently used; all targets never used share place 0."""
        ticks = [self._last.get(target, 0) for target in targets]
        places = {tick: place for place, tick in reversed(list(enumerate(sorted(ticks))))}
        return [places[tick] for tick in ticks]
