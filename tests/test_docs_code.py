"""Code of README and docs can be copied: each block is sound in its language."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
READ: dict[str, Callable[[str], object]] = {
    "python": lambda code: compile(code, "page", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT),
    "json": json.loads,
    "toml": tomllib.loads,
    "yaml": lambda text: list(yaml.safe_load_all(text)),
}
COMMANDS = [ROOT / "README.md", *sorted((ROOT / "docs" / "start").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_can_be_read(page: Path) -> None:
    """Python compiles; JSON, TOML and YAML are read. What examples print is tested where they run."""
    for language, code in BLOCK.findall(page.read_text()):
        if language in READ:
            READ[language](code)


@pytest.mark.parametrize("page", COMMANDS, ids=lambda page: page.name)
def test_commands_are_sound_shell(page: Path) -> None:
    """A shell takes the commands of the first pages: quotes and loops are closed."""
    commands = "".join(re.findall(r"^    .*\n", page.read_text(), re.MULTILINE))

    checked = subprocess.run(["bash", "-n"], input=commands, text=True, capture_output=True, check=False)

    assert commands
    assert (0, "") == (checked.returncode, checked.stderr)
