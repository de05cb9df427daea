"""A plot of a few series as a static SVG file, without dependencies."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 720, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 78, 24, 48, 58
_LEGEND_ROW = 18
# With another marker for each series, for readers who cannot distinguish the colours.
_COLOURS = ("#0b62a4", "#d1495b", "#2e8b57", "#b8860b", "#6a4c93", "#3b3b3b")
_MARKERS = ("circle", "square", "triangle")
_SUFFIXES = ((1e9, " G"), (1e6, " M"), (1e3, " k"))

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps values to positions. `low` and `high` are the ends of the axis, `ticks` the labelled values."""

    low: float
    high: float
    ticks: Sequence[float]
    is_log: bool

    def share(self, value: float) -> float:
        """The position on the axis, 0 to 1."""
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def make_axis(values: Sequence[float], *, is_log: bool) -> Axis:
    """An axis for all values; a linear one begins at 0 unless there are negative values."""
    if is_log:
        if min(values) <= 0:
            raise ValueError(f"a logarithmic axis cannot show {min(values):g}")
        return _log_axis(min(values), max(values))
    low, high = min(0.0, *values), max(0.0, *values)
    step = _round_step((high - low) / 6 or 1.0)
    first, last = math.floor(low / step), math.ceil(high / step) or 1
    return Axis(first * step, last * step, [step * number for number in range(first, last + 1)], is_log=False)


def _log_axis(low: float, high: float) -> Axis:
    """Ends are 1, 2 or 5 times a power of ten. Powers are labelled, on a short axis all three."""
    steps = [m * 10.0**e for e in range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
             for m in (1, 2, 5)]  # fmt: skip
    first = max(step for step in steps if step <= low * (1 + 1e-9))
    last = min(step for step in steps if step >= high * (1 - 1e-9) and step > first)
    inside = [step for step in steps if first <= step <= last]
    powers = [step for step in inside if math.isclose(math.log10(step) % 1, 0, abs_tol=1e-9)]
    return Axis(first, last, powers if len(powers) > 3 else inside, is_log=True)


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return float(next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= step * (1 - 1e-9)))


def write_plot(
    path: Path,
    title: str,
    x_label: str,
    y_label: str,
    series: Mapping[str, Sequence[Point]],
    *,
    log_x: bool = False,
    log_y: bool = False,
) -> None:
    """Write an SVG of lines through points, one for each name. Raises ValueError if there are none."""
    points = [point for line in series.values() for point in line]
    if not points:
        raise ValueError(f"{path.name}: no points to plot")
    x = make_axis([each[0] for each in points], is_log=log_x)
    y = make_axis([each[1] for each in points], is_log=log_y)
    plot = _Plot(x, y)
    height = HEIGHT + _LEGEND_ROW * len(series)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"'
        f' height="{height}" font-family="system-ui, sans-serif" font-size="13" fill="#222">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        _text(WIDTH / 2, 26, title, 'text-anchor="middle" font-size="16" font-weight="600"'),
        *plot.grid(),
        _text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 14, x_label, 'text-anchor="middle"'),
        _text(0, 0, y_label, f'text-anchor="middle" transform="translate(18 {plot.middle}) rotate(-90)"'),
    ]
    for number, (name, line) in enumerate(series.items()):
        parts += plot.line(line, number)
        parts += _legend(name, number)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


@dataclass(frozen=True, slots=True)
class _Plot:
    x: Axis
    y: Axis

    @property
    def middle(self) -> float:
        """Height of the middle of the area."""
        return (_TOP + HEIGHT - _BOTTOM) / 2

    def across(self, value: float) -> float:
        return _LEFT + self.x.share(value) * (WIDTH - _LEFT - _RIGHT)

    def down(self, value: float) -> float:
        return HEIGHT - _BOTTOM - self.y.share(value) * (HEIGHT - _TOP - _BOTTOM)

    def grid(self) -> Iterator[str]:
        """Lines and labels of the ticks, and the two axes."""
        bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
        for tick in self.x.ticks:
            at = self.across(tick)
            yield _line(at, _TOP, at, bottom, "#ddd")
            yield _text(at, bottom + 18, short(tick), 'text-anchor="middle"')
        for tick in self.y.ticks:
            at = self.down(tick)
            yield _line(_LEFT, at, right, at, "#ddd")
            yield _text(_LEFT - 8, at + 4.5, short(tick), 'text-anchor="end"')
        yield _line(_LEFT, bottom, right, bottom, "#222")
        yield _line(_LEFT, _TOP, _LEFT, bottom, "#222")

    def line(self, points: Sequence[Point], number: int) -> Iterator[str]:
        """One series: its line, and markers that show their values as a tooltip."""
        places = [(self.across(x), self.down(y)) for x, y in sorted(points)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        yield f'<polyline points="{path}" fill="none" stroke="{_colour(number)}" stroke-width="2"/>'
        for (x, y), (across, down) in zip(sorted(points), places, strict=True):
            yield _marker(across, down, number, f"{x:,g}: {y:,.4g}")


def short(value: float) -> str:
    """10000 → 10 k."""
    for size, suffix in _SUFFIXES:
        if abs(value) >= size:
            return f"{value / size:g}{suffix}"
    return f"{value:.6g}"


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def _marker(x: float, y: float, number: int, tip: str) -> str:
    inside = f'fill="{_colour(number)}"><title>{escape(tip)}</title>'
    match _MARKERS[number % len(_MARKERS)]:
        case "circle":
            return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" {inside}</circle>'
        case "square":
            return f'<rect x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7" {inside}</rect>'
    return f'<path d="M{x:.1f},{y - 5:.1f} l5,9 h-10 z" {inside}</path>'


def _legend(name: str, number: int) -> Iterator[str]:
    y = HEIGHT + _LEGEND_ROW * number
    yield _line(_LEFT, y, _LEFT + 24, y, _colour(number))
    yield _marker(_LEFT + 12, y, number, name)
    yield _text(_LEFT + 32, y + 4.5, name, "")


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _text(x: float, y: float, text: str, more: str) -> str:
    place = "" if "transform" in more else f'x="{x:.1f}" y="{y:.1f}" '
    return f"<text {place}{more}>{escape(text)}</text>"
