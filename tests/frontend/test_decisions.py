"""Decisions over HTTP: previewed, kept, logged."""

from __future__ import annotations

import json

import pytest

from kvrouter.core.routing.policy import Prompt, RouteRequest
from kvrouter.lab.analyze.live import read_live
from kvrouter.lab.simulate.traces import TraceError
from kvrouter.observe.settings import ReplicaAccess
from tests.frontend.clients import ask
from tests.frontend.fleet import BODY, STREAM, Fleet, FleetOf
from tests.frontend.workers import OK, SSE_HEAD, answer, chunk, event, in_turn, says, says_and_stalls

THREE = (OK, OK, OK)
KV = ("--router-mode", "kv", "--kv-overlap-score-weight", "1")


async def test_route_explains_and_sends_nothing(fleet_of: FleetOf) -> None:
    """/v1/route replies with the terms of every candidate, the winner and the ties. Nothing is sent."""
    async with fleet_of(*KV, scripts=THREE) as fleet:
        response = await fleet.ask(None, "x-request-id: r1", path="/v1/route")

        body = response.json
        assert (200, "r1", "r1") == (response.status, response.header("x-request-id"), body["request_id"])
        assert ("kv", "m", 64, 4, True) == tuple(
            body[name] for name in ("mode", "model", "isl", "prompt_blocks", "dry_run")
        )
        assert ["w0/0", "w1/0", "w2/0"] == sorted(body["ties"])
        assert body["winner"] in body["ties"]
        for row in body["candidates"]:
            assert {
                "prefill_blocks": 4.0, "decayed_blocks": 0, "overlap_weight": 1.0, "decode_blocks": 4,
                "requests": 0, "cost": 8.0,
            } == row["terms"]  # fmt: skip
        assert ([], 0, 404) == (
            fleet.requests, fleet.bookings(), (await fleet.get("/decisions/r1")).status,
        )  # fmt: skip


async def test_seconds_come_first(fleet_of: FleetOf) -> None:
    """With weight auto: the seconds and their parts, then the published formula that gives the same order."""
    async with fleet_of("--router-mode", "kv", scripts=(OK, OK), prefill_tokens_per_s=1000) as fleet:
        await fleet.ask(None, "x-request-id: r1")
        dry = (await fleet.ask(None, path="/v1/route")).json
        (kept,) = (await fleet.get("/decisions/r1")).json["decisions"]

        for terms in [row["terms"] for body in (dry, kept) for row in body["candidates"]]:
            assert ["seconds", "prefill_blocks", "decode_blocks", "cost", "equivalent_weight"] == [*terms][:5]
            seconds = terms["seconds"]
            assert ["waiting", "own_prefill", "congestion", "total"] == [*seconds]
            assert 64 / 1000 == pytest.approx(seconds["own_prefill"])
            assert seconds.pop("total") == pytest.approx(sum(seconds.values()))
            weight = terms["equivalent_weight"]
            assert terms["cost"] == pytest.approx(weight * terms["prefill_blocks"] + terms["decode_blocks"])
            assert (weight, seconds["waiting"], seconds["own_prefill"]) == tuple(
                terms[name] for name in ("overlap_weight", "wait_s", "own_s")
            )


async def test_route_predicts_the_decision(fleet_of: FleetOf) -> None:
    """At temperature 0 and in the same state, a dry run and the request have the same winner."""
    stalls = says_and_stalls(SSE_HEAD, chunk(event("a")))
    async with (
        fleet_of(*KV, scripts=(stalls,) * 3) as fleet,
        fleet.connected() as first,
        fleet.connected() as next_,
    ):
        first.send(STREAM, "x-kvrouter-mode: direct", "x-kvrouter-target: w1")
        await first.read_until(b'"a"')
        next_.send({**STREAM, "prompt": [7] * 640}, "x-kvrouter-mode: direct", "x-kvrouter-target: w0")
        await next_.read_until(b'"a"')
        bodies = [{**BODY, "prompt": [start] * 64} for start in range(1, 6)]
        predicted = [(await fleet.ask(body, path="/v1/route")).json["winner"] for body in bodies]
        shared = (await fleet.ask(BODY, path="/v1/route")).json

        assert ["w2/0"] * 5 == predicted
        assert ("w1/0", 8.0) == (shared["winner"], _terms(shared, "w0")["cost"] - 40)
        router = next(iter(fleet.frontend.replica.routers.values()))
        prompt = shared_prompt(fleet)
        assert "w1/0" == str(router.decide(RouteRequest("x", (prompt,)), 0.0).target)


