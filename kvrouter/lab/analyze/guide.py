"""The rules of the published tuning guide, as far as a trace's figures decide them.

NVIDIA, "KV Router Performance Tuning", 2025-12-09. It is about Dynamo's earlier router, here mode `kv-score`.
Its rules name no thresholds: those below are this project's, and each sentence comes with its figure, so
that a reader can judge. Where mode `kv` decides what a rule sets by hand, there is nothing to change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvrouter.lab.analyze.analysis import Analysis

# "For smaller models this can exceed a million blocks" (rule 1).
MANY_BLOCKS = 1_000_000
# Rule 1: what memory can win that is worth a sentence, in shares of the prompt tokens.
ROOM = 0.05
# Rule 2: the hit rate and the depth / ISL below which overlap is worth little weight.
LOW_HIT_RATE = 0.1
SHALLOW = 0.1
# Rule 3: buckets hold this share of the requests, the largest at most twice the smallest, and each has a
# choice of workers.
MOST_REQUESTS = 0.8
ALIKE = 2.0
WORKERS_A_BUCKET = 2
# Rule 4: what placement decides, in shares of the prompt tokens, and how uneven work by cache alone may be.
LITTLE = 0.02
SKEWED = 1.2

BLOCKS = "1. Consider the number of KV blocks: with very many, usage needs less weight"
HIT_RATE = "2. Low hit rate, or a core tree that is shallow for the input: less overlap weight"
BREADTH = "3. Equal buckets: a router for each, behind a meta-router. Diverse prompts: prefer overlap"
BALANCE = "4. Latency against throughput: overlap saves work, and may lengthen the tail"
SAMPLING = "5. Temperature: chance keeps a popular prefix from filling one worker"


_KV_SCORE = "with --router-mode kv-score: "


@dataclass(frozen=True, slots=True)
class Advice:
    """`flags` empty: nothing to change."""

    rule: str
    figure: str
    sentence: str
    flags: str = ""


def advice_of(found: Analysis) -> list[Advice]:
    """One for each rule that the figures decide, in the guide's order."""
    rules = (_block_allocation, _hit_rate, _breadth, _balance, _sampling)
    return [one for rule in rules for one in rule(found)]


def _block_allocation(found: Analysis) -> Iterator[Advice]:
    fleet, rates, distinct = found.fleet, found.rates, found.working_set.distinct
    figure = (
        f"{fleet.workers} × {fleet.blocks_each:,} blocks = {fleet.tokens / 1e6:,.2f} M tokens; distinct"
        f" blocks of the trace: {distinct / 1e6:,.2f} M tokens, {distinct / fleet.tokens:.2f} × as many"
    )
    fits = distinct <= fleet.tokens
    if fits or fleet.blocks_each >= MANY_BLOCKS:
        why = "hold every block of the trace" if fits else f"have {MANY_BLOCKS:,} blocks or more each"
        sentence = (
            f"The caches {why}: they will hardly run full. With mode kv-score give usage less weight. Mode kv"
            " has no such term: nothing to change there."
        )
        yield Advice(BLOCKS, figure, sentence, _KV_SCORE + "--kv-gpu-cache-usage-weight 0.2")
        return
    sentence = "The caches will run full, so usage keeps its weight: nothing to change."
    if rates.endless - rates.pooled >= ROOM:
        most, twice = rates.endless - rates.pooled, rates.by_cache_size[2.0] - rates.pooled
        sentence += (
            f" More memory can find up to {most:.1%} of the prompt tokens more, twice as much {twice:.1%}."
        )
    yield Advice(BLOCKS, figure, sentence)


