"""Cost of counting a prompt in the ghost caches, by length and sampling rate; and what sampling misjudges.

    new and known prompts ──> Ghosts, as in a router ──> median CPU µs while the rate is 1, 1/2, … 1/32
    conversation trace    ──> Ghosts, sampled and whole ──> cached shares of both caches

At 500 requests/s, 20 µs a request are 1 % of a core.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvrouter.core.tables.ghosts import USE_HALVINGS, Ghosts
from kvrouter.core.wire.hashes import sequence_hashes
from kvrouter.core.wire.ids import BlockHash
from kvrouter.lab.simulate import workloads
from kvrouter.lab.simulate.traces import CONVERSATION_EXCERPT, read_trace
from scripts.kit.bench.meter import machine

LENGTHS = (24, 64, 512)
# Blocks of a fleet of 64 workers: its size does not limit the rate.
FLEET_BLOCKS = 1 << 20
# The pooled caches that are judged, as shares of the trace's distinct blocks.
SHARES = (0.1, 0.5)
# Prompts at the last rate.
_STEADY = 2000


@dataclass(slots=True)
class Cost:
    """CPU µs of a prompt of some length."""

    by_rate: dict[str, float]
    """The median while the rate is `1/N`."""
    until_steady_ms: float
    """The sum until the last rate is reached."""
    longest_ms: float
    """The longest single one: a rate halves."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; returns the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/bench ghosts", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    parser.add_argument("--requests", type=int, default=3000, metavar="N", help="of the trace (%(default)s)")
    flags = parser.parse_args(arguments)
    costs = {blocks: cost(blocks) for blocks in LENGTHS}
    shares = {share: judged(flags.requests, share) for share in SHARES}
    _show(costs, shares)
    if flags.json is not None:
        figures = {"us": {blocks: asdict(one) for blocks, one in costs.items()}, "cached": shares}
        flags.json.write_text(json.dumps({**machine(), **figures}, indent=2) + "\n")
    return 0


def cost(blocks: int, steady: int = _STEADY) -> Cost:
    """Count prompts, every second one known, from an empty sample on."""
    ghosts, spent = Ghosts(), defaultdict[float, list[float]](list)
    last = 0.5**USE_HALVINGS
    for hashes in _prompts(blocks):
        rate, began = ghosts.rate, time.thread_time_ns()
        ghosts.use(hashes, blocks, FLEET_BLOCKS)
        spent[rate].append((time.thread_time_ns() - began) / 1000)
        if sum(len(some) for at, some in spent.items() if at <= last) == steady:
            break
    return Cost(
        {f"1/{1 / rate:.0f}": statistics.median(some) for rate, some in spent.items()},
        sum(sum(some) for rate, some in spent.items() if rate > last) / 1000,
        max(max(some) for some in spent.values()) / 1000,
    )


def _prompts(blocks: int) -> Iterator[array[int]]:
    chance = random.Random(blocks)
    while True:
        new = array("Q", [chance.getrandbits(64) for _ in range(blocks)])
        yield new
        yield new


def judged(requests: int, share: float) -> dict[str, tuple[float, float]]:
    """The cached share of the trace's blocks in each cache: by the sample, and in the whole cache."""
    trace = workloads.trace(read_trace(CONVERSATION_EXCERPT, requests)).draw(0)
    prompts = [sequence_hashes([BlockHash(block) for block in one.hashes]) for one in trace]
    capacity = int(share * len({hash_ for hashes in prompts for hash_ in hashes}))
    sampled, whole = Ghosts(), Ghosts(sys.maxsize, sys.maxsize)
    for hashes in prompts:
        sampled.use(hashes, len(hashes), capacity)
        whole.use(hashes, len(hashes), capacity)
    blocks = sum(map(len, prompts))
    return {
        "endless": (1 - sampled.endless_misses / blocks, 1 - whole.endless_misses / blocks),
        "pooled": (1 - sampled.pooled_misses / blocks, 1 - whole.pooled_misses / blocks),
    }


def _show(costs: dict[int, Cost], shares: dict[float, dict[str, tuple[float, float]]]) -> None:
    console = Console()
    table = Table(title="CPU µs for each prompt, by sampling rate")
    table.add_column("blocks", justify="right")
    rates = list(dict.fromkeys(rate for one in costs.values() for rate in one.by_rate))
    for name in [*rates, "all until 1/32", "longest"]:
        table.add_column(name, justify="right")
    for blocks, one in costs.items():
        figures = [f"{one.by_rate[rate]:.1f}" if rate in one.by_rate else "" for rate in rates]
        table.add_row(str(blocks), *figures, f"{one.until_steady_ms:.0f} ms", f"{one.longest_ms:.1f} ms")
    console.print(table)
    for share, caches in shares.items():
        for cache, (sampled, whole) in caches.items():
            console.print(
                f"fleet of {share:.0%} of the trace's blocks, {cache}: {sampled:.1%} sampled, "
                f"{whole:.1%} whole",
                highlight=False,
            )
