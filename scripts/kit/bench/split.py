"""When KV between engines pays: eight engines whole, apart with several rules, and as peers, simulated.

    cells (workload, load, roles, wire) × rules ──> four tables and one of peers, and a plot of the wire

docs/simulate.md describes engines, loads and rules. Step model `reference`, 614,400 tokens of KV an engine.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvrouter.lab.simulate import generated, workloads
from kvrouter.lab.simulate.cells import ORACLE, Cell
from kvrouter.lab.simulate.compare import Compared, ModeRow, compare
from kvrouter.lab.simulate.generated import Stage
from kvrouter.lab.simulate.measures import Slo
from kvrouter.lab.simulate.progress import shown_progress
from kvrouter.lab.simulate.report import as_json
from kvrouter.lab.simulate.split import GBPS, PEERS, RULES, Roles
from kvrouter.lab.simulate.traces import CONVERSATION_EXCERPT, read_trace
from kvrouter.lab.simulate.workloads import Workload
from kvrouter.policies import PolicySettings
from scripts.kit.bench.meter import conclude, machine
from scripts.kit.plot import write_plot

ENGINES, KV_TOKENS, REQUESTS = 8, 614_400, 800
# Longer prompts need more than three seconds for a first token on these engines: 50 µs a token.
MOST_TOKENS = 64_000
WIRES_GBPS = (5.0, 10.0, 20.0, 50.0, 200.0)
HEAD = (
    "workload, load", "fleet", "TTFT p50 / p90", "ms a token, mean / p90", "end to end", "handed over",
    "cached", "goodput",
)  # fmt: skip
RATIOS = ((3, 5), (4, 4), (5, 3), (6, 2))
LOADS = (0.5, 0.6, 0.64, 0.7)


@dataclass(frozen=True, slots=True)
class Sheet:
    """Cells of one table, and the rules in its rows besides whole engines."""

    title: str
    rules: Sequence[str]
    cells: Sequence[Cell]


def cell(workload: Workload, roles: tuple[int, int], *, load: float | None = None, pace: float = 1.0) -> Cell:
    return Cell(
        workload,
        workloads.cache_of(workload, KV_TOKENS, ENGINES),
        load=load,
        pace=pace,
        workers=ENGINES,
        slo=Slo(itl_s=0.020),
        roles=Roles(*roles),
    )


def peer_cell(workload: Workload, load: float | None, gbps: float = GBPS) -> Cell:
    """Whole engines that read from each other."""
    return replace(cell(workload, (0, 0), load=load), roles=Roles(0, 0, gbps), slo=Slo(itl_s=0.050))


def trace(most_tokens: int = MOST_TOKENS, requests: int = REQUESTS) -> Workload:
    """The first requests of the conversation trace whose prompts are no longer."""
    kept = [one for one in read_trace(CONVERSATION_EXCERPT) if one.prompt_tokens <= most_tokens]
    name = "trace" if most_tokens <= MOST_TOKENS else "trace, long prompts too"
    return replace(workloads.trace(kept[:requests]), name=name)


def sheets() -> dict[str, Sheet]:
    """All tables, by the name that `--only` takes."""
    long = 10 * MOST_TOKENS
    chats = generated.shared_prefix("chats", [Stage(20, 90)], system=1000, question=300, answer=400)
    others = [
        cell(trace(long), (5, 3), load=0.6),
        cell(generated.docs(REQUESTS), (6, 2), load=0.6),
        cell(chats, (3, 5), load=0.6),
        cell(generated.agents(), (4, 4), pace=2.0),
    ]
    base = cell(trace(), (5, 3), load=0.6)
    peers = [
        *(peer_cell(trace(long), load, gbps) for load, gbps in ((0.5, 200), (0.7, 200), (0.7, 20), (0.7, 5))),
        *(peer_cell(generated.docs(REQUESTS), 0.7, gbps) for gbps in (200.0, 5.0)),
        *(peer_cell(generated.docs(1500, 60), 0.7, gbps) for gbps in (200.0, 5.0)),
        *(replace(peer_cell(one, None), pace=2.0) for one in (generated.agents(), generated.multi_turn())),
    ]
    wires = [replace(base, roles=Roles(5, 3, gbps=gbps)) for gbps in WIRES_GBPS]
    few = ("auto", "dynamo", "always")
    return {
        "rules": Sheet("Rules", RULES, [replace(base, load=load) for load in LOADS]),
        "workloads": Sheet("Other requests", few, others),
        "ratio": Sheet("How many of each", few, [replace(base, roles=Roles(*one)) for one in RATIOS]),
        "wire": Sheet("What the wire must carry", few, wires),
        "peers": Sheet("From peers", (PEERS,), peers),
    }


def run(flags: argparse.Namespace) -> int:
    """Run the tables; returns the exit code."""
    figures = {}
    for name, sheet in sheets().items():
        if flags.only and name not in flags.only:
            continue
        modes = ["kv", *(f"kv@{rule}" for rule in sheet.rules)]
        with shown_progress(name) as on_done:
            done = compare(
                sheet.cells, modes, PolicySettings(), seeds=flags.seeds, jobs=flags.jobs, on_done=on_done
            )
        print("\n".join(markdown(sheet.title, done)), flush=True)
        figures[name] = [as_json(one, seeds=flags.seeds) for one in done]
        conclude(flags, [], machine() | {"seeds": flags.seeds}, sheets=figures)
        if name == "wire" and flags.plots is not None:
            title = "5 prefill and 3 decode engines by the wire between them"
            write_plot(
                flags.plots / "split-wire.svg",
                title,
                "Gb/s of each engine",
                "goodput (2 s, 20 ms)",
                lines(done),
            )
    return 0


def markdown(title: str, compared: Sequence[Compared]) -> Iterator[str]:
    yield from (f"### {title}", "")
    yield f"| {' | '.join(HEAD)} |"
    yield "|---" * len(HEAD) + "|"
    for one in compared:
        shown = _name(one.cell)
        for row in one.rows:
            if row.mode != ORACLE:
                yield f"| {shown} | {_fleet(one.cell, row)} | {_figures(row)} |"
                shown = ""
    yield ""


def _name(cell: Cell) -> str:
    return f"{cell.workload.name}, " + (f"{cell.load:g}" if cell.load is not None else f"pace {cell.pace:g}")


def _fleet(cell: Cell, row: ModeRow) -> str:
    assert cell.roles is not None
    rule = row.mode.partition("@")[2]
    return f"{cell.roles}, {cell.roles.gbps:g} Gb/s, {rule}" if rule else "whole"


def _figures(row: ModeRow) -> str:
    mean = row.mean
    return " | ".join([
        f"{mean.ttft_p50_s:.2f} / {mean.ttft_p90_s:.2f} s",
        f"{1000 * mean.itl_mean_s:.0f} / {1000 * mean.itl_p90_s:.0f}",
        f"{mean.e2e_mean_s:.1f} s",
        f"{mean.handed:.0%}",
        f"{mean.cached:.1%}",
        f"{mean.goodput:.2f} ±{row.spread.goodput:.2f}",
    ])  # fmt: skip


def lines(compared: Sequence[Compared]) -> Mapping[str, Sequence[tuple[float, float]]]:
    """Goodput by the wire, for each rule; of whole engines at every wire the same."""
    found: dict[str, list[tuple[float, float]]] = {}
    for one in compared:
        assert one.cell.roles is not None
        for row in one.rows[1:]:
            name = row.mode.partition("@")[2] or "whole engines"
            found.setdefault(name, []).append((one.cell.roles.gbps, row.mean.goodput))
    return found


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--only",
        action="append",
        choices=["rules", "workloads", "ratio", "wire", "peers"],
        help="a table; repeatable; default: all",
    )
    add("--seeds", type=int, default=3, help="runs of each row (%(default)s)")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="processes (%(default)s)")
    add("--plots", type=Path, metavar="DIR", help="also write split-wire.svg there")
