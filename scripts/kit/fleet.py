"""Processes that start and end with a script, with logs in files and readiness over HTTP.

A process ends with its fleet, on `stop` or `kill`, and with this process, also if this is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from scripts.kit.http_client import Client, HttpError
from scripts.kit.script import ScriptError

STOP_GRACE_S = 10.0
_POLL_S = 0.05
_PR_SET_PDEATHSIG = 1


class FleetError(ScriptError):
    """A process did not start, or ended too early; the message contains its last lines."""


class Process:
    """A running process. It leads its own group, so Ctrl-C in the terminal does not reach it."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        process: asyncio.subprocess.Process,
        log: Path,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.command = command
        self.env = env
        self.pid = process.pid
        self.log = log
        self._process = process

    @property
    def returncode(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.returncode

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Pause it (SIGSTOP) while inside."""
        self.send(signal.SIGSTOP)
        try:
            yield
        finally:
            self.send(signal.SIGCONT)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to this process alone, not to its group."""
        if self.returncode is None:
            self._process.send_signal(number)

    async def stop(self, grace_s: float = STOP_GRACE_S) -> int:
        """SIGTERM, then SIGKILL after `grace_s`; returns the exit code."""
        self.send(signal.SIGTERM)
        # not asyncio.timeout: in Python 3.11.2 it raises CancelledError in the clean-up of a cancelled task
        await asyncio.wait([asyncio.ensure_future(self._process.wait())], timeout=grace_s)
        return await self.kill()

    async def kill(self) -> int:
        """SIGKILL for its whole group; returns the exit code."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        return await self._process.wait()

    async def wait(self) -> int:
        """Wait until it ends by itself."""
        return await self._process.wait()

    def tail(self, lines: int = 15) -> str:
        text = self.log.read_text(errors="replace").rstrip()
        return "\n".join(text.splitlines()[-lines:]) or "(no output)"

    def check(self) -> None:
        """Raise if it has ended."""
        if self.returncode is not None:
            raise FleetError(
                f"{self.name} ended with exit code {self.returncode}; last output:\n{self.tail()}"
            )


class Fleet:
    """The processes of one script, and the directory where their logs are."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.processes: dict[str, Process] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop_all()

    async def start(self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None) -> Process:
        """Start a process; `env` is added to this process's own. Its output goes to `<name>.log`."""
        if name in self.processes and self.processes[name].returncode is None:
            raise FleetError(f"{name} is already running")
        log = self.directory / f"{name}.log"
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )
        self.processes[name] = Process(name, command, process, log, env)
        return self.processes[name]

    async def start_again(self, name: str) -> Process:
        """Restart a process that has ended, with the same command line and environment."""
        ended = self.processes[name]
        return await self.start(name, ended.command, ended.env)

    async def stop(self, name: str, grace_s: float = STOP_GRACE_S) -> int:
        """Stop one process and forget it; returns its exit code."""
        return await self.processes.pop(name).stop(grace_s)

    async def stop_all(self, grace_s: float = STOP_GRACE_S) -> None:
        """Stop all processes, the last one started first, so that it can use the others until it ends."""
        while self.processes:
            await self.stop(list(self.processes)[-1], grace_s)

    def check(self) -> None:
        """Raise if any process has ended by itself."""
        for process in self.processes.values():
            process.check()


async def wait_until_ok(client: Client, process: Process, url: str, timeout_s: float = 30.0) -> None:
    """Wait until `url` answers 200; raises FleetError if the process ends or on a timeout."""
    answer = "nothing"
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                process.check()
                try:
                    status, body = await client.get(url)
                except HttpError as error:
                    answer = str(error)
                else:
                    if status == 200:
                        return
                    answer = f"{status} {body[:200].decode(errors='replace')}"
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise FleetError(
            f"{process.name} is not ready after {timeout_s:g} s: {url} answered {answer}; "
            f"log:\n{process.tail()}"
        ) from None


def _die_with_parent() -> None:
    """Make Linux send SIGKILL when the parent ends, which also ends a process paused by SIGSTOP."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
