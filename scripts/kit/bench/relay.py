"""Cost of a request and of a streamed event at one frontend.

Fake workers and a load generator in C (scripts/kit/bench/wire) are faster than the frontend: `direct` is
the load without a frontend. CPU time covers the frontend's process alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from scripts.kit.bench.meter import conclude, machine
from scripts.kit.bench.wire import tables
from scripts.kit.bench.wire.rounds import Results, run_rounds, warm
from scripts.kit.bench.wire.stage import Stage, direct, open_stage
from scripts.kit.bench.wire.tables import tools_line, work_table
from scripts.kit.bench.wire.targets import PAIRS
from scripts.kit.bench.wire.works import Work, after_models, raise_descriptor_limit, standard_works
from scripts.kit.figures import MachineTime


async def run(flags: argparse.Namespace) -> int:
    raise_descriptor_limit()
    before = MachineTime.now()
    works = standard_works(flags.share)
    works.insert(1, after_models(works[0]))
    async with open_stage() as stage:
        results = await _relay(stage, works, flags)
    shown = [work_table(work, tables.names(results), results) for work in works]
    about = machine(before) | {"runs": flags.runs, "share": flags.share}
    conclude(flags, shown, about, results=tables.as_json(results))
    print(tools_line(works, results))
    return 0


async def _relay(stage: Stage, works: Sequence[Work], flags: argparse.Namespace) -> Results:
    workers = await stage.workers(pace_ms=5)
    ours = await stage.both_modes(workers, flags.against, flags.flag)
    for number, (name, connector) in enumerate(PAIRS.items(), start=1):
        halves = await stage.workers(pace_ms=5 + number / 100, connector=connector)
        ours.append(await stage.ours(name, halves, None, flags.flag))
    contenders = [*ours, direct(workers)]
    await warm(contenders, works, stage.directory)
    results = await run_rounds(contenders, lambda: works, flags.runs, stage.directory)
    for each in ours:
        await stage.stop_group(each.group)
    return results


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
