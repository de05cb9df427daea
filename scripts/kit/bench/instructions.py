"""Instructions of a frontend for each work of `relay`: about the same on every load of the machine.

The frontend runs under `valgrind --tool=callgrind`, which counts what the process executes, with libraries
and threads. The kernel's work is not counted, and an instruction that waits for memory counts as any other.
A frontend is some 50 times slower under it, so there are fewer requests than in `relay`, and slower streams:
what an idle frontend takes in the time of a work is measured, too, and subtracted.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.table import Table

from scripts.kit.bench.keyring import FREE, header, keyring
from scripts.kit.bench.meter import conclude, machine
from scripts.kit.bench.relay import checkout
from scripts.kit.bench.wire.rounds import send, warm
from scripts.kit.bench.wire.routers import Workers
from scripts.kit.bench.wire.stage import FLAGS, Stage, open_stage
from scripts.kit.bench.wire.targets import PAIRS
from scripts.kit.bench.wire.works import (
    STREAM_EVENTS,
    Work,
    after_models,
    raise_descriptor_limit,
    standard_works,
    stream_bodies,
)
from scripts.kit.figures import MachineTime
from scripts.kit.fleet import FleetError
from scripts.kit.script import table_of

# The requests of one run. All streams are open at the same time, with an event each 60 ms: a frontend under
# callgrind can send 2,100 events/s.
REQUESTS = {"short": 4000, "after GET": 4000, "long": 1500, "paced": 128, "alone": 2500}
STREAM_PACE_MS = 60.0
START_S = 300.0
IDLE_S = 15.0
# Python specializes code that runs often, and lines of the access log wait for up to 0.25 s.
WARM_RUNS = 2
SETTLE_S = 40.0  # with a mode that needs tokens, which compares its tokenizer for 0.3 s, here 15
LAST_LINES_S = 0.5
# A version of vLLM whose streams can move.
SHOWS_IDS = "0.33.0"


@dataclass(frozen=True, slots=True)
class Cost:
    """Instructions per request, or per event of a stream."""

    units: int  # requests or events of the run
    instructions: float  # without an idle frontend's
    idle: float  # which were subtracted


# By mode and name of the work.
Costs = Mapping[str, Mapping[str, Cost]]


class Callgrind:
    """Runs one process under callgrind, and counts its instructions."""

    def __init__(self, directory: Path) -> None:
        """`directory` is made, for callgrind's files."""
        directory.mkdir()
        self._directory = directory
        self._counted_at = time.monotonic()
        # With another hash seed at each start, dicts of names collide at other places.
        self.command = (
            "env", "PYTHONHASHSEED=0", "valgrind", "--tool=callgrind",
            f"--callgrind-out-file={directory}/out",
        )  # fmt: skip

    async def count(self, pid: int) -> tuple[int, float]:
        """Instructions and seconds since the last call, or since the start. Raises FleetError."""
        asked = await asyncio.to_thread(
            subprocess.run, ["callgrind_control", "-d", str(pid)], capture_output=True, text=True, check=False
        )
        dumps = list(self._directory.glob("out.*"))
        if asked.returncode or not dumps:
            raise FleetError(f"callgrind_control -d {pid} failed: {asked.stdout}{asked.stderr}")
        newest = max(dumps, key=lambda path: int(path.suffix[1:]))
        counted = total(newest.read_text(errors="replace"))
        for path in dumps:
            path.unlink()
        now = time.monotonic()
        elapsed_s, self._counted_at = now - self._counted_at, now
        return counted, elapsed_s


def total(dump: str) -> int:
    """The instructions of a callgrind profile. Raises FleetError."""
    for line in reversed(dump.splitlines()):
        if line.startswith("totals: "):
            return int(line.split()[1])
    raise FleetError("callgrind's profile has no line `totals:`")


async def run(flags: argparse.Namespace) -> int:
    for program in ("valgrind", "callgrind_control"):
        if shutil.which(program) is None:
            raise FleetError(f"{program} is not on PATH: install valgrind")
    raise_descriptor_limit()
    before = MachineTime.now()
    ours: dict[str, dict[str, Cost]] = {}
    others: dict[str, dict[str, Cost]] = {}
    async with open_stage() as stage:
        pace_ms = STREAM_PACE_MS * STREAM_EVENTS / flags.events
        whole = await stage.workers(pace_ms, vllm=SHOWS_IDS if flags.moves else "")
        if flags.moves:
            flags.flag.append("--migration-limit=1")
        headers: tuple[str, ...] = ()
        if flags.keys:
            (key, *_), more = keyring(stage.directory, flags.keys, FREE if flags.limits else {})
            flags.flag += more
            headers = (header(key),)
        for number, mode in enumerate(flags.modes, start=1):
            workers = whole
            if mode in PAIRS:
                workers = await stage.workers(STREAM_PACE_MS + number / 100, connector=PAIRS[mode])
            print(f"{mode}: this takes 5 minutes for each frontend", flush=True)
            ours[mode] = await _measure(stage, workers, mode, flags, None, headers)
            if flags.against is not None and mode not in PAIRS:
                others[mode] = await _measure(stage, workers, mode, flags, flags.against, headers)
    about = machine(before) | {"flags": flags.flag, "share": flags.share}
    conclude(flags, [table(ours, others)], about, this=_as_json(ours), other=_as_json(others))
    return 0


