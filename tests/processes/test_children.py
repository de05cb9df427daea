"""Child processes: their output, restarts and end. Tested with small real processes."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrouter.processes import children
from kvrouter.processes.children import FIRST_DELAY_S, LONGEST_DELAY_S, STEADY_S, Child, RestartDelay
from kvrouter.processes.output import Output
from tests.frontend.workers import until
from tests.serve.serving import is_alive

PRINT_AND_STAY = "echo up; trap 'echo bye; exit 0' TERM; while :; do sleep 0.01; done"
IGNORES_SIGTERM = "trap '' TERM; echo up; while :; do sleep 0.01; done"


class Captured:
    """An output that a test can read and wait on."""

    def __init__(self) -> None:
        self.out, self.err = io.BytesIO(), io.BytesIO()
        self.output = Output(self.out, self.err, width=1)

    async def until(self, text: bytes, count: int = 1) -> None:
        """Wait until the text was written `count` times."""
        await until(lambda: self.out.getvalue().count(text) >= count)


@pytest.fixture
def captured() -> Iterator[Captured]:
    """A captured output."""
    made = Captured()
    yield made
    made.output.close()


def child(script: str, captured: Captured) -> Child:
    """A child that runs a shell script."""
    return Child("c", ["/bin/sh", "-c", script], captured.output)


def test_delay() -> None:
    """The delay doubles up to a bound, and is short again after a child that ran for a while."""
    delay = RestartDelay()

    delays = [delay.after(0.0) for _ in range(10)]

    assert [FIRST_DELAY_S, 2 * FIRST_DELAY_S, 4 * FIRST_DELAY_S] == delays[:3]
    assert LONGEST_DELAY_S == max(delays) == delays[-1]
    assert FIRST_DELAY_S == delay.after(STEADY_S)


async def test_output_and_exit_code(captured: Captured) -> None:
    """Both streams are read to their end, and the exit code is returned."""
    code = await child("echo one; echo two >&2; printf three; exit 7", captured).run()
    captured.output.close()

    assert 7 == code
    assert b"c | one\nc | three\n" == captured.out.getvalue()
    assert b"c | two\n" == captured.err.getvalue()


async def test_started_again(captured: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that dies is restarted, until `end` is called."""
    monkeypatch.setattr(children, "FIRST_DELAY_S", 0.01)
    kept = child("echo up", captured)

    running = asyncio.create_task(kept.keep_running())
    await captured.until(b"up", 3)
    await kept.end(5)
    await running

    assert kept.starts >= 3


async def test_end(captured: Captured) -> None:
    """`end` sends SIGTERM first, so that a child can end in order."""
    kept = child(PRINT_AND_STAY, captured)
    running = asyncio.create_task(kept.keep_running())
    await captured.until(b"up")

    await kept.end(5)
    await running
    captured.output.close()

    assert captured.out.getvalue().endswith(b"c | bye\n")
    assert 1 == kept.starts


async def test_child_that_ignores_sigterm(captured: Captured) -> None:
    """A child that ignores SIGTERM is killed after `patience_s`."""
    kept = child(IGNORES_SIGTERM, captured)
    running = asyncio.create_task(kept.run())
    await captured.until(b"up")

    await kept.end(0.05)

    assert -signal.SIGKILL == await running


async def test_ended_before_it_began(captured: Captured) -> None:
    """A child whose end was requested is not started."""
    kept = child("echo up", captured)
    await kept.end(1)

    await kept.keep_running()

    assert 0 == kept.starts


async def test_cancelled(captured: Captured) -> None:
    """If the task that runs a child is cancelled, the child is killed."""
    kept = child("echo up $$; while :; do sleep 0.01; done", captured)
    running = asyncio.create_task(kept.run())
    await captured.until(b"\n")
    pid = int(captured.out.getvalue().split()[-1])

    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    await until(lambda: not is_alive(pid))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals a child when its parent ends")
async def test_parent_killed(tmp_path: Path) -> None:
    """Children of a killed parent are killed."""
    script = f"""
import asyncio, io
from kvrouter.processes.children import Child
from kvrouter.processes.output import Output
from tests.serve.serving import is_alive
command = ["/bin/sh", "-c", "echo $$ > {tmp_path}/part; mv {tmp_path}/part {tmp_path}/pid; exec sleep 60"]
asyncio.run(Child("c", command, Output(io.BytesIO(), io.BytesIO(), width=1)).run())
"""
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", script)
    await until((tmp_path / "pid").exists)
    pid = int((tmp_path / "pid").read_text())
    os.kill(pid, 0)

    parent.kill()
    await parent.wait()

    await until(lambda: not is_alive(pid))
