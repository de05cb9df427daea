"""The access log: one event for each request that is logged or has failed."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from kvrouter.errors import BadRequestError
from kvrouter.frontend.operators.decision_views import DecisionViews
from kvrouter.frontend.records.access_log import AccessLog
from kvrouter.frontend.run import SWITCH_S
from kvrouter.frontend.settings import AccessOptions
from kvrouter.relay.request import Request, RequestHead
from kvrouter.telemetry.logs import set_log_level
from tests.frontend.clients import ask, connected, get
from tests.frontend.fleet import BODY, STREAM, Fleet, FleetOf
from tests.frontend.workers import (
    LAST_CHUNK,
    OK,
    SSE_HEAD,
    answer,
    chunk,
    event,
    in_turn,
    says,
    says_and_resets,
    says_and_stalls,
    until,
)
from tests.relay.rig import FakeClient

DIES = says_and_resets()
STREAMED = says(SSE_HEAD, chunk(event("a", "stop")), LAST_CHUNK)

TRACE = "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def events(fleet: Fleet) -> list[Any]:
    """The lines of the access log."""
    fleet.frontend.completions.readers.access.flush()  # else some lines wait for others
    return [one for one in fleet.trouble.logs if one["event"] in {"request.served", "request.failed"}]


async def test_all(fleet_of: FleetOf) -> None:
    """Who asked what, where it went, what was cached, how long each step took."""
    flags = ("--access-log", "all", "--router-mode", "kv", "--router-queue-threshold", "4")
    async with fleet_of(*flags, scripts=(STREAMED,)) as fleet:
        await fleet.ask(STREAM, "x-request-id: r1", TRACE)
        (found,) = events(fleet)

        assert ("request.served", "info", "r1", 200, "ok") == (
            found["event"], found["log_level"], found["request"], found["status"], found["outcome"]
        )  # fmt: skip
        assert ("127.0.0.1", "/v1/completions", "m", "kv", "w0", 0, 0, 64, 0) == tuple(
            found[name]
            for name in (
                "client", "path", "model", "mode", "worker", "rank", "retries", "prompt_tokens",
                "predicted_cached_tokens",
            )
        )  # fmt: skip
        assert "0af7651916cd43dd8448eb211c80319c" == found["trace"]
        steps = [found[name] for name in ("accept_s", "queue_s", "decide_s")]
        assert min(steps) > 0
        assert sum(steps) < found["first_byte_s"] < found["duration_s"]
        assert "error" not in found


async def test_what_the_engine_reports(fleet_of: FleetOf) -> None:
    """Its usage: cached tokens next to the prediction, output tokens, and prompt tokens unknown here."""
    usage = {"prompt_tokens": 70, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 48}}
    whole = says(answer(json.dumps({"choices": [], "usage": usage}).encode()))
    async with fleet_of("--access-log", "all", scripts=(whole,)) as fleet:
        await fleet.ask({"model": "m", "prompt": "words"})
        (found,) = events(fleet)

        assert (70, 48, 3) == tuple(
            found[name] for name in ("prompt_tokens", "cached_tokens", "output_tokens")
        )
        assert "queue_s" not in found


async def test_broken(fleet_of: FleetOf) -> None:
    """An answer that broke off after its first byte leaves one line, although its status is 200."""
    async with fleet_of(scripts=(says_and_resets(SSE_HEAD, chunk(event("a"))),)) as fleet:
        await fleet.ask(STREAM)
        (found,) = events(fleet)

        assert ("request.failed", "warning", 200, "broken", "w0") == tuple(
            found[name] for name in ("event", "log_level", "status", "outcome", "worker")
        )
        assert found["error"].startswith("the worker broke off")


async def test_what_no_route_takes(fleet_of: FleetOf) -> None:
    """A path that is not served, what is not HTTP/1.1, a closed door: one line each, and no failure."""
    async with fleet_of() as fleet, fleet.connected() as client:
        await fleet.get("/nowhere")
        await get(fleet.url, "/workers")
        await get(fleet.frontend.admin_url, "/elsewhere")
        client.writer.write(b"nonsense\r\n\r\n")
        await client.response()
        async with fleet.connected() as other:  # HTTP/2 of a proxy: alerts must not count it
            other.writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            await other.response()
        found = events(fleet)

        paths = ["/nowhere", "/workers", "/elsewhere", None]
        assert [("refused", 404, path) for path in paths[:3]] == [
            (one["outcome"], one["status"], one["path"]) for one in found[:3]
        ]
        assert ("refused", 400) == (found[3]["outcome"], found[3]["status"])
        assert ("refused", 505) == (found[4]["outcome"], found[4]["status"])
        assert b'outcome="failed"' not in (await get(fleet.frontend.admin_url, "/metrics")).body
        assert ["127.0.0.1"] * 5 == [one["client"] for one in found]


async def test_terms(fleet_of: FleetOf, request: pytest.FixtureRequest) -> None:
    """With --log-level debug also what the choice cost, and what the next best target would have."""
    usual = structlog.get_config()["wrapper_class"]
    request.addfinalizer(lambda: structlog.configure(wrapper_class=usual))
    set_log_level("debug")
    async with fleet_of("--access-log", "all", "--router-mode", "kv", scripts=(OK, OK, OK)) as fleet:
        fleet.announce(fleet.workers[2], "down")
        await until(lambda: len(fleet.targets(fleet.frontend)) == 2)
        await fleet.ask()
        assert 1 == len(events(fleet))
        set_log_level("info")
        await fleet.ask()
        first, second = events(fleet)

        assert {first["worker"] + "/0", first["next"]} == {"w0/0", "w1/0"}
        assert first["terms"]["cost"] == first["next_terms"]["cost"] > 0
        assert 2 == first["eligible"]
        assert {"terms", "next", "next_terms", "eligible"}.isdisjoint(second)


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
    """One that received nothing leaves a line in any mode; one that stopped its answer does not."""
    script = in_turn(says_and_stalls(b""), says_and_stalls(SSE_HEAD, chunk(event("a"))))
    async with fleet_of(scripts=(script,)) as fleet:
        for begins in (False, True):
            async with fleet.connected() as client:
                client.send(STREAM)
                await until(partial(lambda count: len(fleet.requests) == count, 1 + begins))
                if begins:
                    await client.read_until(event("a"))
                client.leave()
                await fleet.until_free()
        (found,) = events(fleet)

        assert (499, "left", "the client left") == (found["status"], found["outcome"], found["error"])
        assert "info" == found["log_level"]


@pytest.mark.parametrize(
    ("flags", "headers", "client"),
    [
        ((), ("x-forwarded-for: 9.9.9.9",), "127.0.0.1"),
        (("127.0.0.0/8",), (), "127.0.0.1"),
        (("127.0.0.0/8",), ("x-forwarded-for: 8.8.8.8, 9.9.9.9",), "9.9.9.9"),
        (("127.0.0.1", "9.0.0.0/8"), ("x-forwarded-for: 8.8.8.8", "x-forwarded-for: 9.9.9.9:81"), "8.8.8.8"),
        (("127.0.0.1",), ("x-forwarded-for: ::ffff:9.9.9.9",), "9.9.9.9"),
        (("127.0.0.1",), ("x-forwarded-for: [2001:db8::1]:443",), "2001:db8::1"),
        (("127.0.0.1",), ("x-forwarded-for: 8.8.8.8, <b>",), "127.0.0.1"),
        (("127.0.0.1", "9.9.9.9"), ("x-forwarded-for: 8.8.8.8, 9.9.9.9, unknown, 9.9.9.9",), "9.9.9.9"),
    ],
)
def test_client(flags: tuple[str, ...], headers: tuple[str, ...], client: str) -> None:
    """X-Forwarded-For counts only from trusted proxies, and only as far back as they reach."""
    fields = [(name, value) for name, _, value in (header.partition(": ") for header in headers)]
    head = RequestHead("POST", "/v1/completions", fields, wants_keep_alive=True)
    access = AccessLog(AccessOptions("all", flags), DecisionViews(None, logs=False), lambda: 0.0)
    with capture_logs() as logs:
        access.refused(Request(head, FakeClient()), "r", BadRequestError("bad"), "refused")

    assert [client] == [one["client"] for one in logs]


async def test_changed_at_run_time(fleet_of: FleetOf, tmp_path: Path) -> None:
    """A reload switches it on: for a look at a replica that is not to be restarted."""
    file = tmp_path / "c.toml"
    file.write_text("")
    async with fleet_of(f"--config={file}", scripts=(OK,)) as fleet:
        await fleet.ask()
        assert [] == events(fleet)
        file.write_text('[frontend]\naccess-log = "all"\n')
        async with connected(fleet.frontend.admin_url) as client:
            await client.ask(None, path="/config/reload")
        await fleet.ask()

        assert ["request.served"] == [one["event"] for one in events(fleet)]


async def test_one_in_a_hundred(fleet_of: FleetOf) -> None:
    """Chosen by chance; a wrong trace context is left out."""
    async with fleet_of("--access-log", "sampled", scripts=(OK,)) as fleet:
        chances = iter([0.5, 0.009, 0.008, 0.01])
        fleet.frontend.completions.readers.access._chance = lambda: next(chances)
        for version, trace in (("00", "0"), ("00", "0"), ("ff", "1"), ("00", "1")):
            head = f"traceparent: {version}-{trace * 32}-{'1' * 16}-01"
            await ask(fleet.url, BODY, head, path="/v1/completions")
        found = events(fleet)

        assert ["request.served"] * 2 == [one["event"] for one in found]
        assert not any("trace" in one for one in found)


async def test_lines_together(fleet_of: FleetOf) -> None:
    """Lines of served requests wait for others, with their own times: for a while, a failure, or the end."""
    async with fleet_of("--access-log", "all", scripts=(OK,)) as fleet:
        logs: list[Any] = fleet.trouble.logs

        def told() -> list[str]:
            return [one["event"].removeprefix("request.") for one in logs if "outcome" in one]

        for _ in range(3):
            await fleet.ask()
        await until(lambda: told() == ["served"] * 3)
        await fleet.ask()
        await fleet.get("/nowhere")
        assert ["served"] * 4 + ["failed"] == told()
        await fleet.ask()
    assert ["served"] * 4 + ["failed", "served"] == told()
    times = [one["timestamp"] for one in logs if one["event"] == "request.served"]
    assert 5 == len(set(times))
    assert times == sorted(times)
    assert times[0].endswith("Z")


async def test_large_bodies_do_not_wait(fleet_of: FleetOf) -> None:
    """The line of a request with a long body comes at once, and those that waited before it."""
    async with fleet_of("--access-log", "all", scripts=(OK,)) as fleet:
        await fleet.ask()
        await fleet.ask({"model": "m", "prompt": "word " * 20_000})
        assert 2 == len([one for one in fleet.trouble.logs if one["event"] == "request.served"])


@pytest.mark.parametrize(("mode", "is_sooner"), [("round-robin", True), ("kv", False)])
async def test_turn_of_the_log_thread(fleet_of: FleetOf, mode: str, is_sooner: bool) -> None:
    """Threads get their turn sooner than Python's default, where none of them tokenizes."""
    usual = sys.getswitchinterval()
    async with fleet_of("--router-mode", mode, scripts=(OK,)):
        assert (SWITCH_S if is_sooner else usual) == pytest.approx(sys.getswitchinterval())
    assert usual == sys.getswitchinterval()
