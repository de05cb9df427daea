"""An analysis as text, JSON, and a page with plots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from kvrouter.errors import ConfigError
from kvrouter.lab.analyze.analysis import Analysis, Lengths
from kvrouter.lab.analyze.guide import Advice
from kvrouter.lab.simulate.report_html import Page, Series, cdf

# Seconds that the text names.
_AGES_S = (1, 10, 60, 300, 900, 3600)
_PIPE_WIDTH = 120
# Prefixes in the text.
_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Section:
    """A heading, a table whose first column is text, and what there is to say about it."""

    heading: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


def sections(found: Analysis) -> list[Section]:
    """The figures, in order."""
    return [_lengths(found), _hit_rates(found), _sizes(found), _core(found), _breadth(found), _memory(found)]


def summary(found: Analysis) -> str:
    """What was read."""
    fleet = found.fleet
    pace = f", {found.requests / found.span_s:.2f}/s" if found.span_s else ""
    return (
        f"{found.source}: {found.requests:,} requests in {found.span_s:,.0f} s{pace}, "
        f"{found.prompt_tokens / 1e6:,.1f} M prompt tokens. Fleet: {fleet.workers} workers × "
        f"{fleet.blocks_each:,} blocks of {fleet.block_size} tokens."
    )


def show(found: Analysis, advice: Sequence[Advice]) -> None:
    """Print the figures, then the rules."""
    console = Console()
    if not console.is_terminal:  # rich takes 80 columns for a pipe, and would cut off the figures
        console.width = _PIPE_WIDTH
    console.print(summary(found), highlight=False)
    for section in sections(found):
        console.print(f"\n{section.heading}", style="bold", highlight=False)
        table = Table(box=SIMPLE, pad_edge=False, show_edge=False)
        for place, name in enumerate(section.head):
            table.add_column(name, justify="right" if place else "left", no_wrap=True)
        for row in section.rows:
            table.add_row(*row)
        console.print(table)
        for note in section.notes:
            console.print(note, highlight=False)
    console.print("\nWhat the tuning guide makes of it", style="bold", highlight=False)
    for one in advice:
        for line in _advice_lines(one):
            console.print(line, highlight=False, markup=False)


def write_json(path: Path, found: Analysis, advice: Sequence[Advice]) -> None:
    """Write all figures. Raises ConfigError."""
    body: dict[str, Any] = asdict(found) | {"guide": [asdict(one) for one in advice]}
    for lengths in filter(None, (body["input"], body["output"])):
        del lengths["counts"]  # one number for each length that occurs
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(body), indent=2) + b"\n")
    except OSError as error:
        raise ConfigError(f"--json {path}: {error.strerror}") from None


def write_html(page: Page, path: Path, found: Analysis, advice: Sequence[Advice]) -> None:
    """Fill the page and write it. Raises ConfigError."""
    page.paragraph(summary(found))
    for section in sections(found):
        page.heading(section.heading)
        page.table(section.head, section.rows)
        for note in section.notes:
            page.paragraph(note)
        _plot(page, section.heading, found)
    page.heading("What the tuning guide makes of it")
    for one in advice:
        page.items(_advice_lines(one))
    page.write(path)


def _plot(page: Page, heading: str, found: Analysis) -> None:
    rates = found.rates
    if heading == _LENGTHS:
        known = {"input": found.input, "output": found.output}
        lines = [_length_cdf(name, lengths) for name, lengths in known.items() if lengths is not None]
        page.chart("Lengths", lines, x="tokens", y="share of the requests", log_x=True)
    elif heading == _SIZES:
        megatokens = [found.fleet.tokens * multiple / 1e6 for multiple in rates.by_cache_size]
        pooled = Series("one pooled cache", megatokens, [*rates.by_cache_size.values()], "lines+markers")
        endless = Series("endless cache", [megatokens[0], megatokens[-1]], [rates.endless] * 2)
        page.chart("Hit rate by size of the cache", [pooled, endless], x="M tokens", y="hit rate", log_x=True)
    elif heading == _CORE:
        shares = [percent / 100 for percent in range(101)]
        page.chart(
            "Depth of the core tree / input length",
            [Series("requests", found.core.ratios, shares)],
            x="depth / ISL",
            y="share of the requests",
        )
    elif heading == _BREADTH:
        shares = [one.share for one in found.breadth.top]
        names = [f"{place}" for place in range(1, len(shares) + 1)]
        labels = [f"{one.requests:,} requests, {one.tokens:,} tokens" for one in found.breadth.top]
        page.chart(
            "Largest prefixes",
            [Series("share", names, shares, "bars", labels)],
            x="rank",
            y="share of requests",
        )
    elif heading == _MEMORY:
        ages = [*found.hits_by_age]
        shares = [*accumulate(found.hits_by_age.values())]
        page.chart(
            "Hits by age",
            [Series("hits", ages, shares)],
            x="seconds since the last use",
            y="share of the hits",
        )


def _length_cdf(name: str, lengths: Lengths) -> Series:
    return cdf(name, lengths.counts.keys(), lengths.counts.values())


_LENGTHS = "Lengths, in tokens"
_SIZES = "Hit rate by size"
_CORE = "Core prefix tree: blocks visited at least twice"
_BREADTH = "Breadth: what prompts begin with"
_MEMORY = "Working set and ages"


def _lengths(found: Analysis) -> Section:
    known = {"input": found.input, "output": found.output}
    rows = [
        [name, f"{one.p50:,}", f"{one.p90:,}", f"{one.p99:,}", f"{one.mean:,.0f}"]
        for name, one in known.items()
        if one is not None
    ]
    notes = [] if found.output is not None else ["Output lengths are not known."]
    return Section(_LENGTHS, ["", "p50", "p90", "p99", "mean"], rows, notes)


def _hit_rates(found: Analysis) -> Section:
    rates = found.rates
    rows = [
        ["one endless cache", f"{rates.endless:.1%}"],
        ["one pooled cache of the fleet's size", f"{rates.pooled:.1%}"],
        ["a cache for each worker, perfect placement", f"{rates.perfect:.1%}"],
        ["a cache for each worker, random placement", f"{rates.random:.1%}"],
    ]
    busiest = f"the busiest worker computes {rates.perfect_busiest:.2f} × the mean"
    note = f"Perfect: by cache alone, without queues; {busiest}."
    return Section("Hit rate, of the prompt tokens", ["", "cached"], rows, [note])


def _sizes(found: Analysis) -> Section:
    rates, id_tokens = found.rates, found.core.id_tokens
    blocks = [[f"endless, blocks of {size}", f"{rate:.1%}"] for size, rate in rates.by_block_size.items()]
    caches = [
        [f"pooled, {multiple:g} × the fleet's size", f"{rate:.1%}"]
        for multiple, rate in rates.by_cache_size.items()
    ]
    finer = id_tokens > min(rates.by_block_size)
    note = (
        f"Sharing is known in steps of {id_tokens} tokens: smaller blocks gain only at the ends of prompts."
    )
    return Section(_SIZES, ["", "cached"], [*blocks, *caches], [note] if finer else [])


def _core(found: Analysis) -> Section:
    core = found.core
    about = "about " if core.is_estimate else ""
    rows = [
        [f"nodes (blocks of {core.id_tokens} tokens)", f"{about}{core.nodes:,} of {core.distinct:,}"],
        ["depth p50 / p90 / most, tokens", f"{core.depth_p50:,} / {core.depth_p90:,} / {core.depth_max:,}"],
        ["depth / ISL p50 / p90", f"{core.ratio_p50:.3f} / {core.ratio_p90:.3f}"],
    ]
    return Section(_CORE, ["", ""], rows)


def _breadth(found: Analysis) -> Section:
    breadth = found.breadth
    rows = [
        [f"prefix {place}", f"{one.share:.2%}", f"{one.requests:,}", f"{one.tokens:,}"]
        for place, one in enumerate(breadth.top[:_SHOWN], start=1)
    ]
    rows += [[name, f"{share:.1%}", f"{number:,}", ""] for name, share, number in _class_rows(found)]
    rows.append(["requests without such a prefix", f"{breadth.alone:.1%}", "", ""])
    notes = [
        f"{breadth.trunk.share:.0%} of the requests begin with the same {breadth.trunk.tokens:,} tokens. "
        f"Then they part into {breadth.prefixes:,} prefixes of two requests or more, as diverse as "
        f"{breadth.effective:,.0f} equal ones; the first {breadth.separating_blocks} blocks distinguish them."
    ]
    return Section(_BREADTH, ["", "share", "requests", "tokens in common"], rows, notes)


def _class_rows(found: Analysis) -> Iterator[tuple[str, float, int]]:
    above = ""
    for one in found.breadth.classes:
        name = f"all prefixes of {one.least:.1%} or more" if one.least else "all smaller prefixes"
        if one.prefixes:
            yield f"{name}{above}", one.share, one.prefixes
        above = f", below {one.least:.1%}"


def _memory(found: Analysis) -> Section:
    working = found.working_set
    rows = [
        ["distinct blocks, M tokens", f"{working.distinct / 1e6:,.2f}"],
        ["of these visited again", f"{working.reused / 1e6:,.2f}"],
        ["caches of the fleet", f"{working.capacity / 1e6:,.2f}"],
    ]
    passed = 0.0
    by_age = dict.fromkeys(_AGES_S, 0.0)
    for age_s, share in found.hits_by_age.items():
        passed += share
        by_age.update({limit: passed for limit in _AGES_S if age_s <= limit})
    rows += [
        [f"hits on blocks used in the last {_span(limit)}", f"{share:.1%}"] for limit, share in by_age.items()
    ]
    note = f"The caches are {working.capacity / working.distinct:.2f} × the distinct blocks"
    if working.lifetime_s:
        note += f"; as one, they would hold the blocks of the last {_span(round(working.lifetime_s))}"
    return Section(_MEMORY, ["", ""], rows, [f"{note}."])


def _span(seconds: int) -> str:
    if seconds < 60:
        return f"{seconds} s"
    return f"{seconds / 60:,.0f} min" if seconds < 3600 else f"{seconds / 3600:,.1f} h".replace(".0 h", " h")


def _advice_lines(one: Advice) -> list[str]:
    lines = [one.rule, f"  {one.figure}", f"  {one.sentence}"]
    return [*lines, f"  {one.flags}"] if one.flags else lines
