"""Percentiles as everything here reports them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Percentiles:
    """In seconds; NaN if there are no samples."""

    p50: float
    p90: float
    p99: float


def percentiles(samples: Iterable[float | None]) -> Percentiles:
    """By nearest rank: each is a value that occurred."""
    known = sorted(sample for sample in samples if sample is not None)
    return Percentiles(ranked(known, 50), ranked(known, 90), ranked(known, 99))


def ranked(known: Sequence[float], percent: int) -> float:
    """The value at a percentage of the samples, which are in order."""
    return known[math.ceil(percent / 100 * len(known)) - 1] if known else math.nan
