"""--router-policy in a running frontend: decisions, callbacks, refreshes, and its mistakes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvrouter import Candidate, Choice, Policy, RouteRequest
from kvrouter.frontend.__main__ import main
from kvrouter.frontend.settings import parse_options
from kvrouter.policies.guarded import GuardedPolicy
from tests.frontend.clients import connected
from tests.frontend.fleet import STREAM, Fleet, FleetOf
from tests.frontend.workers import (
    LAST_CHUNK,
    OK,
    SSE_HEAD,
    answer,
    chunk,
    event,
    says,
    says_and_resets,
    says_and_stalls,
    stream,
    until,
)

USAGE_EVENT = b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 7}}\n\n'
HERE = "tests.policies.guarded_classes"


class Slow(Policy):
    """A policy whose refresh never ends."""

    refresh_s = 0.01

    def __init__(self) -> None:
        self.begun = 0

    def choose(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Choice:
        return candidates[0]

    async def refresh(self) -> None:
        self.begun += 1
        await asyncio.Event().wait()


class Counting(Slow):
    """Counts refreshes that overlap."""

    at_once = 0
    most_at_once = 0

    async def refresh(self) -> None:
        self.begun += 1
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        await asyncio.sleep(0.03)
        self.at_once -= 1


class AsksTheCancelled(Slow):
    """A policy whose refresh waits for something that is cancelled."""

    async def refresh(self) -> None:
        self.begun += 1
        raise asyncio.CancelledError


def own(fleet: Fleet) -> GuardedPolicy:
    """The policy of the one pool."""
    (router,) = fleet.frontend.replica.routers.values()
    policy = router.selection.policy
    assert isinstance(policy, GuardedPolicy)
    return policy


def told(fleet: Fleet) -> list[Any]:
    """The callbacks that Last has received."""
    policy: Any = own(fleet).policy
    return list(policy.calls)


async def test_it_decides_and_its_callbacks_run(fleet_of: FleetOf) -> None:
    """Requests go where it chooses; callbacks report the workers, each answer, and leaving workers."""
    async with fleet_of("--router-policy", f"{HERE}:Last", scripts=(OK, OK)) as fleet:
        for name in ("one", "two"):
            await fleet.ask(None, f"x-request-id: {name}")
        fleet.announce(fleet.workers[1], "leave")
        await until(lambda: len(fleet.targets(fleet.frontend)) == 1)
        await fleet.ask(None, "x-request-id: three")

        assert ["w0", "w1", "w1"] == fleet.requests
        heard = told(fleet)
        both_at = heard.index(("workers", ["w0", "w1"]))  # both may join at once or one after the other
        assert [
            ("workers", ["w0", "w1"]),
            ("routed", "one", "w1/0", 200), ("routed", "two", "w1/0", 200),
            ("removed", "w1"), ("workers", ["w0"]),
            ("routed", "three", "w0/0", 200),
        ] == heard[both_at:]  # fmt: skip
        policy: Any = own(fleet).policy
    assert ("close",) == policy.calls[-1]


@pytest.mark.parametrize(
    ("script", "status"),
    [
        (says(answer(b"{}", 503)), 503),
        (says(answer(b"{}", 404)), 404),
        (says_and_resets(), 502),
        (says(stream("a", "b")), 200),
    ],
)
async def test_status(fleet_of: FleetOf, script: Any, status: int) -> None:
    """The callback gets the status of each attempt once."""
    async with fleet_of("--router-policy", f"{HERE}:Last", "--retries", "0", scripts=(script,)) as fleet:
        await fleet.ask(STREAM, "x-request-id: r")

        assert [("routed", "r", "w0/0", status)] == told(fleet)[1:]


@pytest.mark.parametrize(
    ("script", "tokens"),
    [
        (says(stream("a", "b")), 2),
        (
            says(SSE_HEAD + chunk(event("a")) + chunk(USAGE_EVENT) + chunk(b"data: [DONE]\n\n") + LAST_CHUNK),
            7,
        ),
        (says(answer(b'{"usage": {"completion_tokens": 9}}')), 9),
        (says(answer(b"{}")), None),
        (says(answer(b"{}", 503)), None),
    ],
    ids=["events", "usage event", "usage", "no usage", "rejected"],
)
async def test_output_tokens(fleet_of: FleetOf, script: Any, tokens: int | None) -> None:
    """The end hook gets them from the usage, else from the events; None where neither is known."""
    flags = ("--router-policy", f"{HERE}:Ends", "--retries", "0")
    async with fleet_of(*flags, scripts=(script,)) as fleet:
        await fleet.ask(STREAM, "x-request-id: r")
        policy: Any = own(fleet).policy

        ((name, _, found),) = policy.ends
        assert ("r", tokens) == (name, found)


async def test_status_of_silence(fleet_of: FleetOf) -> None:
    """A worker that sends nothing: 504."""
    flags = ("--router-policy", f"{HERE}:Last", "--retries", "0", "--first-byte-timeout-s", "0.05")
    async with fleet_of(*flags, scripts=(says_and_stalls(),)) as fleet:
        await fleet.ask(None, "x-request-id: r")

        assert [("routed", "r", "w0/0", 504)] == told(fleet)[1:]


async def test_status_of_a_client_that_left(fleet_of: FleetOf) -> None:
    """Before its answer has begun: 499."""
    async with fleet_of("--router-policy", f"{HERE}:Last", scripts=(says_and_stalls(),)) as fleet:
        async with connected(fleet.url) as client:
            client.send(STREAM, "x-request-id: r")
            await until(lambda: fleet.workers[0].requests)
        await until(lambda: len(told(fleet)) > 1)
        assert [("routed", "r", "w0/0", 499)] == told(fleet)[1:]


async def test_status_comes_when_the_answer_begins(fleet_of: FleetOf) -> None:
    """The callback runs while the stream still runs. A client that leaves then changes nothing."""
    script = says_and_stalls(SSE_HEAD + chunk(event("a")))
    async with fleet_of("--router-policy", f"{HERE}:Last", scripts=(script,)) as fleet:
        async with connected(fleet.url) as client:
            client.send(STREAM, "x-request-id: r")
            await until(lambda: len(told(fleet)) > 1)
            assert 1 == fleet.bookings()
        await fleet.until_free()
        assert [("routed", "r", "w0/0", 200)] == told(fleet)[1:]


async def test_policy_that_always_fails(fleet_of: FleetOf) -> None:
    """No request is lost: they are placed by load. Each kind of mistake is logged once, and counted."""
    async with fleet_of("--router-policy", f"{HERE}:Fails", scripts=(OK, OK)) as fleet:
        answers = [await fleet.ask() for _ in range(6)]
        await until(lambda: own(fleet).troubles["refresh"] > 2)
        await until(lambda: len(fleet.logged("policy.trouble")) == 4)

        assert [200] * 6 == [one.status for one in answers]
        assert {"choose", "on_workers", "on_request_routed", "refresh"} == {
            entry["where"] for entry in fleet.logged("policy.trouble")
        }
        metrics = (await fleet.get("/metrics")).body.decode()
        assert 'kvrouter_policy_troubles_total{where="choose"} 6.0' in metrics


async def test_refresh_never_blocks(fleet_of: FleetOf) -> None:
    """A refresh that never ends is not started again, and requests are served."""
    async with fleet_of("--router-policy", f"{__name__}:Slow") as fleet:
        policy: Any = own(fleet).policy
        await until(lambda: policy.begun)
        assert 200 == (await fleet.ask()).status
        assert 1 == policy.begun


async def test_refresh_again_and_again(fleet_of: FleetOf) -> None:
    """Refreshes run one after the other."""
    async with fleet_of("--router-policy", f"{__name__}:Counting") as fleet:
        policy: Any = own(fleet).policy
        await until(lambda: policy.begun > 3)
        assert 1 == policy.most_at_once


async def test_refresh_that_takes_too_long(fleet_of: FleetOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refresh that takes too long is cancelled, logged once, and started again."""
    monkeypatch.setattr("kvrouter.replica.policy_upkeep.REFRESH_TIMEOUT_S", 0.02)
    async with fleet_of("--router-policy", f"{__name__}:Slow") as fleet:
        policy: Any = own(fleet).policy
        await until(lambda: policy.begun > 2)
        await until(lambda: fleet.logged("policy.trouble"))
        (entry,) = fleet.logged("policy.trouble")
        assert "has taken longer than 0.02 s" == entry["what"]


