"""deploy/nats: nats-server accepts each file with the users of `kvrouter nats-accounts`."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kvrouter.bus import accounts
from kvrouter.bus.embedded import server_binary
from scripts.kit.chaos.cluster import on_this_host
from scripts.kit.proxies import DEPLOY

FILES = ("one.conf", "cluster.conf", "leaf.conf")


@pytest.mark.parametrize("name", FILES)
def test_server_accepts(name: str, tmp_path: Path) -> None:
    """With its environment; without accounts.conf next to it, it does not."""
    assert 0 == accounts.main([str(tmp_path), "--agent", "w1"])
    file = tmp_path / name
    file.write_text((DEPLOY / "nats" / name).read_text())
    variables = {"NATS_NAME": "nats-0", "NATS_LEAF_SEED": (tmp_path / "leaf.nk").read_text().strip()}

    def check() -> subprocess.CompletedProcess[str]:
        command = [str(server_binary()), "-t", "--config", str(file)]
        return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)

    assert 0 == (good := check()).returncode, good.stderr
    (tmp_path / "accounts.conf").unlink()
    assert 0 != check().returncode


@pytest.mark.parametrize("name", ["cluster.conf", "leaf.conf"])
def test_addresses(name: str) -> None:
    """For the rows of scripts/chaos no address of the file is left."""
    text = on_this_host((DEPLOY / "nats" / name).read_text(), [1, 2, 3, 4], [5, 6, 7], [8, 9, 10])

    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert not any(word in line for line in lines for word in ("0.0.0.0", "nats-0:", "4222", "7422"))
    assert any("127.0.0.1:1" in line for line in lines)
