"""What benches measure with: CPU time, memory and messages of processes, instructions of a call.

CPU time and memory are read from /proc, messages and bytes from a process's own /metrics.
"""

from __future__ import annotations

import gc
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, ParamSpec

from kvrouter.version import __version__
from scripts.kit.http_client import Client

P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class Usage:
    """Usage since the start of the process. The difference of two is the usage of an interval."""

    cpu_ns: int
    sent: float = 0.0
    sent_bytes: float = 0.0
    received: float = 0.0
    received_bytes: float = 0.0

    def __sub__(self, earlier: Usage) -> Usage:
        return Usage(*(now - then for now, then in zip(astuple(self), astuple(earlier), strict=True)))


_COUNTERS = (
    "kvrouter_bus_published_total",
    "kvrouter_bus_published_bytes_total",
    "kvrouter_bus_received_total",
    "kvrouter_bus_received_bytes_total",
)


def cpu_ns(pid: int, proc: Path = Path("/proc")) -> int:
    """CPU time of all threads, from schedstat: /proc/PID/stat counts ticks of 10 ms, too coarse here."""
    return sum(
        int((task / "schedstat").read_text().split()[0]) for task in (proc / str(pid) / "task").iterdir()
    )


def group_cpu_ns(group: int, proc: Path = Path("/proc")) -> int:
    """CPU time of a process group, for routers that start further processes."""
    return sum(cpu_ns(pid, proc) for pid in _members(group, proc))


def resident_bytes(group: int, proc: Path = Path("/proc")) -> int:
    """Resident memory of a process group; shared pages count for each process."""
    status = [(proc / str(pid) / "status").read_text() for pid in _members(group, proc)]
    lines = [line for text in status for line in text.splitlines() if line.startswith("VmRSS:")]
    return sum(1024 * int(line.split()[1]) for line in lines)


def _members(group: int, proc: Path) -> Iterator[int]:
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            after_name = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if int(after_name[2]) == group:
            yield int(entry.name)


async def usage(client: Client, pid: int, url: str) -> Usage:
    """The usage of one replica. The cost of this request is part of the next figures, equal for all."""
    _, body = await client.get(f"{url}/metrics")
    counted = dict(_samples(body.decode()))
    return Usage(cpu_ns(pid), *(counted[name] for name in _COUNTERS))


def _samples(text: str) -> Iterator[tuple[str, float]]:
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name in _COUNTERS:
            yield name, float(value)


def instructions(act: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> int:
    """Bytecode instructions of one call, the same on every machine and load. Work inside C is not counted."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        count += event == "opcode"
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()  # a collection would also run finalizers of objects that are not the call's
    sys.settrace(trace)
    try:
        act(*args, **kwargs)
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return count


def machine() -> dict[str, object]:
    """Where and when something was measured, for a bench's JSON."""
    cpus = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": cpus[0].partition(":")[2].strip() if cpus else platform.processor(),
        "cores": len(cpus),
        "python": platform.python_version(),
        "kvrouter": __version__,
    }
