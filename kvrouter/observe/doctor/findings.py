"""Findings, their severity, and the report of them.

checks ──> Finding(code, about, seen) ──> Report: grouped by kind, the most severe first
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvrouter.observe.doctor.kinds import KINDS, Kind, Severity, order

_CONTROL = re.compile(r"[^\x20-\x7e\xa0-\ufffd]+")
_DAY_S = 86_400.0
# Certificates are renewed a month before their end by default (certbot, cert-manager: a third of their life).
EXPIRES_SOON_S = 14 * _DAY_S
# Of a text that came from another process.
_MOST_CHARACTERS = 300


def clean(text: object, most: int = _MOST_CHARACTERS) -> str:
    """A text of another process in one line that cannot steer a terminal, and is not too long."""
    line = _CONTROL.sub(" ", str(text)[: 4 * most]).strip()
    return line if len(line) <= most else f"{line[: most - 1]}…"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong. `about`: the server, worker or replica; `seen`: what was seen there."""

    code: str
    about: str
    seen: str

    def __post_init__(self) -> None:
        assert self.code in KINDS
        object.__setattr__(self, "about", clean(self.about, 120))
        object.__setattr__(self, "seen", clean(self.seen))

    @property
    def kind(self) -> Kind:
        return KINDS[self.code]


def differing(
    code: str, about: str, groups: Mapping[Any, Iterable[str]], shown: str = "{}: {}"
) -> Iterator[Finding]:
    """Whether there are several values. `groups`: who has each value."""
    if len(groups) > 1:
        values = sorted(groups.items())[:6]
        yield Finding(code, about, "; ".join(shown.format(value, listed(who, 3)) for value, who in values))


def expiring(about: str, expires_s: float | None) -> Iterator[Finding]:
    """Whether a certificate ends soon."""
    if expires_s is not None and expires_s < EXPIRES_SOON_S:
        yield Finding("tls.expires", about, f"in {max(0.0, expires_s) / _DAY_S:.1f} days")


@dataclass(frozen=True, slots=True)
class DoctorReport:
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
        by_code: dict[str, list[Finding]] = {}
        for finding in self.findings:
            by_code.setdefault(finding.code, []).append(finding)
        for kind in sorted((KINDS[code] for code in by_code), key=order):
            yield kind, by_code[kind.code]

    def count(self, severity: Severity) -> int:
        return sum(finding.kind.severity == severity for finding in self.findings)


def listed(names: Iterable[str], most: int = 5) -> str:
    """Some names, and how many more there are."""
    every = sorted(names)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + more
