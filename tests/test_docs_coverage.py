"""docs/coverage.md: each claim of the source documents has a test or command that exists."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from kvrouter.settings.commands import command_named
from kvrouter.settings.read import load
from scripts.kit.bench.__main__ import COMMANDS

TESTS = Path(__file__).parent
ROOT = TESTS.parent
PAGE = (ROOT / "docs" / "coverage.md").read_text()
EVIDENCE: dict[str, dict[str, list[str]]] = tomllib.loads((TESTS / "data" / "coverage.toml").read_text())


def rows() -> dict[str, dict[str, str]]:
    """What there is here, by section and claim."""
    found: dict[str, dict[str, str]] = {}
    for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        title, *lines = part.splitlines()
        cells = [
            re.split(r"(?<!\\) \| ?", line[2:].removesuffix("|")) for line in lines if line.startswith("| ")
        ]
        found[title] = {claim.replace("\\|", "|"): here for claim, here, *_ in cells if claim != "claim"}
    return found


def commands() -> list[str]:
    """What a row ends with after a colon: commands that show the claim."""
    cells = [here for claims in rows().values() for here in claims.values()]
    ends = [re.search(r": (`(?:kvrouter|scripts/)[^`]+`(?:, `[^`]+`)*) ?$", here) for here in cells]
    return sorted({one for end in ends if end for one in re.findall(r"`([^`]+)`", end[1])})


def test_every_claim_is_there() -> None:
    """82 claims, each with tests."""
    table = rows()

    assert 82 == sum(map(len, table.values()))
    assert {title: [*claims] for title, claims in table.items()} == {
        title: [*claims] for title, claims in EVIDENCE.items()
    }
    without = [claim for claims in EVIDENCE.values() for claim, tests in claims.items() if not tests]
    assert [] == without


@pytest.mark.parametrize(
    "one", sorted({test for claims in EVIDENCE.values() for tests in claims.values() for test in tests})
)
def test_tests_exist(one: str) -> None:
    """A file, or a test in it."""
    path, _, name = one.partition("::")
    source = (TESTS / path).read_text()

    assert re.search(rf"^(async )?def {name}\(", source, re.MULTILINE) if name else "def test_" in source


@pytest.mark.parametrize("one", commands())
def test_commands_exist(one: str) -> None:
    """Its settings are right, or its sub-command is known."""
    program, *words = shlex.split(one)
    if program == "kvrouter":
        assert load(command_named(words[0]), words[1:], {}).settings
        return
    assert (ROOT / program).exists()
    assert set(words[:1]) <= ({*COMMANDS} if program == "scripts/bench" else set())
