"""The commands of README and docs have flags that exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")


def flags_shown(command: str) -> set[str]:
    """Every flag that a page shows on a line of this command."""
    line = re.compile(rf"(?:python -m kvrouter\.|kvrouter ){command}\b([^`\n&]*)")
    texts = [page.read_text().replace("\\\n", " ") for page in PAGES]
    return {flag for text in texts for rest in line.findall(text) for flag in FLAG.findall(rest)}


def flags_of(page: str) -> set[str]:
    """Every flag of a help page; `--[no-]name` stands for two."""
    off = {f"--no-{name}" for name in re.findall(r"--\[no-\]([a-z0-9-]+)", page)}
    return off | set(FLAG.findall(page.replace("[no-]", "")))


@pytest.mark.parametrize("command", ["frontend", "worker", "mocker", "serve", "verify"])
def test_flags_exist(command: str) -> None:
    """A command line copied from a page has no unknown and no ambiguous flag."""
    helped = subprocess.run(
        [sys.executable, "-m", "kvrouter", command, "--help-all"], capture_output=True, text=True, check=True
    )

    shown = flags_shown(command)

    assert shown
    assert set() == shown - flags_of(helped.stdout)
