"""Runs of several modes side by side, as a table and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from kvrouter.errors import counted
from kvrouter.lab.simulate.compare import Compared, Row
from kvrouter.lab.simulate.engines import Arrival
from kvrouter.lab.simulate.fleet import Run
from kvrouter.lab.simulate.percentiles import Percentiles
from kvrouter.lab.simulate.workloads import achievable

COLUMNS: dict[str, Callable[[Run], str]] = {
    "cached": lambda run: f"{run.hit_rate:.1%}",
    "TTFT p50/p90/p99 ms": lambda run: _ms(run.ttft),
    "latency p50/p90/p99 ms": lambda run: _ms(run.latency),
    "per worker": lambda run: f"{min(_by_worker(run).values()):,}–{max(_by_worker(run).values()):,}",
    "in flight": lambda run: f"{max(run.deepest.values()):,}",
}

# rich takes 80 columns for a pipe, and would cut off the figures.
_PIPE_WIDTH = 120

_DEFAULT_MODE = "kv"

# Moreh, "Prefix cache-aware routing" (Heimdall), experimental result: 8 pods of two MI250, Qwen3-32B.
HEIMDALL_RANDOM_S = (4.464611, 9.292547, 17.961767)
HEIMDALL_PREFIX_AWARE_S = (0.217383, 0.718785, 1.106871)


class Cached(NamedTuple):
    """Shares of the prompt tokens of a run: cached, and cached on the engine with most of each prompt."""

    real: float
    held: float


@dataclass(frozen=True, slots=True)
class Possible:
    """Shares of the prompt tokens that caches which all engines share would have had."""

    endless: float
    pooled: float
    """In one cache of the size of all engines' together."""

    @classmethod
    def of(cls, arrivals: Sequence[Arrival], room_blocks: int, *, block_size: int) -> Possible:
        """Of all arrivals; `room_blocks`: those of all engines."""
        found = achievable(arrivals, room_blocks, block_size=block_size)
        tokens = sum(arrival.prompt_tokens for arrival in arrivals)
        return cls(found.endless / tokens, found.pooled / tokens)


def show(runs: Mapping[str, Run], possible: Possible, *, left_out: int) -> None:
    """Print one row for each mode. Requests per worker: least–most; in flight: the most on one worker."""
    console = new_console()
    table = Table()
    table.add_column("mode", no_wrap=True)
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for mode, run in runs.items():
        table.add_row(mode, *(value(run) for value in COLUMNS.values()))
    console.print(table)
    shares = {mode: Cached(run.hit_rate, run.held_rate) for mode, run in runs.items()}
    console.print(cached_line(shares, possible), highlight=False)
    if left_out:
        console.print(f"left out: {counted(left_out, 'request')} longer than --max-model-len")


def write_json(path: Path, runs: Mapping[str, Run], possible: Possible, *, left_out: int) -> None:
    """Write the figures, times in seconds."""
    figures = {mode: _figures(run) for mode, run in runs.items()}
    shares = {"achievable_rate": possible.endless, "pooled_rate": possible.pooled}
    path.write_text(json.dumps({"left_out": left_out, **shares, "modes": figures}, indent=2) + "\n")


