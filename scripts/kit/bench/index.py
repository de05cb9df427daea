"""Cost of the block index: look-ups, events, memory, and a whole decision; in Python and in C.

`resident`: events of 8 blocks applied to an index that holds millions, in its own process
(scripts/kit/bench/resident.py); `overlap`: prompts of 562 blocks in 230 groups, each held by four of the
targets, or a system prompt by all, or by each target to another depth; `with resume points`: the same where
every target's engine has several KV groups and can resume behind its blocks, but for the last one; `ratio`:
their cost as a multiple of the cost without, the median of 15 ratios of neighbouring runs; `decision`:
Router.route and free, with requests in flight everywhere.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from kvrouter.core.fleet.router import Router, RouterRules
from kvrouter.core.native import versions
from kvrouter.core.routing.policy import Prompt, RouteRequest
from kvrouter.core.tables.block_index import BlockIndex
from kvrouter.core.wire.hashes import Hashes, hashes_of
from kvrouter.core.wire.ids import RouterId, Target
from kvrouter.policies import PolicySettings, new_policy
from scripts.kit.bench.hashes import built
from scripts.kit.bench.index_fixtures import (
    BLOCK_SIZE,
    BLOCKS,
    hold_groups,
    microseconds,
    new_targets,
    random_hashes,
)
from scripts.kit.bench.meter import machine
from scripts.kit.bench.policies import new_pool

# A system prompt of 1,000 tokens.
SHARED_BLOCKS = 62
MOST_BLOCKS = {versions.PYTHON: 1_000_000, versions.NATIVE: 100_000_000}

Row = dict[str, float | str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; returns the exit code."""
    flags = _flags(arguments)
    figures = {
        "overlap": [overlap(core, count) for core in built() for count in flags.targets],
        "overlap with resume points": [
            overlap(core, count, resumes=True) for core in built() for count in flags.targets
        ],
        "ratio with resume points": [ratio(core, count) for core in built() for count in flags.targets],
        "decision": [decision(core, count) for core in built() for count in flags.targets],
        "resident": [resident(core, min(flags.blocks, MOST_BLOCKS[core]), 1000) for core in built()],
    }
    for title, rows in figures.items():
        show(title, rows)
    if versions.why_not_built:
        print(f"no native version: {versions.why_not_built}")
    about = {**machine(), **figures}
    if flags.json is not None:
        flags.json.write_text(json.dumps(about, indent=2) + "\n")
    return 0


class _Resuming(BlockIndex):
    """Each target can resume behind the blocks of every chain, but not behind the last: the dearest case."""

    def store(self, target: Target, hashes: Hashes, tier: str = "device", parent: int | None = None) -> None:
        super().store(target, hashes, tier, parent)
        self.resume(target, hashes_of(hashes)[:-1])


def overlap(core: str, targets: int, *, resumes: bool = False) -> Row:
    """Look-ups in an index of 230 groups: of prompts held by few targets, and of one whose start all hold."""
    asks = _look_ups(core, targets, resumes=resumes)
    return {"core": core, "targets": targets, **{f"{name}_us": microseconds(ask) for name, ask in asks}}


def ratio(core: str, targets: int) -> Row:
    """The same with resume points, as a multiple of the time without."""
    found: Row = {"core": core, "targets": targets}
    pairs = zip(_look_ups(core, targets), _look_ups(core, targets, resumes=True), strict=True)
    for (name, plain), (_, resuming) in pairs:
        times = [
            (microseconds(plain, runs=1, seconds=0.02), microseconds(resuming, runs=1, seconds=0.02))
            for _ in range(15)
        ]
        found[name] = round(median(after / before for before, after in times), 2)
    return found


def _look_ups(core: str, targets: int, *, resumes: bool = False) -> list[tuple[str, Callable[[], object]]]:
    """Each case of `overlap`, in an index of its own."""
    versions.choose(core)
    rng, names = random.Random(targets), new_targets(targets)
    few, every, each = ((_Resuming if resumes else BlockIndex)() for _ in range(3))
    asked = cycle(hold_groups(few, names, rng))
    common, uneven = random_hashes(rng, BLOCKS), random_hashes(rng, BLOCKS)
    for name in names:
        every.store(name, common[:SHARED_BLOCKS])
        each.store(name, uneven[: rng.randrange(2, BLOCKS)])
    return [
        ("four_hold_it", lambda: few.overlap(next(asked))),
        ("all_hold_62", lambda: every.overlap(common)),
        ("all_differ", lambda: each.overlap(uneven)),
    ]


def decision(core: str, targets: int) -> Row:
    """Router.route and free of a 9,000-token prompt; every target has requests in flight."""
    versions.choose(core)
    few, many = _router(targets, uneven=False), _router(targets, uneven=True)
    return {
        "core": core,
        "targets": targets,
        "route_and_free_us": microseconds(few),
        "all_hold_some_us": microseconds(many),
    }


def _router(targets: int, *, uneven: bool) -> Callable[[], None]:
    rng = random.Random(targets)
    chain = random_hashes(rng, BLOCKS)
    pool = new_pool(targets, chain if uneven else (), rng)
    if not uneven:
        for name in rng.sample(list(pool.targets), min(4, targets)):
            pool.index.store(name, chain[: rng.randrange(1, BLOCKS)])
    rules = RouterRules(new_policy("kv", PolicySettings()), rng.random)
    router = Router(pool, rules, router_id=RouterId("bench"), incarnation=1, synced=False)
    request = RouteRequest("bench", (Prompt(chain, BLOCKS * BLOCK_SIZE + 8),))

    def route_and_free() -> None:
        router.bookings.free(router.route(request, 0.0).key)

    return route_and_free


def resident(core: str, blocks: int, targets: int) -> Row:
    """Run it in its own process, as memory is measured."""
    command = [sys.executable, "-m", "scripts.kit.bench.resident", core, str(blocks), str(targets)]
    row: Row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return row


def show(title: str, rows: Sequence[Row]) -> None:
    """A table: one row for each version and size."""
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(f"{one:,.2f}" if isinstance(one, float) else f"{one}" for one in row.values()))
    Console(width=200).print(table)


def _flags(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench index", description=__doc__)
    parser.add_argument("--targets", type=int, nargs="+", default=[8, 64, 512, 1000], metavar="N")
    parser.add_argument(
        "--blocks", type=int, default=4_000_000, metavar="N", help="resident blocks (%(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    return parser.parse_args(arguments)
