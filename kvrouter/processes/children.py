"""Child processes: restarted when they end, their output read line by line, none left behind."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from kvrouter.processes.output import Lines, Output

log = structlog.get_logger()

# A child that ran at least this long did not fail to start: its next restart is early again.
STEADY_S = 60.0
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0
# Time to read the last lines after a process has ended: a grandchild may hold its pipes open.
_LAST_LINES_S = 1.0
_READ_BYTES = 64 * 1024
_PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class RestartDelay:
    """The pause before the next start: it doubles while the child keeps failing early."""

    delay_s: float = 0.0

    def after(self, lived_s: float) -> float:
        """The pause after a run of `lived_s` seconds."""
        is_first = self.delay_s == 0.0 or lived_s >= STEADY_S
        self.delay_s = FIRST_DELAY_S if is_first else min(self.delay_s * 2, LONGEST_DELAY_S)
        return self.delay_s


class Child:
    """Runs one command, one process at a time.

    Each process leads its own session, so that Ctrl-C reaches only the parent, which ends them in order.
    """

    def __init__(
        self, name: str, command: Sequence[str], output: Output, *, pass_fds: Sequence[int] = ()
    ) -> None:
        self.name = name
        self.command = command
        self.starts = 0
        self._pass_fds = tuple(pass_fds)
        self._output = output
        self._process: asyncio.subprocess.Process | None = None
        self._ending = asyncio.Event()
        self._restart_delay = RestartDelay()
        self._exit_code = 0
        self._lived_s = 0.0

    @property
    def is_ending(self) -> bool:
        """Whether it must not start again."""
        return self._ending.is_set()

    @property
    def is_running(self) -> bool:
        """Whether it runs now."""
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int | None:
        """Of the process that runs now."""
        return self._process.pid if self._process is not None and self.is_running else None

    async def run(self) -> int:
        """Run it once; returns its exit code."""
        if self.is_ending:
            return 0
        started = time.monotonic()
        self._exit_code = await self._run()
        self._lived_s = time.monotonic() - started
        return self._exit_code

    async def pause(self) -> None:
        """Log that it has ended, and wait until it may start again; `end` interrupts the wait."""
        if self.is_ending:
            return
        delay_s = self._restart_delay.after(self._lived_s)
        log.warning("child.ended", name=self.name, exit_code=self._exit_code, starts_again_in_s=delay_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._ending.wait()

    async def keep_running(self) -> None:
        """Start it again whenever it ends, until `end`."""
        while not self.is_ending:
            await self.run()
            await self.pause()

    def stop_restarting(self) -> None:
        """Do not start it again; a running process continues."""
        self._ending.set()

    def send_signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            _signal(self._process, number)

    async def end(self, patience_s: float, number: signal.Signals = signal.SIGTERM) -> None:
        """Send the signal, and SIGKILL after `patience_s`; returns when the process has ended."""
        self.stop_restarting()
        process = self._process
        if process is None:
            return
        _signal(process, number)
        try:
            async with asyncio.timeout(patience_s):
                await process.wait()
        except TimeoutError:
            log.warning("child.killed", name=self.name, patience_s=patience_s)
            self.kill()
            await process.wait()

    def kill(self) -> None:
        """SIGKILL, without a restart."""
        self.stop_restarting()
        self.send_signal(signal.SIGKILL)

    async def _run(self) -> int:
        self.starts += 1
        process = await asyncio.create_subprocess_exec(
            *self.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},  # a pipe would be buffered, and lines come late
            start_new_session=True,
            pass_fds=self._pass_fds,
            preexec_fn=_die_with(os.getpid()) if sys.platform == "linux" else None,
        )
        self._process = process
        if self.is_ending:  # `end` was called while the process was being created, and saw none
            _signal(process, signal.SIGTERM)
        assert process.stdout is not None
        assert process.stderr is not None
        readers = [
            asyncio.create_task(self._forward(process.stdout, is_error=False)),
            asyncio.create_task(self._forward(process.stderr, is_error=True)),
        ]
        try:
            return await process.wait()
        finally:
            _signal(process, signal.SIGKILL)  # still running if this task was cancelled
            await process.wait()
            await asyncio.wait(readers, timeout=_LAST_LINES_S)
            for reader in readers:
                reader.cancel()
            self._process = None

    async def _forward(self, stream: asyncio.StreamReader, *, is_error: bool) -> None:
        lines = Lines()
        while data := await stream.read(_READ_BYTES):
            for line in lines.feed(data):
                self._output.line(self.name, line, is_error=is_error)
        for line in lines.rest():
            self._output.line(self.name, line, is_error=is_error)


async def first_of(*events: asyncio.Event) -> None:
    """Return when one of the events is set."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)


def _die_with(parent: int) -> Callable[[], None]:
    """In the child, make Linux send SIGKILL when the parent ends, also if the parent is killed."""

    def ask() -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # the parent ended before prctl, so no signal will come

    return ask
