"""The figures of `bench relay` and `bench peers` as tables and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from scripts.kit.bench.wire.rounds import Ratio, Results
from scripts.kit.bench.wire.targets import DIRECT
from scripts.kit.bench.wire.works import Run, Work
from scripts.kit.script import table_of

CHAT_TITLE = "chat: 4,000 tokens, 3,600 of them shared, 64 streamed"


def names(results: Results) -> list[str]:
    """The names of all contenders, `direct` last."""
    found = dict.fromkeys(name for _, name in results.medians)
    return sorted(found, key=lambda name: name == DIRECT)


def work_table(work: Work, rows: Sequence[str], results: Results) -> Table:
    """The figures of one work, a row for each contender."""
    ratios = {
        name: _ratio(results.ratios[work.name, name]) for name in rows if (work.name, name) in results.ratios
    }
    shown = []
    for name in rows:
        run = results.get(work.name, name)
        if run is not None:
            figures = _figures(work, run, results.get(work.name, DIRECT))
            shown.append([name, *figures, *([ratios.get(name, "")] if ratios else [])])
    return table_of(work.title, ["", *_columns(work), *(["CPU / other"] if ratios else [])], shown)


def _ratio(ratio: Ratio) -> str:
    return f"{ratio.median:.3f} ({ratio.lower:.3f} to {ratio.upper:.3f})"


def _columns(work: Work) -> list[str]:
    if work.is_stream:
        return ["CPU µs / event", "TTFT p50", "TTFT p99", "longest gap", "waits ≥ 35 ms"]
    return [
        "CPU µs / request",
        "p50",
        "p99",
        *(["added p50", "added p99"] if work.concurrency == 1 else ["requests/s"]),
    ]


def _figures(work: Work, run: Run, direct: Run | None) -> list[str]:
    if work.is_stream:
        return [
            f"{run.cpu_us_per_event:.1f}", _ms(run.ttft_p50_ms), _ms(run.ttft_p99_ms), _ms(run.gap_max_ms),
            f"{run.stalls:,.0f}",
        ]  # fmt: skip
    figures = [f"{run.cpu_us_per_request:.1f}", _ms(run.latency_p50_ms), _ms(run.latency_p99_ms)]
    if work.concurrency > 1:
        return [*figures, f"{run.requests_per_s:,.0f}"]
    if direct is None:
        return [*figures, "", ""]
    return [
        *figures,
        _ms(run.latency_p50_ms - direct.latency_p50_ms),
        _ms(run.latency_p99_ms - direct.latency_p99_ms),
    ]


def _ms(value: float) -> str:
    return f"{value:.2f} ms"


def chat_table(results: Results) -> Table:
    """The figures of chats. CPU covers the frontend's process."""
    rows = [
        [name, f"{run.cpu_us_per_request / 1e3:.2f}", _ms(run.ttft_p50_ms), _ms(run.gap_p50_ms),
         f"{run.requests_per_s:,.0f}"]
        for (work, name), run in results.medians.items()
        if work == "chat"
    ]  # fmt: skip
    return table_of(CHAT_TITLE, ("", "CPU ms / request", "TTFT p50", "gap p50", "requests/s"), rows)


def tools_line(works: Sequence[Work], results: Results) -> str:
    """How fast the tools are without a router, and how much of a core the generator left free."""
    parts = []
    for work in works:
        direct = results.get(work.name, DIRECT)
        if direct is None or work.is_stream or work.concurrency == 1:
            continue
        routed = [run for (name, who), run in results.medians.items() if name == work.name and who != DIRECT]
        fastest = max((run.requests_per_s for run in routed), default=0.0)
        busiest = min((run.generator_idle for run in routed), default=0.0)
        parts.append(
            f"{work.name}: {direct.requests_per_s:,.0f} requests/s without a router, worker"
            f" {direct.cpu_us_per_request:.1f} µs of CPU each; the fastest router {fastest:,.0f};"
            f" the generator was idle at least {busiest:.0%} of the time"
        )
    return "tools: " + "; ".join(parts)


def as_json(results: Results) -> list[dict[str, Any]]:
    """A list of the runs, by work and contender."""
    return [
        {"work": work, "name": name, **asdict(run)}
        | ({"cpu_to_other": found._asdict()} if (found := results.ratios.get((work, name))) else {})
        for (work, name), run in results.medians.items()
    ]