async def test_refresh_of_what_was_cancelled(fleet_of: FleetOf) -> None:
    """A refresh that awaits something cancelled counts as a mistake: logged once, and started again."""
    async with fleet_of("--router-policy", f"{__name__}:AsksTheCancelled") as fleet:
        policy: Any = own(fleet).policy
        await until(lambda: policy.begun > 2)
        await until(lambda: fleet.logged("policy.trouble"))
        (entry,) = fleet.logged("policy.trouble")
        assert ("refresh", "CancelledError: ") == (entry["where"], entry["what"])


def test_flags() -> None:
    """The class replaces the mode. Its arguments need a class."""
    options = parse_options(["--router-policy", f"{HERE}:Last", "--router-policy-arg", "weight=2"])

    assert "own" == options.router_mode
    assert options.policy.custom is not None
    assert {"weight": 2.0} == dict(options.policy.custom.arguments)


@pytest.mark.usefixtures("quiet_logs")
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--router-policy", "nowhere:Mine"], "no module 'nowhere'"),
        (["--router-policy", f"{HERE}:NotMade"], "no such store"),
        (["--router-policy-arg", "a=1"], "--router-policy-arg needs --router-policy"),
    ],
)
def test_wrong_class_ends_the_start(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, and one line with the way out."""
    assert 2 == main(["--port", "0", *flags])
    assert said in capsys.readouterr().err


def test_needs_no_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With needs_tokens = False prompts are not tokenized."""
    (tmp_path / "blind.py").write_text(
        "class Blind:\n    needs_tokens = False\n    def choose(self, request, candidates): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    options = parse_options(["--router-policy", "blind:Blind"])
    assert options.policy.custom is not None
    options.policy.custom.begin()

    assert not options.policy.custom().needs_tokens
    sys.modules.pop("blind")
