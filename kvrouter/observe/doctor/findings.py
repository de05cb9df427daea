"""Findings, their severity, and the report of them.

checks ──> Finding(kind, about, seen) ──> Report: grouped by kind, the most severe first
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Severity: TypeAlias = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
# In the order in which one explains the next.
AREAS = ("nats", "fleet", "agent", "engine", "events", "replica", "tls", "clock", "machine", "doctor")
_CONTROL = re.compile(r"[^\x20-\x7e\xa0-\ufffd]+")
# Of a text that came from another process.
_MOST_CHARACTERS = 300


def clean(text: object, most: int = _MOST_CHARACTERS) -> str:
    """A text of another process in one line that cannot steer a terminal, and is not too long."""
    line = _CONTROL.sub(" ", str(text)[: 4 * most]).strip()
    return line if len(line) <= most else f"{line[: most - 1]}…"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of finding. `see`: a page below docs/, with the section."""

    code: str
    severity: Severity
    title: str
    remedy: str
    see: str

    @property
    def area(self) -> str:
        return self.code.partition(".")[0]


def order(kind: Kind) -> tuple[int, int, str]:
    """Sorts kinds: by severity, then by area."""
    return SEVERITIES.index(kind.severity), AREAS.index(kind.area), kind.code


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong. `about`: the server, worker or replica; `seen`: what was seen there."""

    kind: Kind
    about: str
    seen: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "about", clean(self.about, 120))
        object.__setattr__(self, "seen", clean(self.seen))


@dataclass(frozen=True, slots=True)
class Report:
    """`good`: a sentence for each area in which something was examined."""

    fleet: str
    findings: list[Finding]
    good: dict[str, str]
    seconds: float
    ignored: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0: nothing to do, 1: warnings, 2: errors."""
        found = {finding.kind.severity for finding in self.findings}
        return 2 if "error" in found else 1 if "warning" in found else 0

    def grouped(self) -> Iterator[tuple[Kind, list[Finding]]]:
        """The findings of each kind, the most severe kinds first, and of these by area."""
        by_kind: dict[str, list[Finding]] = {}
        for finding in self.findings:
            by_kind.setdefault(finding.kind.code, []).append(finding)
        groups = sorted(by_kind.values(), key=lambda each: order(each[0].kind))
        return ((group[0].kind, group) for group in groups)

    def count(self, severity: Severity) -> int:
        return sum(finding.kind.severity == severity for finding in self.findings)


def listed(names: Iterable[str], most: int = 5) -> str:
    """Some names, and how many more there are."""
    every = sorted(names)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + more
