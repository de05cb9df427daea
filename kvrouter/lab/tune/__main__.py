"""`kvrouter tune TRACE`: the best settings for a trace, searched in the simulator and tested."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from kvrouter.errors import ConfigError, KvRouterError, counted
from kvrouter.lab.simulate.cells import Cell
from kvrouter.lab.simulate.measures import Measures
from kvrouter.lab.simulate.placement import Sync
from kvrouter.lab.simulate.progress import shown_progress
from kvrouter.lab.simulate.report import new_console
from kvrouter.lab.simulate.step_model import STEP_MODELS
from kvrouter.lab.simulate.traces import read_trace
from kvrouter.lab.simulate.workloads import BLOCK, trace, working_set_blocks
from kvrouter.lab.tune.settings import COMMAND, TuneSettings
from kvrouter.settings.read import Loaded, run

if TYPE_CHECKING:
    from kvrouter.lab.tune.search import Choice, Found, Goal

_FEWEST = 20
_NAMES = ("default", "published", "winner")


def main(arguments: Sequence[str] | None = None) -> int:
    """Search; returns the exit code."""
    return run(COMMAND, arguments, _main)


def _main(loaded: Loaded[TuneSettings]) -> int:
    if importlib.util.find_spec("optuna") is None:
        raise ConfigError("kvrouter tune needs Optuna: pip install 'kvrouter[tune]'")
    from kvrouter.lab.tune.search import Search

    settings = loaded.settings
    try:
        cell = cell_of(settings)
        goal: Goal = "goodput" if settings.has_slo else "ttft"
        search = Search(cell, goal, settings.trials, settings.seeds, settings.jobs, settings.seed)
        with shown_progress("runs") as on_done:
            found = search.run(on_done)
    except KvRouterError as error:
        raise ConfigError(str(error)) from None
    show(found, cell, goal)
    winner = found.winner if found.gain.is_better else None
    if winner is not None and (config := winner.endpoint_picker_config()):
        if settings.write_config is not None:
            settings.write_config.write_text(config)
        else:
            print(config, end="")  # noqa: T201
    if settings.json is not None:
        settings.json.write_text(json.dumps(as_json(found, cell, goal), indent=2) + "\n")
    return 0


def cell_of(settings: TuneSettings) -> Cell:
    """The fleet and its requests. Raises KvRouterError."""
    requests = read_trace(settings.trace, settings.requests)
    if len(requests) < _FEWEST:
        raise ConfigError(
            f"{settings.trace}: {counted(len(requests), 'request')}; at least {_FEWEST} are needed"
        )
    workload = trace(requests)
    cache = settings.cache
    if settings.kv_tokens is not None:
        known = working_set_blocks(workload.draw(0)) or 1
        cache = (settings.kv_tokens // BLOCK + 0.5) * settings.workers / known
    return Cell(
        workload,
        cache,
        load=settings.load,
        pace=settings.pace,
        workers=settings.workers,
        model=STEP_MODELS[settings.timing],
        replicas=settings.replicas,
        sync=Sync(settings.sync_ms / 1000),
        slo=settings.slo,
    )


def show(found: Found, cell: Cell, goal: Goal) -> None:
    """Print what was searched, the test, the trials that none beats, and the winner's flags."""
    console = new_console()
    aim = f"goodput (TTFT below {cell.slo.ttft_s:g} s, ITL below {1000 * cell.slo.itl_s:g} ms)"
    console.print(
        f"searched: {counted(len(found.tried), 'setting')} on the first 70 % of the requests, for "
        f"{aim if goal == 'goodput' else 'TTFT p90'}; {counted(cell.workers, 'engine')} of "
        f"{cell.capacity_blocks * BLOCK:,} tokens",
        highlight=False,
    )
    tested = _table(f"on the other 30 %, means of {len(found.tested[0].runs)} seeds")
    for name, one in zip(_NAMES, found.tested, strict=True):
        tested.add_row(name, *_figures(one.mean), " ".join(one.choice.flags()))
    console.print(tested)
    pareto = _table("on the first 70 %: the default, and what none beats in both TTFT p90 and ITL p90")
    pareto.add_row("default", *_figures(found.tried[0].figures), " ".join(found.tried[0].choice.flags()))
    for tried in found.pareto():
        pareto.add_row("", *_figures(tried.figures), " ".join(tried.choice.flags()))
    console.print(pareto)
    _show_winner(console, found)


def _show_winner(console: Console, found: Found) -> None:
    gain, seeds = found.gain, len(found.tested[0].runs)
    ttft = f"TTFT p90 {gain.ttft[0]:+.1%} ({gain.ttft[1]:+.1%} to {gain.ttft[2]:+.1%})"
    points = [100 * value for value in gain.goodput]
    goodput = f"goodput {points[0]:+.1f} points ({points[1]:+.1f} to {points[2]:+.1f})"
    if gain.is_better:
        console.print(f"gain over the default: {ttft}, {goodput}, over {seeds} seeds", highlight=False)
        console.print(f"use: {command_line(found.winner)}", highlight=False, soft_wrap=True)
    else:
        console.print(f"no better than the default: {ttft}, {goodput}, over {seeds} seeds", highlight=False)
        console.print("use: kvrouter frontend (the default: --router-mode=kv)", highlight=False)


def command_line(choice: Choice) -> str:
    """How to start a frontend with these settings."""
    words = ["kvrouter", "frontend", *choice.flags()]
    if choice.weights:
        words.append("--router-config=FILE")
    return shlex.join(words)


def as_json(found: Found, cell: Cell, goal: Goal) -> dict[str, Any]:
    """All trials and the test, times in seconds."""
    return {
        "goal": goal,
        "slo": asdict(cell.slo),
        "workers": cell.workers,
        "capacity_blocks": cell.capacity_blocks,
        "is_better": found.gain.is_better,
        "gain": {"ttft_p90": found.gain.ttft, "goodput": found.gain.goodput},
        "command": command_line(found.winner),
        "endpoint_picker_config": found.winner.endpoint_picker_config(),
        "tested": [
            {"name": name, "flags": one.choice.flags(), "runs": [asdict(figures) for figures in one.runs]}
            for name, one in zip(_NAMES, found.tested, strict=True)
        ],
        "pareto": [_trial(one.choice, one.figures) for one in found.pareto()],
        "trials": [_trial(one.choice, one.figures) for one in found.tried],
    }


def _trial(choice: Choice, figures: Measures) -> Mapping[str, Any]:
    return {"flags": choice.flags(), "weights": dict(choice.weights), **asdict(figures)}


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in ("TTFT s p50", "p90", "p99", "ITL ms p90", "goodput", "cached"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("settings", overflow="fold")
    return table


def _figures(one: Measures) -> list[str]:
    return [
        f"{one.ttft_p50_s:.3f}",
        f"{one.ttft_p90_s:.3f}",
        f"{one.ttft_p99_s:.3f}",
        f"{1000 * one.itl_p90_s:.1f}",
        f"{one.goodput:.1%}",
        f"{one.cached:.1%}",
    ]


if __name__ == "__main__":
    sys.exit(main())
