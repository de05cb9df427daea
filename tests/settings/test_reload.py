"""Settings that are read again while the process runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pytest
from structlog.testing import capture_logs

from kvrouter.errors import ConfigError
from kvrouter.settings.declare import Command, Settings, setting
from kvrouter.settings.read import Loaded, load
from kvrouter.settings.reload import read_again


@dataclass(frozen=True, slots=True)
class Options(Settings):
    port: int = setting(8000, "port")
    weight: float = setting(1.0, "of overlap", least=0, reloadable=True)
    queue: float = setting(0.0, "of the queue; 0: none", reloadable=True)
    key: str = setting("", "of clients", is_secret=True, reloadable=True)
    url: str = setting("", "of a server")

    def checked(self) -> Self:
        if self.weight > self.port:
            raise ConfigError("--weight must not be above --port")
        return self


COMMAND = Command("nats", Options, "Nothing.")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """An empty file of settings."""
    path = tmp_path / "kvrouter.toml"
    path.write_text("")
    return path


def loaded(file: Path) -> Loaded[Options]:
    return load(COMMAND, [f"--config={file}"], {})


def test_what_can_change(file: Path) -> None:
    """A reloadable setting changes; another one stays, and is named."""
    before = loaded(file)
    file.write_text('[nats]\nweight = 2.5\nport = 9000\nkey = "secret"\n')

    after, changes = read_again(before)

    assert (2.5, 8000, "secret") == (after.settings.weight, after.settings.port, after.settings.key)
    assert {"weight": "1 → 2.5", "key": "changed"} == changes.applied
    assert {"port": "8000 → 9000"} == changes.needs_restart


def test_a_change_that_is_not_printed(file: Path) -> None:
    """Another password of a URL is a change, and neither of them is in the text."""
    file.write_text('[nats]\nurl = "nats://u:old@h"\n')
    before = loaded(file)
    file.write_text('[nats]\nurl = "nats://u:new@h"\n')

    assert {"url": "changed"} == read_again(before)[1].needs_restart


def test_compared_with_what_is_in_use(file: Path) -> None:
    """What needs a restart is named at each reading; what was applied is not."""
    file.write_text("[nats]\nweight = 2\nport = 9000\n")
    current, _ = read_again(load(COMMAND, [f"--config={file}"], {}))

    file.write_text("[nats]\nweight = 2\nport = 9001\n")
    _, changes = read_again(current)

    assert ({}, {"port": "9000 → 9001"}) == (changes.applied, changes.needs_restart)


def test_switch(file: Path) -> None:
    """What a value switches on at the start cannot be switched on later; its value can change."""
    off = loaded(file)
    file.write_text("[nats]\nqueue = 2\n")
    _, switched = read_again(off, {"queue"})
    on = loaded(file)
    file.write_text("[nats]\nqueue = 3\n")
    _, changed = read_again(on, {"queue"})

    assert ({"queue": "0 → 2"}, {"queue": "2 → 3"}) == (switched.needs_restart, changed.applied)


@pytest.mark.parametrize("text", ["[nats", "[nats]\nweight = -1", "[nats]\nwait = 1"])
def test_wrong_file(file: Path, text: str) -> None:
    """A wrong file is an error."""
    before = loaded(file)
    file.write_text(text)

    with pytest.raises(ConfigError):
        read_again(before)


def test_must_fit_what_stays(file: Path) -> None:
    """What changes is checked against what stays, which the file may have changed, too."""
    before = loaded(file)
    file.write_text("[nats]\nport = 10000\nweight = 9000\n")

    with pytest.raises(ConfigError, match="--weight must not be above"):
        read_again(before)


def test_log(file: Path) -> None:
    """One line for what changed, and a warning for what needs a restart."""
    before = loaded(file)
    file.write_text("[nats]\nweight = 2\nport = 2\n")
    _, changes = read_again(before)

    with capture_logs() as logs:
        changes.log()

    assert ["weight: 1 → 2"] == logs[0]["changed"]
    assert ("warning", ["port: 8000 → 2"]) == (logs[1]["log_level"], logs[1]["settings"])
