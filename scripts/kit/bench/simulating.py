"""Seconds and memory of one simulated run, by the number of requests and of engines."""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from rich.table import Table

from kvrouter.lab.simulate import generated
from kvrouter.lab.simulate.cells import Cell
from kvrouter.lab.simulate.traces import read_trace
from kvrouter.lab.simulate.workloads import Workload, trace
from kvrouter.policies import PolicySettings
from scripts.kit.bench.growth import PLOTS
from scripts.kit.bench.plot import Point, write_plot
from scripts.kit.script import new_console

REQUESTS = (1_000, 3_000, 10_000, 30_000, 100_000)
ENGINES = (16, 64, 256, 1_000)
# The questions of workload docs a second and engine: about half of what an engine serves without a cache.
RATE = 0.35
_OWN_RATE = 10.0


def measured(workload: Workload, engines: int, pace: float, mode: str) -> tuple[float, float]:
    """CPU seconds of a run, and GiB of its process. Call it in a new process."""
    cell = Cell(workload, 0.5, pace=pace, workers=engines)
    _ = cell.capacity_blocks
    before = time.process_time()
    cell.run(mode, PolicySettings(), 0)
    seconds = time.process_time() - before
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _docs(requests: int, engines: int, mode: str) -> tuple[float, float]:
    workload = generated.named(f"docs:count={requests},documents={max(100, requests // 2)}", ())
    return measured(workload, engines, RATE * engines / _OWN_RATE, mode)


def _trace(path: Path, engines: int, mode: str) -> tuple[float, float]:
    return measured(trace(read_trace(path)), engines, 1.0, mode)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and draw."""
    parser = argparse.ArgumentParser(prog="scripts/bench simulating", description=__doc__)
    parser.add_argument("--mode", default="kv")
    parser.add_argument("--most-requests", type=int, default=REQUESTS[-1])
    parser.add_argument("--most-engines", type=int, default=ENGINES[-1])
    parser.add_argument("--trace", type=Path, help="also one run of this trace on 64 engines")
    parser.add_argument("--plots", type=Path, default=PLOTS, metavar="DIR", help="default: %(default)s")
    flags = parser.parse_args(arguments)
    table = Table(title=f"one run of mode {flags.mode}: CPU seconds, memory")
    table.add_column("requests", justify="right")
    sizes = [count for count in ENGINES if count <= flags.most_engines]
    for count in sizes:
        table.add_column(f"{count:,} engines", justify="right")
    lines: dict[str, list[Point]] = {f"{count:,} engines": [] for count in sizes}
    # a process for each: its memory is that of one run
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        for requests in [one for one in REQUESTS if one <= flags.most_requests]:
            cells = []
            for count in sizes:
                seconds, gib = pool.submit(_docs, requests, count, flags.mode).result()
                lines[f"{count:,} engines"].append((requests, seconds))
                cells.append(f"{seconds:.1f} s, {gib:.2f} GiB")
            table.add_row(f"{requests:,}", *cells)
        if flags.trace is not None:
            seconds, gib = pool.submit(_trace, flags.trace, 64, flags.mode).result()
            print(f"{flags.trace.name} on 64 engines: {seconds:.1f} s, {gib:.2f} GiB")
    new_console().print(table)
    title = f"Simulating mode {flags.mode}, workload docs"
    write_plot(flags.plots / "simulating.svg", title, "requests", "CPU s", lines, log_x=True, log_y=True)
    return 0
