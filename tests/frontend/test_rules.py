"""Filters, circuits and sessions over HTTP, with real sockets and a real NATS between replicas."""

from __future__ import annotations

import asyncio

import pytest

from kvrouter.core.routing.breaker import BreakerSettings
from kvrouter.core.wire.ids import Target, WorkerId
from kvrouter.frontend.run import RunningFrontend, running_frontend
from kvrouter.frontend.settings import parse_options
from tests.frontend.clients import ask
from tests.frontend.fleet import BODY, STREAM, Fleet, FleetOf
from tests.frontend.workers import OK, SSE_HEAD, answer, chunk, event, in_turn, says, says_and_stalls, until

THREE = (OK, OK, OK)
STALLS = says_and_stalls(SSE_HEAD, chunk(event("a")))
DIRECT = ("x-kvrouter-mode: direct", "x-kvrouter-target: w0")


async def workers_of(fleet: Fleet, count: int, *headers: str, url: str = "") -> list[str]:
    """The workers of `count` requests."""
    answers = [await ask(url or fleet.url, BODY, *headers) for _ in range(count)]
    return [one.header("x-kvrouter-worker") for one in answers]


async def test_busy_workers_are_skipped(fleet_of: FleetOf) -> None:
    """A worker above the threshold is skipped; if all are above it: 503 with Retry-After."""
    silent = says_and_stalls(SSE_HEAD)
    async with fleet_of("--active-prefill-tokens-threshold", "63", scripts=(silent, OK)) as fleet:
        async with fleet.connected() as client:
            client.send(STREAM, *DIRECT)
            await until(lambda: fleet.workers[0].requests, "w0 has it")

            assert ["w1"] * 3 == await workers_of(fleet, 3)
            refused = await fleet.ask(None, *DIRECT)

        assert (503, "1") == (refused.status, refused.header("retry-after"))


async def test_thresholds_at_run_time(fleet_of: FleetOf) -> None:
    """POST sets, shows and switches off; GET shows all; the next request uses the new thresholds."""
    fleets = fleet_of("--router-mode", "kv", scripts=(STALLS, STALLS), tiers={"device": 40})
    async with fleets as fleet, fleet.connected() as first, fleet.connected() as second:
        for client, name in ((first, "w0"), (second, "w1")):
            client.send(STREAM, "x-kvrouter-mode: direct", f"x-kvrouter-target: {name}")
            await client.read_until(b'"a"')
        wanted = {"model": "m", "active_decode_blocks_threshold": 0.09}
        changed = await fleet.ask(wanted, path="/busy_threshold")
        view = {**wanted, "active_prefill_tokens_threshold": None}
        assert (200, view) == (changed.status, changed.json)
        assert {"thresholds": [view]} == (await fleet.get("/busy_threshold")).json
        assert view == (await fleet.ask({"model": "m"}, path="/busy_threshold")).json

        refused = await fleet.ask()
        assert (503, "1") == (refused.status, refused.header("retry-after"))
        assert "busy" in refused.json["error"]["message"]

        off = {"model": "m", "active_decode_blocks_threshold": None}
        assert None is (await fleet.ask(off, path="/busy_threshold")).json["active_decode_blocks_threshold"]
        assert 2 == len((await fleet.ask(path="/v1/route")).json["candidates"])


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"model": "x"}, 404),
        ({"active_decode_blocks_threshold": 1.5}, 400),
        ({"active_decode_blocks_threshold": "high"}, 400),
        ({"active_prefill_tokens_threshold": -1}, 400),
        ({"threshold": 1}, 400),
        (b"{", 400),
        (b"\xff", 400),
    ],
)
async def test_wrong_thresholds(fleet_of: FleetOf, body: object, status: int) -> None:
    """A wrong body gets an error with the valid fields, and changes nothing."""
    async with fleet_of() as fleet:
        response = await fleet.ask(body, "content-type: application/json", path="/busy_threshold")

        assert status == response.status, response.body
        if status == 400:
            assert "active_prefill_tokens_threshold" in response.json["error"]["message"]
        (view,) = (await fleet.get("/busy_threshold")).json["thresholds"]
        assert None is view["active_decode_blocks_threshold"] is view["active_prefill_tokens_threshold"]


