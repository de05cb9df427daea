"""Fixtures of the index benches: prompts in groups, held by some targets; and the measurement of time."""

from __future__ import annotations

import random
import statistics
import time
from array import array
from collections.abc import Callable, Sequence

from kvrouter.core.tables.block_index import BlockIndex
from kvrouter.core.wire.ids import Target, WorkerId

# Heimdall's published load: 230 groups of prompts, 9,000 tokens each …
GROUPS, BLOCKS, BLOCK_SIZE = 230, 562, 16
# … of which 8,000 are a system prompt that the group shares.
SYSTEM_BLOCKS = 500
# Targets of a group: all hold its system prompt, and one of them the whole prompt that is looked up.
HOLDERS = 4


def new_targets(count: int) -> list[Target]:
    """Workers of one rank each."""
    return [Target(WorkerId(f"w{number:04d}")) for number in range(count)]


def random_hashes(rng: random.Random, count: int) -> array[int]:
    """Random 64-bit numbers, which are distributed like sequence hashes."""
    return array("Q", rng.randbytes(8 * count))


def hold_groups(
    index: BlockIndex, targets: Sequence[Target], rng: random.Random, holders: int = HOLDERS
) -> list[array[int]]:
    """Every group's prompt, stored on some targets."""
    prompts = [random_hashes(rng, BLOCKS) for _ in range(GROUPS)]
    for prompt in prompts:
        whole, *others = rng.sample(targets, min(holders, len(targets)))
        index.store(whole, prompt)
        for target in others:
            index.store(target, prompt[:SYSTEM_BLOCKS])
    return prompts


def microseconds(act: Callable[[], object], *, runs: int = 7, seconds: float = 0.1) -> float:
    """CPU time of one call: the median of some runs, each of many calls."""
    act()
    began, calls = time.process_time(), 0
    while time.process_time() - began < seconds / 10:
        act()
        calls += 1
    return statistics.median(_run(act, max(1, calls * 10)) for _ in range(runs))


def _run(act: Callable[[], object], calls: int) -> float:
    began = time.process_time()
    for _ in range(calls):
        act()
    return (time.process_time() - began) / calls * 1e6
