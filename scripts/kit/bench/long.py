"""Whether a booking costs the same after a long run: each mode with each index, at steady load.

Two replicas of the real core in virtual time, without sockets: prompts with shared beginnings, later turns of
conversations, bookings that end after some seconds. A warm-up fills the tables; then the cost is measured in
ten equal parts. The cost of a booking is all work of the core for it at both replicas, including timers; of
the seconds of a tenth, the median counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

from rich.table import Table

from kvrouter.core.native import versions
from kvrouter.policies import POLICIES
from scripts.kit.bench.long_world import (
    INDEXES,
    MODES_OF_BLOCKS,
    TEXTS,
    CpuMeter,
    InstructionMeter,
    Load,
    Memory,
    World,
)
from scripts.kit.bench.meter import machine
from scripts.kit.script import new_console

# A smaller load for counting instructions, which is slow.
SMALL = Load(
    targets=2, rate=10, groups=2, shared_blocks=12, own_blocks=4, turns=2, ttl_s=5.0, capacity_blocks=150,
    eviction_chars=8000, eviction_s=1.0, warm_up_s=20, seconds=40,
)  # fmt: skip
MOST_RATIO = 1.3
PAGE_KB = 4


@dataclass(frozen=True, slots=True)
class Row:
    """One mode with one index. Costs are per booking, in CPU microseconds or instructions."""

    mode: str
    index: str
    # With empty tables: the first tenth of the warm-up.
    cold: float
    tenths: list[float]
    memory: Memory
    # Memory of the process: before the first tenth, after it, and at the end.
    rss_mb: tuple[int, int, int]

    @property
    def ratio(self) -> float:
        """The last tenth's cost divided by the first's."""
        return self.tenths[-1] / self.tenths[0]

    @property
    def holds(self) -> bool:
        """Whether cost and memory are within their bounds."""
        return self.ratio <= MOST_RATIO and self.memory.entries <= self.memory.bound


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; 1 if a row exceeds its bounds."""
    flags = _flags(arguments)
    load = SMALL if flags.count else Load(rate=flags.rate, warm_up_s=flags.warm_up, seconds=flags.seconds)
    cases = [one for one in all_cases() if one[0] in flags.modes]
    rows = list(map(count, cases) if flags.count else _measured(cases, load))
    console = new_console()
    console.print(table(rows, "instructions" if flags.count else "CPU µs"))
    about = machine() | {"core": versions.in_use()} | asdict(load)
    console.print(json.dumps(about), soft_wrap=True, highlight=False)
    if flags.json is not None:
        report = [{**asdict(row), "ratio": row.ratio, "holds": row.holds} for row in rows]
        flags.json.write_text(json.dumps({**about, "rows": report}, indent=2) + "\n")
    return 0 if all(row.holds for row in rows) else 1


def all_cases() -> list[tuple[str, str]]:
    """Every mode, with every index that it uses."""
    kinds: dict[str, tuple[str, ...]] = dict.fromkeys(POLICIES, ("none",))
    kinds |= dict.fromkeys(MODES_OF_BLOCKS, INDEXES) | {"prefix-affinity": TEXTS}
    return [(mode, index) for mode, indexes in kinds.items() for index in indexes]


def count(case: tuple[str, str]) -> Row:
    """The small load, measured in instructions."""
    return run(World(*case, SMALL, InstructionMeter()), case)


def run(world: World, case: tuple[str, str]) -> Row:
    """Warm up, then measure ten tenths."""
    load = world.load
    cold = _tenth(world, load.warm_up_s // 10)
    for _ in range(load.warm_up_s - load.warm_up_s // 10):
        world.run_second()
    before = _rss_mb()
    tenths = [_tenth(world, load.seconds // 10)]
    after_first = _rss_mb()
    tenths += [_tenth(world, load.seconds // 10) for _ in range(9)]
    return Row(*case, cold, tenths, world.memory(), (before, after_first, _rss_mb()))


def _tenth(world: World, seconds: int) -> float:
    costs = [world.run_second() for _ in range(seconds)]
    return statistics.median(costs) if isinstance(world.meter, CpuMeter) else statistics.fmean(costs)


def _measured(cases: Sequence[tuple[str, str]], load: Load) -> Iterator[Row]:
    """Run each in its own process, as memory is measured."""
    spawn = get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as processes:
        for row in processes.map(_measure, cases, [load] * len(cases)):
            print(
                f"{row.mode}, {row.index}:", *(f"{cost:,.0f}" for cost in (row.cold, *row.tenths)), flush=True
            )
            yield row


def _measure(case: tuple[str, str], load: Load) -> Row:
    return run(World(*case, load, CpuMeter()), case)


def _rss_mb() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * PAGE_KB // 1024


def table(rows: Iterable[Row], unit: str) -> Table:
    """One row for each mode and index."""
    made = Table(title=f"{unit} per booking, at two replicas")
    made.add_column("mode")
    made.add_column("index")
    for name in ("cold", *(str(number) for number in range(1, 11)), "10 / cold", "10 / 1"):
        made.add_column(name, justify="right")
    made.add_column("memory: entries of at most")
    made.add_column("RSS MB")
    for row in rows:
        memory = f"{row.memory.entries:,} of {row.memory.bound:,} {row.memory.what}"
        costs = [f"{cost:,.0f}" for cost in (row.cold, *row.tenths)]
        rss = " ".join(f"{one}" for one in row.rss_mb)
        ratios = [f"{row.tenths[-1] / cost:.2f}" for cost in (row.cold, row.tenths[0])]
        made.add_row(row.mode, row.index, *costs, *ratios, memory, rss)
    return made


def _flags(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench long", description=__doc__.split("\n", maxsplit=1)[0]
    )
    add = parser.add_argument
    add(
        "--modes",
        nargs="+",
        default=list(POLICIES),
        choices=list(POLICIES),
        metavar="MODE",
        help="router modes (all)",
    )
    add("--rate", type=int, default=Load().rate, metavar="N", help="bookings per second (%(default)s)")
    add(
        "--seconds",
        type=int,
        default=Load().seconds,
        metavar="S",
        help="virtual seconds measured (%(default)s)",
    )
    add(
        "--warm-up",
        type=int,
        default=Load().warm_up_s,
        metavar="S",
        help="virtual seconds before them (%(default)s)",
    )
    add("--count", action="store_true", help="count instructions instead, with few bookings and small tables")
    add("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    flags = parser.parse_args(arguments)
    if min(flags.seconds, flags.warm_up) < 10 or flags.rate < 1:
        parser.error("--seconds and --warm-up: at least 10; --rate: at least 1")
    return flags
