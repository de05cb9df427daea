"""Every mode over HTTP, and the mode of one request: real sockets, scripted workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvrouter.policies import POLICIES
from tests.frontend.fleet import BODY, FleetOf
from tests.frontend.workers import OK, answer, says, stream, until

THREE = (OK, OK, OK)


@pytest.mark.parametrize("mode", sorted(POLICIES))
async def test_every_mode_serves(fleet_of: FleetOf, mode: str) -> None:
    """Each mode serves requests, named by a request or by --router-mode."""
    target = ["x-kvrouter-target: w1"] if mode == "direct" else []
    async with fleet_of("--router-mode", mode, scripts=THREE) as fleet:
        assert 200 == (await fleet.ask(None, *target)).status
        assert 200 == (await fleet.ask(None, "x-kvrouter-mode: " + mode, *target)).status
    async with fleet_of(scripts=THREE) as fleet:
        response = await fleet.ask(None, "x-kvrouter-mode: " + mode, *target)
        decision = (await fleet.get(f"/decisions/{response.header('x-request-id')}")).json["decisions"][0]

        assert (200, mode) == (response.status, decision["mode"])
        assert f"{response.header('x-kvrouter-worker')}/0" == decision["winner"]


async def test_direct(fleet_of: FleetOf) -> None:
    """Mode direct uses the named worker and rank. Other modes ignore a client's rank."""
    async with fleet_of(scripts=(OK, OK), ranks=2, rank_header="X-data-parallel-rank") as fleet:
        direct = "x-kvrouter-mode: direct"
        named = [await fleet.ask(None, direct, "x-kvrouter-target: w1/1") for _ in range(2)]
        by_header = await fleet.ask(None, direct, "x-kvrouter-target: w0", "x-data-parallel-rank: 1")
        in_body = await fleet.ask({**BODY, "kvrouter": {"mode": "direct", "target": "w0/0"}})

        assert [("w1", "1")] * 2 == [
            (one.header("x-kvrouter-worker"), one.header("x-kvrouter-dp-rank")) for one in named
        ]
        assert "1" == by_header.header("x-kvrouter-dp-rank")
        assert ("w0", "0") == (in_body.header("x-kvrouter-worker"), in_body.header("x-kvrouter-dp-rank"))
        last, before = fleet.workers[0].requests[-1], fleet.workers[0].requests[-2]
        assert [["1"], ["0"]] == [one.headers("x-data-parallel-rank") for one in (before, last)]
        assert BODY == last.json


async def test_a_clients_own_rank(fleet_of: FleetOf) -> None:
    """A client's rank header is dropped, unless it names its target and the card has no rank header."""
    async with fleet_of() as fleet:
        await fleet.ask(None, "X-data-parallel-rank: 5")
        await fleet.ask(None, "X-data-parallel-rank: 5", "x-kvrouter-mode: direct", "x-kvrouter-target: w0")

        assert [[], ["5"]] == [one.headers("x-data-parallel-rank") for one in fleet.workers[0].requests]


async def test_direct_errors(fleet_of: FleetOf) -> None:
    """No target is a 400, an unknown one a 404, a draining one a 503. Each contains the way out."""
    async with fleet_of("--router-mode", "direct", scripts=(OK, OK)) as fleet:
        fleet.announce(fleet.workers[1], "draining")
        await until(lambda: len(fleet.targets(fleet.frontend)) == 1, "w1 drains")
        missing = await fleet.ask()
        senseless = await fleet.ask(None, "x-kvrouter-target: w0/x")
        unknown = await fleet.ask(None, "x-kvrouter-target: w7")
        draining = await fleet.ask(None, "x-kvrouter-target: w1")

        assert [400, 400, 404, 503] == [one.status for one in (missing, senseless, unknown, draining)]
        assert "x-kvrouter-target: <worker_id>" in missing.json["error"]["message"]
        assert "/workers of the admin listener" in unknown.json["error"]["message"]
        assert "w1 takes no requests now" in draining.json["error"]["message"]
        assert "1" == draining.header("retry-after")
        assert [] == fleet.requests


async def test_direct_to_one_that_fails(fleet_of: FleetOf) -> None:
    """In mode direct no other worker is tried: the client gets the worker's answer."""
    full = says(answer(b'{"error":{"message":"full"}}', 503))
    async with fleet_of(scripts=(full, OK)) as fleet:
        response = await fleet.ask(None, "x-kvrouter-mode: direct", "x-kvrouter-target: w0")

        assert (503, ["w0"]) == (response.status, fleet.requests)


async def test_prefix_affinity_follows_the_text(fleet_of: FleetOf) -> None:
    """Chats with a common beginning go to the same worker, without a tokenizer; others do not."""
    async with fleet_of("--router-mode", "prefix-affinity", scripts=THREE) as fleet:
        homes: dict[str, set[str]] = {}
        for topic in "abcabcabc":
            messages = [{"role": "system", "content": topic * 500}, {"role": "user", "content": "hi"}]
            response = await fleet.ask({"model": "m", "messages": messages}, path="/v1/chat/completions")
            homes.setdefault(topic, set()).add(response.header("x-kvrouter-worker"))

        assert [1, 1, 1] == [len(workers) for workers in homes.values()], homes
        assert 3 == len(set.union(*homes.values())), "each new text went to the smallest tree"


