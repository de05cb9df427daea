"""`scripts/bench instructions`: its arithmetic, and callgrind on a small process."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from scripts.kit.bench.__main__ import main
from scripts.kit.bench.instructions import Callgrind, cost, table, total, works
from scripts.kit.fleet import Fleet, FleetError


def test_total() -> None:
    """The profile's last line has its sum; without that line it is incomplete."""
    assert 63395 == total("summary: 12\n\nfn=(1)\n15 63395\n\ntotals: 63395\n")
    with pytest.raises(FleetError, match="totals"):
        total("summary: 12\n")


def test_cost_is_without_idle_time() -> None:
    """What an idle frontend takes in the same time is subtracted."""
    one = cost(100, 50_000, 1_000.0)

    assert (490.0, 10.0) == (one.instructions, one.idle)


def test_table() -> None:
    """With another checkout there is a column with the ratio to it."""
    ours = {"kv": {"short": cost(10, 10_200, 0.0)}}
    console = Console(width=120, record=True, file=io.StringIO())

    console.print(table(ours, {"kv": {"short": cost(10, 10_000, 0.0)}}))
    console.print(table(ours, {}))

    text = console.export_text()
    assert 2 == text.count("1,020")
    assert 1 == text.count("1.020")


def test_works() -> None:
    """All streams are open at the same time, so that little of the time is idle."""
    found = {work.name: work for work in works(0.5)}

    assert ["short", "after GET", "long", "paced", "alone"] == list(found)
    assert (64, 64) == (found["paced"].requests, found["paced"].concurrency)
    assert (1250, 1) == (found["alone"].requests, found["alone"].concurrency)


def test_without_valgrind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error names what is missing, before anything is started."""
    monkeypatch.setenv("PATH", str(tmp_path))

    assert 1 == main(["instructions", "--share", "0.001"])

    assert "valgrind is not on PATH: install valgrind" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("callgrind_control") is None, reason="valgrind is not installed")
async def test_counts_since_the_last_call(tmp_path: Path) -> None:
    """A process that waits has executed its start, and then nearly nothing."""
    callgrind = Callgrind(tmp_path / "callgrind")
    os.mkfifo(tmp_path / "never")
    async with Fleet(tmp_path) as fleet:
        shell = ["sh", "-c", f"echo waiting; read line < {tmp_path}/never"]
        process = await fleet.start("shell", [*callgrind.command, *shell])
        while "waiting" not in process.tail().splitlines():
            process.check()
            await asyncio.sleep(0.05)
        first, _ = await callgrind.count(process.pid)
        second, second_s = await callgrind.count(process.pid)

    assert first > 20 * second
    assert 0 < second_s
