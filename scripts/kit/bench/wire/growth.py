"""How the cost of an event and the memory of a stream grow with the number of open streams.

    start ── ramp ──▶ all are open ── settle ──▶ CPU ── window ──▶ CPU, memory ──▶ end

All numbers of streams have the same total rate of events: only the number of open streams changes. Each
number gets new fake workers and a new router, so that no memory is left from an earlier one.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.table import Table

from scripts.kit.bench.meter import group_cpu_ns, resident_bytes
from scripts.kit.bench.wire.load import Load, Report, run_load
from scripts.kit.bench.wire.rounds import Contender
from scripts.kit.bench.wire.works import MODEL
from scripts.kit.fleet import FleetError
from scripts.kit.script import table_of

EVENTS_PER_S = 4000
# Each worker has its own steps, so events arrive in bursts of a fortieth of the streams.
WORKERS = 40
STREAMS = (10, 100, 1000, 3000, 9000)
_RAMP_S_PER_STREAM, _LEAST_RAMP_S = 1 / 400, 0.5
_TRIES = 3
_SETTLE_S, _TAIL_S = 1.0, 1.0
_DESCRIPTORS_A_STREAM, _OTHER_DESCRIPTORS = 2, 200


@dataclass(frozen=True, slots=True)
class Growth:
    """One number of streams through one router."""

    name: str
    streams: int
    pace_ms: float
    cpu_us_per_event: float
    kb_per_stream: float
    resident_mb: float
    errors: int
    gap_p99_ms: float


def possible_streams(wanted: Sequence[int], descriptors: int) -> list[int]:
    """The wanted numbers, reduced to what the descriptors allow: a router has two connections a stream."""
    most = (descriptors - _OTHER_DESCRIPTORS) // _DESCRIPTORS_A_STREAM
    return sorted({min(streams, most) for streams in wanted})


def pace_ms(streams: int) -> float:
    """The pace of one stream at which all together have EVENTS_PER_S."""
    return 1000 * streams / EVENTS_PER_S


async def grow(contender: Contender, streams: int, *, window_s: float, directory: Path) -> Growth:
    """Open the streams, measure, and let them end. If not all were open at once, try again more slowly.

    Raises FleetError if they are not open at once after three tries.
    """
    ramp_s = max(_LEAST_RAMP_S, streams * _RAMP_S_PER_STREAM)
    before = resident_bytes(contender.group)
    for tries_left in reversed(range(_TRIES)):
        growth, report = await _look(contender, streams, ramp_s, window_s, directory, before=before)
        if report.streams_open == streams and not report.errors:
            break
        if not tries_left:
            raise FleetError(
                f"{contender.name}: of {streams} streams {report.streams_open} were open at once and"
                f" {report.errors} failed: {report.first_error or 'others had ended'}"
                f" (TTFT p50 {report.ttft_p50_us / 1e6:.1f} s, p99 {report.ttft_p99_us / 1e6:.1f} s)"
            )
        ramp_s *= 2
    return growth


async def _look(
    contender: Contender, streams: int, ramp_s: float, window_s: float, directory: Path, *, before: int
) -> tuple[Growth, Report]:
    settle_s = _SETTLE_S + 2 * pace_ms(streams) / 1000
    lasts_s = ramp_s + settle_s + window_s + _TAIL_S
    sending = asyncio.create_task(run_load(_load(contender.port, streams, ramp_s, lasts_s), directory))
    try:
        await asyncio.sleep(ramp_s + settle_s)
        cpu = group_cpu_ns(contender.group)
        await asyncio.sleep(window_s)
        cpu = group_cpu_ns(contender.group) - cpu
        resident = resident_bytes(contender.group)
        report = await sending
    finally:
        sending.cancel()
    growth = Growth(
        contender.name, streams, pace_ms(streams), cpu / 1e3 / (window_s * EVENTS_PER_S),
        (resident - before) / 1024 / streams, resident / 1e6, report.errors, report.gap_p99_us / 1e3,
    )  # fmt: skip
    return growth, report


def _load(port: int, streams: int, ramp_s: float, lasts_s: float) -> Load:
    events = math.ceil(1000 * lasts_s / pace_ms(streams))
    body = {"model": MODEL, "prompt": "Count on.", "max_tokens": events, "stream": True}
    return Load(
        port, [json.dumps(body).encode()], concurrency=streams, requests=streams, ramp_ms=1000 * ramp_s,
        is_stream=True, seconds=ramp_s + 5, limit_s=2 * lasts_s + 30,
    )  # fmt: skip


def medians(found: Sequence[Growth]) -> list[Growth]:
    """The medians of all runs with the same router and number of streams."""
    groups: dict[tuple[str, int], list[Growth]] = {}
    for each in found:
        groups.setdefault((each.name, each.streams), []).append(each)
    return [
        Growth(
            name, streams, pace_ms(streams),
            median(each.cpu_us_per_event for each in group), median(each.kb_per_stream for each in group),
            median(each.resident_mb for each in group), sum(each.errors for each in group),
            median(each.gap_p99_ms for each in group),
        )
        for (name, streams), group in groups.items()
    ]  # fmt: skip


def growth_table(rows: Sequence[Growth]) -> Table:
    """A row for each router and number of streams."""
    columns = ("", "streams", "CPU µs / event", "KB / stream", "resident", "gap p99 / pace")
    shown = [
        [row.name, f"{row.streams:,}", f"{row.cpu_us_per_event:.1f}", f"{row.kb_per_stream:.1f}",
         f"{row.resident_mb:.0f} MB", f"{row.gap_p99_ms / row.pace_ms:.2f}"]
        for row in rows
    ]  # fmt: skip
    return table_of(f"open streams, {EVENTS_PER_S:,} events/s in all", columns, shown)
