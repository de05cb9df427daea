"""What is logged, and given as the reason, while NATS cannot be reached."""

from __future__ import annotations

import socket
import ssl

import nats.errors
import pytest
from structlog.testing import capture_logs

from kvrouter.bus import local_users
from kvrouter.bus import outage as outages
from kvrouter.bus.outage import MOST_WARNINGS, NO_ANSWER, NO_SERVER, NO_TLS, OTHERWISE, Outage

DENIED = "nats: permissions violation for"
REJECTED = nats.errors.Error("nats: 'Authorization Violation'")


async def test_most_specific_error_stays() -> None:
    """A server that rejects a password closes the connection, too: the rejection stays the reason."""
    outage = Outage("nats://x")
    with capture_logs() as logs:
        for error in (REJECTED, ConnectionResetError(104, "Connection reset by peer"), TimeoutError()):
            outage.failed(error)

    assert "Authorization Violation" in outage.reason
    assert "--nats-" in outage.remedy
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
    """An unknown name, or a port where something else listens: the setting is wrong."""
    outage = Outage("nats://x")
    with capture_logs() as logs:
        outage.failed(error)

    assert "check --nats" in logs[0]["remedy"]


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (None, NO_ANSWER),
        (ConnectionRefusedError(111, "Connection refused"), NO_SERVER),
        (socket.gaierror(-2, "Name or service not known"), NO_ANSWER),
        (REJECTED, local_users.REJECTED),
        (nats.errors.Error(f'{DENIED} subscription to "a.>"'), outages.NO_RIGHT),
        (nats.errors.Error(f'{DENIED} subscription to "a.kv-replay.sglang.w1"'), outages.OTHER_WORKER),
        (nats.errors.Error(f'{DENIED} publish to "a.live.worker.sglang.w1"'), outages.OTHER_WORKER),
        (nats.errors.Error(f'{DENIED} publish to "a.kv-replay.sglang.w1"'), outages.NO_RIGHT),
        (ssl.SSLCertVerificationError(1, "self-signed certificate"), NO_TLS),
        (nats.errors.UnexpectedEOF(), OTHERWISE),
    ],
    ids=str,
)
async def test_long_outage(error: Exception | None, remedy: str) -> None:
    """After 10 s away, and then more and more rarely, a line says since when, why, and what to do."""
    outage = Outage("nats://x")
    with capture_logs() as logs:
        for second in range(45):
            outage.look(float(second), is_connected=False)
            if error is not None:
                outage.failed(error)

    awaited = [line for line in logs if line["event"] == "nats.awaited"]
    assert [10, 20, 40] == [line["waited_s"] for line in awaited]
    assert {("nats://x", remedy)} == {(line["servers"], line["remedy"]) for line in awaited}
    assert all(line["reason"] for line in awaited)
    # the errors themselves are not repeated
    assert (error is not None) == len(logs) - len(awaited)


async def test_outage_that_ends() -> None:
    """A connection ends the wait; the next outage has its own ten seconds."""
    outage = Outage("nats://x")
    with capture_logs() as logs:
        for second in range(60):
            outage.look(float(second), is_connected=second % 10 == 9)

    assert not logs


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
