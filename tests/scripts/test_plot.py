"""The plot of the demo as SVG."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from scripts.kit.plot import write_plot

SVG = "{http://www.w3.org/2000/svg}"


def test_one_line_for_each_series(tmp_path: Path) -> None:
    """Through its points in order, larger values farther right and up; its name is in the legend."""
    path = tmp_path / "plots" / "growth.svg"
    series = {"ours": [(10.0, 1.0), (9000.0, 3.0), (100.0, 2.0)], "a < b & c": [(10.0, 2.0), (1000.0, 2.0)]}

    write_plot(path, "Growth", "streams", "µs", series)

    root = ET.parse(path).getroot()
    ours, other = (line.get("points", "").split() for line in root.iter(f"{SVG}polyline"))
    places = [tuple(map(float, place.split(","))) for place in ours]
    assert places == sorted(places)
    assert [y for _, y in places] == sorted((y for _, y in places), reverse=True)
    assert 2 == len(other)
    texts = {text.text for text in root.iter(f"{SVG}text")}
    assert {"Growth", "streams", "µs", "ours", "a < b & c", "10", "10,000", "0", "3"} <= texts
    assert 3 + 1 == len(list(root.iter(f"{SVG}circle")))


def test_nothing_to_plot(tmp_path: Path) -> None:
    """No points, or a zero on the logarithmic axis, is an error with the reason."""
    with pytest.raises(ValueError, match="no points"):
        write_plot(tmp_path / "a.svg", "t", "x", "y", {"empty": []})
    with pytest.raises(ValueError, match="logarithmic axis cannot show 0"):
        write_plot(tmp_path / "a.svg", "t", "x", "y", {"s": [(0.0, 1.0)]})