def shared_prompt(fleet: Fleet) -> Prompt:
    """The prompt of BODY, as it was booked."""
    (router,) = fleet.frontend.replica.routers.values()
    bookings = router.pool.active.bookings(router.router_id)
    booking = next(one for one in bookings if one.target.worker_id == "w1")
    return Prompt(booking.hashes, booking.isl)


def _terms(body: dict, worker: str) -> dict[str, float]:  # type: ignore[type-arg]
    (row,) = [one for one in body["candidates"] if one["worker_id"] == worker]
    terms: dict[str, float] = row["terms"]
    return terms


async def test_dry_run_of_an_ordinary_request(fleet_of: FleetOf) -> None:
    """A dry run by header or body gets the same answer as /v1/route."""
    async with fleet_of(*KV, scripts=THREE) as fleet:
        door = fleet.frontend.admin_url
        by_header = (await ask(door, STREAM, "x-kvrouter-dry-run: true")).json
        in_body = (await ask(door, {**BODY, "kvrouter": {"dry_run": True, "overlap_weight": 3}})).json
        not_dry = await fleet.ask(None, "x-kvrouter-dry-run: false")

        assert by_header["dry_run"] is in_body["dry_run"] is True
        assert (0.0, 0.0) == (by_header["unseen_bookings"], by_header["part"])
        assert {8.0} == {row["terms"]["cost"] for row in by_header["candidates"]}
        assert {16.0} == {row["terms"]["cost"] for row in in_body["candidates"]}
        assert (200, 1) == (not_dry.status, len(fleet.requests))


async def test_kinds_of_route(fleet_of: FleetOf) -> None:
    """Chats are recognized; other routes are named by `path`; malformed bodies get the request's error."""
    async with fleet_of(*KV) as fleet:
        chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        passed = {"model": "m", "input": "x", "path": "/v1/embeddings"}
        good = [chat, {**chat, "kind": "chat"}, passed, {**BODY, "path": "/v1/completions"}]
        bad = [
            b"{",
            {**BODY, "path": "/metrics"},
            {**BODY, "kind": "poem"},
            {"model": "m"},
            {**BODY, "model": "x"},
        ]

        assert ["w0/0"] * 4 == [(await fleet.ask(body, path="/v1/route")).json["winner"] for body in good]
        as_json = "content-type: application/json"
        answers = [await fleet.ask(body, as_json, path="/v1/route") for body in bad]
        assert [400, 400, 400, 400, 404] == [answer.status for answer in answers]


async def test_removed_targets_and_reasons(fleet_of: FleetOf) -> None:
    """Removed targets name the filter or the reason. Without candidates the winner is null."""
    stalls = in_turn(says_and_stalls(SSE_HEAD, chunk(event("a"))))
    fleets = fleet_of(*KV, "--max-ongoing-requests", "1", scripts=(stalls, OK, OK))
    async with fleets as fleet, fleet.connected() as client:
        client.send(STREAM, "x-kvrouter-mode: direct", "x-kvrouter-target: w0")
        await client.read_until(b'"a"')
        fleet.announce(fleet.workers[1], "draining")
        await fleet_until_targets(fleet, 2)
        some = (await fleet.ask(path="/v1/route")).json
        fleet.announce(fleet.workers[2], "draining")
        await fleet_until_targets(fleet, 1)
        none = (await fleet.ask(path="/v1/route")).json
        refused = await fleet.ask()

        assert "w2/0" == some["winner"]
        assert {("w0", "max-ongoing-requests"), ("w1", "draining")} == {
            (row["worker_id"], row["by"]) for row in some["removed"]
        }
        assert (None, [], 3) == (none["winner"], none["candidates"], len(none["removed"]))
        assert 503 == refused.status
        assert "max-ongoing-requests" in refused.json["error"]["message"]


async def fleet_until_targets(fleet: Fleet, count: int) -> None:
    """Return when the frontend knows `count` targets."""
    while len(fleet.targets(fleet.frontend)) != count:
        await fleet.get("/live")


