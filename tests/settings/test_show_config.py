"""--show-config of each command: every value with its source, and no secret."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvrouter import cli
from kvrouter.settings.commands import MODULES, command_named

REQUIRED = {
    "serve": ["--engine=http://127.0.0.1:9000"],
    "worker": ["--engine-url=http://127.0.0.1:9000"],
    "verify": ["--replica=http://a:1", "--replica=http://b:1"],
    "analyze": ["--live=http://a:1"],
    "tune": ["trace.jsonl"],
    "keys": ["list"],
    "index": ["dump", "--replica=http://a:1"],
}


def rows(name: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    """What `kvrouter NAME --show-config` prints: [value, source] by setting."""
    assert 0 == cli.main([name, "--show-config", *REQUIRED.get(name, []), *words])
    printed = capsys.readouterr()
    assert "" == printed.err
    assert "secret" not in printed.out
    return {line.split()[0]: line.split(maxsplit=2)[1:] for line in printed.out.splitlines()}


@pytest.mark.parametrize("name", MODULES)
def test_lists_every_setting(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One row for each setting that people can give, with a source."""
    found = rows(name, [], capsys)

    assert [one.name for one in command_named(name).declared() if not one.setting.is_hidden] == list(found)
    given = {word.partition("=")[0] for word in REQUIRED.get(name, [])}
    given |= {f"--{one.name}" for one in command_named(name).declared() if one.is_required}
    assert {key: "flag" if f"--{key}" in given else "default" for key in found} == {
        key: row[-1].split()[-1] for key, row in found.items()
    }


@pytest.mark.parametrize("name", ["serve", "verify"])
def test_without_what_must_be_given(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The page, then what is missing, and exit status 2."""
    assert 2 == cli.main([name, "--show-config"])
    printed = capsys.readouterr()

    assert len(printed.out.splitlines()) > 10
    assert printed.err.startswith(f"kvrouter {name}: ")
    assert 1 == printed.err.count("\n")


def test_defaults_are_described(capsys: pytest.CaptureFixture[str]) -> None:
    """A default that is worked out later reads as in --help."""
    assert ["--port + 100", "default"] == [part.strip() for part in rows_of("frontend", "admin-port", capsys)]


def rows_of(name: str, setting: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Value and source of one setting, without flags."""
    assert 0 == cli.main([name, "--show-config"])
    lines = capsys.readouterr().out.splitlines()
    return next(re.split(r"  +", line)[1:] for line in lines if line.startswith(f"{setting} "))


@pytest.mark.parametrize("name", ["serve", "frontend", "worker", "verify"])
def test_each_source(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Flag, variable, the file's own table, [shared], default; no password of a URL or a file."""
    password = tmp_path / "password"
    password.write_text("secret")
    file = tmp_path / "c.toml"
    file.write_text(
        f'[{name}]\nnamespace = "own"\nnats-user = "own"\n'
        f'[shared]\nnamespace = "shared"\nnats-user = "shared"\nnats-password-file = "{password}"\n'
    )
    monkeypatch.setenv("KVROUTER_NAMESPACE", "variable")
    monkeypatch.setenv("KVROUTER_NATS", "nats://u:secret@variable:4222")

    found = rows(name, [f"--config={file}", "--namespace=flag"], capsys)

    assert ["flag", "flag"] == found["namespace"]
    assert ["nats://variable:4222", "KVROUTER_NATS"] == found["nats"]
    assert ["own", f"{file} [{name}]"] == found["nats-user"]
    assert [str(password), f"{file} [shared]"] == found["nats-password-file"]
    assert "default" == found["nats-creds"][-1]
