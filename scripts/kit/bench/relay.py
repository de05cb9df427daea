"""Cost of a request and of a streamed event at one frontend, and its growth with the open streams.

Fake workers and a load generator in C (scripts/kit/bench/wire) are faster than the frontend: `direct` is
the load without a frontend. CPU time is that of the frontend's process alone.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from scripts.kit.bench.meter import conclude, machine
from scripts.kit.bench.wire import growth, tables
from scripts.kit.bench.wire.growth import Growth
from scripts.kit.bench.wire.rounds import Contender, Results, run_rounds, warm
from scripts.kit.bench.wire.routers import Workers, find_nginx
from scripts.kit.bench.wire.stage import Stage, direct, open_stage
from scripts.kit.bench.wire.tables import tools_line, work_table
from scripts.kit.bench.wire.targets import OURS, OURS_PAIR
from scripts.kit.bench.wire.works import Work, after_models, raise_descriptor_limit, standard_works
from scripts.kit.figures import MachineTime
from scripts.kit.fleet import FleetError


async def run(flags: argparse.Namespace) -> int:
    """Measure; returns the exit code."""
    descriptors, before = raise_descriptor_limit(), MachineTime.now()
    works = standard_works(flags.share)
    works.insert(1, after_models(works[0]))
    async with open_stage() as stage:
        results = await _relay(stage, works, flags)
        grown, failures = await _growth(stage, flags, descriptors)
    shown = [work_table(work, tables.names(results), results) for work in works]
    shown += [growth.growth_table(grown)] if grown else []
    about = machine(before) | {"runs": flags.runs, "share": flags.share}
    figures = {"results": tables.as_json(results), "growth": [asdict(one) for one in grown]}
    conclude(flags, shown, about, **figures, failures=failures)
    print(tools_line(works, results))
    for failure in failures:
        print(f"bench: failed: {failure}", file=sys.stderr)
    return 1 if failures else 0


async def _relay(stage: Stage, works: Sequence[Work], flags: argparse.Namespace) -> Results:
    workers = await stage.workers(pace_ms=5)
    ours = await stage.both_modes(workers, flags.against, flags.flag)
    halves = await stage.workers(pace_ms=5.01, is_split=True)
    ours.append(await stage.ours(OURS_PAIR, halves, None, flags.flag))
    contenders = [*ours, direct(workers)]
    await warm(contenders, works, stage.directory)
    results = await run_rounds(contenders, lambda: works, flags.runs, stage.directory)
    for each in ours:
        await stage.stop_group(each.group)
    return results


async def _growth(
    stage: Stage, flags: argparse.Namespace, descriptors: int
) -> tuple[list[Growth], list[str]]:
    """The measurements, and the programs that could not open all streams."""
    found, failures = [], []
    for streams in growth.possible_streams(flags.streams, descriptors):
        workers = await stage.workers(growth.pace_ms(streams), growth.WORKERS)
        for number, start in itertools.product(range(flags.growth_runs), _routers(stage, workers, flags)):
            one = await start()
            print(f"{streams:,} streams, run {number + 1}, {one.name}", flush=True)
            try:
                found.append(
                    await growth.grow(one, streams, window_s=flags.window_s, directory=stage.directory)
                )
            except FleetError as error:
                failures.append(str(error))
            await stage.stop_group(one.group)
    return growth.medians(found), failures


def _routers(
    stage: Stage, workers: Workers, flags: argparse.Namespace
) -> list[Callable[[], Awaitable[Contender]]]:
    """The programs to measure: a frontend, another checkout's, and nginx, which shows the kernel's part."""
    starts: list[Callable[[], Awaitable[Contender]]] = [partial(stage.ours, OURS, workers)]
    if flags.against is not None:
        starts.append(partial(stage.ours, OURS, workers, flags.against))
    if program := find_nginx(flags.nginx):
        starts.append(partial(stage.nginx, workers, program))
    return starts


def add_measuring_flags(parser: argparse.ArgumentParser) -> None:
    """Flags shared with `peers`."""
    add = parser.add_argument
    add("--runs", type=int, default=5, metavar="N", help="rounds; figures are their medians (%(default)s)")
    add(
        "--share",
        type=float,
        default=1.0,
        metavar="X",
        help="share of the usual requests of a run (%(default)g)",
    )
    add("--against", type=checkout, metavar="DIR",
        help="another checkout of kvrouter: its frontends are measured in the same rounds")  # fmt: skip
    add("--nginx", type=Path, metavar="PATH", help="the program (default: the one on PATH)")


def checkout(name: str) -> Path:
    """The root of a checkout of kvrouter. Raises ArgumentTypeError."""
    path = Path(name).resolve()
    if not (path / "kvrouter" / "frontend").is_dir():
        raise argparse.ArgumentTypeError(f"{name}: not a checkout of kvrouter; give the root of one")
    return path


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_measuring_flags(parser)
    add = parser.add_argument
    add("--flag", action="append", default=[], metavar="FLAG",
        help="one more flag of this checkout's frontends, as in --flag=--access-log=all")  # fmt: skip
    add("--streams", type=int, nargs="*", default=growth.STREAMS, metavar="N",
        help="numbers of open streams; none: skip the growth (10 100 1000 3000 9000)")  # fmt: skip
    add("--growth-runs", type=int, default=1, metavar="N", help="runs for each number (%(default)s)")
    add("--window-s", type=float, default=5.0, metavar="S", help="seconds of a measurement (%(default)g)")
