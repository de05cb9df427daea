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
from array import array
from collections.abc import Callable, Sequence
from itertools import cycle
from statistics import median

from rich.table import Table

from kvrouter.core.fleet.router import Router, RouterRules
from kvrouter.core.native import versions
from kvrouter.core.routing.policy import Prompt, RouteRequest
from kvrouter.core.tables.block_index import BlockIndex
from kvrouter.core.wire.hashes import Hashes, hashes_of
from kvrouter.core.wire.ids import RouterId, Target
from kvrouter.policies import PolicySettings, new_policy
from scripts.kit.bench.meter import built, conclude, machine, microseconds
from scripts.kit.bench.policies import new_pool
from scripts.kit.bench.resident import HOLDERS, new_targets, random_hashes
from scripts.kit.script import table_of

# Heimdall's published load: 230 groups of prompts, 9,000 tokens each …
GROUPS, BLOCKS, BLOCK_SIZE = 230, 562, 16
# … of which 8,000 are a system prompt that the group shares.
SYSTEM_BLOCKS = 500
# A system prompt of 1,000 tokens.
SHARED_BLOCKS = 62
MOST_BLOCKS = {versions.PYTHON: 1_000_000, versions.NATIVE: 100_000_000}

Row = dict[str, float | str]


def run(flags: argparse.Namespace) -> int:
    """Measure; returns the exit code."""
    pairs = [(core, count) for core in built() for count in flags.targets]
    figures = {
        "overlap": [overlap(*pair) for pair in pairs],
        "overlap with resume points": [overlap(*pair, resumes=True) for pair in pairs],
        "ratio with resume points": [ratio(*pair) for pair in pairs],
        "decision": [decision(*pair) for pair in pairs],
        "resident": [resident(core, min(flags.blocks, MOST_BLOCKS[core]), 1000) for core in built()],
    }
    conclude(flags, [table(title, rows) for title, rows in figures.items()], machine(), **figures)
    if versions.why_not_built:
        print(f"no native version: {versions.why_not_built}")
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


def hold_groups(index: BlockIndex, targets: Sequence[Target], rng: random.Random) -> list[array[int]]:
    """Every group's prompt: some targets hold its system prompt, one of them the whole."""
    prompts = [random_hashes(rng, BLOCKS) for _ in range(GROUPS)]
    for prompt in prompts:
        whole, *others = rng.sample(targets, min(HOLDERS, len(targets)))
        index.store(whole, prompt)
        for target in others:
            index.store(target, prompt[:SYSTEM_BLOCKS])
    return prompts


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


def table(title: str, rows: Sequence[Row]) -> Table:
    """One row for each version and size."""
    shown = [[f"{one:,.2f}" if isinstance(one, float) else one for one in row.values()] for row in rows]
    return table_of(title, list(rows[0]), shown)


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--targets", type=int, nargs="+", default=[8, 64, 512, 1000], metavar="N")
    add("--blocks", type=int, default=4_000_000, metavar="N", help="resident blocks (%(default)s)")
