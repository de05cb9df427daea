"""Where a feed's reader stands, and what has happened to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

BROKEN_RETRY_S = 30.0
"""A snapshot that did not help is asked for again after so long."""
FIRST_RETRY_S = 0.1
LAST_RETRY_S = 5.0
LOW_BEATS = 2
"""This many heartbeats in a row that count less than was applied prove that what was applied was forged."""
BAD_ANSWERS = 2
"""This many answers in a row that cannot be used break a source."""
ANSWERS_A_SECOND = 500
"""Of one process: an answer may have a megabyte. Replicas that join ask for some 30 chunks a second each."""
QUESTIONS_A_SECOND = 32
"""Of one reader, chunks of a snapshot aside: a flood of damaged frames must not become one of questions."""


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
    unsent: int = 0
    """Frames met that the source, by its own word, has not sent."""
    other_versions: int = 0
    held_overflows: int = 0
    failures: int = 0
    errors: int = 0
    """Steps that raised: each is a bug here."""
    recovery_s: float = 0.0
    """How long the last recovery took."""


class Backoff:
    """Pauses between questions: they double up to five seconds, with jitter. `chance` is in [0, 1)."""

    def __init__(self, chance: Callable[[], float]) -> None:
        self._chance = chance
        self._attempts = 0
        self._until = 0.0

    def is_over(self, now: float) -> bool:
        """Whether one may ask."""
        return now >= self._until

    def begin(self, now: float) -> None:
        """A question did not help: a pause."""
        delay = min(LAST_RETRY_S, FIRST_RETRY_S * 2 ** min(self._attempts, 10))
        self._attempts += 1
        self.wait(delay * (0.5 + self._chance()), now)

    def wait(self, seconds: float, now: float) -> None:
        """A pause of this length."""
        self._until = now + seconds

    def end(self, now: float) -> None:
        """There is something new to ask: at once. The next pause is as long as it would have been."""
        self._until = now

    def reset(self) -> None:
        """It helped: the next pause is the shortest."""
        self._attempts = 0


class PerSecond:
    """At most `most` of something in each second."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._began = 0.0
        self._count = 0

    def allows(self, now: float) -> bool:
        """Whether one more may happen now; if so it is counted."""
        if now - self._began >= 1.0:
            self._began, self._count = now, 0
        self._count += 1
        return self._count <= self._most


class Trust:
    """Whether what is held can be what the source has.

    A doubt means a snapshot. Trust is lost with the second in a row: then a snapshot every 30 s.
    """

    def __init__(self) -> None:
        self._doubts = 0
        self._not_before = 0.0
        self._low_beats = 0
        self._no_fill_up_before = 0.0

    @property
    def is_lost(self) -> bool:
        """Whether the last snapshot did not help."""
        return self._doubts > 1

    def doubt(self, now: float) -> bool:
        """Something differs; returns whether a snapshot may be asked for now."""
        self._doubts += 1
        if self.is_lost and now < self._not_before:
            return False
        self._not_before = now + BROKEN_RETRY_S
        return True

    def is_broken_by(self, is_low: bool) -> bool:
        """A heartbeat came, which counts less than was applied or not; whether that proves something."""
        self._low_beats = self._low_beats + 1 if is_low else 0
        if self._low_beats < LOW_BEATS:
            return False
        self._low_beats = 0
        return True

    def wants_snapshot(self, now: float) -> bool:
        """Whether it is time for another one, although nothing new differs: the feed may be quiet."""
        if not self.is_lost or now < self._not_before:
            return False
        self._not_before = now + BROKEN_RETRY_S
        return True

    def may_fill_up(self, now: float) -> bool:
        """Whether it is time to see if there is room for what was refused; nothing is wrong with that."""
        if now < self._no_fill_up_before:
            return False
        self._no_fill_up_before = now + BROKEN_RETRY_S
        return True

    def renew(self) -> None:
        """A snapshot was loaded. It counts for well until the next doubt, which is not the first."""
        self._doubts = min(self._doubts, 1)

    def confirm(self) -> None:
        """The source's digest agrees."""
        self._doubts = 0
