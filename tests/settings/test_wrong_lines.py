"""Wrong command lines, variables and files: each is answered with one line that says what to change."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kvrouter import cli
from kvrouter.settings.commands import MODULES

_LINES = Path(__file__).with_name("wrong_lines.txt").read_text().splitlines()[1:]
ANSWERS = list(zip(_LINES[::2], _LINES[1::2], strict=True))


def run(line: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The arguments of a line, with its variables set and its file written."""
    words = shlex.split(line.removeprefix("$ "))
    monkeypatch.chdir(directory)
    while words[0] != "kvrouter":
        name, _, value = words.pop(0).partition("=")
        if name == "FILE":
            Path("kvrouter.toml").write_text(value.replace("\\n", "\n"))
            words += ["--config", "kvrouter.toml"]
        else:
            monkeypatch.setenv(name, value)
    return words[1:]


@pytest.mark.parametrize(("line", "answer"), ANSWERS)
def test_one_line(
    line: str,
    answer: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit status 2, nothing on stdout, and this line on stderr."""
    assert 2 == cli.main(run(line, tmp_path, monkeypatch))
    assert ("", f"{answer}\n") == capsys.readouterr()


@pytest.mark.parametrize("words", [["--log-format=json"], ["--log-format", "json"], []])
def test_as_an_event(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With JSON logs the line is an event, although the settings could not be read."""
    if not words:
        monkeypatch.setenv("KVROUTER_LOG_FORMAT", "json")

    assert 2 == cli.main(["serve", "--no-such", *words])
    event = json.loads(capsys.readouterr().err)
    assert ("settings.wrong", "error") == (event["event"], event["level"])
    assert event["error"].startswith("--no-such: no such setting")
    assert event["timestamp"]


def test_enough_lines() -> None:
    """At least seventy, over every command."""
    assert 70 <= len(ANSWERS)
    assert all(any(f"kvrouter {name}" in line for line, _ in ANSWERS) for name in MODULES)


def test_as_a_process() -> None:
    """`python -m kvrouter.…` answers in the same form."""
    command = [sys.executable, "-m", "kvrouter.worker", "--no-such"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (2, "", 1) == (done.returncode, done.stdout, done.stderr.count("\n"))
    assert done.stderr.startswith("kvrouter worker: --no-such: no such setting")
