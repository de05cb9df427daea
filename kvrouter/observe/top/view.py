"""What is shown: rows of targets and the fleet's facts, from the answers of one or more replicas. Pure.

replica ──GET /fleet──> Fleet ──History──┐
replica ──GET /fleet──> Fleet ──History──┼──> Seen, by URL ──view──> View: Facts, Rows ──arranged──> the table
replica ──── an error ───────────────────┘

Rates and means are those of the last minute, or since the first answer if that is shorter.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvrouter.core.wire.heartbeats import Times, Traffic
from kvrouter.observe.document import Fleet, TargetRow
from kvrouter.observe.top.settings import Column

Key = tuple[str, str, int]

WINDOW_S = 60.0
# An answer of 1,000 targets takes about 1 MB: of the window not all are kept.
_KEPT_EACH_S = 5.0
_DIGITS = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True)
class Seen:
    """What a replica has answered last, or why it has not, and an earlier answer in the same life."""

    now: Fleet | str
    before: Fleet | None = None

    @property
    def seconds(self) -> float:
        """Between the two; 0 if there are not two."""
        return self.now.time - self.before.time if self.before and not isinstance(self.now, str) else 0.0


class History:
    """The answers of one replica in the last minute."""

    def __init__(self) -> None:
        self._kept: deque[Fleet] = deque()

    def seen(self, answer: Fleet | str) -> Seen:
        """Take another answer."""
        if isinstance(answer, str):
            return Seen(answer)
        kept = self._kept
        if kept and not (_is_same(kept[0], answer) and kept[-1].time <= answer.time):
            kept.clear()  # it has started again, or its clock was set back: nothing to subtract from
        while kept and answer.time - kept[0].time > WINDOW_S:
            kept.popleft()
        seen = Seen(answer, kept[0] if kept else None)
        if not kept or answer.time - kept[-1].time >= _KEPT_EACH_S:
            kept.append(answer)
        return seen


@dataclass(frozen=True, slots=True)
class TopRow:
    """One target. Load as its first replica has it; answers are those of all replicas together."""

    fact: TargetRow
    rate: float | None
    """Answers a second; None: there was no earlier answer of a replica."""
    ttft_s: float | None
    """Mean of the first bytes; None: there were none."""
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

    @property
    def part(self) -> str:
        """Its role, behind a comma, if it serves only a part of requests."""
        return "" if self.fact.role == "both" else f", {self.fact.role[:16]}"


@dataclass(frozen=True, slots=True)
class Facts:
    """The fleet in one line, of the time between two answers. Shares are of prompt tokens."""

    requests_per_s: float | None = None
    tokens_per_s: float | None = None
    ttft_p50_s: float | None = None
    ttft_p90_s: float | None = None
    between_p90_s: float | None = None
    """Between two tokens of an answer."""
    output_tokens: float | None = None
    """Of a request, on average."""
    cached: Mapping[str, float] = field(default_factory=dict)
    later_s: float | None = None
    """Regret: how much later than the earliest target the chosen ones were predicted to be, on average."""
    failed: int | None = None


@dataclass(frozen=True, slots=True)
class TopView:
    facts: Facts
    rows: Sequence[TopRow]
    problems: Sequence[str]
    """Replicas that do not answer, or disagree, and problems of pools."""


def view(seen: Mapping[str, Seen]) -> TopView:
    """What is shown of the replicas' answers, by URL."""
    fleets = {url: one.now for url, one in seen.items() if isinstance(one.now, Fleet)}
    rows: dict[Key, list[tuple[TargetRow, TargetRow | None, float]]] = {}
    for url, fleet in fleets.items():
        before = seen[url].before
        known = {_key(row): row for row in before.targets} if before is not None else {}
        for row in fleet.targets:
            rows.setdefault(_key(row), []).append((row, known.get(_key(row)), seen[url].seconds))
    made = [_row(facts, len(fleets)) for facts in rows.values()]
    return TopView(_facts(seen.values()), made, _problems(seen, fleets))


def _key(row: TargetRow) -> Key:
    return row.pool, row.worker, row.rank


def _is_same(old: Fleet, new: Fleet) -> bool:
    """Whether both are of one life of the replica, so that counters can be subtracted."""
    return (old.router_id, old.started_s) == (new.router_id, new.started_s)


