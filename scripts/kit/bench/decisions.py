"""How far every mode's decisions are from a greedy oracle's: cells of the simulator, in virtual time.

    group: cells (workload, cache, load, replicas, engines) × modes × seeds ──> one table

docs/simulate.md describes the engines, the loads, the oracle and the columns. All groups take about ten
minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvrouter.lab.simulate import generated, workloads
from kvrouter.lab.simulate.cells import Cell
from kvrouter.lab.simulate.compare import Compared, ModeRow, compare
from kvrouter.lab.simulate.placement import Sync
from kvrouter.lab.simulate.progress import shown_progress
from kvrouter.lab.simulate.report import as_json
from kvrouter.lab.simulate.settings import mode_name
from kvrouter.lab.simulate.step_model import H100, LARGE_STEPS, SHORTEST
from kvrouter.lab.simulate.traces import CONVERSATION_EXCERPT, read_trace
from kvrouter.policies import PolicySettings
from scripts.kit.bench.meter import conclude, machine

KV = ("kv:auto", "kv:1", "kv:8")
CACHES = (0.25, 0.5, 1.0, 3.0)
LOADS = (0.5, 0.7, 0.8)


@dataclass(frozen=True, slots=True)
class Group:
    """Cells that one table shows, and the modes in its columns."""

    title: str
    modes: Sequence[str]
    cells: Sequence[Cell]


def groups() -> dict[str, Group]:
    """All tables, by the name that `--only` takes."""
    trace = read_trace(CONVERSATION_EXCERPT)
    base = Cell(workloads.trace(trace), 0.25, load=0.7)
    conversation = _grid(base, CACHES, LOADS)
    docs = _grid(replace(base, workload=generated.docs()), CACHES, LOADS)
    others = ("kv-score", "scored", "prefix-affinity", "p2c", "round-robin", "random")
    large = replace(base, model=LARGE_STEPS, workers=8)
    hot = [replace(base, workload=generated.hot(count), cache=3.0, load=None) for count in (1, 3, 10, 40)]
    zero = [replace(base, workload=workloads.zero(trace), cache=1.0, load=load) for load in LOADS]
    return {
        "conversation": Group("conversation trace", (*KV, "sticky", "least-loaded"), conversation),
        "modes": Group("conversation trace, other modes", others, _grid(base, (0.25, 1.0), (0.7,))),
        "replicas": Group("conversation trace, 4 replicas", KV, _replicas(conversation, 4)),
        "docs": Group("long documents", (*KV, "least-loaded"), docs),
        "docs-replicas": Group("long documents, 4 replicas", KV, _replicas(docs, 4)),
        "sync": Group("replicas and their sync", KV, _syncs(base)),
        "hot": Group("hot prefixes", (*KV, "least-loaded"), [*hot, *_replicas(hot, 4)]),
        "zero": Group("nothing shared", (*KV, "least-loaded"), zero),
        "large-steps": Group(
            "second step model, 8 workers", KV, _with_replicas(_grid(large, CACHES, LOADS[:2]))
        ),
        "engines": Group("other engines and clients", KV, _odd(base)),
        "groups": Group(
            "Heimdall's benchmark, 8 workers", (*KV, "sticky", "prefix-affinity", "scored"), _groups(base)
        ),
        "siblings": Group("bursts of siblings", (*KV, "least-loaded"), _siblings(base)),
    }


def _grid(cell: Cell, caches: Sequence[float], loads: Sequence[float]) -> list[Cell]:
    return [replace(cell, cache=cache, load=load) for load in loads for cache in caches]


def _replicas(cells: Sequence[Cell], count: int) -> list[Cell]:
    return [replace(cell, replicas=count) for cell in cells]


def _with_replicas(cells: Sequence[Cell]) -> list[Cell]:
    return [*cells, *_replicas(cells, 4)]


def _syncs(base: Cell) -> list[Cell]:
    syncs = [Sync(0.005), Sync(0.020), Sync(0.005, loss=0.01), None]
    return [
        replace(base, cache=cache, replicas=count, sync=sync)
        for cache in (0.25, 1.0)
        for sync in syncs
        for count in (4, 8)
    ]


def _odd(base: Cell) -> list[Cell]:
    cells = _grid(base, (0.25, 1.0), (0.7,))
    mixed = replace(base, workers=8, speeds=(1.0, 1.0, 1.0, 0.5), load=0.6)
    return [
        *(replace(mixed, cache=cache) for cache in (0.25, 1.0)),
        *(replace(cell, model=cell.model.served(SHORTEST, 1)) for cell in cells),
        *(replace(cell, model=cell.model.served(cell.model.order, 4)) for cell in cells),
        *(replace(cell, leaving=0.1) for cell in cells),
        *(replace(cell, kv_delay_s=2.0) for cell in cells),
    ]


def _groups(base: Cell) -> list[Cell]:
    cell = replace(base, workload=generated.short_groups(), model=H100, workers=8, cache=1.4, load=None)
    return _with_replicas([cell])


def _siblings(base: Cell) -> list[Cell]:
    cells = [replace(base, workload=generated.siblings(), cache=1.0, load=load) for load in LOADS]
    return _with_replicas(cells)


def run(flags: argparse.Namespace) -> int:
    known, figures = groups(), {}
    for name in flags.only or known:
        compared = _run(name, known[name], flags)
        print(markdown(known[name].title, compared), flush=True)
        figures[name] = [as_json(one, seeds=flags.seeds) for one in compared]
        # after each group, so that a run that is stopped leaves its figures
        conclude(flags, [], machine() | {"seeds": flags.seeds}, groups=figures)
    return 0


def _run(name: str, group: Group, flags: argparse.Namespace) -> list[Compared]:
    modes, settings = flags.modes or group.modes, PolicySettings()
    with shown_progress(name) as on_done:
        return compare(group.cells, modes, settings, seeds=flags.seeds, jobs=flags.jobs, on_done=on_done)


def markdown(title: str, compared: Sequence[Compared]) -> str:
    """One row a cell: the oracle's TTFT p90 and goodput; each mode's regret ± its spread, and its goodput."""
    modes = [row.mode for row in compared[0].rows[1:]]
    lines = [
        f"### {title}",
        "",
        "| cell | oracle: TTFT p90, goodput | " + " | ".join(modes) + " |",
        "|---" * (len(modes) + 2) + "|",
    ]
    for one in compared:
        oracle, *rows = one.rows
        best = f"{oracle.mean.ttft_p90_s:.3f} s, {oracle.mean.goodput:.1%}"
        shown = " | ".join(_figure(row, oracle) for row in rows)
        lines.append(f"| {cell_name(one.cell)} | {best} | {shown} |")
    return "\n".join([*lines, ""])


def _figure(row: ModeRow, oracle: ModeRow) -> str:
    spread = row.spread.ttft_p90_s / oracle.mean.ttft_p90_s
    return f"{100 * row.regret:+.1f} ±{100 * spread:.1f} %, {row.mean.goodput:.1%}, {row.mean.busiest:.2f} ×"


def cell_name(cell: Cell) -> str:
    load = f"load {cell.load:g}" if cell.load is not None else f"pace {cell.pace:g}"
    parts = [cell.workload.name, f"cache {cell.cache:.0%}", load]
    if cell.replicas > 1:
        parts.append(f"{cell.replicas} replicas")
        parts.append(f"sync {_sync(cell.sync)}")
    if len(set(cell.speeds)) > 1:
        parts.append("speeds " + "/".join(f"{one:g}" for one in cell.speeds))
    if cell.model.order == SHORTEST:
        parts.append("shortest first")
    if cell.model.parallel > 1:
        parts.append(f"{cell.model.parallel} prefills at a time")
    if cell.kv_delay_s:
        parts.append(f"KV events {cell.kv_delay_s:g} s late")
    if cell.leaving:
        parts.append(f"{cell.leaving:.0%} leave")
    return ", ".join(parts)


def _sync(sync: Sync | None) -> str:
    if sync is None:
        return "off"
    lost = f", {sync.loss:.0%} lost" if sync.loss else ""
    return f"{1000 * sync.delay_s:g} ms{lost}"


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--only", action="append", choices=sorted(groups()), help="a group; repeatable; default: all")
    add("--modes", action="append", type=mode_name, metavar="MODE[:WEIGHT]",
        help="instead of each group's; repeatable")  # fmt: skip
    add("--seeds", type=int, default=3, help="runs of each mode in each cell (%(default)s)")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="processes (%(default)s)")
