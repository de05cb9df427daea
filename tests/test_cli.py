"""The choice of a command."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys

import pytest

from kvrouter.cli import main


@pytest.fixture(scope="module")
def completion() -> str:
    """The script for bash."""
    return subprocess.run(
        [sys.executable, "-m", "kvrouter", "completion", "bash"], capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.parametrize(
    ("word", "answer"),
    [("fronted", "did you mean frontend?"), ("xyz", "commands: serve, frontend,"), ("--port", "commands: ")],
)
def test_unknown_command(word: str, answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown command is one line, with the nearest one or all of them."""
    code = main([word])

    said = capsys.readouterr().err
    assert 2 == code
    assert f"no command {word!r}; {answer}" in said
    assert 1 == said.count("\n")


def test_what_is_loaded_late() -> None:
    """A frontend starts without what only few of them need."""
    load = "from kvrouter.cli import _loaded; _loaded('kvrouter.frontend.__main__')"
    command = [sys.executable, "-c", f"import sys; {load}; print(*sys.modules)"]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert {"structlog", "nats"} <= {*loaded.split()}
    assert {"nkeys", "yaml"}.isdisjoint(loaded.split())


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    """`help COMMAND` is `COMMAND --help`; alone it lists the commands."""
    assert [0, 0] == [main(["help", "nats"]), main(["nats", "--help"])]
    first, second = re.split(r"(?<=\n)(?=usage: )", capsys.readouterr().out)
    assert first == second

    assert [0, 0] == [main(["help"]), main(["help", "help"])]
    assert 2 == capsys.readouterr().out.count("usage: kvrouter COMMAND [flags]")
    assert 2 == main(["help", "fronted"])
    assert "did you mean frontend?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (["fro"], {"frontend"}),
        (["comp"], {"completion"}),
        (["help", "do"], {"doctor"}),
        (["frontend", "--router-mo"], {"--router-mode"}),
        (["frontend", "--router-mode", "kv"], {"kv", "kv-score"}),
        (["frontend", "--log-format", ""], {"console", "json"}),
        (["nats", "--nats-"], {"--nats-port", "--nats-open"}),
    ],
)
@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is needed")
def test_completion(completion: str, line: list[str], wanted: set[str]) -> None:
    """Bash completes commands, flags and choices with the script."""
    words = ["kvrouter", *line]
    ask = 'COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)); _kvrouter; printf "%s\\n" "${COMPREPLY[@]}"'
    ended = subprocess.run(
        ["bash", "-c", f"{completion}\n{ask}", "bash", *words], capture_output=True, text=True, check=True
    )

    assert ("", wanted) == (ended.stderr, {*ended.stdout.split()})


def test_shells(capsys: pytest.CaptureFixture[str]) -> None:
    """Zsh and fish have their own; the usage says where the scripts go; others are refused."""
    assert [0, 0, 0, 2, 2] == [
        main(["completion", *words]) for words in (["zsh"], ["fish"], ["--help"], [], ["tcsh"])
    ]

    said = capsys.readouterr()
    assert said.out.startswith("#compdef kvrouter")
    assert "complete -c kvrouter" in said.out
    assert "usage: kvrouter completion bash|zsh|fish" in said.out
    assert 2 == said.err.count("usage: kvrouter completion bash|zsh|fish")


def test_interrupted_as_it_loads(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C in the first second is no traceback; 130, as shells have it."""

    def interrupted(_name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", interrupted)

    assert 130 == main(["frontend"])
    assert ("", "") == capsys.readouterr()
