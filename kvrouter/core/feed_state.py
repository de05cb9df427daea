"""Where a feed's reader stands, and what has happened to it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class FeedState(Enum):
    """Where a reader stands."""

    WAITING = "waiting"
    RECOVERING = "recovering"
    LIVE = "live"
    BROKEN = "broken"


@dataclass(slots=True)
class FeedCounters:
    """What happened on one feed, for metrics and `/workers`."""

    applied: int = 0
    repeated: int = 0
    stale: int = 0
    gaps: int = 0
    malformed: int = 0
    unknown_ops: int = 0
    replayed: int = 0
    snapshots: int = 0
    contradictions: int = 0
    digest_mismatches: int = 0
    held_overflows: int = 0
    failures: int = 0
    recovery_s: float = 0.0
    """How long the last recovery took."""
