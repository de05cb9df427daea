"""What is said while NATS cannot be reached."""

from __future__ import annotations

import nats.errors
from structlog.testing import capture_logs

from kvrouter.bus.trouble import MOST_KNOWN, Trouble

REFUSED = nats.errors.Error("nats: 'Authorization Violation'")


async def test_most_telling_error_stays() -> None:
    """A server that refuses a password hangs up, too: that it refused is what is said."""
    trouble = Trouble("nats://x")
    with capture_logs() as logs:
        for error in (REFUSED, ConnectionResetError(104, "Connection reset by peer"), TimeoutError()):
            trouble.met(error)

    assert "--nats-" in trouble.reason
    assert ["nats: 'Authorization Violation'"] == [entry["error"] for entry in logs]
    assert "nats://x" == logs[0]["servers"]


async def test_other_error_is_news() -> None:
    """The server has gone since: then that is why NATS is away, whatever it said before."""
    trouble = Trouble("nats://x")
    for error in (REFUSED, ConnectionRefusedError(111, "Connect call failed")):
        trouble.met(error)

    assert "Connect call failed" in trouble.reason


async def test_vague_error_is_better_than_none() -> None:
    """A connection that is only reset is said to be; after a connection nothing is."""
    trouble = Trouble("nats://x")
    trouble.met(ConnectionResetError(104, "Connection reset by peer"))
    assert "reset by peer" in trouble.reason

    trouble.over()
    assert not trouble.reason


async def test_logs_are_few() -> None:
    """The same once in 10 s, and a server that says something new each time does not fill the log."""
    trouble = Trouble("nats://x")
    with capture_logs() as logs:
        for _ in range(100):
            trouble.met(REFUSED)
        assert 1 == len(logs)
        for number in range(10 * MOST_KNOWN):
            trouble.met(ValueError(f"{number} " + "x" * 10_000))

    assert MOST_KNOWN == len(logs)
    assert all(len(entry["error"]) < 400 for entry in logs)
