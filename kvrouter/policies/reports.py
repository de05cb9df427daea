"""What engines report of their load. A target without a fresh report counts as the mean of the others."""

from __future__ import annotations

from collections.abc import Sequence

from kvrouter.core.routing.policy import Candidate


def waiting(candidates: Sequence[Candidate]) -> list[float]:
    """Requests in each engine's queue."""
    return _filled([candidate.waiting for candidate in candidates])


def kv_usage(candidates: Sequence[Candidate]) -> list[float]:
    """The fraction 0..1 of each engine's KV blocks that requests hold."""
    return _filled([candidate.kv_usage for candidate in candidates])


def _filled(reports: Sequence[float | None]) -> list[float]:
    known = [report for report in reports if report is not None]
    mean = sum(known) / len(known) if known else 0.0
    return [mean if report is None else report for report in reports]
