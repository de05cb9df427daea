"""docs/security.md: each line of the threat model names tests, and there are such."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "security.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE)))


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_named_tests(file: str, name: str) -> None:
    """The file, and the function in it."""
    tree = ast.parse((ROOT / file).read_text())
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}

    assert not name or name in names


def test_each_line_has_a_test() -> None:
    """Of the table of who can do what."""
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and "---" not in line][1:]

    assert len(rows) > 10
    assert all("`tests/" in row.split("|")[-2] for row in rows)
