"""What caches that do not exist would have had: one endless cache, and one of the whole fleet's size.

    a prompt's blocks ──sampled by hash──> pooled:  the last used, as many as the fleet holds × rate
                                       └─> endless: all of them, until the sample is full

    last used ── pooled ──┬── older ── first dropped        endless: pooled and older
                          └ the oldest pooled block becomes the last used of the older ones

Spatial sampling as SHARDS does (Waldspurger et al., FAST '15): a block is in the sample if its hash is, so
the sample contains all uses of the blocks it contains, and a cache of `rate` times the size behaves as the
whole one. The rate begins at 1, so that a short run is exact, and halves

    after each 32 Ki sampled blocks that prompts use, down to 1/32: bounds the time
    until a request has 512 sampled blocks or fewer:                 bounds the time of one request
    when the endless cache is full:                                  bounds the memory

but not below 1,024 blocks of the pooled cache: a smaller sample misjudges it.

A block counts only if all before it are cached. Of the sampled blocks of a prompt, those from the first
missing one on are misses, each for 1 / rate blocks; all other blocks are hits. Misses are counted, because
hits of a few popular blocks depend on whether these are in the sample (the paper's SHARDS-adj).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvrouter.core.wire.hashes import sampled_hashes

# Blocks in the sample: about 5 MiB. A standard error of half a point.
MOST_SAMPLED = 1 << 15
# Sampled blocks that are used at one rate, while this halves the rate; and the number of these halvings.
MOST_USED = 1 << 15
USE_HALVINGS = 5
# Of one request: a million instructions. A prompt of 128,000 tokens has 8,000 blocks.
MOST_AT_ONCE = 1 << 9
# At a rate of 1/4096 the sample stands for 134 million blocks. The endless cache, too, then drops the oldest.
# At the least rate that the fleet's size allows it does the same: it then has 32 times its size or more.
MOST_HALVINGS = 12
LEAST_POOLED = 1 << 10


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

    def expect(self, blocks: int, room_blocks: int) -> None:
        """A request with several prompts was routed here, which are counted one by one."""
        self._ghosts.lower_rate(blocks, room_blocks)

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

    Invariants: a block is pooled or older, not both. There are at most `most_sampled` of them. All are in the
    sample, but for those that are not swept yet after a halving.
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
        self._mask = 0  # the bits of a hash that are 0 if it is in the sample
        # ordered by last use; a parent was used after its children, so that a child is dropped first
        self._older: OrderedDict[int, None] = OrderedDict()
        self._pooled: OrderedDict[int, None] = OrderedDict()
        # cached before the last halving: half of them are no longer in the sample
        self._unswept: list[int] = []
        self._unswept_pooled = 0  # about how many pooled blocks are no longer in the sample

    @property
    def rate(self) -> float:
        """The share of the blocks that is in the sample."""
        return float(0.5**self._halvings)

    def lower_rate(self, blocks: int, capacity_blocks: int) -> None:
        """Before a request of so many blocks: halve the rate until few of them are in the sample."""
        before = self._halvings
        while blocks >> self._halvings > self._most_at_once and self._may_halve(capacity_blocks):
            self._halve()
        if self._halvings != before:
            self._begin_sweep()

    def use(self, hashes: Sequence[int], most: int, capacity_blocks: int) -> None:
        """Count a prompt, and cache it. `most`: the leading blocks that an engine would have reused."""
        self.lower_rate(len(hashes), capacity_blocks)
        pooled, older = self._pooled, self._older
        blocks = sampled_hashes(hashes[:most], self._mask)
        count = len(blocks)
        depth = next((place for place in range(count) if blocks[place] not in pooled), count)
        self.pooled_misses += (count - depth) << self._halvings
        while depth < count and (blocks[depth] in older or blocks[depth] in pooled):
            depth += 1
        self.endless_misses += (count - depth) << self._halvings
        self._insert(blocks + sampled_hashes(hashes[most:], self._mask), capacity_blocks)

    def insert(self, hashes: Sequence[int], capacity_blocks: int) -> None:
        """Cache a prompt that another replica counts."""
        self.lower_rate(len(hashes), capacity_blocks)
        self._insert(sampled_hashes(hashes, self._mask), capacity_blocks)

    def check(self) -> None:
        """Raise if an invariant is broken."""
        assert len(self._older) + len(self._pooled) <= self._most
        assert not self._older.keys() & self._pooled.keys()
        unsampled = {block for block in [*self._older, *self._pooled] if block & self._mask}
        assert unsampled <= set(self._unswept)
        assert self._unswept or not self._unswept_pooled

    def _insert(self, blocks: list[int], capacity_blocks: int) -> None:
        pooled, older = self._pooled, self._older
        for block in reversed(blocks):
            if block in pooled:
                pooled.move_to_end(block)
            else:
                older.pop(block, None)
                pooled[block] = None
        self._used += len(blocks)
        is_slow = self._used > self._most_used and self._halvings < USE_HALVINGS
        is_full = len(older) + len(pooled) > self._most
        if (is_slow or is_full) and not self._unswept and self._may_halve(capacity_blocks):
            self._halve()
            self._begin_sweep()
        slice_ = 64 + 2 * len(blocks)  # faster than blocks are added
        if self._unswept:
            self._sweep(slice_)
        self._evict_pooled(capacity_blocks >> self._halvings, slice_)
        while len(older) + len(pooled) > self._most:
            if older:
                older.popitem(last=False)
            else:
                self._pop_pooled()

    def _evict_pooled(self, most: int, count: int) -> None:
        """Of the blocks in the sample at most `most`: those that are not swept yet take no room.

        At most `count` at once: the fleet may have lost half of its room.
        """
        while count and len(self._pooled) - self._unswept_pooled > most:
            count -= 1
            block = self._pop_pooled()
            if not block & self._mask:
                self._older[block] = None

    def _pop_pooled(self) -> int:
        block = self._pooled.popitem(last=False)[0]
        if block & self._mask:
            self._unswept_pooled = max(0, self._unswept_pooled - 1)
        return block

    def _may_halve(self, capacity_blocks: int) -> bool:
        pooled = capacity_blocks >> (self._halvings + 1)
        # of a fleet without a known size, there is nothing to judge
        is_large = pooled >= LEAST_POOLED or not capacity_blocks
        return is_large and self._halvings < MOST_HALVINGS

    def _halve(self) -> None:
        self._halvings += 1
        self._mask = (1 << self._halvings) - 1
        self._used = 0
        # about half of those that were in the sample: to count 32 Ki blocks takes longer than all else here
        self._unswept_pooled += (len(self._pooled) - self._unswept_pooled) // 2

    def _begin_sweep(self) -> None:
        # in any order: a list in the order of an OrderedDict takes four times as long
        self._unswept = [*dict.keys(self._older), *dict.keys(self._pooled)]

    def _sweep(self, count: int) -> None:
        """Drop what is no longer in the sample, a few blocks with each prompt: all at once took 17 ms."""
        mask, older, pooled = self._mask, self._older, self._pooled
        for block in self._unswept[-count:]:
            if not block & mask:
                continue
            if block in pooled:
                del pooled[block]
                self._unswept_pooled = max(0, self._unswept_pooled - 1)
            else:
                older.pop(block, None)
        del self._unswept[-count:]
        if not self._unswept:
            self._unswept_pooled = 0
