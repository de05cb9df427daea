"""What a process has used so far: CPU time from /proc, messages and bytes from its own /metrics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

from scripts.kit.http_client import Client


@dataclass(frozen=True, slots=True)
class Usage:
    """Since the process started. One minus an earlier one is what an interval used."""

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
    """CPU time of all threads. /proc/PID/stat counts ticks of 10 ms, too coarse here; schedstat counts ns."""
    return sum(
        int((task / "schedstat").read_text().split()[0]) for task in (proc / str(pid) / "task").iterdir()
    )


def group_cpu_ns(group: int, proc: Path = Path("/proc")) -> int:
    """CPU time of a process group, as of a router that starts processes of its own."""
    return sum(cpu_ns(pid, proc) for pid in _members(group, proc))


def resident_bytes(group: int, proc: Path = Path("/proc")) -> int:
    """Memory of a process group that is resident, shared pages counted for each process."""
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
    """One replica's. Its own answer to this is part of the next figures, and the same for all."""
    _, body = await client.get(f"{url}/metrics")
    counted = dict(_samples(body.decode()))
    return Usage(cpu_ns(pid), *(counted[name] for name in _COUNTERS))


def _samples(text: str) -> Iterator[tuple[str, float]]:
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name in _COUNTERS:
            yield name, float(value)
