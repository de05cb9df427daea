"""`scripts/wheels`: a pure wheel has no extension modules, and what is built works where it is installed."""

from __future__ import annotations

import shutil
import sys
import tomllib
from pathlib import Path

import pytest

from scripts.kit.wheels import ROOT, WheelError, main, pythons, run, without_extensions
from tests.long import needs_long


def test_pure_wheel() -> None:
    """Only the extension modules and their compiler are gone from pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text()
    before, after = tomllib.loads(text), tomllib.loads(without_extensions(text))

    assert 6 == len(before["tool"]["setuptools"].pop("ext-modules"))
    before["build-system"]["requires"].remove("Cython>=3.1")
    assert before == after


def test_interpreters() -> None:
    """A named one that exists is taken."""
    assert [sys.executable] == pythons([sys.executable, "/nowhere/python3"])


def test_the_last_lines_of_a_failure(tmp_path: Path) -> None:
    """A command that fails is named, with its output."""
    with pytest.raises(WheelError, match=r"exit code 3\nbroken"):
        run(sys.executable, "-c", "print('broken'); raise SystemExit(3)", cwd=tmp_path)


def test_an_older_build(tmp_path: Path) -> None:
    """A module that an older checkout has built is not in the next build."""
    pytest.importorskip("setuptools")
    old, module = tmp_path / "build" / "lib" / "kvrouter" / "gone.py", tmp_path / "kvrouter" / "kept.py"
    for file in (old, module):
        file.parent.mkdir(parents=True)
        file.touch()
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "kvrouter"\nversion = "1"\n')
    shutil.copy(ROOT / "setup.py", tmp_path)

    run(sys.executable, "setup.py", "--quiet", "build", cwd=tmp_path)

    assert [Path("kvrouter/kept.py")] == [
        file.relative_to(tmp_path / "build" / "lib") for file in (tmp_path / "build").rglob("*.py")
    ]


@needs_long("minutes")
@pytest.mark.timeout(1200)
def test_builds_and_tries(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each wheel, pure or with C tables, serves a completion in an empty environment of at most 200 MB."""
    assert 0 == main([str(tmp_path), "--python", sys.executable]), capsys.readouterr().err

    said = capsys.readouterr().out
    assert 3 == len(list(tmp_path.iterdir()))
    assert 2 == said.count("environment of")
    assert 1 == said.count("tables in native")
    assert "-py3-none-any.whl: Python" in said