async def test_decisions_are_kept(fleet_of: FleetOf) -> None:
    """/decisions keeps each attempt of a request, up to the limit."""
    scripts = in_turn(says(answer(b"{}", 500)), OK)
    async with fleet_of(*KV, "--decisions", "3", scripts=(scripts, scripts)) as fleet:
        await fleet.ask(None, "x-request-id: a/1")
        for number in (2, 3):
            await fleet.ask(None, f"x-request-id: a/{number}")
            kept = await fleet.get("/decisions/a/1")
            if number == 2:
                first, second = kept.json["decisions"]
                assert {first["winner"], second["winner"]} == {"w0/0", "w1/0"}
                assert ["failed this request"] == [row["by"] for row in second["removed"]]
                assert {8.0} == {row["terms"]["cost"] for row in first["candidates"]}
        newest = (await fleet.get("/decisions?limit=2")).json["decisions"]

        assert 1 == len(kept.json["decisions"]), "the first attempt has gone"
        assert ["a/3", "a/2"] == [row["request_id"] for row in newest]
        assert (64, 4, 2) == (newest[0]["isl"], newest[0]["prompt_blocks"], newest[0]["candidates"])
        assert (404, 404) == (
            (await fleet.get("/decisions/b")).status, (await fleet.get("/decisions/")).status,
        )  # fmt: skip


@pytest.mark.parametrize("limit", ["0", "1001", "x", ""])
async def test_wrong_limit(fleet_of: FleetOf, limit: str) -> None:
    """The message contains the valid values."""
    async with fleet_of() as fleet:
        response = await fleet.get(f"/decisions?limit={limit}")

        assert (400, "limit") == (response.status, response.json["error"]["param"])


async def test_kept_decisions_as_a_trace(fleet_of: FleetOf) -> None:
    """?blocks=true is JSON lines with the hashes of each prompt; `kvrouter analyze --live` reads a trace."""
    scripts = in_turn(says(answer(b"{}", 500)), OK)
    async with fleet_of(*KV, scripts=(scripts, OK)) as fleet:
        prompts = [[*range(64)], [*range(64)], [*range(32), *range(100, 140)]]
        for number, prompt in enumerate(prompts):
            await fleet.ask({**BODY, "prompt": prompt}, f"x-request-id: a/{number}")
        answered = await fleet.get("/decisions?blocks=true&limit=10")
        rows = [json.loads(line) for line in answered.body.splitlines()]

        newest = rows[0]["prompts"]
        assert (200, "a/2", [72], 4) == (
            answered.status, rows[0]["request_id"], [one["isl"] for one in newest], len(newest[0]["hashes"]),
        )  # fmt: skip
        live = await read_live(fleet.frontend.admin_url, ReplicaAccess(), None)
        assert (2, 16, 0.0) == (live.workers, live.block_size, live.prefill_tokens_per_s), (
            "3 samples are too few"
        )
        assert [64, 64, 72] == [one.prompt_tokens for one in live.requests], "each once, the oldest first"
        first, second, third = (one.hash_ids for one in live.requests)
        assert (first, first[:2]) == (second, third[:2])
        assert first[2] != third[2]
        with pytest.raises(TraceError, match=r"--model x: .* keeps decisions about m"):
            await read_live(fleet.frontend.admin_url, ReplicaAccess(), "x")


async def test_no_trace_of_nothing(fleet_of: FleetOf) -> None:
    """Without kept decisions, the message says what to do."""
    async with fleet_of("--decisions", "0") as fleet:
        await fleet.ask(None)

        with pytest.raises(TraceError, match="keeps no decisions: send requests first, or start it with"):
            await read_live(fleet.frontend.admin_url, ReplicaAccess(), None)


async def test_none_are_kept(fleet_of: FleetOf) -> None:
    """--decisions 0 switches it off."""
    async with fleet_of("--decisions", "0") as fleet:
        await fleet.ask(None, "x-request-id: a")

        assert 404 == (await fleet.get("/decisions/a")).status
        assert {"decisions": []} == (await fleet.get("/decisions")).json


async def test_log_decisions(fleet_of: FleetOf) -> None:
    """Each decision is one log event with the terms of every candidate."""
    async with fleet_of(*KV, "--log-decisions", "--decisions", "0", scripts=THREE) as fleet:
        response = await fleet.ask(None, "x-request-id: r1")

        (said,) = fleet.logged("request.routed")
        assert ("r1", f"{response.header('x-kvrouter-worker')}/0") == (said["request_id"], said["winner"])
        assert [8.0] * 3 == [row["terms"]["cost"] for row in said["candidates"]]
