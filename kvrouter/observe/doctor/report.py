"""The report as text and as JSON. Both are bounded: a fleet of thousands gets a page, too."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import msgspec

from kvrouter.errors import counted
from kvrouter.observe.doctor.findings import DoctorReport, Finding
from kvrouter.observe.doctor.kinds import SEVERITIES, Kind

# Of one kind of finding.
_LINES, _ROWS = 5, 100
_INDENT = " " * 9
_WIDTH = 110


def as_text(report: DoctorReport) -> str:
    """Findings by kind, the most severe first; then what is well, and the count."""
    parts = [f"kvrouter doctor: {report.fleet} · {report.seconds:.1f} s", ""]
    for kind, findings in report.grouped():
        parts += [*_group(kind, findings), ""]
    parts += [f"ok       {area}: {text}" for area, text in report.good.items()]
    if report.ignored:
        parts.append(f"ignored  {', '.join(report.ignored)}")
    counts = ", ".join(counted(report.count(severity), severity) for severity in SEVERITIES)
    return "\n".join([*parts, "", f"{counts}; exit code {report.exit_code}"]) + "\n"


def _group(kind: Kind, findings: list[Finding]) -> Iterator[str]:
    count = f" ({len(findings)} times)" if len(findings) > 1 else ""
    yield f"{kind.severity:<9}{kind.title} [{kind.code}]{count}"
    for finding in findings[:_LINES]:
        yield from _wrapped("- ", f"{finding.about}: {finding.seen}")
    if len(findings) > _LINES:
        yield f"{_INDENT}- … and {len(findings) - _LINES} more (--json lists {_ROWS})"
    yield from _wrapped("do:  ", kind.remedy)
    yield f"{_INDENT}see: docs/{kind.see}"


def _wrapped(mark: str, text: str) -> list[str]:
    # names and URLs stay whole, so that they can be copied
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=_INDENT + mark,
        subsequent_indent=_INDENT + " " * len(mark),
        break_long_words=False,
        break_on_hyphens=False,
    )


def as_json(report: DoctorReport) -> str:
    """One object; of each kind the first findings, and their number."""
    groups = [
        {
            "code": kind.code,
            "severity": kind.severity,
            "title": kind.title,
            "remedy": kind.remedy,
            "see": f"docs/{kind.see}",
            "count": len(findings),
            "findings": [{"about": each.about, "seen": each.seen} for each in findings[:_ROWS]],
        }
        for kind, findings in report.grouped()
    ]
    body = {
        "exit_code": report.exit_code,
        "fleet": report.fleet,
        "seconds": round(report.seconds, 3),
        "counts": {severity: report.count(severity) for severity in SEVERITIES},
        "groups": groups,
        "ok": report.good,
        "ignored": report.ignored,
    }
    return msgspec.json.format(msgspec.json.encode(body), indent=2).decode() + "\n"
