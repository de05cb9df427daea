"""Runs the load generator and reads its report."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.kit.bench.wire.build import binary
from scripts.kit.fleet import FleetError

# How much longer than its own limit the generator may take to print its report.
_SLACK_S = 10.0


@dataclass(frozen=True, slots=True)
class Load:
    """What to send to 127.0.0.1. `bodies` are sent in turn. After `requests` or `seconds` none begins."""

    port: int
    bodies: Sequence[bytes]  # without line breaks
    path: str = "/v1/completions"
    concurrency: int = 1
    requests: int = 1_000_000_000
    seconds: float = 60.0
    limit_s: float = 120.0
    ramp_ms: float = 0.0
    is_stream: bool = False
    headers: Sequence[str] = ()
    first: str = ""  # a path that each connection asks for first; not counted


@dataclass(frozen=True, slots=True)
class Report:
    """The generator's report. `events` are without [DONE]; `stalls` are waits of 35 ms or more."""

    requests: int
    errors: int
    first_error: str
    reopened: int
    seconds: float
    latency_p50_us: int
    latency_p90_us: int
    latency_p99_us: int
    ttft_p50_us: int
    ttft_p90_us: int
    ttft_p99_us: int
    gap_p50_us: int
    gap_p90_us: int
    gap_p99_us: int
    gap_max_us: int
    stalls: int
    events: int
    streams_open: int  # the most at the same time
    bytes: int
    cpu_s: float  # of the generator

    @property
    def requests_per_s(self) -> float:
        return self.requests / self.seconds if self.seconds else 0.0

    @property
    def idle(self) -> float:
        """The share of time in which the generator waited. Near 0 the generator is the bottleneck."""
        return 1 - self.cpu_s / self.seconds if self.seconds else 0.0


async def run_load(load: Load, directory: Path) -> Report:
    """Send; returns when all requests are answered or the time is over. If cancelled, kills the generator."""
    with tempfile.NamedTemporaryFile(dir=directory, suffix=".jsonl") as file:
        file.write(b"".join(body + b"\n" for body in load.bodies))
        file.flush()
        process = await asyncio.create_subprocess_exec(
            *_command(load, file.name), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        try:
            async with asyncio.timeout(load.limit_s + _SLACK_S):
                output, errors = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    if process.returncode:
        raise FleetError(f"the load generator failed: {errors.decode().strip()}")
    return Report(**json.loads(output))


def _command(load: Load, bodies: str) -> list[str]:
    flags = {
        "--port": load.port,
        "--bodies": bodies,
        "--path": load.path,
        "--concurrency": load.concurrency,
        "--requests": load.requests,
        "--seconds": load.seconds,
        "--limit-s": load.limit_s,
        "--ramp-ms": load.ramp_ms,
        "--stream": int(load.is_stream),
    }
    if load.first:
        flags["--first"] = load.first
    words = [str(word) for pair in flags.items() for word in pair]
    return [str(binary("load")), *words, *(word for line in load.headers for word in ("--header", line))]
