"""`kvrouter tune TRACE`: the best settings for a trace, searched in the simulator and tested."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvrouter.errors import ConfigError, KvRouterError, counted
from kvrouter.lab.report import LabReport, Section
from kvrouter.lab.simulate.cells import Cell
from kvrouter.lab.simulate.measures import Measures
from kvrouter.lab.simulate.placement import Sync
from kvrouter.lab.simulate.progress import shown_progress
from kvrouter.lab.simulate.step_model import STEP_MODELS
from kvrouter.lab.simulate.traces import read_trace
from kvrouter.lab.simulate.workloads import BLOCK, cache_of, trace
from kvrouter.lab.tune.settings import COMMAND, TuneSettings
from kvrouter.settings.read import Loaded, run

if TYPE_CHECKING:
    from kvrouter.lab.tune.search import Goal, SearchResult, TunedSettings

_FEWEST = 20
_NAMES = ("default", "published", "winner")


def main(arguments: Sequence[str] | None = None) -> int:
    """Search; returns the exit code."""
    return run(COMMAND, arguments, _main)


def _main(loaded: Loaded[TuneSettings]) -> int:
    if importlib.util.find_spec("optuna") is None:  # search imports it
        raise ConfigError("kvrouter tune needs Optuna: pip install 'kvrouter[tune]'")
    from kvrouter.lab.tune.search import Search

    settings = loaded.settings
    report = LabReport("Settings for a trace", settings.json, None)
    try:
        cell = cell_of(settings)
        goal: Goal = "goodput" if settings.has_slo else "ttft"
        search = Search(cell, goal, settings.trials, settings.seeds, settings.jobs, settings.seed)
        with shown_progress("runs") as on_done:
            found = search.run(on_done)
    except KvRouterError as error:
        raise ConfigError(str(error)) from None
    report.deliver(sections(found, cell, goal), as_json(found, cell, goal))
    winner = found.winner if found.gain.is_better else None
    if winner is not None and (config := winner.endpoint_picker_config()):
        if settings.write_config is not None:
            try:
                settings.write_config.write_text(config)
            except OSError as error:
                print(config, end="")  # noqa: T201  # the search took minutes: what it found must not be lost
                raise ConfigError(f"--write-config {settings.write_config}: {error.strerror}") from error
        else:
            print(config, end="")  # noqa: T201
    return 0


def cell_of(settings: TuneSettings) -> Cell:
    """The fleet and its requests. Raises KvRouterError."""
    requests = read_trace(settings.trace, settings.requests)
    if len(requests) < _FEWEST:
        raise ConfigError(
            f"{settings.trace}: {counted(len(requests), 'request')}; at least {_FEWEST} are needed"
        )
    workload = trace(requests)
    tokens = settings.kv_tokens
    cache = settings.cache if tokens is None else cache_of(workload, tokens, settings.workers)
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


def sections(found: SearchResult, cell: Cell, goal: Goal) -> list[Section]:
    """What was searched, the test, the trials that none beats, and the winner's flags."""
    aim = f"goodput (TTFT below {cell.slo.ttft_s:g} s, ITL below {1000 * cell.slo.itl_s:g} ms)"
    searched = (
        f"searched: {counted(len(found.tried), 'setting')} on the first 70 % of the requests, for "
        f"{aim if goal == 'goodput' else 'TTFT p90'}; {counted(cell.workers, 'engine')} of "
        f"{cell.capacity_blocks * BLOCK:,} tokens"
    )
    tested = [_row(name, one.mean, one.choice) for name, one in zip(_NAMES, found.tested, strict=True)]
    best = [_row("", one.figures, one.choice) for one in found.pareto()]
    default = _row("default", found.tried[0].figures, found.tried[0].choice)
    return [
        Section("", notes=[searched]),
        _section(f"on the other 30 %, means of {len(found.tested[0].runs)} seeds", tested),
        _section(
            "on the first 70 %: the default, and what none beats in both TTFT p90 and ITL p90",
            [default, *best],
        ),
        Section("", notes=_verdict(found)),
    ]


def _section(heading: str, rows: Sequence[Sequence[str]]) -> Section:
    head = ["", "TTFT s p50", "p90", "p99", "ITL ms p90", "goodput", "cached", "settings"]
    return Section(heading, head, rows, texts=(0, 7))


def _row(name: str, one: Measures, choice: TunedSettings) -> list[str]:
    times = [f"{seconds:.3f}" for seconds in (one.ttft_p50_s, one.ttft_p90_s, one.ttft_p99_s)]
    shares = [f"{one.goodput:.1%}", f"{one.cached:.1%}"]
    return [name, *times, f"{1000 * one.itl_p90_s:.1f}", *shares, " ".join(choice.flags())]


def _verdict(found: SearchResult) -> list[str]:
    gain = found.gain
    ttft = f"TTFT p90 {gain.ttft[0]:+.1%} ({gain.ttft[1]:+.1%} to {gain.ttft[2]:+.1%})"
    points = [100 * value for value in gain.goodput]
    goodput = f"goodput {points[0]:+.1f} points ({points[1]:+.1f} to {points[2]:+.1f})"
    gained = f"{ttft}, {goodput}, over {len(found.tested[0].runs)} seeds"
    if gain.is_better:
        return [f"gain over the default: {gained}", f"use: {command_line(found.winner)}"]
    return [
        f"no better than the default: {gained}",
        "use: kvrouter frontend (the default: --router-mode=kv)",
    ]


def command_line(choice: TunedSettings) -> str:
    """How to start a frontend with these settings."""
    words = ["kvrouter", "frontend", *choice.flags()]
    if choice.weights:
        words.append("--router-config=FILE")
    return shlex.join(words)


def as_json(found: SearchResult, cell: Cell, goal: Goal) -> dict[str, Any]:
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


def _trial(choice: TunedSettings, figures: Measures) -> Mapping[str, Any]:
    return {"flags": choice.flags(), "weights": dict(choice.weights), **asdict(figures)}


if __name__ == "__main__":
    sys.exit(main())
