"""What clients of the clients' port may see and do: --expose, --client-overrides, and what is whose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvrouter.errors import ConfigError
from kvrouter.frontend.settings import parse_options
from kvrouter.telemetry.metrics_port import MetricsPortOptions, metrics_port
from tests.frontend.clients import ask, get
from tests.frontend.fleet import BODY, Fleet, FleetOf
from tests.frontend.workers import OK, answer, in_turn, says, says_and_resets

ALICE, MALLORY = "authorization: Bearer alice", "authorization: Bearer mallory"
OWN = {"x-kvrouter-worker", "x-kvrouter-dp-rank", "x-kvrouter-overlap-blocks"}
PATH = "/v1/responses"


def own_headers(head: bytes) -> set[str]:
    """The router's own headers of an answer."""
    names = {line.partition(b":")[0].decode().lower() for line in head.split(b"\r\n")[1:]}
    return {name for name in names if name.startswith("x-kvrouter-") or name == "x-request-id"}


@pytest.mark.parametrize(
    ("exposed", "headers", "metrics"),
    [
        ("headers,metrics", OWN, 200),
        ("metrics,headers", OWN, 200),
        ("headers", OWN, 404),
        ("metrics", set(), 200),
        ("none", set(), 404),
    ],
)
async def test_exposed(fleet_of: FleetOf, exposed: str, headers: set[str], metrics: int) -> None:
    """The clients' port shows what is exposed; the admin listener shows all."""
    always = {"x-request-id", "x-kvrouter-router"}
    async with fleet_of("--expose", exposed, scripts=(OK,)) as fleet:
        assert headers | always == own_headers((await fleet.ask()).head)
        assert OWN | always == own_headers((await ask(fleet.frontend.admin_url, BODY)).head)
        answered = await get(fleet.url, "/metrics")
        assert metrics == answered.status
        if metrics == 404:
            assert "--expose" in answered.json["error"]["message"]
            assert "/metrics" not in (await get(fleet.url, "/openapi.json")).json["paths"]
        assert 200 == (await get(fleet.frontend.admin_url, "/metrics")).status


async def test_errors_name_no_worker(fleet_of: FleetOf) -> None:
    """Nor where it is, if clients may not see which worker they have."""
    lost = says_and_resets(b"")
    for exposed, is_named in (("headers", True), ("none", False)):
        async with fleet_of("--expose", exposed, "--retries", "0", scripts=(lost,)) as fleet:
            answered = await fleet.ask()
            assert 502 == answered.status
            assert is_named == ("the log of the replica" not in answered.json["error"]["message"])


async def test_operators_see_all(fleet_of: FleetOf, tmp_path: Path) -> None:
    """Who has the operators' key sees and overrides everything on the clients' port, too."""
    key = tmp_path / "key"
    key.write_text("s3cret")
    flags = ("--expose", "none", "--client-overrides", "off", "--admin-key-file", str(key))
    async with fleet_of(*flags, scripts=(OK, OK)) as fleet:
        direct = ("x-kvrouter-mode: direct", "x-kvrouter-target: w1", "authorization: Bearer s3cret")
        answers = [await fleet.ask(None, *direct) for _ in range(4)]
        assert ["w1"] * 4 == [one.header("x-kvrouter-worker") for one in answers]
        assert not any(b"s3cret" in one.head for one in fleet.workers[1].requests)
        await ask(fleet.frontend.admin_url, BODY, direct[0], "x-kvrouter-target: w0", direct[2])
        await ask(fleet.frontend.admin_url, BODY, direct[0], "x-kvrouter-target: w0", ALICE)
        assert [False, True] == [b"authorization:" in one.head for one in fleet.workers[0].requests]


@pytest.mark.parametrize("text", ["", "header", "headers,none", "all", "headers metrics"])
def test_wrong_exposure(text: str) -> None:
    """What may be exposed is said."""
    with pytest.raises(ConfigError, match="must be headers, metrics"):
        parse_options(["--expose", text])


def test_direct_needs_overrides() -> None:
    """A frontend whose clients must name workers, and may not, does not start."""
    with pytest.raises(ConfigError, match="--client-overrides on"):
        parse_options(["--router-mode", "direct", "--client-overrides", "off"])


PINS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({}, ("x-kvrouter-mode: direct", "x-kvrouter-target: w1")),
    ({"kvrouter": {"mode": "direct", "target": "w1"}}, ()),
    ({"nvext": {"backend_instance_id": "w1"}}, ()),
    ({"nvext": {"decode_worker_id": "w1", "agent_hints": {"priority": 5}}}, ()),
    ({}, ("x-kvrouter-mode: direct", "x-kvrouter-target: nobody")),
    ({}, ("x-kvrouter-overlap-weight: 1e9", "x-kvrouter-temperature: 100")),
    ({"kvrouter": {"overlap_weight": "wrong"}}, ()),
    ({"priority": -5}, ("x-kvrouter-priority: -5",)),
]


