"""Signals of a process, sent to a small real one."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import signal
import sys
import termios
from collections.abc import AsyncIterator, Callable

import pytest

PROGRAM = """
import asyncio, signal, sys, structlog
from kvrouter.processes.signals import Signals

async def print_reloads(reloads):
    while True:
        await reloads.next()
        print("reload", flush=True)

async def main():
    signals = Signals()
    printing = asyncio.create_task(print_reloads(signals.reloads))
    print("up", flush=True)
    await signals.stopped.wait()
    print("stopped", signals.grace_s(5.0), flush=True)
    await signals.hurried.wait()
    print("hurried", signals.grace_s(5.0), flush=True)

def shown(_logger, _method, entry):
    return f"{entry['event']} {entry['signal']}"

structlog.configure(processors=[shown], logger_factory=structlog.PrintLoggerFactory())
if "nohup" in sys.argv:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def running(
    *arguments: str, before: Callable[[], None] | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """The program, once it listens for signals; `before` runs in it first."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM, *arguments), stdout=asyncio.subprocess.PIPE, preexec_fn=before
    )
    try:
        assert "up" == await next_line(process)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def next_line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(20):
        return (await process.stdout.readline()).decode().strip()


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (signal.SIGTERM, signal.SIGTERM, ["stopped 5.0", "hurried 5.0"]),
        (signal.SIGINT, signal.SIGTERM, ["stopped 0.0", "hurried 0.0"]),
        (signal.SIGTERM, signal.SIGINT, ["stopped 5.0", "hurried 5.0"]),
    ],
)
async def test_ends(first: signal.Signals, second: signal.Signals, expected: list[str]) -> None:
    """SIGTERM has a grace, Ctrl-C does not, and a second signal hurries."""
    async with running() as process:
        process.send_signal(first)
        said = [await next_line(process)]
        process.send_signal(second)
        said.append(await next_line(process))

    assert expected == said


async def test_reload() -> None:
    """SIGHUP reads the settings again, each time; the process goes on."""
    async with running() as process:
        for _ in range(2):
            process.send_signal(signal.SIGHUP)
            assert "reload" == await next_line(process)


@pytest.mark.parametrize("is_nohup", [False, True])
async def test_closed_terminal(is_nohup: bool) -> None:
    """A closed terminal ends the process like Ctrl-C; not under nohup."""
    terminal, inside = pty.openpty()

    def take_terminal() -> None:
        os.setsid()
        fcntl.ioctl(inside, termios.TIOCSCTTY, 0)

    arguments = ["nohup"] if is_nohup else []
    async with running(*arguments, before=take_terminal) as process:
        os.close(inside)
        process.send_signal(signal.SIGHUP)
        before = await next_line(process)
        os.close(terminal)
        after = await next_line(process)

    assert "reload" == before
    assert ("reload" if is_nohup else "stopped 0.0") == after


async def test_signals_without_use() -> None:
    """They end nothing: without a handler each of them would, at once."""
    async with running() as process:
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
            process.send_signal(number)
            assert f"signal.ignored {number.name}" == await next_line(process)
        process.send_signal(signal.SIGTERM)
        assert "stopped 5.0" == await next_line(process)
