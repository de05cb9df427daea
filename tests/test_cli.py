"""The choice of a command."""

from __future__ import annotations

import importlib

import pytest

from kvrouter.cli import main


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


def test_interrupted_as_it_loads(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C in the first second is no traceback; 130, as shells have it."""

    def interrupted(_name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", interrupted)

    assert 130 == main(["frontend"])
    assert ("", "") == capsys.readouterr()
