"""What is shown: rows of targets and the fleet's facts, from looks at one or more replicas. Pure.

replica ──GET /fleet──> Fleet ┐
replica ──GET /fleet──> Fleet ┼──> Look ──since the look before──> View: Facts, Rows ──arranged──> the table
replica ──── an error ────────┘
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvrouter.dashboard.fleet import Fleet, TargetRow, Times
from kvrouter.top.settings import Column

Key = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class Look:
    """The answers of one moment, by URL: a fleet, or why there is none."""

    at_s: float
    answers: Mapping[str, Fleet | str]

    @property
    def fleets(self) -> dict[str, Fleet]:
        return {url: one for url, one in self.answers.items() if isinstance(one, Fleet)}


@dataclass(frozen=True, slots=True)
class Row:
    """One target. Load as its first replica has it; answers are those of all replicas together."""

    fact: TargetRow
    rate: float | None
    """Answers a second since the look before; None: there was none."""
    ttft_s: float | None
    """Mean of the first bytes since the look before; of all, if there were none."""
    answers: int
    errors: int
    differs: str
    """How the replicas disagree about it; empty: they do not, or were not asked at one frame."""

    @property
    def key(self) -> Key:
        return _key(self.fact)

    @property
    def name(self) -> str:
        return f"{self.fact.worker}/{self.fact.rank}"

    @property
    def state(self) -> str:
        return self.fact.state if self.fact.eligible or self.fact.state != "up" else "not eligible"


@dataclass(frozen=True, slots=True)
class Facts:
    """The fleet in one line. Shares are of prompt tokens, since the look before."""

    requests_per_s: float | None
    tokens_per_s: float | None
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    cached: Mapping[str, float]
    later_s: float | None
    """Regret: how much later than the earliest target the chosen ones were predicted to be, on average."""
    failed: int


@dataclass(frozen=True, slots=True)
class View:
    facts: Facts
    rows: Sequence[Row]
    problems: Sequence[str]
    """Replicas that do not answer, or disagree, and problems of pools."""


def view(look: Look, before: Look | None) -> View:
    """What the look shows, beside the look before."""
    seconds = look.at_s - before.at_s if before is not None else 0.0
    rows: dict[Key, list[tuple[TargetRow, TargetRow | None]]] = {}
    for url, fleet in look.fleets.items():
        old = before.fleets.get(url) if before is not None else None
        known = {_key(row): row for row in old.targets} if old is not None and _is_same(old, fleet) else {}
        for row in fleet.targets:
            rows.setdefault(_key(row), []).append((row, known.get(_key(row))))
    count = len(look.fleets)
    made = [_row(pairs, seconds, count) for pairs in rows.values()]
    return View(_facts(look, before, seconds), made, _problems(look))


def _key(row: TargetRow) -> Key:
    return row.pool, row.worker, row.rank


def _is_same(old: Fleet, new: Fleet) -> bool:
    """Whether both are of one life of the replica, so that counters can be subtracted."""
    return (old.router_id, old.started_s) == (new.router_id, new.started_s)


def _row(pairs: Sequence[tuple[TargetRow, TargetRow | None]], seconds: float, replicas: int) -> Row:
    fact = pairs[0][0]
    known = [(new, old) for new, old in pairs if old is not None]
    first_bytes = sum(new.ttft_count - old.ttft_count for new, old in known)
    spent_s = sum(new.ttft_sum_s - old.ttft_sum_s for new, old in known)
    if first_bytes <= 0:
        first_bytes, spent_s = (
            sum(new.ttft_count for new, _ in pairs),
            sum(new.ttft_sum_s for new, _ in pairs),
        )
    ended = sum(new.answers - old.answers for new, old in known)
    return Row(
        fact,
        rate=max(0, ended) / seconds if known and seconds > 0 else None,
        ttft_s=spent_s / first_bytes if first_bytes > 0 else None,
        answers=sum(new.answers for new, _ in pairs),
        errors=sum(new.errors for new, _ in pairs),
        differs=_difference([new for new, _ in pairs], replicas),
    )


def _difference(facts: Sequence[TargetRow], replicas: int) -> str:
    if len(facts) < replicas:
        return f"known to {len(facts)} of {replicas} replicas"
    if len({(one.state, one.eligible) for one in facts}) > 1:
        return "replicas see different states"
    at_one_frame: dict[int | None, set[str]] = {}
    for one in facts:
        at_one_frame.setdefault(one.seq, set()).add(one.digest)
    if any(len(digests) > 1 for seq, digests in at_one_frame.items() if seq is not None):
        return "replicas hold different blocks"
    return ""


def _facts(look: Look, before: Look | None, seconds: float) -> Facts:
    pairs = [
        (new, old)
        for url, new in look.fleets.items()
        if before is not None and (old := before.fleets.get(url)) is not None and _is_same(old, new)
    ]
    failed = sum(fleet.traffic.failed for fleet in look.fleets.values())
    if not pairs or seconds <= 0:
        return Facts(None, None, None, None, {}, None, failed)
    times = [_since(new.traffic.ttft, old.traffic.ttft) for new, old in pairs]
    bounds = pairs[0][0].traffic.ttft.bounds_s
    counts = [sum(column) for column in zip(*times, strict=True)]
    requests = sum(new.traffic.requests - old.traffic.requests for new, old in pairs)
    tokens = sum(new.traffic.output_tokens - old.traffic.output_tokens for new, old in pairs)
    decisions = _pools(pairs, lambda pool: pool.ttft_decisions)
    later_s = _pools(pairs, lambda pool: pool.later_s)
    prompt = _pools(pairs, lambda pool: pool.reusable_tokens)
    cached = {}
    for cache in ("chosen", "best", "pooled"):
        uncached = _pools(pairs, lambda pool, cache=cache: pool.uncached_tokens.get(cache, 0))
        if prompt > 0:
            cached[cache] = min(1.0, max(0.0, 1 - uncached / prompt))
    return Facts(
        max(0, requests) / seconds,
        max(0, tokens) / seconds,
        quantile(0.5, bounds, counts),
        quantile(0.9, bounds, counts),
        cached,
        later_s / decisions if decisions > 0 else None,
        failed,
    )


def _pools(pairs: Iterable[tuple[Fleet, Fleet]], amount: Callable[..., float]) -> float:
    """How much an amount of all pools has grown."""
    return sum(sum(map(amount, new.pools)) - sum(map(amount, old.pools)) for new, old in pairs)


def _since(new: Times, old: Times) -> list[int]:
    same = len(new.counts) == len(old.counts)
    return [max(0, one - other) for one, other in zip(new.counts, old.counts, strict=True)] if same else []


def quantile(share: float, bounds: Sequence[float], counts: Sequence[int]) -> float | None:
    """As Prometheus's histogram_quantile: linear within a bucket; None without observations."""
    rank, below = share * sum(counts), 0
    if not rank:
        return None
    lower = 0.0
    for bound, count in zip((*bounds, math.inf), counts, strict=False):
        if count and below + count >= rank:
            return lower if bound == math.inf else lower + (bound - lower) * (rank - below) / count
        below, lower = below + count, bound if bound != math.inf else lower
    return lower


