"""The sampled caches against whole ones."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import pytest

from kvrouter.core.tables.ghosts import LEAST_POOLED, MOST_AT_ONCE, MOST_SAMPLED, Ghosts
from kvrouter.core.wire.hashes import sequence_hashes
from kvrouter.core.wire.ids import BlockHash
from kvrouter.lab.simulate import generated, traces, workloads


def _chain(blocks: Iterable[int]) -> list[int]:
    """Sequence hashes of blocks that are named by a number."""
    return list(sequence_hashes([BlockHash(block) for block in blocks]))


class _Whole:
    """A whole LRU cache of blocks."""

    def __init__(self, capacity: int) -> None:
        self.misses = 0
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def use(self, hashes: Sequence[int], most: int) -> None:
        missing = [place for place in range(most) if hashes[place] not in self._blocks]
        self.misses += most - missing[0] if missing else 0
        for hash_ in reversed(hashes):
            self._blocks[hash_] = None
            self._blocks.move_to_end(hash_)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)


_EXCERPT = traces.read_trace(traces.CONVERSATION_EXCERPT)
_STREAMS = {
    "conversation": workloads.trace(_EXCERPT),
    "docs": generated.docs(),
    "zero": workloads.zero(_EXCERPT),
}


@pytest.mark.parametrize("share", [0.1, 0.5])
@pytest.mark.parametrize("name", _STREAMS)
def test_within_a_point(name: str, share: float) -> None:
    """A sample of half of the blocks or less gives the cached share within 1 point."""
    prompts = [_chain(one.hashes) for one in _STREAMS[name].draw(0)]
    distinct = len({hash_ for hashes in prompts for hash_ in hashes})
    capacity = int(distinct * share)
    ghosts, endless, pooled = Ghosts(min(MOST_SAMPLED, distinct // 2)), _Whole(distinct), _Whole(capacity)

    for hashes in prompts:
        ghosts.use(hashes, len(hashes), capacity)
        endless.use(hashes, len(hashes))
        pooled.use(hashes, len(hashes))

    ghosts.check()
    blocks = sum(map(len, prompts))
    assert ghosts.rate <= 0.5
    assert ghosts.endless_misses / blocks == pytest.approx(endless.misses / blocks, abs=0.01)
    assert ghosts.pooled_misses / blocks == pytest.approx(pooled.misses / blocks, abs=0.01)


def test_exact_while_small() -> None:
    """While the sample has room for all blocks, nothing is estimated."""
    ghosts, chance = Ghosts(), random.Random(1)
    whole = _Whole(40)
    for _ in range(200):
        length = chance.randint(1, 20)
        hashes = _chain([chance.randrange(3) for _ in range(length)])
        ghosts.use(hashes, length, 40)
        whole.use(hashes, length)

    assert 1.0 == ghosts.rate
    assert whole.misses == ghosts.pooled_misses


def test_bounded() -> None:
    """Below a rate of 1/256 the sample stays bounded and estimates still hold."""
    ghosts, blocks = Ghosts(16), 0
    for number in range(300):
        hashes = _chain([number] * 64)
        ghosts.use(hashes, 64, 1 << 22)
        blocks += 64
        ghosts.check()

    assert ghosts.rate < 1 / 256
    assert ghosts.endless_misses == pytest.approx(blocks, rel=0.5)


def test_a_small_fleet_is_not_sampled() -> None:
    """The pooled cache of a few blocks would be misjudged; the endless cache drops the oldest then."""
    ghosts = Ghosts(16, most_used=16)
    for number in range(300):
        ghosts.use(_chain([number] * 64), 64, LEAST_POOLED)
        ghosts.check()

    assert 1.0 == ghosts.rate
    assert 300 * 64 == ghosts.endless_misses


def test_use_lowers_the_rate() -> None:
    """Down to 1/32: prompts then cost little, also known ones, with which the sample does not grow."""
    ghosts, hashes = Ghosts(most_used=1000, most_at_once=4000), _chain(range(4000))

    for _ in range(200):
        ghosts.use(hashes, 4000, 1 << 20)
        ghosts.check()

    assert 1 / 32 == ghosts.rate
    assert 4000 == ghosts.endless_misses == ghosts.pooled_misses


def test_a_long_prompt_lowers_the_rate_at_once() -> None:
    """However much is cached already: one prompt of 128,000 tokens must not hold the loop for long."""
    ghosts, chance = Ghosts(), random.Random(1)
    for number in range(500):
        ghosts.use(_chain([number] * 20), 20, 1 << 20)
    shared, blocks = [chance.getrandbits(60) for _ in range(4000)], 500 * 20
    for _ in range(40):
        hashes = _chain(shared + [chance.getrandbits(60) for _ in range(4000)])
        ghosts.use(hashes, 8000, 1 << 20)
        ghosts.check()
        assert len(hashes) * ghosts.rate <= MOST_AT_ONCE
    blocks += 4000 + 40 * 4000

    assert 1 / 8 >= ghosts.rate
    assert blocks == pytest.approx(ghosts.endless_misses, rel=0.03)


def test_a_long_request_lowers_the_rate_at_once() -> None:
    """Its prompts count together: many of them must not hold the loop longer than one."""
    ghosts, chance = Ghosts(), random.Random(1)

    ghosts.lower_rate(8 * 1000, 1 << 20)
    for _ in range(8):
        ghosts.use(_chain([chance.getrandbits(60) for _ in range(1000)]), 1000, 1 << 20)

    assert 8000 * ghosts.rate <= MOST_AT_ONCE
    assert 8000 == pytest.approx(ghosts.endless_misses, rel=0.1)


@pytest.mark.parametrize("most_used", [MOST_SAMPLED, 3000])
def test_a_fleet_that_loses_room(most_used: int) -> None:
    """The pooled cache becomes smaller with a few requests, not at once, and then misses as a small one."""
    ghosts, chance = Ghosts(most_used=most_used), random.Random(1)
    chains = [_chain([chance.getrandbits(60) for _ in range(20)]) for _ in range(200)]
    for chain in chains:
        ghosts.use(chain, 20, 1 << 12)
    for _ in range(40):
        ghosts.use(_chain([chance.getrandbits(60)]), 1, 400)
        ghosts.check()
    before = ghosts.pooled_misses

    for chain in chains[:180]:
        ghosts.use(chain, 20, 400)
        ghosts.check()

    assert 180 * 20 == pytest.approx(ghosts.pooled_misses - before, rel=0.1)


def test_a_prompt_of_a_peer() -> None:
    """A prompt that a peer counts is cached here, and not counted."""
    ghosts = Ghosts()
    hashes = _chain([1, 2, 3])

    ghosts.insert(hashes, 10)

    assert 0 == ghosts.endless_misses
    ghosts.use(hashes, 3, 10)
    assert (0, 0) == (ghosts.endless_misses, ghosts.pooled_misses)
