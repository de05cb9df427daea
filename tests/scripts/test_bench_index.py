"""`scripts/bench hashes`, `index` and `growth`: all versions that are built, and plots."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvrouter.core.native import versions
from scripts.kit.bench import growth
from scripts.kit.bench.__main__ import main
from scripts.kit.bench.hashes import built


def _once(act: Callable[[], object], **_: float) -> float:
    act()
    return 1.0


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Shortens the measurements, as figures are not tested, and restores the version in use."""
    before = versions.in_use()
    for module in ("scripts.kit.bench.hashes", "scripts.kit.bench.index", "scripts.kit.bench.growth"):
        monkeypatch.setattr(f"{module}.microseconds", _once)
    yield
    versions.choose(before)


def test_hashes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table has a column for each version; the file has the same figures."""
    told = tmp_path / "figures.json"

    assert 0 == main(["hashes", "--tokens", "64", "--json", str(told)])

    said = capsys.readouterr().out
    assert all(name in said for name in built())
    assert set(built()) == set(json.loads(told.read_text())["us"])


def test_index(tmp_path: Path) -> None:
    """Look-ups, decisions and a resident index are measured with every version that is built."""
    told = tmp_path / "figures.json"

    assert 0 == main(["index", "--targets", "2", "5", "--blocks", "2000", "--json", str(told)])

    figures = json.loads(told.read_text())
    assert [(core, count) for core in built() for count in (2, 5)] == [
        (row["core"], row["targets"]) for row in figures["overlap"]
    ]
    assert all(row["store_m_per_s"] > 0 and row["blocks"] == 2000 for row in figures["resident"])


def test_growth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One plot for each question, and a file of figures."""
    monkeypatch.setattr(growth, "RESIDENT", (2000, 4000))

    assert 0 == main(["growth", "--quick", "--plots", str(tmp_path)])

    names = {"decision-targets", "overlap-targets", "prompt-tokens", "store-blocks", "memory-blocks"}
    assert {f"{name}.svg" for name in names} == {path.name for path in tmp_path.glob("*.svg")}
    assert names < json.loads((tmp_path / "index-growth.json").read_text()).keys()


def test_quick_growth_says_where(capsys: pytest.CaptureFixture[str]) -> None:
    """A trial run does not replace the plots of the docs."""
    with pytest.raises(SystemExit):
        main(["growth", "--quick"])

    assert "--quick needs --plots DIR" in capsys.readouterr().err
