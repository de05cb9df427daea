"""Packages that have moved answer to the names that they had."""

from __future__ import annotations

import asyncio
import importlib
import sys
from asyncio.subprocess import PIPE

import pytest

MOVED = {
    **dict.fromkeys(("mocker", "simulate", "analyze"), "lab"),
    **dict.fromkeys(("doctor", "verify", "top"), "observe"),
}


@pytest.mark.parametrize(("name", "room"), MOVED.items())
def test_imports(name: str, room: str) -> None:
    """The package is the one that has moved, and so are its modules."""
    module = importlib.import_module(f"kvrouter.{name}")

    assert module is importlib.import_module(f"kvrouter.{room}.{name}")
    assert importlib.import_module(f"kvrouter.{name}.settings").COMMAND


def test_names_that_scripts_used() -> None:
    """`from kvrouter.verify import compare`, and modules below a package."""
    verify = importlib.import_module("kvrouter.verify")

    assert verify.compare
    assert importlib.import_module("kvrouter.mocker.answers").Answer


async def test_command() -> None:
    """`python -m kvrouter.X` runs the command."""
    command = ("-P", "-m", "kvrouter.simulate", "--help")
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=PIPE)
    out, _ = await process.communicate()

    assert process.returncode == 0
    assert "kvrouter simulate" in out.decode()
