"""The caches of a fleet without its clocks: what random and perfect placement find in them.

Every worker has one cache, and drops the least recently used blocks, of one prompt the deepest first. There
are no queues and batches: so `perfect` is a bound for the cache alone.

    random      any worker
    perfect     the worker that holds most of the prompt. If all that is held is a prefix too popular for one
                worker (more than its share of the requests have it), the worker that has computed the least

Bounded: when all caches together hold more than MOST_BLOCKS, half of the blocks by hash stay, in caches half
as large, then a quarter, ... (as in core/tables/ghosts.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

MOST_BLOCKS = 1 << 19
# Uses before a prefix can be popular: of few requests, two are already a large share.
_FEW = 8


class FleetCaches:
    """One least-recently-used cache for each worker."""

    def __init__(self, workers: int, blocks_each: int, most_blocks: int = MOST_BLOCKS) -> None:
        self.computed = [0] * workers
        """Blocks, by worker."""
        self._most = most_blocks
        self._mask = 0
        self._each = blocks_each
        self._held = 0
        self._caches: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(workers)]

    @property
    def busiest(self) -> float:
        """Blocks computed by the worker with most of them, divided by the mean."""
        total = sum(self.computed)
        return max(self.computed) * len(self.computed) / total if total else 1.0

    def place(self, names: Sequence[int]) -> int:
        """Choose a worker and cache the prompt there; returns the blocks that had to be computed."""
        sampled = [name for name in names if not name & self._mask] if self._mask else names
        worker = self._choose(sampled)
        cache = self._caches[worker]
        found = next((place for place, name in enumerate(sampled) if name not in cache), len(sampled))
        missing = (len(sampled) - found) * (self._mask + 1)
        self.computed[worker] += missing
        self._held -= len(cache)
        self._use(worker, sampled, found)
        self._held += len(cache)
        while self._held > self._most:
            self._halve()
        return missing

    def check(self) -> None:
        """Raise if an invariant is broken."""
        assert self._held == sum(len(cache) for cache in self._caches) <= self._most
        for cache in self._caches:
            assert len(cache) <= self._each

    def _choose(self, names: Sequence[int]) -> int:
        raise NotImplementedError

    def _halve(self) -> None:
        """Keep every other block, in caches half as large."""
        self._mask = 2 * self._mask + 1
        self._each //= 2
        self._held = 0
        for worker in range(len(self._caches)):
            gone = [name for name in self._caches[worker] if name & self._mask]
            self._drop(worker, gone)
            self._drop(worker, self._excess(worker))
            self._held += len(self._caches[worker])

    def _excess(self, worker: int) -> list[int]:
        """What does not fit, the least recently used first."""
        cache = self._caches[worker]
        return [*islice(cache, max(0, len(cache) - self._each))]

    def _drop(self, worker: int, names: Sequence[int]) -> None:
        for name in names:
            del self._caches[worker][name]

    def _use(self, worker: int, names: Sequence[int], found: int) -> None:
        """Cache a prompt of whose blocks the first `found` are cached."""
        cache = self._caches[worker]
        # the deepest first, so that it is evicted first
        for name in reversed(names):
            cache[name] = None
            cache.move_to_end(name)
        self._drop(worker, self._excess(worker))


class RandomPlacement(FleetCaches):
    def __init__(
        self,
        workers: int,
        blocks_each: int,
        chance: Callable[[int], int],
        most_blocks: int = MOST_BLOCKS,
    ) -> None:
        """`chance(n)` is a number below n."""
        super().__init__(workers, blocks_each, most_blocks)
        self._chance = chance

    def _choose(self, names: Sequence[int]) -> int:
        return self._chance(len(self._caches))


class PerfectPlacement(FleetCaches):
    """Invariant: bit `w` of a block's holders is set exactly if worker `w` has it."""

    def __init__(self, workers: int, blocks_each: int, most_blocks: int = MOST_BLOCKS) -> None:
        super().__init__(workers, blocks_each, most_blocks)
        self._holders: dict[int, int] = {}
        self._uses: dict[int, int] = {}  # since it is held
        self._requests = 0

    def check(self) -> None:
        super().check()
        for worker, cache in enumerate(self._caches):
            assert {name for name, holders in self._holders.items() if holders >> worker & 1} == cache.keys()
        assert self._uses.keys() == self._holders.keys()

    def _choose(self, names: Sequence[int]) -> int:
        holders, last = (1 << len(self._caches)) - 1, None
        for name in names:
            both = holders & self._holders.get(name, 0)
            if not both:
                break
            holders, last = both, name
        fair = self._requests / len(self._caches) + _FEW
        is_popular = last is None or self._uses[last] > fair
        among = range(len(self._caches)) if is_popular else _bits(holders)
        return min(among, key=self.computed.__getitem__)

    def _use(self, worker: int, names: Sequence[int], found: int) -> None:
        self._requests += 1
        for name in names:
            self._uses[name] = self._uses.get(name, 0) + 1
        # of the blocks behind the first missing one, some may be cached
        for name in names[found:]:
            self._holders[name] = self._holders.get(name, 0) | 1 << worker
        super()._use(worker, names, found)

    def _drop(self, worker: int, names: Sequence[int]) -> None:
        super()._drop(worker, names)
        for name in names:
            self._holders[name] &= ~(1 << worker)
            if not self._holders[name]:
                del self._holders[name], self._uses[name]


def _bits(mask: int) -> Iterator[int]:
    """The places of its set bits."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