def _row(facts: Sequence[tuple[TargetRow, TargetRow | None, float]], replicas: int) -> TopRow:
    """One target, of each replica that knows it: its facts now and before, and the seconds between."""
    known = [(now, before, seconds) for now, before, seconds in facts if before is not None and seconds > 0]
    first_bytes = sum(now.ttft_count - before.ttft_count for now, before, _ in known)
    spent_s = sum(now.ttft_sum_s - before.ttft_sum_s for now, before, _ in known)
    rate = sum(max(0, now.answers - before.answers) / seconds for now, before, seconds in known)
    return TopRow(
        facts[0][0],
        rate=rate if known else None,
        ttft_s=max(0.0, spent_s) / first_bytes if first_bytes > 0 else None,
        answers=sum(now.answers for now, _, _ in facts),
        errors=sum(now.errors for now, _, _ in facts),
        differs=_difference([now for now, _, _ in facts], replicas),
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


def _facts(seen: Iterable[Seen]) -> Facts:
    """As the first replica that has answered twice counts it: the requests of all replicas."""
    for one in seen:
        if isinstance(one.now, Fleet) and one.before is not None and one.seconds > 0:
            return _between(_traffic(one.before), _traffic(one.now), one.seconds)
    return Facts()


def _traffic(fleet: Fleet) -> Traffic:
    """Of an older version: only of that replica."""
    return fleet.fleet_traffic or fleet.traffic


def _between(before: Traffic, now: Traffic, seconds: float) -> Facts:
    prompt = now.reusable_tokens - before.reusable_tokens
    decisions = now.ttft_decisions - before.ttft_decisions
    cached: dict[str, float] = {}
    for cache in ("chosen", "best", "pooled") if prompt > 0 else ():
        uncached = now.uncached_tokens.get(cache, 0) - before.uncached_tokens.get(cache, 0)
        # estimated from a sample, and empty after a replica's start: a larger cache has no less
        cached[cache] = min(1.0, max(0.0, 1 - uncached / prompt, *cached.values()))
    requests = max(0, now.requests - before.requests)
    answered = requests - max(0, now.refused - before.refused)
    tokens = max(0, now.output_tokens - before.output_tokens)
    ttft = _counted(before.ttft, now.ttft)
    return Facts(
        requests_per_s=requests / seconds,
        tokens_per_s=tokens / seconds,
        ttft_p50_s=quantile(0.5, now.ttft.bounds_s, ttft),
        ttft_p90_s=quantile(0.9, now.ttft.bounds_s, ttft),
        between_p90_s=quantile(0.9, now.inter_token.bounds_s, _counted(before.inter_token, now.inter_token)),
        output_tokens=tokens / answered if answered > 0 else None,
        cached=cached,
        later_s=(now.later_s - before.later_s) / decisions if decisions > 0 else None,
        failed=max(0, now.failed - before.failed),
    )


def _counted(before: Times, now: Times) -> list[int]:
    return [max(0, one - other) for one, other in zip(now.counts, before.counts, strict=False)]


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


def _problems(seen: Mapping[str, Seen], fleets: Mapping[str, Fleet]) -> list[str]:
    found = [f"{url}: {one.now}" for url, one in seen.items() if isinstance(one.now, str)]
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


_ORDER: dict[Column, Callable[[TopRow], Any]] = {
    "target": lambda row: (),  # by name, as all rows that are equal in a column
    "state": lambda row: (row.fact.eligible and not row.fact.problems, row.state),  # False first: trouble
    "requests": lambda row: -row.fact.requests,
    "waiting": lambda row: -(row.fact.waiting or 0),
    "charged": lambda row: -row.fact.charged_prefill_tokens,
    "usage": lambda row: -(row.fact.kv_usage or 0.0),
    "blocks": lambda row: -row.fact.blocks,
    "ttft": lambda row: -(row.ttft_s or 0.0),
    "rate": lambda row: -(row.rate or 0.0),
    "errors": lambda row: -row.errors,
}


def arranged(rows: Iterable[TopRow], sort: Column, text: str, *, is_reversed: bool = False) -> list[TopRow]:
    """The rows that contain the text, in order: the greatest first, names and states from the least."""
    wanted = text.casefold()
    kept = [row for row in rows if wanted in _searched(row)]
    return sorted(kept, key=lambda row: (_ORDER[sort](row), _natural(row.name)), reverse=is_reversed)


def _natural(name: str) -> list[str | int]:
    """Sorts w2 before w10."""
    return [int(part) if at % 2 else part for at, part in enumerate(_DIGITS.split(name))]


def _searched(row: TopRow) -> str:
    texts = [row.name, row.fact.pool, row.state, row.part, row.differs, *row.fact.problems]
    return " ".join(texts).casefold()