async def test_max_ongoing_requests(fleet_of: FleetOf) -> None:
    """A target with N requests in flight is skipped until one ends."""
    async with fleet_of("--max-ongoing-requests", "1", scripts=(STALLS, OK)) as fleet:
        async with fleet.connected() as client:
            client.send(STREAM, *DIRECT)
            await client.read_until(b'"a"')

            assert ["w1"] * 3 == await workers_of(fleet, 3)
        await fleet.until_free()
        candidates = (await fleet.ask(path="/v1/route")).json["candidates"]
        assert ["w0", "w1"] == [row["worker_id"] for row in candidates]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--locality-node", "n1", "--locality-zone", "z1"), {"w1"}),
        (("--locality-node", "n9", "--locality-zone", "z1"), {"w0", "w1"}),
        (("--locality-node", "n9", "--locality-zone", "z9"), {"w0", "w1", "w2"}),
    ],
)
async def test_locality(fleet_of: FleetOf, flags: tuple[str, ...], expected: set[str]) -> None:
    """Requests go to workers on this node, else in this zone, else to all."""
    async with fleet_of(*flags, scripts=THREE) as fleet:
        places = ({"zone": "z1", "node": "n0"}, {"zone": "z1", "node": "n1"}, {"zone": "z2", "node": "n2"})
        for worker, labels in zip(fleet.workers, places, strict=True):
            fleet.announce(worker, labels=labels, started_at_us=2)
        (router,) = fleet.frontend.replica.routers.values()

        def are_known() -> bool:
            return all(worker.card.labels for worker in router.pool.workers.values())

        await until(are_known, "the labels are known")

        assert expected == set(await workers_of(fleet, 9))


async def test_lora_multiplex(fleet_of: FleetOf) -> None:
    """Without the flag an adapter's requests stay where it is loaded; with it others may load it."""
    full = says(answer(b"{}", 503))
    for flags, status in (((), 503), (("--lora-multiplex",), 200)):
        async with fleet_of(*flags, scripts=(full, OK)) as fleet:
            fleet.announce(fleet.workers[0], lora_names=["ad"], started_at_us=2)
            (router,) = fleet.frontend.replica.routers.values()
            await until(lambda: "ad" in router.pool.lora_names, "the adapter is known")  # noqa: B023

            response = await fleet.ask({**BODY, "model": "ad"})

            assert (status, "w0") == (response.status, fleet.requests[0])


async def test_name_of_some_workers(fleet_of: FleetOf) -> None:
    """A name that only a renamed engine serves goes there; without that engine no other one is asked."""
    async with fleet_of(scripts=(OK, OK)) as fleet:
        fleet.announce(fleet.workers[0], served_names=["m-v2", "m"], started_at_us=2)
        (router,) = fleet.frontend.replica.routers.values()
        await until(lambda: "m-v2" in router.pool.uneven_names, "the name is known")

        answers = [await fleet.ask({**BODY, "model": "m-v2"}) for _ in range(6)]

        assert {200} == {answer.status for answer in answers}
        assert ["w0"] * 6 == fleet.requests
        fleet.announce(fleet.workers[0], "down", served_names=["m-v2", "m"], started_at_us=2)
        await until(lambda: len(router.pool.targets) == 1, "it is down")
        assert 503 == (await fleet.ask({**BODY, "model": "m-v2"})).status
        assert 200 == (await fleet.ask()).status


async def test_circuit_opens_and_closes(fleet_of: FleetOf) -> None:
    """A worker that keeps failing is skipped; one good request after the pause closes its circuit."""
    flaky = in_turn(*[says(answer(b"{}", 500))] * 2, OK)
    flags = ("--circuit-breaker", "--circuit-breaker-failures", "2")
    async with fleet_of(*flags, scripts=(flaky, OK)) as fleet:
        for _ in range(2):
            await fleet.ask(None, *DIRECT)
        assert 1 == len(fleet.logged("worker.circuit_opened"))
        assert b"kvrouter_circuit_open{" in (await fleet.get("/metrics")).body
        asked = len(fleet.workers[0].requests)
        assert ["w1"] * 4 == await workers_of(fleet, 4)
        assert asked == len(fleet.workers[0].requests)
        removed = (await fleet.ask(path="/v1/route")).json["removed"]
        assert [("w0", "circuit-breaker")] == [(row["worker_id"], row["by"]) for row in removed]

        (router,) = fleet.frontend.replica.routers.values()
        assert router.circuits is not None
        router.circuits.settings = BreakerSettings(2, 1, open_s=0.0)  # as if the pause were over
        assert {"w0", "w1"} == set(await workers_of(fleet, 4))
        assert b"kvrouter_circuit_open{" not in (await fleet.get("/metrics")).body


@pytest.mark.parametrize("status", [400, 404, 429])
async def test_clients_open_no_circuit(fleet_of: FleetOf, status: int) -> None:
    """Neither 4xx nor clients that disconnect open a circuit."""
    script = says(answer(b"{}", status))
    async with fleet_of("--circuit-breaker", "--circuit-breaker-failures", "1", scripts=(script,)) as fleet:
        assert [status] * 3 == [(await fleet.ask()).status for _ in range(3)]
        fleet.workers[0].script = says_and_stalls()
        async with fleet.connected() as client:
            client.send(BODY)
            await until(lambda: len(fleet.workers[0].requests) == 4, "it has it")
            client.leave()
        await fleet.until_free()

        assert [] == fleet.logged("worker.circuit_opened")


async def test_no_circuits_unless_asked_for(fleet_of: FleetOf) -> None:
    """By default the next request tries a failed worker again."""
    async with fleet_of(scripts=(says(answer(b"{}", 500)),)) as fleet:
        assert [500] * 12 == [(await fleet.ask()).status for _ in range(12)]


