"""What is logged, and given as the reason, while NATS cannot be reached."""

from __future__ import annotations

import socket

import nats.errors
import pytest
from structlog.testing import capture_logs

from kvrouter.bus.outage import MOST_WARNINGS, Outage

REJECTED = nats.errors.Error("nats: 'Authorization Violation'")


async def test_most_specific_error_stays() -> None:
    """A server that rejects a password closes the connection, too: the rejection stays the reason."""
    outage = Outage("nats://x")
    with capture_logs() as logs:
        for error in (REJECTED, ConnectionResetError(104, "Connection reset by peer"), TimeoutError()):
            outage.failed(error)

    assert "--nats-" in outage.reason
    assert ["nats: 'Authorization Violation'"] == [entry["error"] for entry in logs]
    assert "nats://x" == logs[0]["servers"]


async def test_other_error_replaces_reason() -> None:
    """If the server is gone since, that is the reason, not the error before."""
    outage = Outage("nats://x")
    for error in (REJECTED, ConnectionRefusedError(111, "Connect call failed")):
        outage.failed(error)

    assert "Connect call failed" in outage.reason


async def test_no_server() -> None:
    """If no server is there, the warning says how to start one."""
    outage = Outage("nats://x")
    with capture_logs() as logs:
        outage.failed(ConnectionRefusedError(111, "Connection refused"))

    assert "`kvrouter nats`, --nats embedded, or nats-server" in logs[0]["remedy"]


@pytest.mark.parametrize("error", [socket.gaierror(-2, "Name or service not known"), TimeoutError()])
async def test_another_address(error: Exception) -> None:
    """A name that is not known, or a port where something else listens: the setting is wrong."""
    outage = Outage("nats://x")
    with capture_logs() as logs:
        outage.failed(error)

    assert "check --nats" in logs[0]["remedy"]


async def test_vague_error_counts_alone() -> None:
    """A reset connection is the reason unless a better one is known; once connected it is empty."""
    outage = Outage("nats://x")
    outage.failed(ConnectionResetError(104, "Connection reset by peer"))
    assert "reset by peer" in outage.reason

    outage.end()
    assert not outage.reason


async def test_warnings_are_few() -> None:
    """Each warning is logged once in 10 s; a server with new texts each time cannot fill the log."""
    outage = Outage("nats://x")
    with capture_logs() as logs:
        for _ in range(100):
            outage.failed(REJECTED)
        assert 1 == len(logs)
        for number in range(10 * MOST_WARNINGS):
            outage.failed(ValueError(f"{number} " + "x" * 10_000))

    assert MOST_WARNINGS == len(logs)
    assert all(len(entry["error"]) < 400 for entry in logs)
