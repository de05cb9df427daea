"""The responses that `previous_response_id` may name: bounded, and found at the target that keeps them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvrouter.core.wire.ids import Target, WorkerId
from kvrouter.frontend.requests.kept_responses import KeptResponses, NewResponse
from tests.frontend.fleet import FleetOf
from tests.frontend.workers import OK

T1, T2 = Target(WorkerId("w1"), 0), Target(WorkerId("w2"), 1)
HELLO = {"role": "user", "content": "hello"}
PATH = "/v1/responses"
LONG = "Tell me about the cache of a transformer, block by block. " * 8
BODY: dict[str, Any] = {"model": "m", "input": LONG}


def new(name: str, *, size_bytes: int = 100) -> NewResponse:
    return NewResponse(name, [HELLO], size_bytes)


def test_found() -> None:
    """A response is found at its target, with its chat; an answer that was not read has a name of its own."""
    kept = KeptResponses()
    said = {"role": "assistant", "content": "a"}
    kept.keep(new("a"), T1, [said])
    kept.keep(new("b"), T2, None)
    kept.keep(new("c"), T2, None)

    a, b, c = (kept.find(name) for name in "abc")

    assert a is not None
    assert b is not None
    assert c is not None
    assert (T1, T2) == (a.target, b.target)
    assert (HELLO, said) == a.chat
    assert b.chat != c.chat
    assert kept.find("d") is None


def test_number() -> None:
    """The least recently used is forgotten first."""
    kept = KeptResponses(most=2)
    for name in ("a", "b"):
        kept.keep(new(name), T1, None)
    kept.find("a")

    kept.keep(new("c"), T1, None)

    assert [True, False, True] == [kept.find(name) is not None for name in ("a", "b", "c")]


def test_bytes() -> None:
    """Large chats make room for each other; one that is too large alone is not kept."""
    kept = KeptResponses(max_bytes=1000)
    for name in ("a", "a", "b", "c"):
        kept.keep(new(name, size_bytes=300), T1, [])
    assert (2, False) == (len(kept), kept.held_bytes > 1000)

    kept.keep(new("d", size_bytes=2000), T1, [])

    assert (0, 0) == (len(kept), kept.held_bytes)


async def test_continued(fleet_of: FleetOf, tiny: Path) -> None:
    """A response is continued at its worker, with the overlap of the chat before it."""
    flags = ("--router-mode", "kv", "--no-use-kv-events", "--model-path", str(tiny))
    async with fleet_of(*flags, scripts=(OK, OK, OK)) as fleet:
        first = await fleet.ask(BODY, path=PATH)
        holder = first.header("x-kvrouter-worker")
        (sent,) = (one.json for worker in fleet.workers for one in worker.requests)
        for _ in range(3):
            after = {**BODY, "input": "go on", "previous_response_id": sent["request_id"]}
            second = await fleet.ask(after, path=PATH)

            assert holder == second.header("x-kvrouter-worker")
            assert int(second.header("x-kvrouter-overlap-blocks") or 0) > 3
        assert BODY == {name: value for name, value in sent.items() if name != "request_id"}


async def test_continued_without_overlap(fleet_of: FleetOf) -> None:
    """Whatever the mode, and whatever the engine has evicted: only this worker has the response."""
    async with fleet_of("--router-mode", "round-robin", scripts=(OK, OK, OK)) as fleet:
        first = await fleet.ask({**BODY, "request_id": "mine"}, path=PATH)

        after = {**BODY, "previous_response_id": "mine", "store": False}
        holders = {(await fleet.ask(after, path=PATH)).header("x-kvrouter-worker") for _ in range(3)}

        assert {first.header("x-kvrouter-worker")} == holders


async def test_unknown(fleet_of: FleetOf) -> None:
    """An unknown one, or one whose worker is gone, goes by load: the engine answers it."""
    async with fleet_of(scripts=(OK, OK)) as fleet:
        response = await fleet.ask({**BODY, "previous_response_id": "resp_x"}, path=PATH)
        assert 200 == response.status

        await fleet.ask({**BODY, "request_id": "mine"}, path=PATH)
        (holder,) = (one for one in fleet.workers if any("mine" in str(each.json) for each in one.requests))
        fleet.announce(holder, "leave")
        await fleet.ask({**BODY, "previous_response_id": "mine"}, path=PATH)
        assert 3 == len(fleet.requests)


@pytest.mark.parametrize("body", [{"store": False}, {"request_id": "x" * 300}])
async def test_not_kept(fleet_of: FleetOf, body: dict[str, Any]) -> None:
    """The body of a request that is not to be stored, or with an id that is too long, is not changed."""
    async with fleet_of() as fleet:
        await fleet.ask({**BODY, **body}, path=PATH)

        (received,) = fleet.workers[0].requests
        assert {**BODY, **body} == received.json
        assert 0 == len(fleet.frontend.completions.accept.kept)
