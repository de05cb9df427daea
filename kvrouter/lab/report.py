"""What a command has found, once: printed, written as JSON, and as a page with plots.

report = Report("What a trace holds", settings.json, settings.html)    before the work
report.deliver([Section("Lengths", ["", "p50"], [["input", "6,909"]])], figures)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from kvrouter.errors import ConfigError
from kvrouter.lab.page import Chart, HtmlPage

# rich takes 80 columns for a pipe, and would cut off the figures.
_PIPE_WIDTH = 120


@dataclass(frozen=True, slots=True)
class Section:
    """A table, what there is to say about it, and plots of it, which only a page shows."""

    heading: str
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    notes: Sequence[str] = ()
    lists: Sequence[Sequence[str]] = ()
    charts: Sequence[Chart] = ()
    texts: Collection[int] = (0,)
    """The columns that are text; the others are numbers."""

    @property
    def is_shown(self) -> bool:
        """Whether a terminal can show any of it."""
        return bool(self.rows or self.notes or self.lists)


class LabReport:
    """The text, and the files that were asked for."""

    def __init__(self, title: str, json: Path | None, html: Path | None) -> None:
        """Raises ConfigError if a page is asked for and Plotly is missing: before any work is done."""
        self._page = HtmlPage(title) if html is not None else None
        self._json, self._html = json, html

    def deliver(self, sections: Sequence[Section], figures: object, *, about: str = "") -> None:
        """Write the files, then print: nothing is printed if one cannot be written. Raises ConfigError.

        `about`: what only the page says.
        """
        if self._json is not None:
            write_json(self._json, figures)
        if self._page is not None and self._html is not None:
            if about:
                self._page.paragraph(about)
            for section in sections:
                _fill(self._page, section)
            self._page.write(self._html)
        console = new_console()
        for section in sections:
            if section.is_shown:
                _show(console, section)


def write_json(path: Path, figures: object) -> None:
    """Write figures; NaN becomes null. Raises ConfigError."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=2) + b"\n")
    except OSError as error:
        raise ConfigError(f"--json {path}: {error.strerror}") from None


def new_console() -> Console:
    """For tables: as wide as a terminal, else wide enough for all figures."""
    console = Console()
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    return console


def _show(console: Console, section: Section) -> None:
    if section.heading:
        console.print(section.heading, style="bold", highlight=False)
    if section.rows:
        table = Table(box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
        for place, name in enumerate(section.head):
            is_text = place in section.texts
            table.add_column(name, justify="left" if is_text else "right", no_wrap=not (is_text and place))
        for row in section.rows:
            table.add_row(*row)
        console.print(table)
    for line in section.notes:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for first, *others in section.lists:
        console.print("\n  ".join([first, *others]), highlight=False, markup=False)
    console.print()


def _fill(page: HtmlPage, section: Section) -> None:
    if section.heading:
        page.heading(section.heading)
    if section.rows:
        # two lines of a head are one here
        page.table([" ".join(name.split()) for name in section.head], section.rows)
    for note in section.notes:
        page.paragraph(note)
    for texts in section.lists:
        page.items(texts)
    for chart in section.charts:
        page.chart(chart)
