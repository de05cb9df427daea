"""docs/operations.md has a remedy for every problem that the audit can report."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
KIND = re.compile(r"""Problem\(\s*"(\w+)",""")
ROW = re.compile(r"^\| \(?`(\w+)`\)? \|", re.MULTILINE)


def test_every_problem_has_a_row() -> None:
    """An operator finds each `problem` of a metric or a log line on the page."""
    sources = sorted((ROOT / "kvrouter" / "core" / "audit").glob("*.py"))
    kinds = {kind for source in sources for kind in KIND.findall(source.read_text())}
    page = (ROOT / "docs" / "operations.md").read_text()
    _, _, section = page.partition("\n| `problem` |")

    assert kinds
    assert kinds == set(ROW.findall(section.partition("\n\n")[0]))
