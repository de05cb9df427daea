"""Draws a view with rich. Only the rows that fit are drawn: a fleet has thousands of targets."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvrouter.observe.top.settings import COLUMNS, Column
from kvrouter.observe.top.view import Facts, Key, TopRow, TopView, arranged

HELP = """\
↑ ↓ j k        select a target            PgUp PgDn  a page
s              sort by the next column    r          the other direction
/              filter; Enter keeps it, Esc drops it
Enter          the selected target's details, or none
?              this help                  q          end"""

# Left out first on narrow terminals.
_LESS_NEEDED: Sequence[Column] = (
    "usage", "errors", "blocks", "rate", "waiting", "charged", "ttft", "state",
)  # fmt: skip
_WIDTH_OF_A_COLUMN = 13
# Of the terminal's lines, so that targets are left to see.
_MOST_OF_HEAD = 3
_MOST_OF_DETAIL = 2
# Facts of the fleet on a line of `--once`: 80 columns have room for them.
_ON_A_LINE = 4
# Does not break a line.
_JOINED = "\u00a0"


@dataclass(slots=True)
class Choices:
    """What the keys have chosen."""

    sort: Column
    text: str = ""
    is_reversed: bool = False
    selected: int = 0
    chosen: Key | None = None
    """The selected target: rows change their places."""
    shows_detail: bool = False
    shows_help: bool = False
    is_typing: bool = False
    rows: Sequence[TopRow] = field(default_factory=list)
    """The rows of the last drawing, in order."""

    def choose(self) -> None:
        """Choose the target of the selected row."""
        self.selected = max(0, min(self.selected, len(self.rows) - 1))
        self.chosen = self.rows[self.selected].key if self.rows else None


def draw(view: TopView, choices: Choices, *, width: int, height: int) -> RenderableType:
    """The whole screen."""
    choices.rows = arranged(view.rows, choices.sort, choices.text, is_reversed=choices.is_reversed)
    _select(choices)
    problems = [(f"! {text}", "bold red") for text in view.problems]
    head = _wrapped(
        [("   ".join(_facts(view.facts)), "bold"), *problems], width, max(1, height // _MOST_OF_HEAD)
    )
    foot = _foot(choices, len(view.rows), width, height)
    room = height - len(head) - len(foot) - 2  # of the table's head
    first = max(0, min(choices.selected - room // 2, len(choices.rows) - room))
    shown = choices.rows[first : first + max(1, room)]
    return Group(*head, _table(shown, choices, width, choices.selected - first), *foot)


def _select(choices: Choices) -> None:
    """Find the chosen target again; if it is gone, take the row in its place."""
    keys = [row.key for row in choices.rows]
    if choices.chosen in keys:
        choices.selected = keys.index(choices.chosen)
    choices.choose()


def _printable(text: str) -> str:
    """Names come from agents: no control characters reach the terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _wrapped(texts: Sequence[tuple[str, str]], width: int, most: int) -> list[Text]:
    """Texts with their styles as lines of the terminal; an ellipsis stands where more would follow."""
    lines = [(line, style) for text, style in texts for line in textwrap.wrap(text, width) or [""]]
    if len(lines) > most:
        line, style = lines[most - 1]
        lines[most - 1 :] = [(line[: width - 1] + "…", style)]
    return [
        Text(_printable(line.replace(_JOINED, " ")), style, no_wrap=True, overflow="ellipsis")
        for line, style in lines
    ]


def plain(view: TopView, sort: Column, text: str) -> RenderableType:
    """Everything, without a screen."""
    rows, choices, facts = arranged(view.rows, sort, text), Choices(sort), _facts(view.facts)
    problems = [Text(_printable(f"! {one}")) for one in view.problems]
    return Group(
        *[
            Text("   ".join(facts[at : at + _ON_A_LINE]).replace(_JOINED, " "), "bold")
            for at in (0, _ON_A_LINE)
        ],
        *problems,
        _table(rows, choices, None, -1),
        *_marks(rows),
    )


def _marks(rows: Sequence[TopRow]) -> list[Text]:
    texts = [(row.name, text) for row in rows for text in (row.differs, *row.fact.problems) if text]
    return [Text(_printable(f"! {name}: {text}")) for name, text in texts]


