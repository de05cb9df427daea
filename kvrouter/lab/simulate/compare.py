"""Runs modes and the oracle in cells, over several seeds, in one or more processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace

from kvrouter.lab.simulate.cells import ORACLE, Cell
from kvrouter.lab.simulate.measures import Measures, mean, spread
from kvrouter.lab.simulate.placement import Frontend
from kvrouter.lab.simulate.split import RULE
from kvrouter.policies import PolicySettings

# Seeds as far apart as those of the published figures.
SEED_STEP = 1000


@dataclass(frozen=True, slots=True)
class ModeRow:
    """A mode in a cell: means over the seeds, and half the distance between least and greatest."""

    mode: str
    mean: Measures
    spread: Measures
    regret: float
    """TTFT p90 above the oracle's, as a share of it; negative: below."""

    @property
    def cached_of_achievable(self) -> float:
        """The cached tokens, as a share of what one endless shared cache would have."""
        return self.mean.cached / self.mean.achievable if self.mean.achievable else 1.0


@dataclass(frozen=True, slots=True)
class Compared:
    """A cell with its rows; the oracle is the first."""

    cell: Cell
    rows: Sequence[ModeRow]


@dataclass(frozen=True, slots=True)
class Task:
    """A run of a mode in a cell."""

    cell: Cell
    mode: str
    settings: PolicySettings = field(compare=False)  # the same for all; a custom policy has no hash
    seed: int

    def run(self) -> Measures:
        return self.cell.measure(self.mode, self.settings, self.seed)


# What the processes of a pool run: inherited by fork, as policies and workloads have functions.
_tasks: list[Task] = []


def compare(
    cells: Sequence[Cell],
    modes: Sequence[str],
    settings: PolicySettings,
    *,
    seeds: int = 1,
    jobs: int = 1,
    on_done: Callable[[int, int], None] = lambda _done, _all: None,
) -> list[Compared]:
    """Every mode in every cell, after the oracle. `on_done(done, all)` is called after each run."""
    names = list(dict.fromkeys([ORACLE, *modes]))
    for cell in cells:
        _ = cell.offered_pace  # measured once, before the processes begin
    wanted = {
        (cell, mode): [_task(cell, mode, settings, number * SEED_STEP) for number in range(seeds)]
        for cell in cells
        for mode in names
    }
    tasks = list(dict.fromkeys(task for group in wanted.values() for task in group))
    measured: dict[Task, Measures] = {}
    for task, figures in zip(tasks, run_tasks(tasks, jobs), strict=True):
        measured[task] = figures
        on_done(len(measured), len(tasks))
    return [
        _compared(cell, {mode: [measured[task] for task in wanted[cell, mode]] for mode in names})
        for cell in cells
    ]


def _task(cell: Cell, mode: str, settings: PolicySettings, seed: int) -> Task:
    if mode == ORACLE:  # cells that differ in their routers alone share its runs
        cell = replace(cell, replicas=1, sync=None, frontend=Frontend(), kv_delay_s=0.0)
    if RULE not in mode:  # so do cells that differ in their roles
        cell = replace(cell, roles=None)
    return Task(cell, mode, settings, seed)


def run_tasks(tasks: Sequence[Task], jobs: int) -> Iterator[Measures]:
    """The figures of each, in `jobs` processes."""
    if jobs == 1:
        yield from (task.run() for task in tasks)
        return
    _tasks[:] = tasks
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork")) as pool:
        yield from pool.map(_run_task, range(len(tasks)))
    _tasks.clear()


def _run_task(place: int) -> Measures:
    return _tasks[place].run()


def _compared(cell: Cell, runs: dict[str, list[Measures]]) -> Compared:
    best = mean(runs[ORACLE]).ttft_p90_s
    rows = [
        ModeRow(mode, mean(measured), spread(measured), mean(measured).ttft_p90_s / best - 1)
        for mode, measured in runs.items()
    ]
    return Compared(cell, rows)
