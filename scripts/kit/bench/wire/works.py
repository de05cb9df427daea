"""The work that routers are measured with, and what one run of it gave."""

from __future__ import annotations

import json
import resource
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median

from scripts.kit.bench.meter import group_cpu_ns
from scripts.kit.bench.wire.load import Load, Report, run_load
from scripts.kit.fleet import FleetError

MODEL = "mock"
PACE_MS = 5.0
LONG_BYTES = 36 * 1024
STREAM_EVENTS = 200
PAUSE_RAMP_MS = 1000.0


def _body(prompt: str, **more: object) -> bytes:
    return json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 8, **more}).encode()


def long_prompt(size: int) -> str:
    """English words of so many bytes in all."""
    words = "the router sends each request to the worker that holds most of its prompt in cache already "
    return (words * (size // len(words) + 1))[:size]


SHORT_BODY = _body("Say hello to the world.")
LONG_BODY = _body(long_prompt(LONG_BYTES))
STREAM_BODY = _body("Say hello to the world.", stream=True, max_tokens=STREAM_EVENTS)


@dataclass(frozen=True, slots=True)
class Work:
    """One kind of load, closed loop. `requests` is of one run."""

    name: str
    title: str
    body: bytes
    concurrency: int
    requests: int
    is_stream: bool = False
    ramp_ms: float = 0.0

    def load(self, port: int) -> Load:
        """The same for every router."""
        return Load(
            port, [self.body], concurrency=self.concurrency, requests=self.requests, is_stream=self.is_stream,
            ramp_ms=self.ramp_ms, seconds=90, limit_s=100,
        )  # fmt: skip


def standard_works(share: float = 1.0) -> list[Work]:
    """The rows of the comparison; `share` makes the runs shorter or longer."""

    def count(requests: int) -> int:
        return max(8, round(requests * share))

    return [
        Work("short", "short request, not streamed, 32 at a time", SHORT_BODY, 32, count(16_000)),
        Work("long", "the same with a prompt of 36 KB", LONG_BODY, 32, count(8_000)),
        Work("paced", "64 streams, an event every 5 ms", STREAM_BODY, 64, count(256), True, PAUSE_RAMP_MS),
        Work("alone", "short request, one at a time", SHORT_BODY, 1, count(3_000)),
    ]


@dataclass(frozen=True, slots=True)
class Run:
    """What one run cost and gave."""

    cpu_us_per_request: float
    cpu_us_per_event: float
    latency_p50_ms: float
    latency_p99_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    gap_max_ms: float
    stalls: float
    requests_per_s: float
    generator_idle: float

    @classmethod
    def of(cls, report: Report, cpu_ns: int) -> Run:
        """From what the generator saw and the CPU time of what was measured."""
        return cls(
            cpu_ns / 1e3 / report.requests,
            cpu_ns / 1e3 / report.events if report.events else 0.0,
            report.latency_p50_us / 1e3,
            report.latency_p99_us / 1e3,
            report.ttft_p50_us / 1e3,
            report.ttft_p99_us / 1e3,
            report.gap_max_us / 1e3,
            report.stalls,
            report.requests_per_s,
            report.idle,
        )

    @classmethod
    def median(cls, runs: Sequence[Run]) -> Run:
        """Figure by figure; but stalls are added up, for none may be lost."""
        figures = {field.name: median(getattr(run, field.name) for run in runs) for field in fields(cls)}
        return cls(**figures | {"stalls": sum(run.stalls for run in runs)})


async def measure(work: Work, name: str, port: int, group: int, directory: Path) -> Run:
    """One run. Raises FleetError if a request fails: a router that fails is not compared."""
    before = group_cpu_ns(group)
    report = await run_load(work.load(port), directory)
    used = group_cpu_ns(group) - before
    if report.errors or not report.requests:
        raise FleetError(
            f"{name}, {work.name}: {report.errors} of {work.requests} requests failed: {report.first_error}"
        )
    return Run.of(report, used)


def raise_descriptor_limit() -> int:
    """As many open files as are allowed, for this process and all it starts; returns how many."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most
