"""deploy/systemd: systemd accepts the units, they are hardened, and kvrouter accepts their settings."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from kvrouter.bus.embedded import server_binary
from kvrouter.settings.commands import command_named
from kvrouter.settings.read import load

UNITS = Path(__file__).resolve().parents[2] / "deploy" / "systemd"
# Of systemd's 0 (contained) to 100 (open), times ten.
MOST_EXPOSED = 15


@pytest.fixture
def units(tmp_path: Path) -> list[str]:
    """The units with the binaries of this environment: systemd checks that they exist."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed: apt-get install systemd")
    # by links: a path with a space would be two words to systemd
    (tmp_path / "bin").symlink_to(sysconfig.get_path("scripts"))
    (tmp_path / "nats-server").symlink_to(server_binary())
    for unit in UNITS.glob("*.service"):
        text = unit.read_text().replace("/opt/kvrouter/bin/nats-server", str(tmp_path / "nats-server"))
        text = text.replace("/opt/kvrouter/bin", str(tmp_path / "bin"))
        (tmp_path / unit.name).write_text(text)
    return sorted(str(unit) for unit in tmp_path.glob("*.service"))


def analyze(*words: str) -> tuple[int, str]:
    """Exit code and errors of systemd-analyze."""
    ended = subprocess.run(["systemd-analyze", *words], capture_output=True, text=True, check=False)
    return ended.returncode, ended.stderr


def test_systemd_accepts(units: list[str]) -> None:
    """No unknown key, no missing binary; a planted typo is found."""
    assert (0, "") == analyze("verify", *units)
    Path(units[0]).write_text(Path(units[0]).read_text().replace("Restart=always", "Restart=allways"))

    assert "allways" in analyze("verify", *units)[1]


def test_hardened(units: list[str]) -> None:
    """Exposure as systemd counts it; without the system call filter it is too high."""
    verdict = ("security", "--offline=true", f"--threshold={MOST_EXPOSED}")
    assert [0, 0, 0] == [analyze(*verdict, unit)[0] for unit in units]
    Path(units[0]).write_text(Path(units[0]).read_text().replace("SystemCallFilter", "#"))

    assert 0 != analyze(*verdict, units[0])[0]


@pytest.mark.parametrize(("command", "unit"), [("frontend", "frontend@"), ("worker", "agent@")])
def test_command_lines(command: str, unit: str) -> None:
    """The commands accept the flags, the config file and the environment file."""
    text = (UNITS / f"kvrouter-{unit}.service").read_text()
    (line,) = re.findall(rf"^ExecStart=\S+ {command} (.*)$", text, re.MULTILINE)
    variables = dict(
        line.split("=", 1) for line in (UNITS / "agent.env").read_text().splitlines() if "=" in line
    )
    words = [*line.replace("%i", "8000").split(), "--config", str(UNITS / "kvrouter.toml")]

    assert load(command_named(command), words, variables if command == "worker" else {}).settings