def _hit_rate(found: Analysis) -> Iterator[Advice]:
    endless, ratio = found.rates.endless, found.core.ratio_p50
    figure = f"endless cache {endless:.1%}; depth / ISL p50 {ratio:.3f}, p90 {found.core.ratio_p90:.3f}"
    if endless >= LOW_HIT_RATE and ratio >= SHALLOW:
        yield Advice(HIT_RATE, figure, "Neither is low: overlap deserves its weight. Nothing to change.")
        return
    low = "The hit rate is low" if endless < LOW_HIT_RATE else "The core tree is shallow"
    sentence = (
        f"{low}. With mode kv-score lower the weight from its 2. Mode kv (weight auto) compares seconds of"
        " prefill, and an overlap that is not there saves none: nothing to change there."
    )
    yield Advice(HIT_RATE, figure, sentence, _KV_SCORE + "--kv-overlap-score-weight 0.5")


def _breadth(found: Analysis) -> Iterator[Advice]:
    breadth, workers = found.breadth, found.fleet.workers
    figure = (
        f"{breadth.prefixes:,} prefixes, as diverse as {breadth.effective:,.0f} equal ones, after"
        f" {breadth.trunk.tokens:,} common tokens; {breadth.alone:.1%} of the requests have none of them"
    )
    largest = breadth.top[0].share if breadth.top else 0.0
    buckets = [one.share for one in breadth.top if one.share * ALIKE >= largest]
    if 2 <= len(buckets) <= workers // WORKERS_A_BUCKET and sum(buckets) >= MOST_REQUESTS:
        blocks = breadth.separating_blocks
        sentence = (
            f"{len(buckets)} buckets of about equal size hold {sum(buckets):.0%} of the requests, and the"
            f" first {blocks} blocks distinguish them: consider a group of workers for each (card label"
            " `group`). Groups leave less choice: compare both in the simulator first."
        )
        flags = f"--router-mode two-stage --stage-one hash --stage-one-blocks {blocks}"
        yield Advice(BREADTH, figure, sentence, flags)
    elif breadth.effective > workers and found.rates.endless >= LOW_HIT_RATE:
        sentence = (
            f"More prefixes than the {workers} workers, and none that dominates: prefer overlap. Mode kv"
            " (weight auto) does: nothing to change."
        )
        yield Advice(BREADTH, figure, sentence)


def _balance(found: Analysis) -> Iterator[Advice]:
    rates = found.rates
    gain = rates.perfect - rates.random
    figure = (
        f"cached with perfect placement {rates.perfect:.1%}, at random {rates.random:.1%}; by cache alone the"
        f" busiest worker computes {rates.perfect_busiest:.2f} × the mean"
    )
    decides = f"Placement decides {gain:.1%} of the prompt tokens"
    if gain < LITTLE:
        sentence = (
            f"{decides}: overlap can win no more. With mode kv-score weigh queues higher. Mode kv needs no"
            " change."
        )
        yield Advice(BALANCE, figure, sentence, _KV_SCORE + "--kv-waiting-requests-weight 2")
    elif rates.perfect_busiest >= SKEWED:
        sentence = (
            f"{decides}, but by cache alone the work is uneven: a high fixed weight costs latency."
            " Weight auto of mode kv counts the wait: nothing to change."
        )
        yield Advice(BALANCE, figure, sentence)
    else:
        sentence = (
            f"{decides}, and the work stays even: overlap costs little latency. Weight auto of mode kv counts"
            " both in seconds: nothing to change."
        )
        yield Advice(BALANCE, figure, sentence)


def _sampling(found: Analysis) -> Iterator[Advice]:
    fair = 1 / found.fleet.workers
    popular = [one for one in (found.breadth.trunk, *found.breadth.top) if one.tokens and one.share > fair]
    if not popular:
        return
    figure = (
        f"{popular[0].share:.0%} of the requests begin with the same {popular[0].tokens:,} tokens; a worker's"
        f" share of the requests is {fair:.1%}"
    )
    sentence = (
        "With mode kv-score at temperature 0 the worker that has this prefix is chosen again and again: set a"
        " temperature. Mode kv counts the wait there: nothing to change."
    )
    yield Advice(SAMPLING, figure, sentence, _KV_SCORE + "--router-temperature 0.5")
