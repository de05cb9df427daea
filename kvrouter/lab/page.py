"""A report as one HTML file that needs nothing else: paragraphs, tables, and plots drawn by Plotly.

    page = Page("What a trace holds")
    page.heading("Lengths")
    page.paragraph("12,031 requests")
    page.table(["", "p50"], [["input", "6,909"]])
    page.chart(Chart("Input length", [cdf("input", lengths)], x="tokens", y="share", log_x=True))
    page.write(path)

Plotly comes with the extra `report`; its script (5 MB) is in the file, once.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal

from kvrouter.errors import ConfigError

Mode = Literal["lines", "markers", "lines+markers", "bars"]

# More points than a screen has columns only make the file longer.
_MOST_POINTS = 2_000
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
       color: #1c1c1c; background: #fff }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #ccc }
table { border-collapse: collapse; margin: 1rem 0 }
th, td { padding: .2rem .8rem .2rem 0; text-align: right; font-variant-numeric: tabular-nums }
th:first-child, td:first-child { text-align: left } tr { border-bottom: 1px solid #e4e4e4 }
"""


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one line, or bars. `labels`: what a point shows when the pointer is on it."""

    name: str
    x: Sequence[float | str]
    y: Sequence[float]
    mode: Mode = "lines"
    labels: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines, points or bars, with the names of the axes."""

    title: str
    series: Sequence[Series]
    x: str
    y: str
    log_x: bool = False
    log_y: bool = False


def cdf(name: str, values: Iterable[float], weights: Iterable[float] | None = None) -> Series:
    """The share of the values, or of their weights, up to each value."""
    pairs = (
        sorted((value, 1.0) for value in values)
        if weights is None
        else sorted(zip(values, weights, strict=True))
    )
    total = sum(weight for _, weight in pairs)
    x: list[float | str] = []
    y: list[float] = []
    passed, step = 0.0, total / _MOST_POINTS
    for place, (value, weight) in enumerate(pairs):
        passed += weight
        if not y or passed - y[-1] * total >= step or place == len(pairs) - 1:
            x.append(value)
            y.append(passed / total)
    return Series(name, x, y)


class HtmlPage:
    """Parts are shown in the order in which they are added."""

    def __init__(self, title: str) -> None:
        """Raises ConfigError if Plotly is not installed: before any work is done."""
        try:
            self._to_html: Any = importlib.import_module("plotly.io").to_html
            self._script: Any = importlib.import_module("plotly.offline").get_plotlyjs
        except ImportError:
            raise ConfigError("--html needs Plotly: pip install 'kvrouter[report]'") from None
        self.title = title
        self._parts = [f"<h1>{escape(title)}</h1>"]
        self._charts = 0

    def heading(self, text: str) -> None:
        self._parts.append(f"<h2>{escape(text)}</h2>")

    def paragraph(self, text: str) -> None:
        self._parts.append(f"<p>{escape(text)}</p>")

    def items(self, texts: Iterable[str]) -> None:
        """A list with one line for each text."""
        self._parts.append("<ul>" + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>")

    def table(self, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """The first column is text, the others are numbers."""
        lines = "".join(_row(row, "td") for row in rows)
        self._parts.append(f"<table><thead>{_row(head, 'th')}</thead><tbody>{lines}</tbody></table>")

    def chart(self, chart: Chart) -> None:
        """A plot; none if it has no points."""
        shown = [one for one in chart.series if one.y]
        if not shown:
            return
        self._charts += 1
        figure = {
            "data": [_trace(one) for one in shown],
            "layout": {
                "title": {"text": _label(chart.title)},
                "xaxis": {"title": {"text": _label(chart.x)}, "type": _axis(shown, is_log=chart.log_x)},
                "yaxis": {
                    "title": {"text": _label(chart.y)},
                    "type": "log" if chart.log_y else "linear",
                    "rangemode": "tozero",
                },
                "showlegend": len(shown) > 1,
                "height": 420,
                "plot_bgcolor": "#f7f7f7",
                "hovermode": "closest",
            },
        }
        # the figure is made of plain numbers and texts: checking it would take a second
        self._parts.append(
            self._to_html(
                figure,
                full_html=False,
                include_plotlyjs=False,
                validate=False,
                div_id=f"chart-{self._charts}",
            )
        )

    def write(self, path: Path) -> None:
        """Write the whole file. Raises ConfigError if it cannot be written."""
        script = f"<script>{self._script()}</script>" if self._charts else ""
        head = f'<meta charset="utf-8"><title>{escape(self.title)}</title><style>{_STYLE}</style>{script}'
        page = f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n'
        try:
            path.write_text(page + "\n".join(self._parts) + "\n</body></html>\n")
        except OSError as error:
            raise ConfigError(f"--html {path}: {error.strerror}") from None


def _label(text: str) -> str:
    """Plotly reads a few tags in its texts."""
    return escape(text, quote=False)


def _row(cells: Sequence[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def _axis(series: Sequence[Series], *, is_log: bool) -> str:
    if any(isinstance(value, str) for one in series for value in one.x):
        return "category"
    return "log" if is_log else "linear"


def _trace(one: Series) -> dict[str, Any]:
    labels = {"hovertext": [_label(label) for label in one.labels]} if one.labels else {}
    points: dict[str, Any] = {"x": [*one.x], "y": [*one.y], "name": _label(one.name), **labels}
    return (
        {"type": "bar", **points} if one.mode == "bars" else {"type": "scatter", "mode": one.mode, **points}
    )
