"""`scripts/bench decisions`: groups of cells as tables."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvrouter.lab.simulate import workloads
from kvrouter.lab.simulate.cells import Cell
from kvrouter.lab.simulate.traces import CONVERSATION_EXCERPT, read_trace
from scripts.kit.bench import decisions

SMALL = Cell(workloads.trace(read_trace(CONVERSATION_EXCERPT, 100)), 0.5, load=0.6, workers=2)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """One group of two cells."""
    cells = [SMALL, replace(SMALL, replicas=2, sync=None)]
    group = decisions.Group("a few requests", ("kv:8", "round-robin"), cells)
    monkeypatch.setattr(decisions, "groups", lambda: {"small": group})


@pytest.mark.usefixtures("small")
def test_tables_and_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each cell, the oracle first; the file has the figures that the table shows."""
    file = tmp_path / "figures.json"

    assert 0 == decisions.main(["--seeds", "2", "--jobs", "1", "--json", str(file)])

    first, second = json.loads(file.read_text())["groups"]["small"]
    lines = capsys.readouterr().out.splitlines()
    assert "| cell | oracle: TTFT p90, goodput | kv:8 | round-robin |" == lines[2]
    regret = 100 * first["modes"]["kv:8"]["regret_ttft_p90"]
    assert lines[4].startswith("| trace, cache 50%, load 0.6 | ")
    assert f" | {regret:+.1f} ±" in lines[4]
    assert "| trace, cache 50%, load 0.6, 2 replicas, sync off | " in lines[5]
    assert (2, None) == (second["replicas"], second["sync"])


@pytest.mark.usefixtures("small")
def test_other_modes(capsys: pytest.CaptureFixture[str]) -> None:
    """`--modes` replaces those of the groups."""
    assert 0 == decisions.main(["--seeds", "1", "--jobs", "1", "--modes", "p2c"])

    assert "goodput | p2c |" in capsys.readouterr().out


def test_groups() -> None:
    """Every cell has its own name in its table, and only the oracle's columns are added."""
    for group in decisions.groups().values():
        names = [decisions.cell_name(cell) for cell in group.cells]
        assert len(names) == len(set(names))
        assert "oracle" not in group.modes
