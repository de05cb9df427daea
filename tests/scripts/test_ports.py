"""Ports for processes that will start later."""

from __future__ import annotations

import random
import socket
import subprocess
import sys

from scripts.kit.ports import free_ports

DRAW = "import random; random.seed(7); from scripts.kit.ports import free_ports; print(*free_ports(3))"


def test_in_a_row() -> None:
    """Each port is free, and outside of the range for outgoing connections."""
    ports = free_ports(20)

    assert list(range(ports[0], ports[0] + 20)) == ports
    assert 20_000 <= ports[0] < ports[-1] < 32_000
    for port in ports:
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_two_draws_never_agree() -> None:
    """A port is not drawn twice, even if the random numbers repeat and no process listens yet."""
    drawn = []
    for _ in range(20):
        random.seed(7)
        drawn += free_ports(3)

    assert 60 == len(set(drawn))


def test_two_processes_never_agree() -> None:
    """Ports drawn by this process are skipped by others."""
    random.seed(7)
    ours = free_ports(3)

    theirs = subprocess.run([sys.executable, "-c", DRAW], capture_output=True, text=True, check=True)

    assert {*ours}.isdisjoint(map(int, theirs.stdout.split()))


def test_what_listens_is_left_out() -> None:
    """A port in use that was never drawn is skipped."""
    again = DRAW.replace("seed(7)", "seed(8)")
    drawn = subprocess.run([sys.executable, "-c", again], capture_output=True, text=True, check=True)
    first = int(drawn.stdout.split()[0])
    with socket.create_server(("127.0.0.1", first)):
        random.seed(8)

        assert first not in free_ports(3)
