"""Cost of a request and of a streamed event at one frontend, and its growth with the open streams.

Fake workers and a load generator in C (scripts/kit/bench/wire) are faster than the frontend: `direct` is
the load without a frontend. CPU time is that of the frontend's process alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import uvloop
from rich.console import Console

from scripts.kit.bench.meter import machine
from scripts.kit.bench.wire import growth, tables
from scripts.kit.bench.wire.growth import Growth
from scripts.kit.bench.wire.rounds import Contender, Results, run_rounds, warm
from scripts.kit.bench.wire.routers import Workers, find_nginx
from scripts.kit.bench.wire.stage import Stage, direct, open_stage
from scripts.kit.bench.wire.tables import tools_line, work_table
from scripts.kit.bench.wire.targets import OURS
from scripts.kit.bench.wire.works import Work, after_models, raise_descriptor_limit, standard_works
from scripts.kit.figures import MachineTime
from scripts.kit.fleet import FleetError
from scripts.kit.http_client import HttpError
from scripts.kit.script import new_console, until_signalled


@dataclass(frozen=True, slots=True)
class Options:
    """The command line."""

    runs: int
    share: float
    streams: Sequence[int]
    growth_runs: int
    window_s: float
    against: Path | None
    flag: Sequence[str]
    nginx: Path | None
    plots: Path | None
    json: Path | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; returns the exit code."""
    options = _options(arguments)
    try:
        return uvloop.run(until_signalled("bench", _run(options)))
    except (FleetError, HttpError) as error:
        print(f"bench: failed: {error}", file=sys.stderr)
        return 1


async def _run(options: Options) -> int:
    console = new_console()
    descriptors = raise_descriptor_limit()
    works = standard_works(options.share)
    works.insert(1, after_models(works[0]))
    before = MachineTime.now()
    async with open_stage() as stage:
        results = await _relay(stage, works, options, console)
        grown, failures = await _growth(stage, options, descriptors, console)
    about = about_machine(before) | {"runs": options.runs, "share": options.share}
    names = tables.names(results)
    for work in works:
        console.print(work_table(work, names, results))
    if grown:
        console.print(growth.growth_table(grown))
    console.print(tools_line(works, results), highlight=False)
    console.print(json.dumps(about), soft_wrap=True, highlight=False)
    if options.plots is not None and grown:
        growth.write_plots(options.plots, grown)
    if options.json is not None:
        body = {
            **about,
            "results": tables.as_json(results),
            "growth": growth.as_json(grown),
            "failures": failures,
        }
        options.json.write_text(json.dumps(body, indent=2) + "\n")
    for failure in failures:
        print(f"bench: failed: {failure}", file=sys.stderr)
    return 1 if failures else 0


async def _relay(stage: Stage, works: Sequence[Work], options: Options, console: Console) -> Results:
    workers = await stage.workers(pace_ms=5)
    ours = await stage.both_modes(workers, options.against, options.flag)
    contenders = [*ours, direct(workers)]
    await warm(contenders, works, stage.directory)
    results = await run_rounds(contenders, lambda: works, options.runs, stage.directory, sayer(console))
    for each in ours:
        await stage.stop(each.group)
    return results


async def _growth(
    stage: Stage, options: Options, descriptors: int, console: Console
) -> tuple[list[Growth], list[str]]:
    """The measurements, and the programs that could not open all streams."""
    found, failures = [], []
    for streams in growth.possible_streams(options.streams, descriptors):
        workers = await stage.workers(growth.pace_ms(streams), growth.WORKERS)
        for number, start in itertools.product(range(options.growth_runs), _routers(stage, workers, options)):
            one = await start()
            console.print(f"{streams:,} streams, run {number + 1}, {one.name}", highlight=False)
            try:
                found.append(
                    await growth.grow(one, streams, window_s=options.window_s, directory=stage.directory)
                )
            except FleetError as error:
                failures.append(str(error))
            await stage.stop(one.group)
    return growth.medians(found), failures


def _routers(stage: Stage, workers: Workers, options: Options) -> list[Callable[[], Awaitable[Contender]]]:
    """The programs to measure: a frontend, another checkout's, and nginx, which shows the kernel's part."""
    starts: list[Callable[[], Awaitable[Contender]]] = [partial(stage.ours, OURS, workers)]
    if options.against is not None:
        starts.append(partial(stage.ours, OURS, workers, options.against))
    if program := find_nginx(options.nginx):
        starts.append(partial(stage.nginx, workers, program))
    return starts


def sayer(console: Console, prefix: str = "") -> Callable[[str], None]:
    """Prints the progress of a long measurement."""

    def say(text: str) -> None:
        console.print(prefix + text, highlight=False)

    return say


def about_machine(before: MachineTime | None) -> dict[str, object]:
    """The machine, the date, and the CPU load since the start."""
    about = machine()
    after = MachineTime.now()
    if before and after:
        about["machine_busy"] = round(after.busy_since(before), 3)
    return about | {"kernel": platform.release().partition("-")[0]}


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
    add("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    add("--against", type=checkout, metavar="DIR",
        help="another checkout of kvrouter: its frontends are measured in the same rounds")  # fmt: skip
    add("--nginx", type=Path, metavar="PATH", help="the program (default: the one on PATH)")


def checkout(name: str) -> Path:
    """The root of a checkout of kvrouter. Raises ArgumentTypeError."""
    path = Path(name).resolve()
    if not (path / "kvrouter" / "frontend").is_dir():
        raise argparse.ArgumentTypeError(f"{name}: not a checkout of kvrouter; give the root of one")
    return path


def _options(arguments: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(
        prog="scripts/bench relay", description=__doc__.split("\n", maxsplit=1)[0]
    )
    add_measuring_flags(parser)
    add = parser.add_argument
    add("--flag", action="append", default=[], metavar="FLAG",
        help="one more flag of this checkout's frontends, as in --flag=--access-log=all")  # fmt: skip
    add("--streams", type=int, nargs="*", default=growth.STREAMS, metavar="N",
        help="numbers of open streams; none: skip the growth (10 100 1000 3000 9000)")  # fmt: skip
    add("--growth-runs", type=int, default=1, metavar="N", help="runs for each number (%(default)s)")
    add("--window-s", type=float, default=5.0, metavar="S", help="seconds of a measurement (%(default)g)")
    add("--plots", type=Path, metavar="DIR", help="directory for SVG plots of the growth")
    return Options(**vars(parser.parse_args(arguments)))
