"""The kinds of findings, and their table in docs/doctor.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvrouter.observe.doctor.findings import Kind, order
from kvrouter.observe.doctor.kinds import KINDS

ROOT = Path(__file__).resolve().parents[3]


def row(kind: Kind) -> str:
    """A kind's row of the table."""
    return f"| `{kind.code}` | {kind.severity} | {kind.title} | {kind.remedy} | [{kind.see}]({kind.see}) |"


def test_table() -> None:
    """docs/doctor.md lists every kind, the most severe first."""
    kinds = sorted(KINDS.values(), key=order)
    lines = (ROOT / "docs/doctor.md").read_text().splitlines()

    assert [row(kind) for kind in kinds] == [line for line in lines if line.startswith("| `")]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_see(kind: Kind) -> None:
    """The page exists, and has the section."""
    page, _, section = kind.see.partition("#")
    headings = re.findall(r"^#+ (.+)$", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}

    assert not section or section in anchors
