"""The commands of docs/start/five-minutes.md do what the page says, on other ports."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from scripts.kit.ports import free_ports
from tests.long import needs_long

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "start" / "five-minutes.md"
pytestmark = needs_long("twenty seconds")


@contextmanager
def running(command: str) -> Iterator[subprocess.Popen[str]]:
    """A process of the page; stopped at the end."""
    process = subprocess.Popen(
        ["bash", "-c", f"exec {command}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    with process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)


def test_the_second_replica_knows_what_the_first_request_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both answers name one worker, the second overlaps, and the doctor finds nothing wrong."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    first, second, nats = free_ports(3)
    http, admin = (port[0] for port in (free_ports(2), free_ports(2)))
    text = PAGE.read_text().replace("/tmp/tiny", str(tmp_path / "tiny"))
    for shown, port in ((9000, first), (9001, second), (8000, http), (8001, http + 1), (8100, admin)):
        text = text.replace(str(shown), str(port))
    blocks = [re.sub(r"^    ", "", block, flags=re.M) for block in re.findall(r"(?:^    .*\n)+", text, re.M)]
    _, fleet, request, look = blocks
    tokenizer, *mockers, serve = fleet.splitlines()
    subprocess.run(["bash", "-c", tokenizer], check=True, capture_output=True)

    with ExitStack() as stack:
        for mocker in mockers:
            stack.enter_context(running(mocker))
        served = stack.enter_context(running(f"{serve} --admin-port {admin} --nats-port {nats}"))
        assert served.stdout is not None
        assert any("ready:" in line for line in served.stdout)
        answers = subprocess.run(["bash", "-c", request], capture_output=True, text=True, check=True).stdout
        looked = subprocess.run(
            ["bash", "-ec", look],
            env={**os.environ, "NATS_URL": f"nats://127.0.0.1:{nats}"},
            capture_output=True,
            text=True,
            check=False,
        )

    workers = re.findall(r"x-kvrouter-worker: (\S+)", answers)
    overlaps = [int(blocks) for blocks in re.findall(r"x-kvrouter-overlap-blocks: (\d+)", answers)]
    assert (2, 1) == (len(workers), len(set(workers)))
    assert 0 == overlaps[0] < overlaps[1]
    assert (0, True) == (looked.returncode, "0 errors" in looked.stdout), looked.stdout
