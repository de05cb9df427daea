"""The kinds of findings, and their table in docs/doctor.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvrouter.observe.doctor.kinds import KINDS, SEVERITIES, Kind, Severity, order

ROOT = Path(__file__).resolve().parents[3]


SECTIONS = {"error": "### Errors", "warning": "### Warnings", "note": "### Notes"}


def row(kind: Kind) -> str:
    """A kind's row of the table; its remedy is printed with each finding."""
    return f"| [`{kind.code}`]({kind.see}) | {kind.title} |"


@pytest.mark.parametrize("severity", SEVERITIES)
def test_table(severity: Severity) -> None:
    """docs/doctor.md lists every kind of a severity."""
    kinds = sorted((kind for kind in KINDS.values() if kind.severity == severity), key=order)
    _, _, section = (ROOT / "docs/doctor.md").read_text().partition(f"\n{SECTIONS[severity]}\n")
    lines = section.partition("\n### ")[0].splitlines()

    assert [row(kind) for kind in kinds] == [line for line in lines if line.startswith("| [`")]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_see(kind: Kind) -> None:
    """The page exists, and has the section."""
    page, _, section = kind.see.partition("#")
    headings = re.findall(r"^#+ (.+)$", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}

    assert not section or section in anchors
