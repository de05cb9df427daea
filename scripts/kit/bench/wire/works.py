"""The works that routers are measured with, and the result of a run."""

from __future__ import annotations

import json
import resource
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from statistics import median

from scripts.kit.bench.wire.load import Load, Report

MODEL = "mock"
PACE_MS = 5.0
LONG_BYTES = 36 * 1024
STREAM_EVENTS = 200
RAMP_MS = 1000.0
BODIES = 64


def _bodies(prompt: str, **more: object) -> list[bytes]:
    """Requests that differ only in their last word."""
    request = {"model": MODEL, "max_tokens": 8, **more}
    return [json.dumps({**request, "prompt": f"{prompt} {number}"}).encode() for number in range(BODIES)]


def long_prompt(size: int) -> str:
    """English words, `size` bytes in all."""
    words = "the router sends each request to the worker that holds most of its prompt in cache already "
    return (words * (size // len(words) + 1))[:size]


_HELLO = "Say hello to the world."
SHORT_BODIES = _bodies(_HELLO)
TURNS = 12


def conversations() -> dict[str, list[bytes]]:
    """A conversation of TURNS turns in each API, by path; the requests differ only in their last word."""
    roles = ("user", "assistant")
    turns = [{"role": roles[number % 2], "content": long_prompt(300)} for number in range(2 * TURNS - 2)]
    system, common = long_prompt(1000), {"model": MODEL}
    found: dict[str, list[bytes]] = {
        path: [] for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses")
    }
    for number in range(BODIES):
        chat = [*turns, {"role": "user", "content": f"{_HELLO} {number}"}]
        first = {"role": "system", "content": system}
        bodies: list[dict[str, object]] = [
            {"max_tokens": 8, "messages": [first, *chat]},
            {"max_tokens": 8, "system": system, "messages": chat},
            {"max_output_tokens": 8, "instructions": system, "input": chat, "store": False},
        ]
        for listed, body in zip(found.values(), bodies, strict=True):
            listed.append(json.dumps({**common, **body}).encode())
    return found


LONG_BODIES = _bodies(long_prompt(LONG_BYTES))


@dataclass(frozen=True, slots=True)
class Work:
    """One kind of load, as a closed loop. `requests` is the number in one run."""

    name: str
    title: str
    bodies: Sequence[bytes]
    concurrency: int
    requests: int
    is_stream: bool = False
    ramp_ms: float = 0.0
    path: str = "/v1/completions"
    first: str = ""
    headers: tuple[str, ...] = ()

    def load(self, port: int) -> Load:
        return Load(
            port, self.bodies, path=self.path, concurrency=self.concurrency, requests=self.requests,
            is_stream=self.is_stream, ramp_ms=self.ramp_ms, seconds=90, limit_s=100,
            first=self.first, headers=self.headers,
        )  # fmt: skip


def stream_bodies(events: int) -> list[bytes]:
    """Streams of so many events."""
    return _bodies(_HELLO, stream=True, max_tokens=events)


def after_models(short: Work) -> Work:
    """The same from clients that list the models first: each connection begins with a GET."""
    title = f"{short.title}, after a GET of the models"
    return replace(short, name="after GET", title=title, first="/v1/models")


def standard_works(share: float = 1.0) -> list[Work]:
    """The rows of the comparison; `share` makes the runs shorter or longer."""

    def count(requests: int) -> int:
        return max(8, round(requests * share))

    streams = stream_bodies(STREAM_EVENTS)
    return [
        Work("short", "short requests, 32 at a time", SHORT_BODIES, 32, count(12_000)),
        Work("long", "the same with 36 KB prompts", LONG_BODIES, 32, count(6_000)),
        Work("paced", "64 streams, an event each 5 ms", streams, 64, count(256), True, RAMP_MS),
        Work("alone", "short requests, one at a time", SHORT_BODIES, 1, count(2_000)),
    ]


@dataclass(frozen=True, slots=True)
class Run:
    cpu_us_per_request: float
    cpu_us_per_event: float
    latency_p50_ms: float
    latency_p99_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    gap_p50_ms: float
    gap_max_ms: float
    stalls: float
    requests_per_s: float
    generator_idle: float

    @property
    def cpu_us(self) -> float:
        """CPU µs per event of a stream, else per request."""
        return self.cpu_us_per_event or self.cpu_us_per_request

    @classmethod
    def of(cls, report: Report, cpu_ns: int) -> Run:
        """From the generator's report and the router's CPU time."""
        return cls(
            cpu_ns / 1e3 / report.requests,
            cpu_ns / 1e3 / report.events if report.events else 0.0,
            report.latency_p50_us / 1e3,
            report.latency_p99_us / 1e3,
            report.ttft_p50_us / 1e3,
            report.ttft_p99_us / 1e3,
            report.gap_p50_us / 1e3,
            report.gap_max_us / 1e3,
            report.stalls,
            report.requests_per_s,
            report.idle,
        )

    @classmethod
    def median(cls, runs: Sequence[Run]) -> Run:
        """The median of each figure. Stalls are added up, so that a median cannot hide one."""
        figures = {field.name: median(getattr(run, field.name) for run in runs) for field in fields(cls)}
        return cls(**figures | {"stalls": sum(run.stalls for run in runs)})


def raise_descriptor_limit() -> int:
    """Raise the limit of open files to the hard one, for this process and its children; returns it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most
