"""The caches of a fleet without its clocks: what random and perfect placement find in them.

Every worker has one cache, and drops the least recently used blocks, of one prompt the deepest first. There
are no queues and batches: so `perfect` is a bound for the cache alone.

    random      any worker
    perfect     the worker that holds most of the prompt. If all that is held is a prefix too popular for one
                worker (more than its share of the requests have it), the worker that has computed the least

Bounded: above MOST_BLOCKS of all caches together, a sample of the blocks in caches as much smaller.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

MOST_BLOCKS = 1 << 17
# Uses before a prefix can be popular: of few requests, two are already a large share.
_FEW = 8


class FleetCaches:
    """One least-recently-used cache for each worker."""

    def __init__(self, workers: int, blocks_each: int, most_blocks: int = MOST_BLOCKS) -> None:
        self.computed = [0] * workers
        """Blocks, by worker."""
        halvings = max(0, (workers * blocks_each - 1).bit_length() - (most_blocks - 1).bit_length())
        self._mask = (1 << halvings) - 1
        self._each = blocks_each >> halvings
        self._caches: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(workers)]

    @property
    def is_sampled(self) -> bool:
        return self._mask > 0

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
        self._use(worker, sampled, found)
        missing = (len(sampled) - found) * (self._mask + 1)
        self.computed[worker] += missing
        return missing

    def check(self) -> None:
        """Raise if an invariant is broken."""
        for cache in self._caches:
            assert len(cache) <= self._each

    def _choose(self, names: Sequence[int]) -> int:
        raise NotImplementedError

    def _use(self, worker: int, names: Sequence[int], found: int) -> list[int]:
        """Cache a prompt of whose blocks `found` are cached; returns what is evicted."""
        cache = self._caches[worker]
        # the deepest first, so that it is evicted first
        for name in reversed(names):
            cache[name] = None
            cache.move_to_end(name)
        return [cache.popitem(last=False)[0] for _ in range(len(cache) - self._each)]


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

    def _use(self, worker: int, names: Sequence[int], found: int) -> list[int]:
        bit = 1 << worker
        self._requests += 1
        for name in names:
            self._uses[name] = self._uses.get(name, 0) + 1
        # of the blocks behind the first missing one, some may be cached
        for name in names[found:]:
            self._holders[name] = self._holders.get(name, 0) | bit
        evicted = super()._use(worker, names, found)
        for name in evicted:
            self._holders[name] &= ~bit
            if not self._holders[name]:
                del self._holders[name], self._uses[name]
        return evicted


def _bits(mask: int) -> Iterator[int]:
    """The places of its set bits."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
