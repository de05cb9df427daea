"""The access log: one event for each request that is logged or has failed."""

from __future__ import annotations

from typing import Any

from tests.frontend.clients import ask
from tests.frontend.fleet import BODY, STREAM, Fleet, FleetOf
from tests.frontend.workers import (
    LAST_CHUNK,
    OK,
    SSE_HEAD,
    chunk,
    event,
    says,
    says_and_resets,
    says_and_stalls,
    until,
)

DIES = says_and_resets()
STREAMED = says(SSE_HEAD, chunk(event("a")), LAST_CHUNK)

TRACE = "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def events(fleet: Fleet) -> list[Any]:
    """Those of the access log."""
    return [one for one in fleet.trouble.logs if one["event"] in {"request.served", "request.failed"}]


async def test_all(fleet_of: FleetOf) -> None:
    """What was asked, where it went, what was cached, how long it took."""
    async with fleet_of("--access-log", "all", "--router-mode", "kv", scripts=(STREAMED,)) as fleet:
        await fleet.ask(STREAM, "x-request-id: r1", TRACE)
        (found,) = events(fleet)

        assert ("request.served", "info", "r1", 200) == (
            found["event"], found["log_level"], found["request"], found["status"]
        )  # fmt: skip
        assert ("/v1/completions", "m", "kv", "w0", 0, 0, 64) == tuple(
            found[name] for name in ("path", "model", "mode", "worker", "rank", "retries", "prompt_tokens")
        )
        assert "0af7651916cd43dd8448eb211c80319c" == found["trace"]
        assert 0 <= found["routed_s"] <= found["first_byte_s"] <= found["duration_s"]
        assert "error" not in found


async def test_off_but_failures(fleet_of: FleetOf) -> None:
    """By default only what failed leaves a line: by the client's fault an info, else a warning."""
    async with fleet_of(scripts=(OK,)) as fleet:
        await fleet.ask()
        await fleet.ask({"model": "x" * 500, "prompt": "p"})
        (found,) = events(fleet)

        assert ("request.failed", "info", 404) == (found["event"], found["log_level"], found["status"])
        assert 0 < len(found["error"]) <= 200


async def test_retries_and_lost_workers(fleet_of: FleetOf) -> None:
    """The worker that answered, and how many did not; without one a warning."""
    async with fleet_of("--access-log", "all", "--retries", "2", scripts=(DIES, OK)) as fleet:
        for _ in range(2):
            await fleet.ask()
        assert 1 == max(one["retries"] for one in events(fleet))
        assert {"w1"} == {one["worker"] for one in events(fleet)}
    async with fleet_of("--retries", "0", scripts=(DIES,)) as fleet:
        await fleet.ask()
        (found,) = events(fleet)
        assert ("warning", 502, "m", "w0") == (
            found["log_level"], found["status"], found["model"], found["worker"]
        )  # fmt: skip


async def test_client_that_left(fleet_of: FleetOf) -> None:
    """Its request is logged with status 499."""
    scripts = (says_and_stalls(b""),)
    async with fleet_of("--access-log", "all", scripts=scripts) as fleet, fleet.connected() as client:
        client.send(BODY)
        await until(lambda: bool(fleet.requests))
        client.leave()
        await until(lambda: bool(events(fleet)))
        (found,) = events(fleet)

        assert (499, "the client left") == (found["status"], found["error"])


async def test_one_in_a_hundred(fleet_of: FleetOf) -> None:
    """Chosen by chance; a wrong trace context is left out."""
    async with fleet_of("--access-log", "sampled", scripts=(OK,)) as fleet:
        chances = iter([0.5, 0.009, 0.01])
        fleet.frontend.completions._access._chance = lambda: next(chances)
        for _ in range(3):
            await ask(fleet.url, BODY, f"traceparent: 00-{'0' * 32}-{'1' * 16}-01", path="/v1/completions")
        (found,) = events(fleet)

        assert "trace" not in found
