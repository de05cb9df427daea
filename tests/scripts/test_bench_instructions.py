"""`scripts/bench instructions`: callgrind on a small process."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from scripts.kit.bench.instructions import Callgrind
from scripts.kit.fleet import Fleet
from tests.frontend.workers import until


@pytest.mark.skipif(shutil.which("callgrind_control") is None, reason="valgrind is not installed")
async def test_counts_since_the_last_call(tmp_path: Path) -> None:
    """A process that waits has executed its start, and then nearly nothing."""
    callgrind = Callgrind(tmp_path / "callgrind")
    os.mkfifo(tmp_path / "never")
    async with Fleet(tmp_path) as fleet:
        shell = ["sh", "-c", f"echo waiting; read line < {tmp_path}/never"]
        process = await fleet.start("shell", [*callgrind.command, *shell])

        def is_waiting() -> bool:
            process.check()
            return "waiting" in process.tail().splitlines()

        await until(is_waiting, within_s=60)
        first, _ = await callgrind.count(process.pid)
        second, second_s = await callgrind.count(process.pid)

    assert first > 20 * second
    assert 0 < second_s
