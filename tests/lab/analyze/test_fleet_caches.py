"""Caches of a fleet without clocks."""

from __future__ import annotations

import random

from kvrouter.core.wire.hashes import sequence_hashes
from kvrouter.core.wire.ids import BlockHash
from kvrouter.lab.analyze.fleet_caches import PerfectPlacement, RandomPlacement


def names(*blocks: int) -> list[int]:
    """Names of the prefixes of a prompt."""
    return [*sequence_hashes([BlockHash(block) for block in blocks])]


def test_prompts_follow_their_blocks() -> None:
    """A prompt goes where most of it is; new ones go to the worker that has computed least."""
    caches = PerfectPlacement(2, 100)

    missed = [caches.place(names(*blocks)) for blocks in ((1, 2), (3, 4, 5), (1, 2, 6), (3, 4, 5))]

    assert [2, 3, 1, 0] == missed
    assert [3, 3] == caches.computed
    caches.check()


def test_a_popular_prefix_is_on_several_workers() -> None:
    """A prefix of all requests draws none to the worker that had it first; what follows it does."""
    caches = PerfectPlacement(4, 1000)
    for number in range(200):
        caches.place(names(0, number, 1000 + number))
    again = [caches.place(names(0, number, 1000 + number, 5)) for number in range(100, 200)]

    assert [1] * 100 == again, "the blocks of its own turn are found"
    assert caches.busiest < 1.1
    caches.check()


def test_least_recently_used() -> None:
    """A full cache drops what was used longest ago, of one prompt the deepest block first."""
    caches = PerfectPlacement(1, 3)
    for blocks in ((1, 2), (3,), (4,)):
        caches.place(names(*blocks))

    assert 1 == caches.place(names(1, 2))
    caches.check()


def test_random_placement() -> None:
    """Each worker computes a prompt that it does not have."""
    caches = RandomPlacement(4, 100, random.Random(2).randrange)
    missed = sum(caches.place(names(1, 2, 3)) for _ in range(50))

    assert 4 * 3 == missed
    caches.check()


def test_caches_that_stay_empty_are_exact() -> None:
    """However large they are: only blocks that they hold need memory."""
    caches = PerfectPlacement(4, 1 << 40, most_blocks=100)
    for number in range(9):
        caches.place(names(0, *(10 * number + place for place in range(1, 8))))
    caches.check()

    assert [0, 4] == [caches.place(names(0, 1)), caches.place(names(100, 101, 102, 103))]


def test_large_caches_are_sampled() -> None:
    """A sample of an eighth finds the same misses, about."""
    whole, sampled = PerfectPlacement(4, 2000), PerfectPlacement(4, 2000, most_blocks=1500)
    chance = random.Random(3)
    misses = [0, 0]
    for _ in range(1500):
        group, own = chance.randrange(300), chance.randrange(1 << 40)
        prompt = names(*(group * 50 + place for place in range(30)), *(own + place for place in range(10)))
        misses[0] += whole.place(prompt)
        misses[1] += sampled.place(prompt)
    sampled.check()

    assert misses[0] != misses[1], "the second one is no sample"
    assert abs(misses[1] / misses[0] - 1) < 0.08
