"""The result of a fault: expected failures, unexpected failures, recovery and leftovers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

from scripts.kit.load import Outcome
from scripts.kit.script import table_of

CLEAN_LIMIT_S = 30.0
_SHOWN_FAILURES = 20


@dataclass(frozen=True, slots=True)
class Excuse:
    """Requests that inevitably fail with a fault: the ones in flight on the killed process.

    `worker` and `had_begun` limit it to answers of one worker that had begun; a request without
    a first byte can be retried elsewhere, so its failure is never excused.
    """

    reason: str
    # When it was killed, in seconds of the outcomes' clock.
    at_s: float
    url: str | None = None
    request_numbers: frozenset[int] = frozenset()

    def covers(self, outcome: Outcome) -> bool:
        ended = math.inf if outcome.ended_at_s is None else outcome.ended_at_s
        was_in_flight = outcome.sent_at_s <= self.at_s <= ended
        return was_in_flight and (outcome.url == self.url or outcome.number in self.request_numbers)


@dataclass(frozen=True, slots=True)
class Damage:
    ended_at_s: float
    excuses: Sequence[Excuse] = ()
    notes: Sequence[str] = ()
    # Failures other than of requests: an exit code, a process that did not restart.
    problems: Sequence[str] = ()
    # Whether a row of a replica's /workers shows that the replica has noticed the fault.
    is_noticed: Callable[[dict[str, Any]], bool] = lambda _target: True


@dataclass(frozen=True, slots=True)
class Leftovers:
    """State that must be gone when no request is in flight, summed over the replicas."""

    bookings: int = 0
    active_blocks: int = 0
    # Blocks that are in a replica's index but not in its agent's snapshot, or the other way round.
    index_blocks: int = 0

    @property
    def total(self) -> int:
        """Must be 0."""
        return self.bookings + self.active_blocks + self.index_blocks


@dataclass(frozen=True, slots=True)
class RowResult:
    name: str
    what: str
    requests: int = 0
    # Expected failures, by reason.
    expected: dict[str, int] = field(default_factory=dict)
    unexpected: list[Outcome] = field(default_factory=list)
    clean_after_s: float | None = None
    unclean: Sequence[str] = ()
    leftovers: Leftovers = Leftovers()
    notes: Sequence[str] = ()
    problems: Sequence[str] = ()
    skipped: str = ""
    worst_ttft_s: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether the fault met all conditions; a skipped one does."""
        return bool(self.skipped) or not self.reasons()

    def reasons(self) -> list[str]:
        found = list(self.problems)
        counted = Counter(outcome.error or "" for outcome in self.unexpected)
        found += [f"{count} requests failed: {error}" for error, count in counted.most_common(5)]
        if self.clean_after_s is None:
            found.append(f"verify was not clean within {CLEAN_LIMIT_S:g} s: {'; '.join(self.unclean[:3])}")
        if self.leftovers.total:
            found.append(f"left behind: {self.leftovers}")
        return found

    def as_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "unexpected": [asdict(outcome) for outcome in self.unexpected[:_SHOWN_FAILURES]],
            "failed": sum(self.expected.values()) + len(self.unexpected),
            "holds": self.holds,
            "reasons": [] if self.skipped else self.reasons(),
        }


def judge(outcomes: Sequence[Outcome], excuses: Sequence[Excuse]) -> tuple[dict[str, int], list[Outcome]]:
    """Failures: the expected ones counted by reason, and the others."""
    expected: Counter[str] = Counter()
    unexpected = []
    for outcome in outcomes:
        if outcome.error is None:
            continue
        reason = next((excuse.reason for excuse in excuses if excuse.covers(outcome)), None)
        if reason is None:
            unexpected.append(outcome)
        else:
            expected[reason] += 1
    return dict(expected), unexpected


def table(results: Sequence[RowResult]) -> Table:
    rows: list[Sequence[object]] = []
    for result in results:
        promise = "[green]kept[/]" if result.holds else "[bold red]broken[/]"
        if not result.requests:  # skipped, or judged by its alerts
            skipped = f"[yellow]skipped[/]: {result.skipped}"
            rows.append([result.what, *5 * ["–"], skipped if result.skipped else promise])
            continue
        clean = "never" if result.clean_after_s is None else f"{result.clean_after_s:.1f} s"
        figures = (_failed(result), clean, result.leftovers.total, f"{result.worst_ttft_s:.1f} s", promise)
        rows.append([result.what, result.requests, *figures])
    columns = ("fault", "requests", "failed", "clean after", "phantoms", "longest TTFT", "promise")
    return table_of("", columns, rows)


def _failed(result: RowResult) -> str:
    lines = [f"{count} {reason}" for reason, count in result.expected.items()]
    if result.unexpected:
        lines.append(f"[bold red]{len(result.unexpected)} unexpected[/]")
    return "\n".join(lines) or "0"
