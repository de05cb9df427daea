"""The commands of README and docs have flags that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvrouter.settings.commands import MODULES, command_named

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs/start").glob("*.md")),
]
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
OF_EVERY_COMMAND = {"--help", "--help-all", "--config", "--show-config"}


def flags_shown(command: str) -> set[str]:
    """Every flag that a page shows on a line of this command."""
    line = re.compile(rf"(?:python -m kvrouter\.|kvrouter ){command}\b([^`\n&]*)")
    texts = [page.read_text().replace("\\\n", " ") for page in PAGES]
    return {flag for text in texts for rest in line.findall(text) for flag in FLAG.findall(rest)}


@pytest.mark.parametrize("command", [name for name in MODULES if name != "nats"])
def test_flags_exist(command: str) -> None:
    """A command line copied from a page has no unknown flag."""
    shown = flags_shown(command)

    assert shown
    assert [] == [flag for flag in shown - OF_EVERY_COMMAND if not command_named(command).has(flag)]
