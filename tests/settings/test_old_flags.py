"""Every flag that a command had before settings were declared once still works, or says what to use."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrouter.settings.commands import command_named

OLD = [
    (line.split()[0], spelling)
    for line in Path(__file__).with_name("old_flags.txt").read_text().splitlines()
    if not line.startswith("#")
    for spelling in line.split()[1:]
]


@pytest.mark.parametrize("command", sorted({command for command, _ in OLD}))
def test_still_known(command: str) -> None:
    """It is a spelling of a setting, and still takes a value or none; or its removal is explained."""
    declared = command_named(command).declared()
    explained = {**command_named(command).removed, **command_named(command).left_out}
    for spelling in (spelling for name, spelling in OLD if name == command):
        flag = spelling.removesuffix("=")
        found = [not one.is_switch for one in declared if flag in one.spellings]
        gone = flag.removeprefix("--").removeprefix("no-")

        assert [spelling.endswith("=")] == found or gone in explained, spelling