def _facts(facts: Facts) -> list[str]:
    parts = [
        f"requests/s {_number(facts.requests_per_s)}",
        f"tokens/s {_number(facts.tokens_per_s)}",
        f"TTFT p50 {_seconds(facts.ttft_p50_s)} p90 {_seconds(facts.ttft_p90_s)}",
        f"between tokens p90 {_seconds(facts.between_p90_s)}",
        f"tokens/request {_number(facts.output_tokens)}",
        "cached " + (" ".join(f"{name} {share:.0%}" for name, share in facts.cached.items()) or "-"),
        f"regret {_seconds(facts.later_s)}",
        f"failed {'-' if facts.failed is None else facts.failed}",
    ]
    return [part.replace(" ", _JOINED) for part in parts]


def _table(rows: Sequence[TopRow], choices: Choices, width: int | None, selected: int) -> Table:
    columns = list(COLUMNS)
    for column in _LESS_NEEDED:
        if width is not None and len(columns) * _WIDTH_OF_A_COLUMN > width:
            columns.remove(column)
    table = Table(box=None, pad_edge=False, expand=width is not None, header_style="bold")
    for column in columns:
        mark = (" ▲" if choices.is_reversed else " ▼") if column == choices.sort else ""
        table.add_column(
            _CELLS[column][0] + mark,
            justify="left" if column in {"target", "state"} else "right",
            no_wrap=True,
            overflow="ellipsis",
        )
    for number, row in enumerate(rows):
        style = "red" if not row.fact.eligible else "yellow" if row.fact.problems or row.differs else ""
        table.add_row(
            *[Text(_printable(_CELLS[column][1](row))) for column in columns],
            style=f"{style} reverse" if number == selected else style,
        )
    return table


_CELLS: dict[Column, tuple[str, Callable[[TopRow], str]]] = {
    "target": ("target", lambda row: ("! " if row.fact.problems or row.differs else "") + row.name),
    "state": ("state", lambda row: row.state + row.part),
    "requests": ("in flight", lambda row: str(row.fact.requests)),
    "waiting": ("engine run+wait", lambda row: _load(row.fact.running, row.fact.waiting)),
    "charged": ("prefill tokens", lambda row: f"{row.fact.charged_prefill_tokens:,}"),
    "usage": ("KV used", lambda row: "-" if row.fact.kv_usage is None else f"{row.fact.kv_usage:.0%}"),
    "blocks": ("cached blocks", lambda row: f"{row.fact.blocks:,}"),
    "ttft": ("TTFT", lambda row: _seconds(row.ttft_s)),
    "rate": ("answers/s", lambda row: _number(row.rate)),
    "errors": ("errors", lambda row: str(row.errors)),
}


def _load(running: int | None, waiting: int | None) -> str:
    return "-" if running is None else f"{running}+{waiting or 0}"


def _foot(choices: Choices, total: int, width: int, height: int) -> list[Text]:
    if choices.shows_help:
        return [Text(line) for line in HELP.splitlines()]
    lines = []
    if choices.shows_detail and choices.rows:
        texts = [(text, "") for text in _detail(choices.rows[choices.selected])]
        lines += _wrapped(texts, width, max(1, height // _MOST_OF_DETAIL))
    if choices.is_typing:
        return [*lines, Text(f"filter: {choices.text}▏", "bold")]
    kept = f"{len(choices.rows)} of {total} targets" + (f" with {choices.text!r}" if choices.text else "")
    return [*lines, Text(f"{kept}   ? help   q end", "dim", no_wrap=True, overflow="ellipsis")]


def _detail(row: TopRow) -> list[str]:
    fact = row.fact
    feed = (
        "its KV events are not followed"
        if fact.lag_frames is None
        else f"KV feed {'in step' if fact.live else 'NOT in step'}, frame {fact.seq}, lag {fact.lag_frames}, "
        f"last message {_seconds(fact.stale_s)} ago"
    )
    cached = (
        f"cached tokens predicted {fact.predicted_tokens:,}, reported {fact.reported_tokens:,}"
        if fact.predicted_tokens is not None and fact.reported_tokens is not None
        else "no answer of it was compared"
    )
    capacity = f" of {fact.total_blocks:,}" if fact.total_blocks else ""
    return [
        "",
        f"{row.name}{row.part} {fact.kv_connector[:16]}   {fact.engine}   {fact.url}   pool {fact.pool}",
        f"active blocks {fact.active_blocks:,}{capacity}; {feed}",
        f"{row.answers:,} answers, {row.errors:,} errors; {cached}",
        *[f"! {text}" for text in (row.differs, *fact.problems) if text],
    ]


def _seconds(amount: float | None) -> str:
    if amount is None:
        return "-"
    return f"{amount:.2f} s" if amount >= 1 else f"{amount * 1000:.0f} ms"


def _number(amount: float | None) -> str:
    if amount is None:
        return "-"
    return f"{amount:,.0f}" if amount >= 100 else f"{amount:.1f}"
