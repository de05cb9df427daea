"""What caches that do not exist would have had: one endless cache, and one of the whole fleet's size.

    a prompt's blocks ──sampled by hash──> pooled:  the last used, as many as the fleet holds × rate
                                       └─> endless: all of them, until the sample is full

Spatial sampling as SHARDS does (Waldspurger et al., FAST '15): a block is in the sample if its hash is, so
the sample contains all uses of the blocks it contains, and a cache of `rate` times the size behaves as the
whole one. The rate begins at 1, so that a short run is exact, and halves

    after each 32 Ki sampled blocks that prompts use, down to 1/32: bounds the time
    until a prompt has 512 sampled blocks or fewer:                  bounds the time of one prompt
    when the endless cache is full:                                  bounds the memory

but not below 1,024 blocks of the pooled cache: a smaller sample misjudges it.

A block counts only if all before it are cached. Of the sampled blocks of a prompt, those from the first
missing one on are misses, each for 1 / rate blocks; all other blocks are hits. Misses are counted, because
hits of a few popular blocks depend on whether these are in the sample (the paper's SHARDS-adj).
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache

from kvrouter.core.wire.hashes import pack_hashes

# Blocks in the sample: about 5 MiB. A standard error of half a point.
MOST_SAMPLED = 1 << 15
# Sampled blocks that are used at one rate, while this halves the rate; and the number of these halvings.
MOST_USED = 1 << 15
USE_HALVINGS = 5
# Of one prompt: 4 M instructions. A prompt of 128,000 tokens has 8,000 blocks.
MOST_AT_ONCE = 1 << 9
# At a rate of 1/4096 the sample stands for 134 million blocks. The endless cache, too, then drops the oldest.
# At the least rate that the fleet's size allows it does the same: it then has 32 times its size or more.
MOST_HALVINGS = 12
LEAST_POOLED = 1 << 10
_HASH_BYTES = 8


class Reuse:
    """Prompt tokens routed here, and those of them that had to be computed, by the cache that is asked."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.chosen = 0
        """Not cached on the chosen target."""
        self.best = 0
        """Not cached on the target that holds most of the prompt."""
        self.pooled = 0
        """Not cached in one cache of the fleet's size, shared by all targets."""
        self.endless = 0
        """Not cached in one endless cache."""
        self._ghosts = Ghosts()

    def count(self, hashes: Sequence[int], isl: int, block_size: int, room_blocks: int) -> None:
        """A prompt of `isl` tokens was routed here. `room_blocks`: those that all targets have room for."""
        self.prompt_tokens += isl
        ghosts, most = self._ghosts, min(len(hashes), max(0, isl - 1) // block_size)
        endless, pooled = ghosts.endless_misses, ghosts.pooled_misses
        if hashes:
            ghosts.use(hashes, most, room_blocks)
        never = isl - most * block_size
        self.endless += never + (ghosts.endless_misses - endless) * block_size
        self.pooled += never + (ghosts.pooled_misses - pooled) * block_size

    def booked_elsewhere(self, hashes: Sequence[int], room_blocks: int) -> None:
        """A peer has routed a prompt: the caches that all replicas' requests share hold it, too."""
        self._ghosts.insert(hashes, room_blocks)

    def uncached(self) -> dict[str, int]:
        """The tokens by cache, the largest first."""
        return {
            "chosen": self.chosen, "best": self.best, "pooled": self.pooled, "endless": self.endless
        }  # fmt: skip


class Ghosts:
    """The two caches.

    Invariants: the endless one holds all blocks of the pooled one, at most `most_sampled`. Both hold sampled
    blocks, and after a halving those that are not swept yet.
    """

    def __init__(
        self,
        most_sampled: int = MOST_SAMPLED,
        most_used: int = MOST_USED,
        most_at_once: int = MOST_AT_ONCE,
    ) -> None:
        self.endless_misses = 0
        """Blocks that an endless cache would not have had, estimated."""
        self.pooled_misses = 0
        self._most = most_sampled
        self._most_used = most_used
        self._most_at_once = most_at_once
        self._used = 0  # at this rate
        self._halvings = 0
        self._in_sample = _low_bytes(0)
        # ordered by last use; a parent was used after its children, so that a child is dropped first
        self._endless: OrderedDict[int, None] = OrderedDict()
        self._pooled: OrderedDict[int, None] = OrderedDict()
        # cached before the last halving: half of them are no longer in the sample
        self._unswept: list[int] = []
        self._unswept_pooled = 0  # of the pooled cache, those that are no longer in the sample

    @property
    def rate(self) -> float:
        """The share of the blocks that is in the sample."""
        return float(0.5**self._halvings)

    def use(self, hashes: Sequence[int], most: int, capacity_blocks: int) -> None:
        """Count a prompt, and cache it. `most`: the leading blocks that an engine would have reused."""
        places = self._places(hashes, capacity_blocks)
        blocks = [hashes[place] for place in places if place < most]
        self.endless_misses += _misses(blocks, self._endless) << self._halvings
        self.pooled_misses += _misses(blocks, self._pooled) << self._halvings
        self._insert([hashes[place] for place in places], capacity_blocks)

    def insert(self, hashes: Sequence[int], capacity_blocks: int) -> None:
        """Cache a prompt that another replica counts."""
        self._insert([hashes[place] for place in self._places(hashes, capacity_blocks)], capacity_blocks)

    def check(self) -> None:
        """Raise if an invariant is broken."""
        assert len(self._endless) <= self._most
        assert self._pooled.keys() <= self._endless.keys()
        unsampled = {block for block in self._endless if block & ((1 << self._halvings) - 1)}
        assert unsampled <= set(self._unswept)
        assert len(unsampled & self._pooled.keys()) == self._unswept_pooled

    def _places(self, hashes: Sequence[int], capacity_blocks: int) -> list[int]:
        """Where in the prompt its sampled blocks are. A pattern finds them in C: a loop is slower."""
        while len(hashes) >> self._halvings > self._most_at_once and self._may_halve(capacity_blocks):
            self._halve()
        places = [found.start() for found in self._in_sample.finditer(pack_hashes(hashes)[::_HASH_BYTES])]
        if self._halvings > 8:  # the lowest byte alone cannot say
            mask = (1 << self._halvings) - 1
            places = [place for place in places if not hashes[place] & mask]
        return places

    def _insert(self, blocks: list[int], capacity_blocks: int) -> None:
        blocks.reverse()
        _touch(self._endless, blocks)
        _touch(self._pooled, blocks)
        self._used += len(blocks)
        is_slow = self._used > self._most_used and self._halvings < USE_HALVINGS
        is_swept = not self._unswept
        if (is_slow or len(self._endless) > self._most) and is_swept and self._may_halve(capacity_blocks):
            self._halve()
        _evict(self._endless, self._most)
        if self._unswept:
            self._sweep(64 + 4 * len(blocks))  # faster than blocks are added
        self._evict_pooled(capacity_blocks >> self._halvings)

    def _evict_pooled(self, most: int) -> None:
        """Of the blocks in the sample at most `most`: those that are not swept yet take no room."""
        mask, pooled = (1 << self._halvings) - 1, self._pooled
        # as the last used, the pooled blocks are in the endless cache
        while len(pooled) - self._unswept_pooled > most or len(pooled) > len(self._endless):
            self._unswept_pooled -= bool(pooled.popitem(last=False)[0] & mask)

    def _may_halve(self, capacity_blocks: int) -> bool:
        pooled = capacity_blocks >> (self._halvings + 1)
        # of a fleet without a known size, there is nothing to judge
        is_large = pooled >= LEAST_POOLED or not capacity_blocks
        return is_large and self._halvings < MOST_HALVINGS

    def _halve(self) -> None:
        self._halvings += 1
        self._used = 0
        self._in_sample = _low_bytes(self._halvings)
        self._unswept = list(self._endless)
        mask = (1 << self._halvings) - 1
        self._unswept_pooled = sum([bool(block & mask) for block in self._pooled])

    def _sweep(self, count: int) -> None:
        """Drop what is no longer in the sample, a few blocks with each prompt: all at once took 17 ms."""
        mask = (1 << self._halvings) - 1
        for block in self._unswept[-count:]:
            if block & mask and block in self._endless:
                del self._endless[block]
                if block in self._pooled:
                    del self._pooled[block]
                    self._unswept_pooled -= 1
        del self._unswept[-count:]


@lru_cache
def _low_bytes(halvings: int) -> re.Pattern[bytes]:
    """Matches the lowest byte of a sampled hash: its last `halvings` bits are 0."""
    step = 1 << min(halvings, 8)
    return re.compile(
        b"[" + b"".join(re.escape(bytes([low])) for low in range(0, 256, step)) + b"]", re.DOTALL
    )


def _misses(blocks: Sequence[int], cache: OrderedDict[int, None]) -> int:
    """The blocks from the first missing one on."""
    for place, block in enumerate(blocks):
        if block not in cache:
            return len(blocks) - place
    return 0


def _touch(cache: OrderedDict[int, None], blocks: Sequence[int]) -> None:
    for block in blocks:
        cache[block] = None
        cache.move_to_end(block)


def _evict(cache: OrderedDict[int, None], most: int) -> None:
    while len(cache) > most:
        cache.popitem(last=False)