async def test_overrides_off(fleet_of: FleetOf) -> None:
    """What clients send to be routed otherwise is ignored, and counted; no engine gets it either."""
    async with fleet_of("--client-overrides", "off", scripts=(OK, OK)) as fleet:
        for body, headers in PINS:
            places = [(await fleet.ask({**BODY, **body}, *headers)).header("x-kvrouter-worker") for _ in "ab"]
            assert {"w0", "w1"} == set(places), (body, headers)  # round-robin
        sent = [one.json for worker in fleet.workers for one in worker.requests]
        assert not any({"kvrouter", "nvext", "priority"} & body.keys() for body in sent)
        text = (await get(fleet.frontend.admin_url, "/metrics")).body.decode()
        count = 2 * len(PINS)
        assert f'kvrouter_removed_fields_total{{field="overrides"}} {count}.0' in text


async def test_priority_with_escapes(fleet_of: FleetOf) -> None:
    """A name with escapes is the same name, and a route that is passed on has the field, too."""
    async with fleet_of("--client-overrides", "off", scripts=(OK,)) as fleet:
        hidden = b'{"model":"m","prompt":"x","prior\\u0069ty":-3}'
        for path in ("/v1/completions", "/inference/v1/generate", PATH):
            body = hidden.replace(b"prompt", b"input") if path == PATH else hidden
            assert 200 == (await fleet.ask(body, path=path)).status
            assert "priority" not in fleet.workers[0].requests[-1].json
        kept = {**BODY, "note": "\\u0069"}
        await fleet.ask(kept)
        assert kept == fleet.workers[0].requests[-1].json


async def test_overrides_on(fleet_of: FleetOf) -> None:
    """By default clients may choose, and engines get their priority."""
    async with fleet_of(scripts=(OK, OK)) as fleet:
        body, headers = {**BODY, "priority": -5}, PINS[0][1]
        assert {"w1"} == {(await fleet.ask(body, *headers)).header("x-kvrouter-worker") for _ in "abc"}
        assert -5 == fleet.workers[1].requests[0].json["priority"]


async def test_dry_runs_stay_the_operators(fleet_of: FleetOf) -> None:
    """A dry run that is not allowed must not become a real request."""
    async with fleet_of("--client-overrides", "off") as fleet:
        assert 404 == (await fleet.ask(None, "x-kvrouter-dry-run: true")).status
        assert not fleet.requests
        pinned = await ask(fleet.frontend.admin_url, BODY, "x-kvrouter-mode: direct", "x-kvrouter-target: w0")
        assert 200 == pinned.status  # of the admin listener's clients none is limited


async def test_wrong_targets_name_no_others(fleet_of: FleetOf) -> None:
    """The 404 says where operators find the names."""
    async with fleet_of(scripts=(OK, OK)) as fleet:
        answered = await fleet.ask(None, "x-kvrouter-mode: direct", "x-kvrouter-target: ?")
        assert 404 == answered.status
        assert not {"w0", "w1"} & set(answered.json["error"]["message"].replace(",", " ").split())


HARD = ("--session-affinity", "hard")


async def test_sessions_belong_to_clients(fleet_of: FleetOf) -> None:
    """One name is a different session for each client; no client can move another client's session."""
    async with fleet_of(*HARD, scripts=(OK, OK, OK)) as fleet:
        session = "x-session-id: chat"
        home = (await fleet.ask(None, session, ALICE)).header("x-kvrouter-worker")
        other = next(one.id for one in fleet.workers if one.id != home)
        direct = ("x-kvrouter-mode: direct", f"x-kvrouter-target: {other}")
        for credentials in (MALLORY, "x-api-key: alice", "x-a: b"):
            await fleet.ask(None, session, credentials, *direct)
            assert {home} == await _places(fleet, session, ALICE)
            assert {other} == await _places(fleet, session, credentials)
        decisions = (await fleet.get("/decisions?limit=1")).json["decisions"]
        one = (await fleet.get(f"/decisions/{decisions[0]['request_id']}")).json["decisions"][0]
        assert "chat" == one["session"]


async def _places(fleet: Fleet, *headers: str) -> set[str]:
    return {(await fleet.ask(None, *headers)).header("x-kvrouter-worker") for _ in range(3)}