def works(share: float, events: int) -> list[Work]:
    """The works of `relay`, with fewer requests. Streams have so many events."""
    short, *more = standard_works()
    shares = {"paced": share * STREAM_EVENTS / events}
    scaled = [
        replace(work, requests=max(8, round(REQUESTS[work.name] * shares.get(work.name, share))))
        for work in (short, after_models(short), *more)
    ]
    return [
        replace(work, concurrency=work.requests, bodies=stream_bodies(events)) if work.is_stream else work
        for work in scaled
    ]


async def _measure(  # noqa: PLR0917
    stage: Stage,
    workers: Workers,
    mode: str,
    flags: argparse.Namespace,
    other: Path | None,
    headers: tuple[str, ...],
) -> dict[str, Cost]:
    """The costs of each work, at a frontend that is started for it."""
    which = "other" if other else "this"
    callgrind = Callgrind(stage.directory / f"callgrind-{mode.replace(' ', '-')}-{which}")
    one = await stage.ours(mode, workers, other, flags.flag, under=callgrind.command, timeout_s=START_S)
    todo = [
        replace(work, headers=headers)
        for work in works(flags.share, flags.events)
        if work.name in flags.works
    ]
    for _ in range(WARM_RUNS):
        await warm([one], todo, stage.directory)
    await asyncio.sleep(SETTLE_S)
    await callgrind.count(one.group)
    await asyncio.sleep(IDLE_S)
    idle, idle_s = await callgrind.count(one.group)
    costs = {}
    for work in todo:
        report = await send(work, one, stage.directory)
        await asyncio.sleep(LAST_LINES_S)
        instructions, took_s = await callgrind.count(one.group)
        costs[work.name] = cost(report.events or report.requests, instructions, idle / idle_s * took_s)
    await stage.stop_group(one.group)
    return costs


def cost(units: int, instructions: int, idle: float) -> Cost:
    """`idle`: instructions that an idle frontend takes in the same time."""
    return Cost(units, (instructions - idle) / units, idle / units)


def table(ours: Costs, others: Costs) -> Table:
    """One row for each mode and work, with the ratio to another checkout if it was measured."""
    rows = []
    for mode, costs in ours.items():
        for work, one in costs.items():
            figures = [f"{figure:,.0f}" for figure in (one.units, one.instructions, one.idle)]
            if mode in others:
                other = others[mode][work].instructions
                figures += [f"{other:,.0f}", f"{one.instructions / other:.3f}"]
            rows.append([mode, work, *figures])
    columns = ("", "work", "number", "instructions", "idle", *(("other", "this / other") if others else ()))
    return table_of("instructions of a request, or of an event of a stream", columns, rows)


def _as_json(costs: Costs) -> dict[str, dict[str, dict[str, float]]]:
    return {mode: {work: asdict(one) for work, one in row.items()} for mode, row in costs.items()}


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--against", type=checkout, metavar="DIR",
        help="another checkout of kvrouter: its frontends are measured, too")  # fmt: skip
    add("--flag", action="append", default=[], metavar="FLAG",
        help="one more flag of this checkout's frontends, as in --flag=--access-log=all")  # fmt: skip
    add("--modes", nargs="+", default=list(FLAGS), choices=list(FLAGS), metavar="MODE",
        help="which frontends (all)")  # fmt: skip
    add("--keys", type=int, default=0, metavar="N",
        help="this checkout's frontends ask for one of N keys; see --against .")  # fmt: skip
    add("--limits", action="store_true", help="these keys have limits")
    add("--events", type=int, default=STREAM_EVENTS, metavar="N", help="of a stream (%(default)s)")
    add("--moves", action="store_true", help="this checkout's streams may move; see --against .")
    add("--works", nargs="+", default=list(REQUESTS), choices=list(REQUESTS), metavar="WORK",
        help="what is sent (all)")  # fmt: skip
    add("--share", type=float, default=1.0, metavar="X", help="share of the usual requests (%(default)g)")
