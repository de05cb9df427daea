"""What --help says of defaults."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

NOTHING = re.compile(r"default: (None|\[\])?\)")


@pytest.mark.parametrize("command", ["frontend", "worker", "serve", "simulate"])
def test_defaults_are_told_once(command: str) -> None:
    """Each flag has one default at most, and none that says nothing."""
    helped = subprocess.run(
        [sys.executable, "-m", "kvrouter", command, "--help"],
        env={**os.environ, "COLUMNS": "1000"},
        capture_output=True,
        text=True,
        check=True,
    )

    flags = re.split(r"\n  (?=--)", helped.stdout)

    assert "(default: " in helped.stdout
    assert [] == [flag for flag in flags if flag.count("default:") > 1 or NOTHING.search(flag)]