def _problems(look: Look) -> list[str]:
    found = [f"{url}: {one}" for url, one in look.answers.items() if isinstance(one, str)]
    fleets = look.fleets
    ids = {fleet.router_id for fleet in fleets.values()}
    for url, fleet in fleets.items():
        if missing := ids - {one.router_id for one in fleet.replicas}:
            found.append(f"{url} does not hear {', '.join(sorted(missing))}")
        found += [f"{url}: {reason}" for reason in fleet.reasons]
    if len({fleet.revision for fleet in fleets.values()}) > 1:
        found.append("the replicas route by different revisions of POST /routing")
    found += dict.fromkeys(
        text for fleet in fleets.values() for pool in fleet.pools for text in pool.problems
    )
    return found


_ORDER: dict[Column, Callable[[Row], Any]] = {
    "target": lambda row: row.name,
    "state": lambda row: (row.fact.eligible and not row.fact.problems, row.state),
    "requests": lambda row: -row.fact.requests,
    "waiting": lambda row: -(row.fact.waiting or 0),
    "charged": lambda row: -row.fact.charged_prefill_tokens,
    "usage": lambda row: -(row.fact.kv_usage or 0.0),
    "blocks": lambda row: -row.fact.blocks,
    "ttft": lambda row: -(row.ttft_s or 0.0),
    "rate": lambda row: -(row.rate or 0.0),
    "errors": lambda row: -row.errors,
}


def arranged(rows: Iterable[Row], sort: Column, text: str, *, is_reversed: bool = False) -> list[Row]:
    """The rows that contain the text, in order: the greatest first, names and states from the least."""
    wanted = text.casefold()
    kept = [row for row in rows if wanted in _searched(row)]
    return sorted(kept, key=lambda row: (_ORDER[sort](row), row.name), reverse=is_reversed)


def _searched(row: Row) -> str:
    return " ".join([row.name, row.fact.pool, row.state, row.differs, *row.fact.problems]).casefold()
