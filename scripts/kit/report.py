"""The demo's result: checks, one table, one verdict, and the same as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kvrouter.lab.page import Chart, HtmlPage, Series, cdf
from kvrouter.lab.simulate.report import Cached, Possible, cached_line
from scripts.kit.figures import BUSY_LIMIT, Figures
from scripts.kit.load import Outcome
from scripts.kit.replicas import View, disagreements

LATE_LIMIT_S = 0.25


@dataclass(frozen=True, slots=True)
class ModeResult:
    mode: str
    figures: Figures
    # One view for each replica, at the end of the run.
    views: list[View]
    machine_busy: float | None
    failed: list[Outcome]
    ttft_s: Sequence[float] = ()
    """Of each answer."""

    @property
    def cached(self) -> Cached:
        """Shares of the prompt tokens."""
        routed = max(1, sum(view.prompt_tokens for view in self.views))
        return Cached(self.figures.cached_token_rate, sum(view.held_tokens for view in self.views) / routed)

    def problems(self) -> list[str]:
        """Reasons why this run failed."""
        found = [f"{self.mode}: {text}" for text in disagreements(self.views)]
        if self.failed:
            first = self.failed[0]
            found.append(
                f"{self.mode}: {len(self.failed)} of {self.figures.requests} requests failed;"
                f" the first is number {first.number}: {first.error}"
            )
        return found

    def warnings(self) -> list[str]:
        """Reasons to doubt its times."""
        found = []
        if self.machine_busy is not None and self.machine_busy > BUSY_LIMIT:
            found.append(
                f"{self.mode}: the machine was {self.machine_busy:.0%} busy; its times are not reliable"
            )
        if self.figures.worst_late_s > LATE_LIMIT_S:
            found.append(
                f"{self.mode}: a request left {1000 * self.figures.worst_late_s:.0f} ms after its time"
            )
        return found

    def as_json(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            **self.figures.as_json(),
            "machine_busy": self.machine_busy,
            "bookings_left": [view.bookings_left for view in self.views],
            "replicas": [asdict(view) for view in self.views],
            "failed": [asdict(outcome) for outcome in self.failed[:20]],
        }


def problems(results: Sequence[ModeResult]) -> list[str]:
    """Every reason for exit code 1. Mode kv is the last."""
    *others, kv = results
    found = [problem for result in results for problem in result.problems()]
    found += [
        f"kv found {kv.figures.cached_token_rate:.1%} of the prompt tokens in cache,"
        f" not more than {other.mode} with {other.figures.cached_token_rate:.1%}"
        for other in others
        if kv.figures.cached_token_rate <= other.figures.cached_token_rate
    ]
    return found


def show(console: Console, results: Sequence[ModeResult], possible: Possible) -> None:
    """Print the table, the warnings, and the failures or the verdict."""
    console.print()
    console.print(_table(results))
    cached = {result.mode: result.cached for result in results}
    console.print(cached_line(cached, possible), highlight=False)
    for warning in [text for result in results for text in result.warnings()]:
        console.print(f"[yellow]warning:[/] {warning}")
    failures = problems(results)
    for failure in failures:
        console.print(f"[bold red]failed:[/] {failure}", highlight=False)
    if not failures:
        console.print(Panel.fit(Text(_headline(results), style="bold"), padding=(0, 2), style="green"))
        console.print(f"[bold green]passed:[/] {_verdict(results)}", highlight=False)


def _verdict(results: Sequence[ModeResult]) -> str:
    best = min(results[:-1], key=lambda result: result.figures.ttft_s.p90)
    return (
        f"nine of ten first tokens within these times with kv and with {best.mode}, the better of the others;"
        " replicas agree, no bookings left"
    )


def _headline(results: Sequence[ModeResult]) -> str:
    """The run in one sentence: nine of ten first tokens, kv against the better of the other modes."""
    *others, kv = results
    mine, theirs = kv.figures.ttft_s.p90, min(result.figures.ttft_s.p90 for result in others)
    times = f"{_ms(mine)} instead of {_ms(theirs)}"
    if not 0 < mine < theirs:
        return f"first tokens not faster: {times}"
    return f"first tokens {theirs / mine:.1f} times faster: {times}"


def _change(before: float, after: float) -> str:
    return f"{(after - before) / before:+.0%}".replace("-", "−") if before else "–"


@dataclass(frozen=True, slots=True)
class _Row:
    label: str
    value: Callable[[ModeResult], float]
    text: Callable[[float], str]
    compares: bool = True
    ends_section: bool = False


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _ms(value: float) -> str:
    return f"{1000 * value:,.0f} ms"


_ROWS = (
    _Row("requests", lambda r: r.figures.requests, _count, compares=False),
    _Row("errors", lambda r: r.figures.errors, _count, compares=False),
    _Row("prompt tokens from caches", lambda r: r.figures.cached_token_rate, _percent, ends_section=True),
    _Row("first token: half within", lambda r: r.figures.ttft_s.p50, _ms),
    _Row("9 of 10 within", lambda r: r.figures.ttft_s.p90, _ms),
    _Row("99 of 100 within", lambda r: r.figures.ttft_s.p99, _ms, ends_section=True),
    _Row("whole answer: half within", lambda r: r.figures.latency_s.p50, _ms),
    _Row("9 of 10 within", lambda r: r.figures.latency_s.p90, _ms),
    _Row("99 of 100 within", lambda r: r.figures.latency_s.p99, _ms, ends_section=True),
)


def _table(results: Sequence[ModeResult]) -> Table:
    """It fits 80 columns with the figures of the largest run."""
    *others, kv = results
    table = Table(box=box.HORIZONTALS, pad_edge=False, collapse_padding=True)
    table.add_column("", no_wrap=True)
    for result in others:
        table.add_column(result.mode, justify="right", no_wrap=True)
    table.add_column(kv.mode, justify="right", style="bold", no_wrap=True)
    table.add_column(f"kv against {others[-1].mode}", justify="right")
    for row in _ROWS:
        values = [row.value(result) for result in results]
        change = _change(values[-2], values[-1]) if row.compares else ""
        table.add_row(row.label, *map(row.text, values), change, end_section=row.ends_section)
    for label, text in _MODE_ROWS:
        table.add_row(label, *map(text, results), "")
    return table


def _per_engine(result: ModeResult) -> str:
    counts = result.figures.requests_per_worker.values()
    return f"{min(counts, default=0)}–{max(counts, default=0)}"


def _bookings_left(result: ModeResult) -> str:
    return "/".join(str(view.bookings_left) for view in result.views)


def _indexes(result: ModeResult) -> str:
    return "equal" if all(view.index == result.views[0].index for view in result.views) else "different"


def _busy(result: ModeResult) -> str:
    return "unknown" if result.machine_busy is None else f"{result.machine_busy:.0%}"


_MODE_ROWS: Sequence[tuple[str, Callable[[ModeResult], str]]] = (
    ("requests per engine", _per_engine),
    ("bookings left, by replica", _bookings_left),
    ("state of the replicas", _indexes),
    ("machine busy", _busy),
)


def write_json(path: Path, results: Sequence[ModeResult], about: dict[str, Any]) -> None:
    """The same figures for machines."""
    failures = problems(results)
    figures = {
        "passed": not failures,
        "problems": failures,
        **about,
        "modes": [result.as_json() for result in results],
    }
    path.write_text(json.dumps(figures, indent=2) + "\n")


def write_html(path: Path, results: Sequence[ModeResult], possible: Possible, about: str) -> None:
    """The same figures as plots, in one file."""
    page = HtmlPage("kvrouter: what routing by the cache gains")
    page.paragraph(about)
    rows = [[row.label, *(row.text(row.value(result)) for result in results)] for row in _ROWS]
    page.table(["", *(result.mode for result in results)], rows)
    modes = [result.mode for result in results]
    bounds = ["one pooled cache", "one endless cache"]
    shares = [result.cached.real for result in results] + [possible.pooled, possible.endless]
    page.chart(
        Chart("Prompt tokens from caches", [Series("share", modes + bounds, shares, "bars")], "", "share")
    )
    curves = [cdf(result.mode, [1000 * second for second in result.ttft_s]) for result in results]
    page.chart(Chart("Time to first token", curves, "ms", "share of the requests", log_x=True))
    page.write(path)
