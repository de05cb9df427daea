"""docs/coverage.md: each claim of the source documents has a test or command that exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from kvrouter.settings.commands import command_named
from kvrouter.settings.read import load
from scripts.kit.bench.__main__ import _COMMANDS

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "coverage.md"
MISSING = {
    "the same as flags",
}
"""The capabilities that other work is to add; nothing else may be missing."""


def rows() -> list[tuple[str, str, str]]:
    """Claim, what there is here, what shows it."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [re.split(r"(?<!\\) \| ?", line.removeprefix("| ").removesuffix("|")) for line in lines]
    return [(claim, here, shown) for claim, here, shown, *_ in cells if claim != "claim"]


def evidence() -> list[str]:
    """Each test and command of the last column, once."""
    return sorted({one for _, _, shown in rows() for one in re.findall(r"`([^`]+)`", shown)})


def test_every_claim_is_there() -> None:
    """84 claims; one without evidence names what is missing, and that is known."""
    table = rows()

    assert 84 == len(table)
    assert [] == [claim for claim, here, shown in table if not shown.strip() and "**not yet**" not in here]
    missing = {text.strip() for _, here, _ in table for text in re.findall(r"\*\*not yet\*\*: (.+)$", here)}
    assert set() == missing - MISSING


@pytest.mark.parametrize("one", [text for text in evidence() if text.startswith("tests/")])
def test_tests_exist(one: str) -> None:
    """A file, or a test in it."""
    path, _, name = one.partition("::")
    source = (ROOT / path).read_text()

    assert re.search(rf"^(async )?def {name}\(", source, re.MULTILINE) if name else "def test_" in source


@pytest.mark.parametrize("one", [text for text in evidence() if not text.startswith("tests/")])
def test_commands_exist(one: str) -> None:
    """Its settings are right, or its sub-command is known."""
    program, *words = shlex.split(one)
    if program == "kvrouter":
        assert load(command_named(words[0]), words[1:], {}).settings
        return
    assert (ROOT / program).exists()
    assert set(words[:1]) <= ({*_COMMANDS} if program == "scripts/bench" else set())
