"""What benches measure with: CPU time and memory of processes, from /proc, and instructions of a call."""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, ParamSpec

from rich.table import Table

from kvrouter.version import __version__
from scripts.kit.figures import MachineTime
from scripts.kit.script import new_console

P = ParamSpec("P")


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


def machine(since: MachineTime | None = None) -> dict[str, object]:
    """Where and when something was measured, and how busy the machine was `since` then."""
    cpus = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    now = MachineTime.now()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": cpus[0].partition(":")[2].strip() if cpus else platform.processor(),
        "cores": len(cpus),
        "kernel": platform.release().partition("-")[0],
        "python": platform.python_version(),
        "kvrouter": __version__,
        **({"machine_busy": round(now.busy_since(since), 3)} if now and since else {}),
    }


def conclude(
    flags: argparse.Namespace, tables: Iterable[Table], about: Mapping[str, object], **figures: object
) -> None:
    """Print the tables and what they are of; write the figures to the file of --json."""
    console = new_console()
    for table in tables:
        console.print(table)
    console.print(json.dumps(about), soft_wrap=True, highlight=False)
    if flags.json is not None:
        flags.json.write_text(json.dumps({**about, **figures}, indent=2) + "\n")
