"""A few lines through points as a static SVG file, without dependencies: x logarithmic, y from 0."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT, _LEGEND_ROW = 720, 420, 18
_LEFT, _RIGHT, _TOP, _BOTTOM = 78, 696, 48, 362
_COLOURS = ("#0b62a4", "#d1495b", "#2e8b57", "#b8860b", "#6a4c93", "#3b3b3b")

Point = tuple[float, float]


def write_plot(
    path: Path, title: str, x_label: str, y_label: str, series: Mapping[str, Sequence[Point]]
) -> None:
    """One line for each name. Raises ValueError if there are no points."""
    points = [point for line in series.values() for point in line]
    if not points:
        raise ValueError(f"{path.name}: no points to plot")
    xs, ys = _log_ticks([x for x, _ in points]), _linear_ticks([y for _, y in points])
    height, middle = _HEIGHT + _LEGEND_ROW * len(series), 'text-anchor="middle"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}"'
        f' height="{height}" font-family="system-ui, sans-serif" font-size="13" fill="#222">',
        f'<title>{escape(title)}</title><rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
        _text(_WIDTH / 2, 26, title, f'{middle} font-size="16" font-weight="600"'),
        *(_line(_across(x, xs), _TOP, _across(x, xs), _BOTTOM, "#ddd") for x in xs),
        *(_text(_across(x, xs), _BOTTOM + 18, f"{x:,g}", middle) for x in xs),
        *(_line(_LEFT, _down(y, ys), _RIGHT, _down(y, ys), "#ddd") for y in ys),
        *(_text(_LEFT - 8, _down(y, ys) + 4.5, f"{y:.6g}", 'text-anchor="end"') for y in ys),
        _line(_LEFT, _BOTTOM, _RIGHT, _BOTTOM, "#222"),
        _line(_LEFT, _TOP, _LEFT, _BOTTOM, "#222"),
        _text((_LEFT + _RIGHT) / 2, _HEIGHT - 14, x_label, middle),
        _text(0, 0, y_label, f'{middle} transform="translate(18 {(_TOP + _BOTTOM) / 2}) rotate(-90)"'),
    ]
    for number, (name, line) in enumerate(series.items()):
        places = [(_across(x, xs), _down(y, ys), f"{x:,g}: {y:,.4g}") for x, y in sorted(line)]
        parts += _series(name, places, number)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


def _log_ticks(values: Sequence[float]) -> list[float]:
    """1, 2 and 5 times powers of ten, from the last below all values to the first above."""
    if min(values) <= 0:
        raise ValueError(f"a logarithmic axis cannot show {min(values):g}")
    powers = range(math.floor(math.log10(min(values))) - 1, math.ceil(math.log10(max(values))) + 2)
    steps = [m * 10.0**e for e in powers for m in (1, 2, 5)]
    first = max(step for step in steps if step <= min(values) * (1 + 1e-9))
    last = min(step for step in steps if step >= max(values) * (1 - 1e-9) and step > first)
    return [step for step in steps if first <= step <= last]


def _linear_ticks(values: Sequence[float]) -> list[float]:
    """Round values from 0 to the first above all."""
    high = max(0.0, *values)
    power = 10.0 ** math.floor(math.log10(high / 6 or 1.0))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= (high / 6) * (1 - 1e-9))
    return [step * number for number in range((math.ceil(high / step) or 1) + 1)]


def _across(x: float, ticks: Sequence[float]) -> float:
    return _LEFT + math.log(x / ticks[0]) / math.log(ticks[-1] / ticks[0]) * (_RIGHT - _LEFT)


def _down(y: float, ticks: Sequence[float]) -> float:
    return _BOTTOM - y / ticks[-1] * (_BOTTOM - _TOP)


def _series(name: str, places: Sequence[tuple[float, float, str]], number: int) -> Iterator[str]:
    """Its line, markers that show their values as a tooltip, and its row of the legend."""
    colour, y = _COLOURS[number % len(_COLOURS)], _HEIGHT + _LEGEND_ROW * number
    path = " ".join(f"{across:.1f},{down:.1f}" for across, down, _ in places)
    yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
    yield _line(_LEFT, y, _LEFT + 24, y, colour)
    for across, down, tip in [*places, (_LEFT + 12, y, name)]:
        yield _marker(across, down, number, f'fill="{colour}"><title>{escape(tip)}</title>')
    yield _text(_LEFT + 32, y + 4.5, name, "")


def _marker(x: float, y: float, number: int, inside: str) -> str:
    """Another one for each series, for readers who cannot distinguish the colours."""
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" {inside}</circle>',
        f'<rect x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7" {inside}</rect>',
        f'<path d="M{x:.1f},{y - 5:.1f} l5,9 h-10 z" {inside}</path>',
    )[number % 3]


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _text(x: float, y: float, text: str, more: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(text)}</text>'