@pytest.mark.parametrize("chosen", [{}, {"request_id": "mine"}])
async def test_responses_belong_to_clients(fleet_of: FleetOf, chosen: dict[str, str]) -> None:
    """Another client gets the 404 of an id that does not exist, at each replica; no engine is asked."""
    flags, body = ("--router-replica-sync",), {"model": "m", "input": "x"}
    async with fleet_of(*flags, scripts=(OK, OK), replicas=2) as fleet:
        await fleet.ask({**body, **chosen}, ALICE, path=PATH)
        (made,) = [one.json["request_id"] for worker in fleet.workers for one in worker.requests]
        (holder,) = [worker for worker in fleet.workers if worker.requests]
        for replica in fleet.frontends:
            after = {**body, "previous_response_id": made, "store": False}
            await _until_known(replica.url, after, holder.id)
            before = len(fleet.requests)
            for credentials in (MALLORY, "x-a: b", "x-api-key: alice"):
                answered = await ask(replica.url, after, credentials, path=PATH)
                assert 404 == answered.status
                assert f"Response with id '{made}' not found." == answered.json["error"]["message"]
            taken = await ask(replica.url, {**body, "request_id": made}, MALLORY, path=PATH)
            assert (400, "request_id") == (taken.status, taken.json["error"]["param"])
            assert before == len(fleet.requests)
        await fleet.ask({**body, "request_id": made}, ALICE, path=PATH)  # her own she may use again


async def _until_known(url: str, after: dict[str, Any], holder: str) -> None:
    """Return when the replica has heard where the response is: three in a row go there."""
    row = 0
    while row < 3:
        answered = await ask(url, after, ALICE, path=PATH)
        assert 200 == answered.status
        row = row + 1 if answered.header("x-kvrouter-worker") == holder else 0


async def test_ids_name_their_owner(fleet_of: FleetOf) -> None:
    """A replica that has never heard of a response still tells whose it is; guesses are unknown."""
    body = {"model": "m", "input": "x"}
    async with fleet_of(scripts=(OK,)) as fleet:
        await fleet.ask(body, ALICE, path=PATH)
        made = fleet.workers[0].requests[0].json["request_id"]
    guess = made[:-1] + ("0" if made[-1] != "0" else "1")
    async with fleet_of(scripts=(OK,)) as fleet:
        for response_id, credentials, status in (
            (made, ALICE, 200),
            (made, MALLORY, 404),
            (made, "x-a: b", 404),
            (guess, ALICE, 404),
            ("resp_" + "0" * 32, MALLORY, 200),  # as former versions made them: the engine knows
        ):
            after = {**body, "previous_response_id": response_id}
            assert status == (await fleet.ask(after, credentials, path=PATH)).status


async def test_clients_without_credentials(fleet_of: FleetOf) -> None:
    """All of them are one, as they were."""
    async with fleet_of(scripts=(in_turn(says(answer())), OK)) as fleet:
        body = {"model": "m", "input": "x"}
        await fleet.ask(body, path=PATH)
        (made,) = [one.json["request_id"] for worker in fleet.workers for one in worker.requests]
        after = {**body, "previous_response_id": made}
        assert 200 == (await fleet.ask(after, path=PATH)).status
        assert 404 == (await fleet.ask(after, ALICE, path=PATH)).status


async def test_metrics_port(fleet_of: FleetOf, free_port: Callable[[], int]) -> None:
    """A frontend's metrics are on a port of their own, by names if they are asked for, and nothing else."""
    port = free_port()
    async with fleet_of("--expose", "none", "--metrics-port", str(port)) as fleet:
        await fleet.ask()
        url = f"http://127.0.0.1:{port}"
        assert "kvrouter_requests_total" in (await get(url, "/metrics")).body.decode()
        few = (await get(url, "/metrics?name[]=kvrouter_build_info")).body.decode()
        assert {"kvrouter_build_info"} == {one.partition("{")[0] for one in few.split("\n") if "{" in one}
        assert [404] * 3 == [(await get(url, path)).status for path in ("/workers", "/live", "/")]


async def test_metrics_port_of_several_processes(free_port: Callable[[], int]) -> None:
    """All processes on one port listen on it; anyone else's port is an error."""
    port = MetricsPortOptions(free_port())

    async def text(_names: Sequence[str]) -> bytes:
        return b"x 1\n"

    async with metrics_port(port, text, is_shared=True), metrics_port(port, text, is_shared=True):
        assert b"x 1\n" == (await get(f"http://127.0.0.1:{port.port}", "/metrics")).body
        with pytest.raises(ConfigError, match="--metrics-port: cannot listen"):
            async with metrics_port(port, text):
                pass
