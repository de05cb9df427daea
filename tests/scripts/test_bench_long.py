"""`scripts/bench long` in a short form: instructions instead of time, small tables, few bookings."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from kvrouter.policies import POLICIES
from scripts.kit.bench import long
from scripts.kit.bench.__main__ import main
from scripts.kit.bench.long_world import InstructionMeter, World

# Forty bookings.
SAMPLE_S = 4
CASES = long.all_cases()
if not os.environ.get("KVROUTER_TEST_LONG"):  # every mode once, every index once
    CASES = [case for case in CASES if case[0] == "kv" or not case[1].startswith("assumed")]


@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_a_booking_costs_the_same_after_a_long_time(case: tuple[str, str]) -> None:
    """With full tables, later bookings cost the same as the first ones, and memory is bounded."""
    meter = InstructionMeter()
    world = World(*case, long.SMALL, meter)
    samples = [range(20, 20 + SAMPLE_S), range(41, 41 + SAMPLE_S)]
    costs: dict[int, float] = {}
    for second in range(45):
        meter.is_on = any(second in sample for sample in samples)
        costs[second] = world.run_second()

    first, last = (fmean(costs[second] for second in sample) for sample in samples)
    assert last <= long.MOST_RATIO * first
    memory = world.memory()
    assert 0 < memory.entries <= memory.bound


def test_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One row for each mode and index with all tenths, equal in table and file."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(long, "SMALL", replace(long.SMALL, rate=2, warm_up_s=10, seconds=10))

    main(["long", "--count", "--modes", "kv", "--json", str(tmp_path / "figures.json")])

    said = capsys.readouterr().out
    assert all(word in said for word in ("assumed by time", "10 / cold", "blocks and heap"))
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"]
    assert ["exact", "assumed by time", "assumed by capacity"] == [row["index"] for row in rows]
    assert all(10 == len(row["tenths"]) and row["cold"] > 0 for row in rows)


def test_every_mode_has_a_row() -> None:
    """Each mode has a row; modes that use blocks have one for each index."""
    assert set(POLICIES) == {mode for mode, _ in long.all_cases()}
    assert 22 == len(long.all_cases())
