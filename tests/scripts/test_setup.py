"""scripts/setup reports what is missing. These tests install nothing."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ("bash", "cat", "cksum", "dirname", "env", "flock", "head", "rm", "tail", "tee")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the fake PATH is made of Linux's tools")


class Checkout:
    """A checkout without .venv, on a machine with little more than bash."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bin = root / "bin"
        self.bin.mkdir()
        (root / "scripts").mkdir()
        for name in ("scripts/setup", "scripts/constraints.txt", "pyproject.toml"):
            shutil.copy(ROOT / name, root / name)
        sources = shutil.ignore_patterns("*.so", "*.c", "__pycache__")
        shutil.copytree(ROOT / "kvrouter/core/native", root / "kvrouter/core/native", ignore=sources)
        for tool in TOOLS:
            found = shutil.which(tool)
            if found:
                (self.bin / tool).symlink_to(found)

    def program(self, path: str, *lines: str) -> None:
        """Write a shell script."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(["#!/usr/bin/env bash", *lines, ""]))
        file.chmod(0o755)

    def set_up(self, *flags: str, **environment: str) -> tuple[int, str]:
        """Exit code and output."""
        done = subprocess.run(
            ["bash", self.root / "scripts/setup", *flags],
            env={"PATH": str(self.bin), **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stderr


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """A new checkout."""
    return Checkout(tmp_path)


def test_no_python(checkout: Checkout) -> None:
    """No Python, or one that is too old, is an error with the remedy."""
    checkout.program("bin/python3", "exit 1")

    code, says = checkout.set_up()

    assert 1 == code
    assert says.startswith("setup: no Python 3.11 or newer found")


def test_no_venv_module(checkout: Checkout) -> None:
    """Debian's Python without python3-venv is an error with the remedy."""
    checkout.program("bin/python3", 'case "$*" in *ensurepip*) exit 1;; esac')

    code, says = checkout.set_up()

    assert 1 == code
    assert "no venv and ensurepip modules; on Debian and Ubuntu they are in the package python3-venv" in says


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("", "no such program"),
        ("exit 1", "not a Python of 3.11 or newer"),
        ('case "$*" in *ensurepip*) exit 1;; esac', "it has no venv and ensurepip modules"),
    ],
)
def test_a_wrong_python_is_named(checkout: Checkout, program: str, reason: str) -> None:
    """One line says what is wrong with PYTHON=; no other interpreter is taken instead."""
    checkout.program("bin/python3", "exit 0")
    if program:
        checkout.program("bin/mine", program)

    assert (1, f"setup: PYTHON=mine: {reason}\n") == checkout.set_up(PYTHON="mine")


def test_demo_help_installs_nothing(checkout: Checkout) -> None:
    """--help of the demo prints every flag without a .venv."""
    shutil.copy(ROOT / "scripts/demo", checkout.root / "scripts/demo")
    done = subprocess.run(
        ["bash", checkout.root / "scripts/demo", "--keep", "--help"],
        env={"PATH": str(checkout.bin)},
        capture_output=True,
        text=True,
        check=True,
    )

    assert all(f"  --{flag}" in done.stdout for flag in ("requests N", "json FILE", "keep"))
    assert ("", False) == (done.stderr, (checkout.root / ".venv").exists())


FAKE_VENV = 'case "$*" in *"-m venv"*) mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python";; esac'


def fake_python(checkout: Checkout, *lines: str) -> None:
    """A fake python that creates .venv as a copy of itself, then runs `lines`."""
    for tool in ("mkdir", "cp"):
        (checkout.bin / tool).symlink_to(str(shutil.which(tool)))
    checkout.program("bin/python3", FAKE_VENV, *lines)


def test_pip_fails(checkout: Checkout) -> None:
    """A failed installation is repeated the next time."""
    fake_python(checkout, 'case "$*" in *"-m pip"*) echo no network >&2; exit 1;; esac')

    code, says = checkout.set_up()

    assert 1 == code
    assert "no network\nsetup: pip could not install the packages, see above" in says
    assert not (checkout.root / ".venv/set-up").exists()


def test_no_compiler(checkout: Checkout) -> None:
    """Without C tables there is one line about it, and the set-up succeeds."""
    fake_python(checkout, 'case "$*" in *native*) exit 1;; esac')

    code, says = checkout.set_up()

    assert 0 == code
    assert "setup: without C tables (they need a C compiler and Python's headers): everything works" in says


def test_progress(checkout: Checkout) -> None:
    """What pip does is shown while it does it, in lines of fewer than 80 columns."""
    fake_python(
        checkout, """case $* in *'-m pip'*) printf 'Collecting one>=1 (from x)\\nCollecting two\\n';; esac"""
    )
    script = checkout.root / "scripts/setup"
    script.write_text(script.read_text().replace("every_s=5", "every_s=0"))

    code, says = checkout.set_up()

    assert 0 == code
    assert re.search(r"^setup: \d+ s: fetching package 2, two$", says, re.MULTILINE)
    assert [] == [line for line in says.splitlines() if len(line) > 80 and " s: " in line]


def test_runtime_only(checkout: Checkout) -> None:
    """The demo's set-up leaves out what is for development; it is added when asked for, and stays."""
    fake_python(checkout, 'case "$*" in *"-m pip"*) echo "${@: -1}" >>"${0%/bin/python}/asked";; esac')

    assert 0 == checkout.set_up("--runtime")[0]
    assert (0, "") == checkout.set_up("--runtime")
    assert 0 == checkout.set_up()[0]
    assert (0, "") == checkout.set_up("--runtime")
    with (checkout.root / "scripts/constraints.txt").open("a") as constraints:
        constraints.write("another==1.0\n")
    assert 0 == checkout.set_up("--runtime")[0]

    asked = (checkout.root / ".venv/asked").read_text().splitlines()
    assert [str(checkout.root), f"{checkout.root}[dev]", f"{checkout.root}[dev]"] == asked


def test_a_wrong_flag(checkout: Checkout) -> None:
    """It is named, with the one there is."""
    assert (1, "setup: --all: the only flag is --runtime\n") == checkout.set_up("--all")


def test_done_once(checkout: Checkout) -> None:
    """A second set-up does nothing, until the versions change."""
    fake_python(checkout)
    checkout.set_up()

    assert (0, "") == checkout.set_up()

    with (checkout.root / "scripts/constraints.txt").open("a") as constraints:
        constraints.write("another==1.0\n")
    code, says = checkout.set_up()

    assert 0 == code
    assert "installing the packages" in says
    assert "making .venv" not in says


def test_another_python(checkout: Checkout) -> None:
    """PYTHON= does not change a .venv that works: a line says so, and what to do."""
    fake_python(checkout, 'case "$*" in *base_prefix*) echo /first;; esac')
    checkout.set_up()
    checkout.program("bin/mine", 'case "$*" in *base_prefix*) echo /second;; esac')

    assert (0, "") == checkout.set_up(PYTHON="python3")
    says = "setup: .venv stays on the Python of /first; for PYTHON=mine remove .venv first\n"
    assert (0, says) == checkout.set_up(PYTHON="mine")


def test_moved_checkout(checkout: Checkout) -> None:
    """Scripts in a .venv contain its path: after a move it is created again."""
    fake_python(checkout)
    checkout.set_up()
    stamp = checkout.root / ".venv/set-up"
    stamp.write_text("\n".join(["/elsewhere", *stamp.read_text().splitlines()[1:]]))

    code, says = checkout.set_up()

    assert 0 == code
    assert "making .venv" in says
