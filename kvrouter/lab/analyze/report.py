"""What is shown of an analysis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import accumulate
from typing import Any

from kvrouter.lab.analyze.analysis import Analysis
from kvrouter.lab.analyze.apart import Apart
from kvrouter.lab.analyze.guide import Advice
from kvrouter.lab.page import Chart, Series, cdf
from kvrouter.lab.report import Section

# Seconds that the text names.
_AGES_S = (1, 10, 60, 300, 900, 3600)
# Prefixes in the text.
_SHOWN = 10


def sections(found: Analysis, advice: Sequence[Advice]) -> list[Section]:
    """What was read, the figures in order, then the rules of the tuning guide."""
    lists = [[text for text in (one.rule, one.figure, one.sentence, one.flags) if text] for one in advice]
    return [
        Section("", notes=[summary(found)]),
        _lengths(found),
        _hit_rates(found),
        _sizes(found),
        _core(found),
        _breadth(found),
        _memory(found),
        Section("What the tuning guide makes of it", lists=lists),
    ]


def summary(found: Analysis) -> str:
    """What was read."""
    fleet = found.fleet
    pace = f", {found.requests / found.span_s:.2f}/s" if found.span_s else ""
    return (
        f"{found.source}: {found.requests:,} requests in {found.span_s:,.0f} s{pace}, "
        f"{found.prompt_tokens / 1e6:,.1f} M prompt tokens. Fleet: {fleet.workers} workers × "
        f"{fleet.blocks_each:,} blocks of {fleet.block_size} tokens."
    )


def as_json(found: Analysis, advice: Sequence[Advice], apart: Apart | None) -> dict[str, Any]:
    """All figures."""
    body: dict[str, Any] = asdict(found) | {"guide": [asdict(one) for one in advice]}
    body["apart"] = None if apart is None else asdict(apart) | {"pays": apart.pays}
    for lengths in filter(None, (body["input"], body["output"])):
        del lengths["counts"]  # one number for each length that occurs
    return body


def _lengths(found: Analysis) -> Section:
    known = {"input": found.input, "output": found.output}
    rows = [
        [name, f"{one.p50:,}", f"{one.p90:,}", f"{one.p99:,}", f"{one.mean:,.0f}"]
        for name, one in known.items()
        if one is not None
    ]
    notes = [] if found.output is not None else ["Output lengths are not known."]
    lines = [
        cdf(name, one.counts.keys(), one.counts.values()) for name, one in known.items() if one is not None
    ]
    chart = Chart("Lengths", lines, "tokens", "share of the requests", log_x=True)
    return Section("Lengths, in tokens", ["", "p50", "p90", "p99", "mean"], rows, notes, charts=[chart])


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
    notes = [note] if finer else []
    megatokens = [found.fleet.tokens * multiple / 1e6 for multiple in rates.by_cache_size]
    pooled = Series("one pooled cache", megatokens, [*rates.by_cache_size.values()], "lines+markers")
    endless = Series("endless cache", [megatokens[0], megatokens[-1]], [rates.endless] * 2)
    chart = Chart("Hit rate by size of the cache", [pooled, endless], "M tokens", "hit rate", log_x=True)
    return Section("Hit rate by size", ["", "cached"], [*blocks, *caches], notes, charts=[chart])


def _core(found: Analysis) -> Section:
    core = found.core
    about = "about " if core.is_estimate else ""
    rows = [
        [f"nodes (blocks of {core.id_tokens} tokens)", f"{about}{core.nodes:,} of {core.distinct:,}"],
        ["depth p50 / p90 / most, tokens", f"{core.depth_p50:,} / {core.depth_p90:,} / {core.depth_max:,}"],
        ["depth / ISL p50 / p90", f"{core.ratio_p50:.3f} / {core.ratio_p90:.3f}"],
    ]
    ratios = Series("requests", core.ratios, [percent / 100 for percent in range(101)])
    chart = Chart("Depth of the core tree / input length", [ratios], "depth / ISL", "share of the requests")
    heading = "Core prefix tree: blocks visited at least twice"
    return Section(heading, ["", ""], rows, charts=[chart])


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
    shares = [one.share for one in breadth.top]
    labels = [f"{one.requests:,} requests, {one.tokens:,} tokens" for one in breadth.top]
    bars = Series("share", [f"{place}" for place in range(1, len(shares) + 1)], shares, "bars", labels)
    chart = Chart("Largest prefixes", [bars], "rank", "share of requests")
    head = ["", "share", "requests", "tokens in common"]
    return Section("Breadth: what prompts begin with", head, rows, notes, charts=[chart])


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
    hits = Series("hits", [*found.hits_by_age], [*accumulate(found.hits_by_age.values())])
    chart = Chart("Hits by age", [hits], "seconds since the last use", "share of the hits")
    return Section("Working set and ages", ["", ""], rows, [f"{note}."], charts=[chart])


def _span(seconds: int) -> str:
    if seconds < 60:
        return f"{seconds} s"
    return f"{seconds / 60:,.0f} min" if seconds < 3600 else f"{seconds / 3600:,.1f} h".replace(".0 h", " h")
