"""Plots as SVG."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from scripts.kit.bench.plot import make_axis, short, write_plot

SVG = "{http://www.w3.org/2000/svg}"


def test_one_line_for_each_series(tmp_path: Path) -> None:
    """Each series has a line through its points in order, a marker at each, and its name in the legend."""
    path = tmp_path / "plots" / "growth.svg"
    series = {"ours": [(10.0, 1.0), (1000.0, 3.0), (100.0, 2.0)], "a < b & c": [(10.0, 2.0), (1000.0, 2.0)]}

    write_plot(path, "Growth", "streams", "µs", series, log_x=True)

    root = ET.parse(path).getroot()
    lines = [line.get("points", "").split() for line in root.iter(f"{SVG}polyline")]
    assert [3, 2] == [len(line) for line in lines]
    assert sorted(lines[0], key=lambda place: float(place.split(",")[0])) == lines[0]
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"Growth", "streams", "µs", "ours", "a < b & c", "1 k"} <= set(texts)
    assert 3 + 1 == len(list(root.iter(f"{SVG}circle")))


def test_higher_values_stand_higher(tmp_path: Path) -> None:
    """Larger values are farther right and farther up, and all are inside the area."""
    path = tmp_path / "plot.svg"
    write_plot(path, "t", "x", "y", {"s": [(1.0, 5.0), (2.0, 80.0)]})

    (line,) = ET.parse(path).getroot().iter(f"{SVG}polyline")
    (x1, y1), (x2, y2) = [map(float, place.split(",")) for place in line.get("points", "").split()]

    assert 0 < x1 < x2 < 720
    assert 420 > y1 > y2 > 0


def test_linear_axis() -> None:
    """A linear axis begins at zero, ends above the greatest value, and has round ticks."""
    axis = make_axis([3.0, 11.7], is_log=False)

    assert [0, 2, 4, 6, 8, 10, 12] == axis.ticks
    assert (0.0, 0.5, 1.0) == (axis.share(0), axis.share(6), axis.share(12))


def test_log_axis() -> None:
    """A logarithmic axis has round ends; equal factors are equal distances."""
    axis = make_axis([10.0, 9_000.0], is_log=True)

    assert (10.0, 10_000.0) == (axis.low, axis.high)
    assert [10, 100, 1000, 10_000] == pytest.approx(list(axis.ticks))
    assert pytest.approx(1 / 3) == axis.share(100)


@pytest.mark.parametrize("is_log", [True, False])
def test_equal_values(*, is_log: bool) -> None:
    """A single value makes an axis, too."""
    axis = make_axis([5.0, 5.0], is_log=is_log)

    assert axis.low < axis.high
    assert 0 <= axis.share(5.0) <= 1


def test_nothing_to_plot(tmp_path: Path) -> None:
    """No points, or a zero on a logarithmic axis, is an error with the reason."""
    with pytest.raises(ValueError, match="no points"):
        write_plot(tmp_path / "a.svg", "t", "x", "y", {"empty": []})
    with pytest.raises(ValueError, match="logarithmic axis cannot show 0"):
        write_plot(tmp_path / "a.svg", "t", "x", "y", {"s": [(1.0, 0.0)]}, log_y=True)


def test_short_numbers() -> None:
    """Thousands, millions and billions are abbreviated."""
    assert ["0.5", "10", "2.5 k", "4 M", "1 G"] == [short(v) for v in (0.5, 10, 2500, 4e6, 1e9)]