async def test_prefix_affinity_learns_from_streams(fleet_of: FleetOf) -> None:
    """A prompt's text is assigned to the target that completed its prefill."""
    async with fleet_of("--router-mode", "prefix-affinity", scripts=(says(stream("a")),) * 3) as fleet:
        body = {"model": "m", "prompt": "once upon a time " * 20, "stream": True}
        workers = {(await fleet.ask(body)).header("x-kvrouter-worker") for _ in range(6)}

        assert 1 == len(workers)


async def test_stage_one_by_header(fleet_of: FleetOf) -> None:
    """The header names a group, or anything else: equal values go to the same group."""
    flags = ("--router-mode", "two-stage", "--stage-one", "header:X-Bucket")
    async with fleet_of(*flags, scripts=THREE) as fleet:
        for worker, group in zip(fleet.workers, ("gold", "silver", "silver"), strict=True):
            fleet.announce(worker, labels={"group": group}, started_at_us=2)
        router = next(iter(fleet.frontend.replica.routers.values()))

        def groups_are_known() -> bool:
            return all(worker.card.labels for worker in router.pool.workers.values())

        await until(groups_are_known, "the groups are known")
        gold = {(await fleet.ask(None, "x-bucket: gold")).header("x-kvrouter-worker") for _ in range(5)}
        silver = {(await fleet.ask(None, "x-bucket: silver")).header("x-kvrouter-worker") for _ in range(20)}
        other = [(await fleet.ask(None, "x-bucket: kind-7")).header("x-kvrouter-worker") for _ in range(6)]

        assert ({"w0"}, {"w1", "w2"}) == (gold, silver)
        assert set(other) <= gold or set(other) <= silver


async def test_one_request_in_another_mode(fleet_of: FleetOf) -> None:
    """The mode of one request counts its own turns. The engine does not get the (deprecated) object."""
    async with fleet_of("--router-mode", "kv", scripts=THREE) as fleet:
        body = {**BODY, "kvrouter": {"mode": "round-robin", "temperature": 0.5}}
        workers = [(await fleet.ask(body)).header("x-kvrouter-worker") for _ in range(6)]

        assert workers[:3] == workers[3:]
        assert {"w0", "w1", "w2"} == set(workers[:3])
        assert all(BODY == one.json for worker in fleet.workers for one in worker.requests)
        assert ["kvrouter"] == [one["object"] for one in fleet.logged("request.deprecated_object")]


async def test_object_is_removed_from_every_body(fleet_of: FleetOf) -> None:
    """The object goes also if its name is escaped, and on routes that are passed on."""
    async with fleet_of(scripts=(OK, OK)) as fleet:
        body = json.dumps({"model": "m", "input": "x", "kvrouter": {"mode": "direct", "target": "w1"}})
        await fleet.ask(body.replace("kvrouter", "kv\\u0072outer").encode(), path="/v1/embeddings")
        await fleet.ask(body.encode(), path="/v1/embeddings")

        assert ["w1", "w1"] == fleet.requests
        assert [{"model": "m", "input": "x"}] * 2 == [one.json for one in fleet.workers[1].requests]


@pytest.mark.parametrize(
    ("header", "told"),
    [
        ("x-kvrouter-mode: best", "use one of direct, kv"),
        ("x-kvrouter-dry-run: perhaps", "true or false"),
        ("x-kvrouter-temperature: hot", "not a number of at least 0"),
    ],
)
async def test_wrong_values_are_refused(fleet_of: FleetOf, header: str, told: str) -> None:
    """A wrong value is a 400 that names the field. Nothing is sent."""
    async with fleet_of() as fleet:
        response = await fleet.ask(None, header)

        assert (400, header.partition(":")[0]) == (response.status, response.json["error"]["param"])
        assert told in response.json["error"]["message"]
        assert [] == fleet.requests


async def test_kvrouter_that_is_not_an_object(fleet_of: FleetOf) -> None:
    """`kvrouter` must be an object."""
    async with fleet_of() as fleet:
        response = await fleet.ask({**BODY, "kvrouter": "p2c"})

        assert (400, "kvrouter") == (response.status, response.json["error"]["param"])


async def test_retries_follow_the_fallbacks(fleet_of: FleetOf, tmp_path: Path) -> None:
    """With maxNumOfEndpoints 3, retries follow the order of the first decision."""
    file = tmp_path / "picker.yaml"
    file.write_text(
        "kind: EndpointPickerConfig\n"
        "plugins: [{type: queue-scorer}, {type: max-score-picker, parameters: {maxNumOfEndpoints: 3}}]\n"
        "schedulingProfiles:\n"
        "- {name: p, plugins: [{pluginRef: queue-scorer}, {pluginRef: max-score-picker}]}\n"
    )
    down = says(answer(b"{}", 500))
    async with fleet_of(
        "--router-mode", "scored", "--router-config", str(file), scripts=(down,) * 3
    ) as fleet:
        for number in range(5):  # equal workers are ordered by chance
            await fleet.ask(None, f"x-request-id: r{number}")
            decisions = (await fleet.get(f"/decisions/r{number}")).json["decisions"]

            assert 3 == len(decisions)
            assert decisions[0]["order"] == [one["winner"] for one in decisions]
            assert decisions[0]["order"][1:] == decisions[1]["order"]
