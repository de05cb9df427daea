"""A reader's state, its counters, and when it may ask its source again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

# A snapshot costs the source up to megabytes, so one that did not help is not asked for again at once.
BROKEN_RETRY_S = 30.0
FIRST_RETRY_S = 0.1
LAST_RETRY_S = 5.0
# One heartbeat that reports fewer frames than were applied here may itself be damaged; a second in a row
# proves that the applied frames did not come from the source.
LOW_BEATS = 2
# The first unusable answer may be damage, or forged. The second in a row breaks the source.
BAD_ANSWERS = 2
# Of one process: an answer may have a megabyte. Joining replicas ask for some 30 chunks a second each.
ANSWERS_A_SECOND = 500
# Of one reader, chunks of a snapshot aside: a flood of damaged frames must not become a flood of questions.
QUESTIONS_A_SECOND = 32


class FeedState(Enum):
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
    unsent: int = 0  # frames that, by the source's heartbeat or answer, it has not sent
    other_versions: int = 0
    held_overflows: int = 0
    failures: int = 0
    errors: int = 0  # exceptions while data of the feed was processed: each is a bug of kvrouter
    recovery_s: float = 0.0  # duration of the last recovery


class Backoff:
    """Pauses between questions. They double up to LAST_RETRY_S; `chance` in [0, 1) makes them differ.

    Without the jitter all replicas that lost the same frame would ask its source at the same moment.
    """

    def __init__(self, chance: Callable[[], float]) -> None:
        self._chance = chance
        self._attempts = 0
        self._until = 0.0

    def is_over(self, now: float) -> bool:
        return now >= self._until

    @property
    def is_reset(self) -> bool:
        """Whether the next pause is the shortest."""
        return not self._attempts

    def begin(self, now: float) -> None:
        """Start the next pause, after a question that did not help."""
        delay = min(LAST_RETRY_S, FIRST_RETRY_S * 2 ** min(self._attempts, 10))
        self._attempts += 1
        self.wait(delay * (0.5 + self._chance()), now)

    def wait(self, seconds: float, now: float) -> None:
        self._until = now + seconds

    def end(self, now: float) -> None:
        """End the pause, because there is something new to ask. The next one is not shorter for that."""
        self._until = now

    def reset(self) -> None:
        """Make the next pause the shortest again."""
        self._attempts = 0


class PerSecond:
    """Allows `most` events in each second."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._began = 0.0
        self._count = 0

    def allows(self, now: float) -> bool:
        """Whether one more may happen now. Counts it."""
        if now - self._began >= 1.0:
            self._began, self._count = now, 0
        self._count += 1
        return self._count <= self._most


class Doubts:
    """Evidence that the copy differs from what the source has.

    The first doubt asks for a snapshot at once. After the second in a row a snapshot has not helped, and
    another one is asked for every BROKEN_RETRY_S.
    """

    def __init__(self) -> None:
        self._count = 0
        self._not_before = 0.0
        self._low_beats = 0
        self._no_fill_up_before = 0.0

    @property
    def is_clear(self) -> bool:
        """Whether nothing speaks against the copy."""
        return not (self._count or self._low_beats)

    @property
    def is_repeated(self) -> bool:
        """Whether the last snapshot did not help."""
        return self._count > 1

    def add(self, now: float) -> bool:
        """Count a doubt; returns whether a snapshot may be asked for now."""
        self._count += 1
        if self.is_repeated and now < self._not_before:
            return False
        self._not_before = now + BROKEN_RETRY_S
        return True

    def is_proved_by(self, *, is_low: bool) -> bool:
        """Whether LOW_BEATS heartbeats in a row, this one included, report fewer frames than were applied."""
        self._low_beats = self._low_beats + 1 if is_low else 0
        if self._low_beats < LOW_BEATS:
            return False
        self._low_beats = 0
        return True

    def wants_snapshot(self, now: float) -> bool:
        """Whether another snapshot is due although no new doubt came: the feed may be quiet."""
        if not self.is_repeated or now < self._not_before:
            return False
        self._not_before = now + BROKEN_RETRY_S
        return True

    def may_fill_up(self, now: float) -> bool:
        """Whether to check now if refused blocks fit again. Not a doubt: nothing differs."""
        if now < self._no_fill_up_before:
            return False
        self._no_fill_up_before = now + BROKEN_RETRY_S
        return True

    def renew(self) -> None:
        """A snapshot was loaded. One doubt remains until a digest agrees, so the next counts as repeated."""
        self._count = min(self._count, 1)

    def clear(self) -> None:
        """The source's digest agrees with the copy's."""
        self._count = 0
