"""Percentiles as everything here reports them."""

from __future__ import annotations

import math
from collections.abc import Iterable
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

    def at(share: float) -> float:
        return known[math.ceil(share * len(known)) - 1] if known else math.nan

    return Percentiles(at(0.50), at(0.90), at(0.99))
