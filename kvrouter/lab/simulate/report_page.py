"""Simulated runs as a page with plots: one mode next to another, and cells of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kvrouter.lab.simulate.cells import Cell
from kvrouter.lab.simulate.compare import Compared, Row
from kvrouter.lab.simulate.fleet import Run
from kvrouter.lab.simulate.report import (
    COLUMNS,
    COMPARED_COLUMNS,
    Cached,
    Possible,
    cached_line,
    cached_line_of,
    title_of,
)
from kvrouter.lab.simulate.report_html import Page, Series, cdf
from kvrouter.settings.declare import number

TITLE = "Simulated routing"
MODELLED = (
    "Modelled: the queue, batch and cache of every engine, the router's real code, and the delays of bookings"
    " and KV events. Not modelled: networks, HTTP, tokenizers, preemption, and the router's own time. So"
    " differences between modes are real, and absolute times are those of the engines' model."
)
_SHARES = (50, 75, 90, 99)


def write_runs(page: Page, path: Path, runs: Mapping[str, Run], possible: Possible, *, left_out: int) -> None:
    """The mocker's engines: a table, the distributions, and what was cached. Raises ConfigError."""
    page.paragraph(MODELLED)
    page.table(["mode", *COLUMNS], [[mode, *_cells(COLUMNS, run)] for mode, run in runs.items()])
    shares = {mode: Cached(run.hit_rate, run.held_rate) for mode, run in runs.items()}
    page.paragraph(cached_line(shares, possible))
    if left_out:
        page.paragraph(f"Left out: {left_out} requests longer than --max-model-len.")
    page.chart(
        "Time to first token",
        [cdf(mode, run.ttft_s) for mode, run in runs.items()],
        x="seconds",
        y="share of the requests",
        log_x=True,
    )
    page.chart(
        "Time to last token",
        [cdf(mode, run.latency_s) for mode, run in runs.items()],
        x="seconds",
        y="share of the requests",
        log_x=True,
    )
    bounds = {"one pooled cache": possible.pooled, "one endless cache": possible.endless}
    cached = {mode: run.hit_rate for mode, run in runs.items()} | bounds
    page.chart(
        "Cached prompt tokens", [Series("share", [*cached], [*cached.values()], "bars")], x="", y="share"
    )
    page.write(path)


def write_cells(page: Page, path: Path, compared: Sequence[Compared], *, seeds: int) -> None:
    """Step models' engines: each cell, and how modes compare over loads or paces. Raises ConfigError."""
    page.paragraph(MODELLED)
    for one in compared:
        page.heading(title_of(one, seeds))
        # two lines of a heading are one here
        head = [" ".join(name.split()) for name in COMPARED_COLUMNS]
        page.table(["mode", *head], [[row.mode, *_cells(COMPARED_COLUMNS, row)] for row in one.rows])
        page.paragraph(cached_line_of(one))
        page.chart("Time to first token", [_times(row) for row in one.rows], x="percentile", y="seconds")
        _plot_pareto(page, one)
    for ladder in _ladders(compared):
        _plot_ladder(page, ladder)
    page.write(path)


def _plot_pareto(page: Page, compared: Compared) -> None:
    """The weights of a mode are a line, in their order."""
    lines: dict[str, list[tuple[float, Row]]] = {}
    for row in compared.rows:
        name, _, text = row.mode.partition(":")
        weight = number(text)
        lines.setdefault(row.mode if weight is None else f"{name}:w", []).append((weight or 0.0, row))
    series = [
        _ordered(name, [row for _, row in sorted(rows, key=lambda one: one[0])])
        for name, rows in lines.items()
    ]
    page.chart("First token against the following ones", series, x="TTFT p90, seconds", y="ITL p90, ms")


def _ordered(name: str, rows: Sequence[Row]) -> Series:
    ttft, itl = [row.mean.ttft_p90_s for row in rows], [1000 * row.mean.itl_p90_s for row in rows]
    return Series(name, ttft, itl, "lines+markers", [row.mode for row in rows])


def _plot_ladder(page: Page, ladder: Sequence[Compared]) -> None:
    """Of a workload and a cache, from the least load to the greatest."""
    cell = ladder[0].cell
    page.heading(f"{cell.workload.name}, cache {cell.cache:.0%}: by load")
    charts: list[tuple[str, str, Callable[[Row], float]]] = [
        ("TTFT p90", "seconds", lambda row: row.mean.ttft_p90_s),
        ("Regret: TTFT p90 above the oracle's", "share", lambda row: row.regret),
        ("Goodput", "share of the requests", lambda row: row.mean.goodput),
    ]
    for name, unit, value in charts:
        lines = [
            Series(mode, [_load(one.cell) for one in ladder], [value(row) for row in rows], "lines+markers")
            for mode, rows in _by_mode(ladder).items()
        ]
        page.chart(name, lines, x="pace" if cell.load is None else "load", y=unit)


def _ladders(compared: Sequence[Compared]) -> list[list[Compared]]:
    """Cells that differ in their load alone, where there are several."""
    groups: dict[tuple[str, float], list[Compared]] = {}
    for one in compared:
        groups.setdefault((one.cell.workload.name, one.cell.cache), []).append(one)
    return [sorted(group, key=lambda one: _load(one.cell)) for group in groups.values() if len(group) > 1]


def _by_mode(ladder: Sequence[Compared]) -> dict[str, list[Row]]:
    modes: dict[str, list[Row]] = {}
    for one in ladder:
        for row in one.rows:
            modes.setdefault(row.mode, []).append(row)
    return modes


def _load(cell: Cell) -> float:
    return cell.pace if cell.load is None else cell.load


def _times(row: Row) -> Series:
    mean = row.mean
    seconds = [mean.ttft_p50_s, mean.ttft_p75_s, mean.ttft_p90_s, mean.ttft_p99_s]
    return Series(row.mode, _SHARES, seconds, "lines+markers")


def _cells(columns: Mapping[str, Callable[..., str]], row: object) -> list[str]:
    return [value(row) for value in columns.values()]
