"""`scripts/bench policies`: every mode, every size, a table and a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.kit.bench.__main__ import main
from scripts.kit.bench.policies import MODES


def test_every_mode_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One row for each mode and one for the candidates; the file has the same figures."""
    told = tmp_path / "figures.json"

    code = main(["policies", "--targets", "2", "5", "--runs", "1", "--seconds", "0.001", "--json", str(told)])

    assert 0 == code
    said = capsys.readouterr().out
    assert all(mode in said for mode in MODES)
    figures = json.loads(told.read_text())["figures"]
    assert {(mode, count) for mode in [*MODES, "candidates"] for count in (2, 5)} == {
        (one["mode"], one["targets"]) for one in figures
    }
    assert all(one["least"] <= one["us"] <= one["most"] for one in figures)