@pytest.mark.parametrize(
    ("flags", "header"), [((), "x-session-id: chat-1"), (("--session-header", "X-Chat"), "x-chat: chat-1")]
)
async def test_a_session_stays(fleet_of: FleetOf, flags: tuple[str, ...], header: str) -> None:
    """A session's requests go to one worker; other requests take turns."""
    async with fleet_of("--session-affinity", "soft", *flags, scripts=THREE) as fleet:
        assert 1 == len(set(await workers_of(fleet, 6, header)))
        assert 3 == len(set(await workers_of(fleet, 3)))


async def test_a_session_in_the_body(fleet_of: FleetOf) -> None:
    """The session may be `session_id`, or in the object `kvrouter`."""
    async with fleet_of("--session-affinity", "soft", scripts=THREE) as fleet:
        bodies = [{**BODY, "session_id": "s"}, {**BODY, "kvrouter": {"session": "s"}}] * 3

        assert 1 == len({(await fleet.ask(body)).header("x-kvrouter-worker") for body in bodies})
        assert "s" in [
            request.json.get("session_id") for worker in fleet.workers for request in worker.requests
        ]


@pytest.mark.parametrize(("affinity", "status"), [("soft", 200), ("hard", 503)])
async def test_a_session_whose_worker_is_full(fleet_of: FleetOf, affinity: str, status: int) -> None:
    """Soft: another worker takes the session over. Hard: the request gets a 503."""
    flags = ("--session-affinity", affinity, "--max-ongoing-requests", "1")
    async with fleet_of(*flags, scripts=(STALLS, OK, OK)) as fleet:
        async with fleet.connected() as client:
            client.send(STREAM, *DIRECT, "x-session-id: s")
            await client.read_until(b'"a"')

            response = await fleet.ask(None, "x-session-id: s")

            assert status == response.status
        await fleet.until_free()
        if affinity == "soft":
            assert {response.header("x-kvrouter-worker")} == set(
                await workers_of(fleet, 3, "x-session-id: s")
            )


async def test_a_session_ends(fleet_of: FleetOf) -> None:
    """An expired session is no longer bound."""
    async with fleet_of("--session-affinity", "soft", "--session-ttl-s", "0.000001", scripts=THREE) as fleet:
        workers = []
        for _ in THREE:
            workers += await workers_of(fleet, 1, "x-session-id: s")
            await until(lambda: bound(fleet.frontend, "s") is None, "the session is over")

        assert {"w0", "w1", "w2"} == set(workers)


def bound(frontend: RunningFrontend, session: str) -> Target | None:
    """The target to which this replica has bound the session."""
    (router,) = frontend.replica.routers.values()
    now = asyncio.get_running_loop().time()
    return router.tables.sessions.target_of(session, now)


async def test_two_replicas_share_sessions(fleet_of: FleetOf) -> None:
    """A session bound by one replica stays with its worker at the other."""
    flags = ("--session-affinity", "soft", "--router-replica-sync")
    async with fleet_of(*flags, scripts=THREE, replicas=2) as fleet:
        for number in range(6):
            session = f"s{number}"
            one, other = fleet.frontends[number % 2], fleet.frontends[1 - number % 2]
            (worker,) = await workers_of(fleet, 1, f"x-session-id: {session}", url=one.url)
            await until(lambda: bound(other, session), "the other replica has received it")  # noqa: B023

            assert bound(one, session) == bound(other, session) == Target(WorkerId(worker))
            assert [worker] * 2 == await workers_of(fleet, 2, f"x-session-id: {session}", url=other.url)


async def test_a_joiner_learns_sessions(fleet_of: FleetOf, nats_url: str) -> None:
    """The first snapshot contains sessions, also sessions that its owner received from others."""
    flags = ("--session-affinity", "soft", "--router-replica-sync")
    async with fleet_of(*flags, scripts=THREE, replicas=2) as fleet:
        first, second = fleet.frontends
        (worker,) = await workers_of(fleet, 1, "x-session-id: s", url=first.url)
        await until(lambda: bound(second, "s"), "the second knows it")
        await workers_of(fleet, 1, url=second.url)
        namespace = fleet.subjects.live.split(".")[1]
        words = ["--host", "127.0.0.1", "--port", "0", "--nats", nats_url, "--namespace", namespace]
        async with running_frontend(parse_options([*words, "--router-mode", "random", *flags])) as joiner:
            fleet.frontends.append(joiner)
            await until(lambda: joiner.replica.routers, "the pool is known")
            for each in fleet.workers:
                fleet.announce(each)
            await until(lambda: len(fleet.targets(joiner)) == 3, "workers seen")
            await until(lambda: bound(joiner, "s"), "the joiner knows it")

            assert [worker] * 3 == await workers_of(fleet, 3, "x-session-id: s", url=joiner.url)
            await fleet.until_free()
            fleet.frontends.remove(joiner)
