"""A `kvrouter serve` in its own process, as seen by a test."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import aiohttp
import pytest

from scripts.kit.ports import free_ports
from tests.frontend.workers import until, until_found

PATIENCE_S = 40.0


@dataclass
class Serving:
    """A running `kvrouter serve` and its output so far."""

    process: asyncio.subprocess.Process
    said: list[str] = field(default_factory=list)
    # All its children so far.
    seen: dict[int, str] = field(default_factory=dict)

    async def listen(self, stream: asyncio.StreamReader | None) -> None:
        """Keep what it says."""
        assert stream is not None
        async for line in stream:
            self.said.append(line.decode().rstrip())

    def text(self) -> str:
        """All of it."""
        return "\n".join(self.said)

    async def until(self, is_so: Callable[[], bool], what: str) -> None:
        """Wait for something; if it does not come, show what was said instead."""
        try:
            await until(is_so, within_s=PATIENCE_S)
        except AssertionError:
            pytest.fail(f"{what} did not come to be; it said:\n{self.text()}")

    async def until_said(self, pattern: str, count: int = 1) -> None:
        """Wait until lines match so often."""
        await self.until(
            lambda: sum(bool(re.search(pattern, line)) for line in self.said) >= count,
            f"{count} × {pattern!r}",
        )

    def children(self) -> dict[int, str]:
        """Its child processes: command lines by process id."""
        found = {}
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            for pid in (task / "children").read_text().split():
                found[int(pid)] = command_of(int(pid))
        self.seen.update(found)
        return found

    def agents(self) -> list[int]:
        """The process ids of its agents."""
        return [pid for pid, command in self.children().items() if "kvrouter worker" in command]

    async def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Signal it and wait; returns the exit code."""
        self.process.send_signal(number)
        async with asyncio.timeout(PATIENCE_S):
            return await self.process.wait()


@contextlib.asynccontextmanager
async def serving(*flags: str, backend: str = "huggingface") -> AsyncIterator[Serving]:
    """Run it while inside; it is killed if it does not end by itself.

    `backend`: of the tokenizer. With `auto` each frontend compares two at its start, for 0.3 s of CPU time.
    """
    admin = free_ports(2)[0]  # with 0 another process may take the port before a frontend listens
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvrouter", "serve", "--host=127.0.0.1", f"--admin-port={admin}",
        "--drain-grace-s=0", f"--tokenizer-backend={backend}", *flags,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    running = Serving(process)
    ears = [asyncio.create_task(running.listen(stream)) for stream in (process.stdout, process.stderr)]
    try:
        yield running
    finally:
        await _clean_up(running, ears)


async def _clean_up(running: Serving, ears: Sequence[asyncio.Task[None]]) -> None:
    """Kill processes left by a failed test."""
    if running.process.returncode is None:
        running.children()
    with contextlib.suppress(ProcessLookupError):
        running.process.kill()
    await running.process.wait()
    for pid, command in running.seen.items():
        if command and command == command_of(pid):
            os.kill(pid, signal.SIGKILL)
    await asyncio.wait(ears, timeout=PATIENCE_S)


async def get(http: aiohttp.ClientSession, url: str) -> bool:
    """Whether a URL answers 200."""
    try:
        async with http.get(url) as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


async def until_ready(served: Serving, http: aiohttp.ClientSession, urls: Sequence[str]) -> None:
    """Wait until every frontend is ready."""
    try:
        for url in urls:
            await until_found(partial(get, http, f"{url}/ready"), within_s=PATIENCE_S)
    except AssertionError:
        pytest.fail(f"not ready; it said:\n{served.text()}")


def bound(port: int) -> socket.socket:
    """A socket that occupies a port."""
    listener = socket.socket()
    try:
        listener.bind(("127.0.0.1", port))
    except BaseException:
        listener.close()
        raise
    return listener


def all_gone(pids: Sequence[int]) -> bool:
    """Whether all these processes have ended."""
    return not any(is_alive(pid) for pid in pids)


def command_of(pid: int) -> str:
    """A process's command line; empty if it has gone, or is a zombie."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def until_known(served: Serving, http: aiohttp.ClientSession, url: str, worker: str) -> None:
    """Wait until a replica knows of blocks on a worker, and of no request in flight."""

    async def is_known() -> bool:
        async with http.get(f"{url}/workers") as response:
            view = await response.json()
        rows = {row["worker_id"]: row for row in view["targets"]}
        return bool(rows[worker]["blocks"]) and not any(row["active_blocks"] for row in rows.values())

    await until_found(is_known, within_s=PATIENCE_S)
