"""What is measured of a run, and the mean over several seeds."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields

from kvrouter.lab.simulate.fleet import Run
from kvrouter.lab.simulate.percentiles import ranked
from kvrouter.lab.simulate.workloads import Achievable


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must keep to count as goodput: its time to first token, and its mean time per token."""

    ttft_s: float = 2.0
    itl_s: float = 0.050


@dataclass(frozen=True, slots=True)
class Measures:
    """Figures of one run, or their means. Times in seconds; shares of 1."""

    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p75_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    itl_mean_s: float
    itl_p50_s: float
    itl_p75_s: float
    itl_p90_s: float
    itl_p99_s: float
    e2e_mean_s: float
    e2e_p50_s: float
    e2e_p75_s: float
    e2e_p90_s: float
    e2e_p99_s: float
    goodput: float
    """The share of the requests within the SLO."""
    cached: float
    """The share of the prompt tokens that were cached."""
    held: float
    """The share that was cached on the engine with most of each prompt."""
    achievable: float
    """The share that one endless cache, shared by all engines, would have had."""
    pooled: float
    """The share that one cache of the size of all engines' together would have had."""
    busiest: float
    """Requests of the worker with most of them, divided by the mean."""
    handed: float
    """The share of the requests that two engines served."""
    completed: float
    """The share of the requests whose clients did not leave."""


def measure(run: Run, slo: Slo, achievable: Achievable) -> Measures:
    """The figures of a run."""
    ttft, itl, e2e = run.ttft_s, run.itl_s, run.latency_s
    within = sum(first < slo.ttft_s and between < slo.itl_s for first, between in zip(ttft, itl, strict=True))
    counted = Counter(target.worker_id for target in run.targets)
    return Measures(
        **_times("ttft", ttft),
        **_times("itl", itl),
        **_times("e2e", e2e),
        goodput=within / max(1, len(ttft)),
        cached=run.hit_rate,
        held=run.held_rate,
        achievable=achievable.endless / run.prompt_tokens,
        pooled=achievable.pooled / run.prompt_tokens,
        busiest=max(counted.values()) * len(run.deepest) / len(run.targets),
        handed=sum(run.handed) / len(run.targets),
        completed=len(ttft) / len(run.targets),
    )


def mean(runs: Sequence[Measures]) -> Measures:
    """The mean of each figure."""
    return _each(runs, statistics.fmean)


def spread(runs: Sequence[Measures]) -> Measures:
    """Half the distance between the least and the greatest of each figure."""
    return _each(runs, lambda values: (max(values) - min(values)) / 2)


def _each(runs: Sequence[Measures], combine: object) -> Measures:
    names = [one.name for one in fields(Measures)]
    return Measures(**{name: combine([getattr(run, name) for run in runs]) for name in names})  # type: ignore[operator]


def _times(name: str, samples: Sequence[float]) -> dict[str, float]:
    """The mean, and percentiles."""
    known = sorted(samples) or [math.nan]
    ranks = {f"{name}_p{percent}_s": ranked(known, percent) for percent in (50, 75, 90, 99)}
    return {f"{name}_mean_s": statistics.fmean(known), **ranks}
