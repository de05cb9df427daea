"""Runs of several modes side by side, as a table and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvrouter.simulate.fleet import Run
from kvrouter.simulate.percentiles import Percentiles

_COLUMNS: dict[str, Callable[[Run], str]] = {
    "cached": lambda run: f"{run.hit_rate:.1%}",
    "TTFT p50/p90/p99 ms": lambda run: _ms(run.ttft),
    "latency p50/p90/p99 ms": lambda run: _ms(run.latency),
    "per worker": lambda run: f"{min(_by_worker(run).values()):,}–{max(_by_worker(run).values()):,}",
    "in flight": lambda run: f"{max(run.deepest.values()):,}",
}

# rich takes 80 columns for a pipe, and would cut off the figures.
_PIPE_WIDTH = 110


def show(runs: Mapping[str, Run], *, left_out: int) -> None:
    """Print one row for each mode. Requests per worker: least–most; in flight: the most on one worker."""
    console = Console()
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    table = Table()
    table.add_column("mode", no_wrap=True)
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for mode, run in runs.items():
        table.add_row(mode, *(value(run) for value in _COLUMNS.values()))
    console.print(table)
    if left_out:
        console.print(f"left out: {left_out} requests longer than --max-model-len")


def write_json(path: Path, runs: Mapping[str, Run], *, left_out: int) -> None:
    """Write the figures, times in seconds."""
    figures = {mode: _figures(run) for mode, run in runs.items()}
    path.write_text(json.dumps({"left_out": left_out, "modes": figures}, indent=2) + "\n")


def _figures(run: Run) -> dict[str, Any]:
    return {
        "requests": len(run.targets),
        "prompt_tokens": run.prompt_tokens,
        "cached_tokens": run.cached_tokens,
        "cached_token_rate": run.hit_rate,
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
