"""How many requests arrive, and which share of them begins with the same blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence

# An arrival fades to a third in this time.
FADES_S = 30.0
# Arrivals within this time fade as the first of them: no exponential for each, and wrong by 0.3 % at most.
TOGETHER_S = 0.1
# A share is taken of at least this many requests: the first ones say little.
FEWEST = 32
# Walking 2,000 blocks takes 40 µs. A prime: of clients that take turns, none is walked always, or never.
_WALKED_EVERY = 31


class Arrivals:
    """Requests per second over all replicas: a decayed count."""

    def __init__(self) -> None:
        self._rate = 0.0
        self._at = 0.0

    def count(self, now: float) -> None:
        """A request was placed, here or at a peer."""
        if not 0 <= now - self._at < TOGETHER_S:
            self._rate, self._at = self.per_s(now), now
        self._rate += 1 / FADES_S

    def per_s(self, now: float) -> float:
        """Requests per second, as of now."""
        return self._rate * math.exp(min(0.0, self._at - now) / FADES_S)


class PrefixShares:
    """Counts requests by the deepest block of theirs that any target holds. Counts halve, so all is bounded.

        chain of a request   ■ ■ ■ ■ ■ ■ □ □      ■ held by some target
                                 │     └ counted: its deepest
                                 └ counted for one request in 31, as 31: the deepest of other requests

    So a system prompt has the share of all that begins with it, also of those that hold more of their own.
    Invariant: at most `most` counts, of at least 1 each.
    """

    def __init__(self, most: int = 1024) -> None:
        self._most = most
        self._counts: dict[int, float] = {}
        self._total = 0.0
        self._placed = 0

    def count(self, hashes: Sequence[int], depth: int) -> None:
        """A request was placed. Some target holds the first `depth` blocks of its prompt, and no more."""
        self._total += 1
        if depth:
            block, counts = hashes[depth - 1], self._counts
            counts[block] = counts.get(block, 0.0) + 1
            self._placed += 1
            if self._placed % _WALKED_EVERY == 0:
                for above in counts.keys() & hashes[: depth - 1]:
                    counts[above] += _WALKED_EVERY
        if self._total > self._most:
            self._total /= 2
            self._counts = {block: count / 2 for block, count in self._counts.items() if count >= 2}

    def share(self, block: int) -> float:
        """The share of recent requests that would reuse this block; 0 after less than two of them."""
        count = self._counts.get(block, 0.0)
        return min(1.0, count / max(self._total, FEWEST)) if count >= 2 else 0.0
