"""A report as one HTML file."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrouter.errors import ConfigError
from kvrouter.lab.page import Chart, HtmlPage, Series, cdf


def test_cdf() -> None:
    """The share up to each value; with weights, of the weights."""
    assert Series("a", [1, 2, 2, 9], [0.25, 0.5, 0.75, 1.0]) == cdf("a", [9, 1, 2, 2])
    assert Series("a", [1, 9], [0.75, 1.0]) == cdf("a", [9, 1], [1, 3])
    assert Series("a", [], []) == cdf("a", [])


def test_cdf_of_many_values() -> None:
    """A screen shows no more than some thousand points."""
    made = cdf("a", range(100_000))

    assert 1_900 <= len(made.x) <= 2_001
    assert (99_999, 1.0) == (made.x[-1], made.y[-1])
    assert pytest.approx([(float(value) + 1) / 100_000 for value in made.x]) == made.y


def test_texts_are_not_markup(tmp_path: Path) -> None:
    """What a trace or a user says stays text, also in a plot."""
    page = HtmlPage("<i>title</i>")
    page.paragraph("</script><b>")
    page.items(["<u>"])
    page.table(["<th>"], [["<td>"]])
    page.chart(Chart("</script>", [Series("<s>", [1], [2], "markers", ["</script>"])], "<x>", "<y>"))
    page.write(tmp_path / "page.html")

    body = (tmp_path / "page.html").read_text().partition("</head>")[2]
    for tag in ("<i>", "<b>", "<u>", "<td><td>", "<s>", "<x>"):
        assert tag not in body
    assert 1 == body.count("</script>"), "only the plot's own end"


def test_no_chart_no_script(tmp_path: Path) -> None:
    """A page without plots is small; a plot without points is left out."""
    page = HtmlPage("title")
    page.heading("part")
    page.chart(Chart("empty", [Series("a", [], [])], "x", "y"))
    page.write(tmp_path / "page.html")

    assert (tmp_path / "page.html").stat().st_size < 2_000


def test_axes(tmp_path: Path) -> None:
    """Names are categories, and logarithms are asked for."""
    page = HtmlPage("title")
    page.chart(Chart("bars", [Series("a", ["p", "q"], [1, 2], "bars")], "x", "y", log_x=True))
    lines_ = [Series("a", [1], [1]), Series("b", [1], [1])]
    page.chart(Chart("lines", lines_, "x", "y", log_x=True, log_y=True))
    page.write(tmp_path / "page.html")

    bars, lines = (tmp_path / "page.html").read_text().partition("</head>")[2].split('id="chart-2"')
    assert '"type":"category"' in bars
    assert ('"showlegend":true' in lines, lines.count('"type":"log"')) == (True, 2)


def test_unwritable(tmp_path: Path) -> None:
    """The error names the file."""
    with pytest.raises(ConfigError, match=r"--html .*nowhere/page.html: No such file"):
        HtmlPage("title").write(tmp_path / "nowhere" / "page.html")