def show_compared(compared: Sequence[Compared], *, seeds: int) -> None:
    """Print one table for each cell; ± is half the distance between the least and the greatest seed."""
    console = new_console()
    for one in compared:
        table = Table(box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
        table.add_column("mode", no_wrap=True)
        for name in COMPARED_COLUMNS:
            table.add_column(name, justify="right", no_wrap=True)
        for row in one.rows:
            table.add_row(row.mode, *(value(row) for value in COMPARED_COLUMNS.values()))
        console.print(title_of(one, seeds), style="bold", highlight=False)
        console.print(table)
        console.print(cached_line_of(one), highlight=False)
        answered = {row.mode: row.mean.completed for row in one.rows}
        if min(answered.values()) < 1:  # clients have left, or engines failed
            shown = "; ".join(f"{mode} {share:.1%}" for mode, share in answered.items())
            console.print(f"answered: {shown}", highlight=False)
        if one.cell.workload.name == "heimdall":
            console.print(_beside_published(one))


def _beside_published(compared: Compared) -> Table:
    """TTFT of random and of the other modes beside Heimdall's own, and how many times less it is."""
    table = Table(title="TTFT ms, p50 / p75 / p90", box=SIMPLE, pad_edge=False)
    for name in ("", "p50", "p75", "p90", "random / it"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    ours = {
        row.mode: (row.mean.ttft_p50_s, row.mean.ttft_p75_s, row.mean.ttft_p90_s) for row in compared.rows
    }
    random = ours.pop("random", None)
    groups = [("published", HEIMDALL_RANDOM_S, {"prefix cache-aware": HEIMDALL_PREFIX_AWARE_S})]
    if random is not None:
        groups.append(("here", random, ours))
    for where, base, others in groups:
        table.add_row(f"{where}: random", *_ms_of(base), "")
        for mode, times in others.items():
            ratios = " / ".join(f"{one / other:.1f}×" for one, other in zip(base, times, strict=True))
            table.add_row(f"{where}: {mode}", *_ms_of(times), ratios)
    return table


def _ms_of(times_s: Sequence[float]) -> list[str]:
    return [f"{1000 * value:,.0f}" for value in times_s]


def cached_line(shares: Mapping[str, Cached], possible: Possible) -> str:
    """`cached: kv 14.8% of 18.3% possible (best engines 15.2%, ...); round-robin 8.3%`, by mode."""
    first, *others = sorted(shares, key=lambda mode: mode.partition(":")[0] != _DEFAULT_MODE)
    rest = "".join(f"; {mode} {shares[mode].real:.1%}" for mode in others)
    bounds = f"best engines {shares[first].held:.1%}, one pooled cache {possible.pooled:.1%}"
    return f"cached: {first} {shares[first].real:.1%} of {possible.endless:.1%} possible ({bounds}){rest}"


def cached_line_of(compared: Compared) -> str:
    """`cached_line` of a cell's modes."""
    shares = {row.mode: Cached(row.mean.cached, row.mean.held) for row in compared.rows}
    mean = compared.rows[0].mean
    return cached_line(shares, Possible(mean.achievable, mean.pooled))


def write_compared(path: Path, compared: Sequence[Compared], *, seeds: int) -> None:
    """Write the figures of all cells, times in seconds."""
    cells = [as_json(one, seeds=seeds) for one in compared]
    path.write_text(json.dumps({"cells": cells}, indent=2) + "\n")


def as_json(compared: Compared, *, seeds: int) -> dict[str, Any]:
    """A cell and the figures of its modes."""
    modes = {row.mode: _row(row) for row in compared.rows}
    return {**_facts(compared), "seeds": seeds, "modes": modes}


def _row(row: Row) -> dict[str, Any]:
    return {
        "regret_ttft_p90": row.regret,
        "cached_of_achievable": row.cached_of_achievable,
        "mean": asdict(row.mean),
        "spread": asdict(row.spread),
    }


def _facts(compared: Compared) -> dict[str, Any]:
    cell = compared.cell
    return {
        "workload": cell.workload.name,
        "cache": cell.cache,
        "capacity_blocks": cell.capacity_blocks,
        "load": cell.load,
        "pace": cell.offered_pace,
        "workers": cell.workers,
        "replicas": cell.replicas,
        "model": asdict(cell.model),
        "speeds": cell.speeds,
        "sync": asdict(cell.sync) if cell.sync else None,
        "kv_delay_s": cell.kv_delay_s,
        "leaving": cell.leaving,
        "slo": asdict(cell.slo),
    }


def title_of(compared: Compared, seeds: int) -> str:
    cell = compared.cell
    load = f"load {cell.load:g}, " if cell.load is not None else ""
    sync = f" (sync {1000 * cell.sync.delay_s:g} ms)" if cell.sync else " (sync off)"
    replicas = f", {cell.replicas} replicas{sync}" if cell.replicas > 1 else ""
    return (
        f"{cell.workload.name}: cache {cell.cache:.0%}, {load}pace {cell.offered_pace:.2f}, "
        f"{counted(cell.workers, 'worker')}{replicas}, {counted(seeds, 'seed')}"
    )


COMPARED_COLUMNS: dict[str, Callable[[Row], str]] = {
    "TTFT s\nmean": lambda row: _s(row.mean.ttft_mean_s),
    "\np50": lambda row: _s(row.mean.ttft_p50_s),
    "\np90": lambda row: f"{_s(row.mean.ttft_p90_s)} ±{_s(row.spread.ttft_p90_s)}",
    "\np99": lambda row: _s(row.mean.ttft_p99_s),
    "regret\np90": lambda row: f"{row.regret:+.1%}",
    "ITL ms\np90": lambda row: f"{1000 * row.mean.itl_p90_s:.1f}",
    "e2e s\nmean": lambda row: f"{row.mean.e2e_mean_s:.2f}",
    "good-\nput": lambda row: f"{row.mean.goodput:.1%} ±{100 * row.spread.goodput:.1f}",
    "cached\ntokens": lambda row: f"{row.mean.cached:.1%}",
    "of pos-\nsible": lambda row: f"{row.cached_of_achievable:.0%}",
    "busiest\n/ mean": lambda row: f"{row.mean.busiest:.2f}",
}


def _s(seconds: float) -> str:
    return f"{seconds:.3f}" if seconds < 10 else f"{seconds:.1f}"


def new_console() -> Console:
    """For tables: as wide as a terminal, else wide enough for all figures."""
    console = Console()
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    return console


def _figures(run: Run) -> dict[str, Any]:
    return {
        "requests": len(run.targets),
        "prompt_tokens": run.prompt_tokens,
        "cached_tokens": run.cached_tokens,
        "cached_token_rate": run.hit_rate,
        "best_engines_rate": run.held_rate,
        "ttft_s": asdict(run.ttft),
        "latency_s": asdict(run.latency),
        "requests_by_worker": _by_worker(run),
        "most_in_flight": max(run.deepest.values()),
    }


def _by_worker(run: Run) -> dict[str, int]:
    counted = Counter(target.worker_id for target in run.targets)
    return {str(worker): counted[worker] for worker in run.deepest}


def _ms(times: Percentiles) -> str:
    return "/".join(f"{1000 * seconds:,.0f}" for seconds in (times.p50, times.p90, times.p99))
