"""The defaults that --help shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

NOTHING = re.compile(r"default: (None|\[\])?\)")


@pytest.mark.parametrize("command", ["frontend", "worker", "serve", "simulate"])
def test_each_default_is_shown_once(command: str) -> None:
    """Each flag shows one default at most, and never an empty one."""
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
