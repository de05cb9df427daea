"""Requests that a prefill and a decode worker serve together."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from email.utils import formatdate
from typing import Any

import pytest

from kvrouter.connectors.nixl import NEEDED, Nixl
from kvrouter.core.routing.policy import RouteRequest
from kvrouter.core.wire.heartbeats import State
from kvrouter.relay.collected import Collected
from tests.frontend.clients import connected
from tests.frontend.fleet import BODY, STREAM, Fleet, FleetOf
from tests.frontend.workers import (
    END,
    OK,
    SSE_HEAD,
    WAIT_S,
    Received,
    Script,
    Wire,
    answer,
    chunk,
    event,
    in_turn,
    says,
    says_and_closes,
    says_and_resets,
    says_and_stalls,
    stream,
    until,
    until_found,
)

HANDED = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3, 4]],
    "remote_engine_id": "e1",
    "remote_request_id": "r1",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "remote_num_tokens": 64,
    "invented": {"by": "a later version"},
}
USAGE = {"prompt_tokens": 64, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}


def prefilled(headers: bytes = b"", /, **changes: Any) -> bytes:
    """A prefill worker's answer. A change of None removes the parameter."""
    handed = {name: value for name, value in (HANDED | changes).items() if value is not None}
    choice = {"index": 0, "text": "x", "finish_reason": "length"}
    whole = {"id": "p", "choices": [choice], "usage": USAGE, "kv_transfer_params": handed}
    return answer(json.dumps(whole).encode(), headers=headers)


P = says(prefilled())
D = says(stream("hi", "!"))
# Any prompt is handed over.
ALWAYS = ("--pd-min-uncached-tokens", "0")


@asynccontextmanager
async def pair(
    fleet_of: FleetOf,
    *flags: str,
    prefill: tuple[Script, ...] = (P,),
    decode: tuple[Script, ...] = (D,),
    connector: str = "nixl",
    **card: Any,
) -> AsyncIterator[Fleet]:
    """A fleet whose first workers compute prompts, and the others generate."""
    flags = ("--router-mode", "kv", *(flags or ALWAYS))
    async with fleet_of(*flags, scripts=(*prefill, *decode), replicas=1) as fleet:
        assign(fleet, len(prefill), kv_connector=connector, **card)
        (router,) = fleet.frontend.replica.routers.values()
        await until(lambda: len(router.pool.split.islands) == 1)
        yield fleet


def assign(fleet: Fleet, prefills: int, **card: Any) -> None:
    """Announce the first workers as prefill workers, and the others as decode workers."""
    for number, worker in enumerate(fleet.workers):
        role = "prefill" if number < prefills else "decode"
        fleet.announce(worker, role=role, started_at_us=2, **card)


async def shows(fleet: Fleet, line: str) -> bool:
    """Whether /metrics has the line."""
    return line in (await fleet.get("/metrics")).body.decode()


async def metric(fleet: Fleet, line: str) -> bool:
    """Wait until /metrics has the line: a request is counted just after its client has its answer."""
    async with asyncio.timeout(WAIT_S):
        while not await shows(fleet, line):
            pass
    return True


async def test_two_calls(fleet_of: FleetOf) -> None:
    """The prompt goes to the prefill worker, and what it hands over goes, verbatim, to the decode worker."""
    async with pair(fleet_of) as fleet:
        response = await fleet.ask(
            STREAM | {"max_tokens": 9, "stream_options": {"include_usage": True}, "seed": 1}
        )

        assert 200 == response.status
        first, second = fleet.workers
        (asked,), (answered,) = first.requests, second.requests
        assert {"stream": False, "max_tokens": 1, "seed": 1}.items() <= asked.json.items()
        assert "stream_options" not in asked.json
        assert asked.json["kv_transfer_params"]["do_remote_decode"] is True
        assert HANDED == answered.json.pop("kv_transfer_params")
        assert (STREAM | {"max_tokens": 9})["prompt"] == answered.json["prompt"]
        assert {"max_tokens": 9, "stream": True}.items() <= answered.json.items()
        assert asked.headers("x-request-id") == answered.headers("x-request-id")
        assert "w0" == response.header("x-kvrouter-prefill-worker")
        assert "w1" == response.header("x-kvrouter-worker")
        assert await metric(fleet, 'kvrouter_pd_requests_total{path="pair"} 1')


MOONCAKE: dict[str, Any] = {"connector": "mooncake", "kv_engine_ids": ("e1",), "bootstrap_port": 8998}


async def test_mooncake(fleet_of: FleetOf) -> None:
    """Both get the name of the transfer, a new one each time; the count of cached tokens is the prefill's."""
    async with pair(fleet_of, prefill=(P,), **MOONCAKE) as fleet:
        first, second = fleet.workers
        for _ in range(2):
            assert 200 == (await fleet.ask(STREAM)).status

        asked = [one.json["kv_transfer_params"] for one in first.requests]
        answered = [one.json["kv_transfer_params"] for one in second.requests]
        names = [one.pop("transfer_id") for one in asked]
        assert [{"do_remote_decode": True, "do_remote_prefill": False}] * 2 == asked
        assert 2 == len(set(names))
        assert names == [one.pop("transfer_id") for one in answered]
        finds = {"remote_engine_id": "e1", "remote_bootstrap_addr": "http://127.0.0.1:8998"}
        reads = {"do_remote_decode": False, "do_remote_prefill": True, "remote_prefill_cached_tokens": 0}
        assert [finds | reads] * 2 == answered
        assert await metric(fleet, 'kvrouter_pd_requests_total{path="pair"} 2')


async def test_mooncake_keeps_nothing(fleet_of: FleetOf) -> None:
    """An answer that ended by a stop word leaves no blocks: the decode worker must not wait for them."""
    ended = prefilled().replace(b'"length"', b'"stop"  ')
    async with pair(fleet_of, prefill=(says(ended),), **MOONCAKE) as fleet:
        assert 200 == (await fleet.ask(STREAM)).status

        assert "kv_transfer_params" not in fleet.workers[1].requests[0].json
        assert await metric(fleet, 'kvrouter_pd_requests_total{path="fallback"} 1')


ENDS: dict[str, tuple[State, dict[str, Any]]] = {
    "down": ("down", {}), "restarted": ("up", {"kv_engine_ids": ("e2",)}), "left": ("leave", {})
}  # fmt: skip


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("decodes", [1, 2])
async def test_the_mooncake_engine_dies(fleet_of: FleetOf, end: str, decodes: int) -> None:
    """Its decode engine would wait for the blocks for minutes: the request moves, if need be to the same."""
    waits = in_turn(says_and_stalls(), D)
    async with pair(fleet_of, decode=(waits,) * decodes, **MOONCAKE) as fleet:
        asking = asyncio.create_task(fleet.ask(STREAM))
        await until(lambda: any(worker.requests for worker in fleet.workers[1:]))
        state, change = ENDS[end]
        card: dict[str, Any] = {
            "kv_connector": "mooncake",
            "kv_engine_ids": ("e1",),
            "role": "prefill",
            "started_at_us": 3,
        }
        fleet.announce(fleet.workers[0], state, **(card | change))

        await until_found(fleet.frontend.hung_engines.look, lambda _: asking.done(), within_s=20)

        response = await asking
        assert 200 == response.status
        assert b"hi" in response.body
        assert await metric(fleet, "kvrouter_pd_pair_failures_total 1")


async def test_two_bookings(fleet_of: FleetOf) -> None:
    """Both halves are booked at once; the first ends with its answer, the second with the client's."""
    begun, release = asyncio.Event(), asyncio.Event()

    async def prefill(_received: Received, wire: Wire) -> None:
        begun.set()
        await release.wait()
        await wire.send(prefilled())

    async with pair(fleet_of, prefill=(prefill,), decode=(says_and_stalls(stream("a")[:-20]),)) as fleet:
        (router,) = fleet.frontend.replica.routers.values()

        def loads() -> list[tuple[int, int, int]]:
            return [router.pool.active.load(target) for target in router.pool.targets]

        asking = asyncio.create_task(fleet.ask(STREAM))
        await begun.wait()
        assert [(64, 4, 1), (0, 4, 1)] == loads()
        release.set()
        await until(lambda: loads() == [(0, 0, 0), (0, 4, 1)])
        asking.cancel()
        await until(lambda: loads() == [(0, 0, 0)] * 2)


async def test_decision(fleet_of: FleetOf) -> None:
    """A dry run and a kept decision show both halves, and why two are better than one."""
    async with pair(fleet_of) as fleet:
        planned = (await fleet.ask(BODY, path="/v1/route")).json
        response = await fleet.ask(BODY)
        kept = (await fleet.get(f"/decisions/{response.header('x-request-id')}")).json["decisions"][0]

        for one in (planned, kept):
            assert ("w1/0", "w0/0") == (one["winner"], one["prefill"]["winner"])
            assert {"w1"} == {each["worker_id"] for each in one["candidates"]}
            assert {"w0"} == {each["worker_id"] for each in one["prefill"]["candidates"]}
            assert {"uncached_tokens": 64, "least_tokens": 0} == one["remote"]
        assert [] == planned["removed"]


WHOLE = {
    "two answers": {"n": 2},
    "the best of two": {"best_of": 2},
    "two prompts": {"prompt": [[1, 2, 3], [4, 5, 6]]},
    "echo": {"echo": True},
    "logprobs of the prompt": {"prompt_logprobs": 1},
    "beam search": {"use_beam_search": True, "n": 1},
}


@pytest.mark.parametrize("fields", WHOLE.values(), ids=WHOLE)
async def test_whole(fleet_of: FleetOf, fields: dict[str, Any]) -> None:
    """What can be read only once is not handed over: the decode worker computes it."""
    async with pair(fleet_of, decode=(OK,)) as fleet:
        assert 200 == (await fleet.ask(BODY | fields)).status
        assert ["w1"] == fleet.requests


async def test_few_tokens_stay(fleet_of: FleetOf) -> None:
    async with pair(fleet_of, "--pd-min-uncached-tokens", "64", decode=(OK,)) as fleet:
        response = await fleet.ask(BODY)
        kept = (await fleet.get(f"/decisions/{response.header('x-request-id')}")).json["decisions"][0]
        assert {"uncached_tokens": 64, "least_tokens": 64} == kept["remote"]
        assert ["w1"] == fleet.requests
        assert await metric(fleet, 'kvrouter_pd_requests_total{path="decode"} 1')


@pytest.mark.parametrize("name", NEEDED)
async def test_all_or_none(fleet_of: FleetOf, name: str) -> None:
    """With a parameter missing the decode worker gets none, and computes the prompt."""
    async with pair(fleet_of, prefill=(says(prefilled(**{name: None})),)) as fleet:
        assert 200 == (await fleet.ask(STREAM)).status
        assert "kv_transfer_params" not in fleet.workers[1].requests[0].json
        assert await metric(fleet, 'kvrouter_pd_requests_total{path="fallback"} 1')


DATES = {
    "old": (lambda: f"date: {formatdate(time.time() - 60, usegmt=True)}\r\n", "fallback"),
    "none": (lambda: "", "fallback"),
    "in time": (lambda: f"date: {formatdate(time.time() + 60, usegmt=True)}\r\n", "pair"),
}


@pytest.mark.parametrize(("date", "path"), DATES.values(), ids=DATES)
async def test_lease_over(
    fleet_of: FleetOf, monkeypatch: pytest.MonkeyPatch, date: Callable[[], str], path: str
) -> None:
    """The decode worker gets no parameters whose lease may be over: it would read other prompts' blocks."""
    monkeypatch.setattr(Nixl, "lease_s", 0.0)
    async with pair(fleet_of, prefill=(says(prefilled(date().encode())),)) as fleet:
        assert 200 == (await fleet.ask(STREAM)).status
        assert ("kv_transfer_params" in fleet.workers[1].requests[0].json) == (path == "pair")
        assert await metric(fleet, f'kvrouter_pd_requests_total{{path="{path}"}} 1')


@pytest.mark.parametrize("head", [b"", b"date: yesterday\r\n"])
def test_answer_of_unknown_age(head: bytes) -> None:
    """Then the time since the request counts."""
    kept = Collected()
    kept.write(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n{}")
    assert float("inf") == kept.age_s(time.time())


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b'{"kv_transfer_params": 7}', b'{"kv_transfer_params": null, "x": 12345}']
)
async def test_strange_answer_of_the_prefill_worker(fleet_of: FleetOf, body: bytes) -> None:
    """Whatever a prefill worker answers with 200, the client is answered."""
    async with pair(fleet_of, prefill=(says(answer(body)),)) as fleet:
        assert 200 == (await fleet.ask(STREAM)).status


async def test_shared_storage(fleet_of: FleetOf) -> None:
    """Connector `example` adds no field to either body."""
    async with pair(fleet_of, connector="example") as fleet:
        assert 200 == (await fleet.ask(STREAM)).status
        assert ["w0", "w1"] == fleet.requests
        assert "kv_transfer_params" not in fleet.workers[0].requests[0].json
        assert STREAM == fleet.workers[1].requests[0].json


FAILURES = {
    "reset": says_and_resets(),
    "closed": says_and_closes(b"HTTP/1.1 200 OK\r\ncontent-length: 900\r\n\r\n{"),
    "503": says(answer(b'{"error": {"message": "full"}}', 503)),
    "429": says(answer(b'{"error": {"message": "later"}}', 429)),
    "an error under 200": says(answer(b'{"error": {"message": "no memory", "code": 500}}')),
}


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
async def test_prefill_worker_fails(fleet_of: FleetOf, failure: Script) -> None:
    """Another prefill worker is tried, and the client notices nothing."""
    shared = in_turn(failure, P)
    async with pair(fleet_of, prefill=(shared, shared)) as fleet:
        assert 200 == (await fleet.ask(STREAM)).status
        assert ["w0", "w1", "w2"] == sorted(fleet.requests)
        assert HANDED == fleet.workers[2].requests[0].json["kv_transfer_params"]


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
async def test_last_prefill_worker_fails(fleet_of: FleetOf, failure: Script) -> None:
    """Without another prefill worker the decode worker computes the prompt."""
    async with pair(fleet_of, prefill=(failure,)) as fleet:
        assert 200 == (await fleet.ask(STREAM)).status
        assert "kv_transfer_params" not in fleet.workers[1].requests[0].json


ERROR = b'data: {"error": {"message": "KV load failure", "code": 500}}\n\n'
LATE = {
    **FAILURES,
    "an error as the first event": says(SSE_HEAD + chunk(ERROR) + END),
    "an abort without a token": says(SSE_HEAD + chunk(event("", "abort")) + END),
}


@pytest.mark.parametrize("failure", LATE.values(), ids=LATE)
async def test_decode_worker_fails(fleet_of: FleetOf, failure: Script) -> None:
    """The prompt is computed again, as its blocks may be gone, and handed to another decode worker."""
    shared = in_turn(failure, D)
    async with pair(fleet_of, decode=(shared, shared)) as fleet:
        assert 200 == (await fleet.ask(STREAM)).status
        assert ["w0", "w0", "w1", "w2"] == sorted(fleet.requests)
        assert await metric(fleet, "kvrouter_pd_pair_failures_total 1")
        assert await metric(fleet, 'kvrouter_pd_requests_total{path="pair"} 1')


async def test_decode_worker_refuses_the_connection(fleet_of: FleetOf) -> None:
    """What was computed goes to another decode worker; the prompt is not computed again."""
    async with pair(fleet_of, decode=(D, D)) as fleet:
        gone = fleet.workers[1]
        gone.die()
        for count in range(1, 21):  # of two equal ones chance decides
            assert 200 == (await fleet.ask(STREAM)).status
            assert count == fleet.requests.count("w0")
            assert HANDED == fleet.workers[2].requests[-1].json["kv_transfer_params"]
        assert await metric(fleet, 'kvrouter_failed_attempts_total{reason="lost"}')
        assert await metric(fleet, 'kvrouter_pd_requests_total{path="pair"} 20')
        assert await metric(fleet, "kvrouter_pd_pair_failures_total 0")


@pytest.mark.parametrize(
    "failure", [answer(b'{"error": {"message": "load"}}', 500), SSE_HEAD + chunk(ERROR) + END]
)
async def test_the_prefill_worker_is_gone(fleet_of: FleetOf, failure: bytes) -> None:
    """The only decode worker cannot read what was handed over: it is asked again, without that."""

    async def decode(received: Received, wire: Wire) -> None:
        await (says(failure) if b"kv_transfer_params" in received.body else D)(received, wire)

    async with pair(fleet_of, decode=(decode,)) as fleet:
        assert 200 == (await fleet.ask(STREAM)).status
        assert ["w0", "w1", "w1"] == sorted(fleet.requests)
        assert await metric(fleet, 'kvrouter_pd_requests_total{path="fallback"} 1')


async def test_pair_that_fails_rests(fleet_of: FleetOf) -> None:
    """After three failures in a row the pair is left alone; the decode worker still serves whole requests."""
    bad = says(answer(b'{"error": {"message": "handshake"}}', 500))

    async def decode(received: Received, wire: Wire) -> None:
        await (bad if b"kv_transfer_params" in received.body else D)(received, wire)

    async with pair(fleet_of, *ALWAYS, "--retries", "0", decode=(decode,)) as fleet:
        statuses = [(await fleet.ask(STREAM)).status for _ in range(5)]
        assert [500, 500, 500, 200, 200] == statuses
        fleet.frontend.audit.check_events(asyncio.get_running_loop().time())
        fleet.frontend.audit.run()
        assert b"failed 3 times in a row with requests handed over" in (await fleet.get("/ready")).body


async def test_bad_request(fleet_of: FleetOf) -> None:
    """The prefill worker's 400 is the client's answer, and nothing else is tried."""
    refusal = says(answer(b'{"error": {"message": "max_tokens is wrong", "type": "BadRequestError"}}', 400))
    async with pair(fleet_of, prefill=(refusal, refusal)) as fleet:
        response = await fleet.ask(STREAM)
        assert 400 == response.status
        assert "max_tokens is wrong" in response.json["error"]["message"]
        assert 1 == len(fleet.requests)
        assert not await shows(fleet, "kvrouter_pd_requests_total{")  # nothing was computed


@pytest.mark.parametrize("fields", [{"max_tokens": 0}, {"max_tokens": -1}, {"max_completion_tokens": 0}])
async def test_invalid_limits_reach_the_prefill_worker(fleet_of: FleetOf, fields: dict[str, Any]) -> None:
    """So it rejects the request before it computes anything."""
    async with pair(fleet_of) as fleet:
        await fleet.ask(BODY | fields)
        assert fields.items() <= fleet.workers[0].requests[0].json.items()


async def test_options_of_no_stream_reach_the_prefill_worker(fleet_of: FleetOf) -> None:
    async with pair(fleet_of) as fleet:
        await fleet.ask(BODY | {"stream_options": {"include_usage": True}})
        assert "stream_options" in fleet.workers[0].requests[0].json


async def test_all_pairs_fail(fleet_of: FleetOf) -> None:
    """The last try is a decode worker alone, whatever the number of pairs."""
    bad = says(answer(b'{"error": {"message": "handshake"}}', 500))

    async def decode(received: Received, wire: Wire) -> None:
        await (bad if b"kv_transfer_params" in received.body else D)(received, wire)

    async with pair(fleet_of, prefill=(P, P), decode=(decode, decode)) as fleet:
        assert [200] * 6 == [(await fleet.ask(STREAM)).status for _ in range(6)]


async def test_client_leaves(fleet_of: FleetOf) -> None:
    """A client that leaves ends the prefill, and nothing reaches the decode worker."""
    async with pair(fleet_of, prefill=(says_and_stalls(),)) as fleet, connected(fleet.url) as client:
        client.send(STREAM)
        await until(lambda: fleet.requests == ["w0"])
        client.leave()
        await until(lambda: not fleet.workers[0].wires[0].is_open)
        await fleet.until_free()
        assert ["w0"] == fleet.requests


async def test_no_decode_worker(fleet_of: FleetOf) -> None:
    """Prefill workers alone serve nothing: the error and /ready say so."""
    async with fleet_of("--router-mode", "kv", scripts=(P,)) as fleet:
        fleet.announce(fleet.workers[0], role="prefill", kv_connector="nixl", started_at_us=2)
        (router,) = fleet.frontend.replica.routers.values()
        await until(lambda: not router.pool.has_live_target)
        response = await fleet.ask(STREAM)
        assert 503 == response.status
        assert "role prefill" in response.json["error"]["message"]
        await until(lambda: fleet.frontend.replica.readiness.is_ready)
        fleet.frontend.audit.run()
        assert b"role prefill and no decode worker" in (await fleet.get("/ready")).body


@pytest.mark.parametrize(("flags", "status"), [((), 200), (("--pd-fallback", "refuse"), 503)])
async def test_no_prefill_worker(fleet_of: FleetOf, flags: tuple[str, ...], status: int) -> None:
    """Decode workers alone serve whole requests, or none."""
    async with fleet_of("--router-mode", "kv", *flags, scripts=(D,)) as fleet:
        fleet.announce(fleet.workers[0], role="decode", kv_connector="nixl", started_at_us=2)
        (router,) = fleet.frontend.replica.routers.values()
        await until(lambda: router.pool.split.whole is not None)
        response = await fleet.ask(STREAM)
        assert status == response.status
        if status == 200:
            assert await metric(fleet, 'kvrouter_pd_requests_total{path="fallback"} 1')
        else:
            assert "--pd-fallback refuse" in response.json["error"]["message"]
        await until(lambda: fleet.frontend.replica.readiness.is_ready)
        fleet.frontend.audit.run()
        assert b"role decode and no prefill worker" in (await fleet.get("/ready")).body


REFUSE = (*ALWAYS, "--pd-fallback", "refuse")


async def test_refuse_without_hand_over(fleet_of: FleetOf) -> None:
    """With `--pd-fallback refuse` no decode worker computes a prompt for want of a prefill worker."""
    nothing = says(prefilled(remote_host=None))
    async with pair(fleet_of, *REFUSE, prefill=(nothing, P)) as fleet:
        for _ in range(4):
            assert 200 == (await fleet.ask(STREAM)).status
        assert all(HANDED == one.json["kv_transfer_params"] for one in fleet.workers[2].requests)
    async with pair(fleet_of, *REFUSE, prefill=(nothing,)) as fleet:
        assert 502 == (await fleet.ask(STREAM)).status
        assert ["w0"] == fleet.requests
        short = await fleet.ask(STREAM | {"prompt": [1, 2, 3]})  # less than a block: nothing to hand over
        assert 200 == short.status


async def test_refuse_where_pairs_fail(fleet_of: FleetOf) -> None:
    """Neither the last try nor a resting pair leaves a prompt to a decode worker."""
    bad = says(answer(b'{"error": {"message": "handshake"}}', 500))

    async def decode(received: Received, wire: Wire) -> None:
        await (bad if b"kv_transfer_params" in received.body else D)(received, wire)

    async with pair(fleet_of, *REFUSE, decode=(decode,)) as fleet:
        replies = [await fleet.ask(STREAM) for _ in range(4)]
        assert [500, 500, 500, 503] == [one.status for one in replies]
        assert "--pd-fallback refuse" in replies[-1].json["error"]["message"]
        planned = (await fleet.ask(BODY, path="/v1/route")).json
        assert planned["winner"] is None
        (router,) = fleet.frontend.replica.routers.values()
        assert {"w0"} == {target.worker_id for target in router.pool.refusals(RouteRequest(""))}  # as before
        assert ["w1"] == [one["worker_id"] for one in planned["removed"] if "just failed" in one["by"]]


async def test_pairs_that_rest_are_a_fallback(fleet_of: FleetOf) -> None:
    """A request counts once, by the path that it ended on."""
    bad = says(answer(b'{"error": {"message": "handshake"}}', 500))

    async def decode(received: Received, wire: Wire) -> None:
        await (bad if b"kv_transfer_params" in received.body else D)(received, wire)

    async with pair(fleet_of, decode=(decode,)) as fleet:
        assert [200] * 5 == [(await fleet.ask(STREAM)).status for _ in range(5)]
        assert await metric(fleet, 'kvrouter_pd_requests_total{path="fallback"} 5')
        assert not await shows(fleet, 'path="pair"')


async def test_islands(fleet_of: FleetOf) -> None:
    """No prompt is handed over to an engine of another version, and both versions serve."""
    async with fleet_of("--router-mode", "kv", *ALWAYS, scripts=(P, P, D, D)) as fleet:
        for number, worker in enumerate(fleet.workers):
            role, version = ("prefill", "decode")[number // 2], str(number % 2)
            fleet.announce(worker, role=role, engine_version=version, kv_connector="nixl", started_at_us=2)
        (router,) = fleet.frontend.replica.routers.values()
        await until(lambda: len(router.pool.split.islands) == 2)
        for _ in range(12):
            response = await fleet.ask(STREAM)
            pair_of = response.header("x-kvrouter-prefill-worker"), response.header("x-kvrouter-worker")
            assert pair_of in {("w0", "w2"), ("w1", "w3")}


# --- both halves at once (SGLang) ---

SGLANG: dict[str, Any] = {"connector": "sglang", "bootstrap_port": 8998}
ROOM = ("bootstrap_host", "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank")
FULL = answer(b'{"error": {"message": "full"}}', 503)
WAITS = says_and_stalls()
WHOLE_P = says(prefilled(kv_transfer_params=None))


def rooms(fleet: Fleet) -> list[list[int]]:
    """The rooms that each worker was given."""
    return [[one.json["bootstrap_room"] for one in worker.requests] for worker in fleet.workers]


async def test_at_once(fleet_of: FleetOf) -> None:
    """Both get the client's body and one room, a new one each time. That of the prefill is not streamed."""
    body = STREAM | {"max_tokens": 9, "stream_options": {"include_usage": True}, "logprobs": 2}
    async with pair(fleet_of, "--router-mode", "kv", **SGLANG) as fleet:
        for _ in range(2):
            response = await fleet.ask(body)
            assert (200, "w0", "w1") == (
                response.status,
                response.header("x-kvrouter-prefill-worker"),
                response.header("x-kvrouter-worker"),
            )
        first, second = fleet.workers
        for one, other in zip(first.requests, second.requests, strict=True):
            asked, answered = one.json, other.json
            fields = {name: answered.pop(name) for name in ROOM}
            assert fields == {name: asked.pop(name) for name in ROOM}
            assert {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998}.items() <= fields.items()
            assert 0 <= fields["bootstrap_room"] < 2**63
            assert body == answered
            unstreamed = {name: value for name, value in body.items() if name != "stream_options"}
            assert unstreamed | {"stream": False} == asked
        assert await metric(fleet, 'kvrouter_pd_requests_total{path="pair"} 2')
        assert 2 == len({room for rooms_of in rooms(fleet) for room in rooms_of})
        await fleet.until_free()


@pytest.mark.parametrize("mode", ["kv", "round-robin"])
@pytest.mark.parametrize("body", [BODY, STREAM])
async def test_at_once_in_every_mode(fleet_of: FleetOf, mode: str, body: dict[str, Any]) -> None:
    """A prompt of any length, as no worker could serve it alone."""
    decode = D if body.get("stream") else OK
    async with pair(fleet_of, "--router-mode", mode, decode=(decode,), **SGLANG) as fleet:
        assert 200 == (await fleet.ask(body | {"prompt": [1, 2]})).status
        assert ["w0", "w1"] == sorted(fleet.requests)


async def test_both_are_asked_at_once(fleet_of: FleetOf) -> None:
    """Each waits for the other. The prefill's booking ends with its answer, before the other's."""
    here = [asyncio.Event(), asyncio.Event()]

    async def prefill(received: Received, wire: Wire) -> None:
        here[0].set()
        await here[1].wait()
        await WHOLE_P(received, wire)

    async def decode(received: Received, wire: Wire) -> None:
        here[1].set()
        await here[0].wait()
        await says_and_stalls(stream("a")[:-20])(received, wire)

    async with pair(fleet_of, prefill=(prefill,), decode=(decode,), **SGLANG) as fleet:
        (router,) = fleet.frontend.replica.routers.values()
        asking = asyncio.create_task(fleet.ask(STREAM))
        await until(
            lambda: [(0, 0, 0), (0, 4, 1)] == [router.pool.active.load(one) for one in router.pool.targets]
        )
        asking.cancel()
        await until(lambda: [(0, 0, 0)] * 2 == [router.pool.active.load(one) for one in router.pool.targets])


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
async def test_a_prefill_worker_that_fails_ends_the_other_half(fleet_of: FleetOf, failure: Script) -> None:
    """The decode worker would wait for it; another pair is tried, in another room."""
    shared = in_turn(failure, WHOLE_P)
    async with pair(fleet_of, prefill=(shared, shared), decode=(in_turn(WAITS, D),), **SGLANG) as fleet:
        assert 200 == (await fleet.ask(STREAM)).status
        assert ["w0", "w1", "w2", "w2"] == sorted(fleet.requests)
        first, second = rooms(fleet)[2]
        assert first != second
        assert {first, second} == {room for (room,) in rooms(fleet)[:2]}
        assert not fleet.workers[2].wires[0].is_open
        assert await shows(fleet, "kvrouter_pd_pair_failures_total 0")


async def test_the_only_prefill_worker_fails(fleet_of: FleetOf) -> None:
    """Its error is the client's: no decode worker is asked alone."""
    async with pair(fleet_of, prefill=(says(FULL),), decode=(WAITS,), **SGLANG) as fleet:
        response = await fleet.ask(STREAM)
        assert (503, "full") == (response.status, response.json["error"]["message"])
        assert all(one.json.get("bootstrap_room") for one in fleet.workers[1].requests)
        await until(lambda: not any(wire.is_open for wire in fleet.workers[1].wires))
        await fleet.until_free()


@pytest.mark.parametrize("failure", LATE.values(), ids=LATE)
async def test_a_decode_worker_that_fails_ends_the_other_half(fleet_of: FleetOf, failure: Script) -> None:
    shared = in_turn(failure, D)
    async with pair(fleet_of, prefill=(in_turn(WAITS, WHOLE_P),), decode=(shared, shared), **SGLANG) as fleet:
        assert 200 == (await fleet.ask(STREAM)).status
        assert ["w0", "w0", "w1", "w2"] == sorted(fleet.requests)
        assert 2 == len(set(rooms(fleet)[0]))
        assert not fleet.workers[0].wires[0].is_open
        await fleet.until_free()


async def test_the_same_pair_again(fleet_of: FleetOf) -> None:
    """A transfer that has failed is tried again where there is no other pair, in another room."""
    failed = says(answer(b'{"error": {"message": "KVTransferError"}}', 500))
    decode = in_turn(failed, D)
    async with pair(fleet_of, prefill=(in_turn(WAITS, WHOLE_P),), decode=(decode,), **SGLANG) as fleet:
        assert 200 == (await fleet.ask(STREAM)).status
        assert 2 == len(set(rooms(fleet)[1]))


async def test_a_bad_request_at_once(fleet_of: FleetOf) -> None:
    refusal = says(answer(b'{"error": {"message": "max_tokens is wrong", "type": "BadRequestError"}}', 400))
    for scripts in ({"prefill": (refusal,), "decode": (WAITS,)}, {"prefill": (WAITS,), "decode": (refusal,)}):
        async with pair(fleet_of, **scripts, **SGLANG) as fleet:  # type: ignore[arg-type]
            response = await fleet.ask(STREAM)
            assert (400, "max_tokens is wrong") == (response.status, response.json["error"]["message"])
            assert ["w0", "w1"] == sorted(fleet.requests)


async def test_a_prefill_worker_fails_late(fleet_of: FleetOf) -> None:
    """When the client has output, the blocks are there: nothing is broken off."""
    go_on = asyncio.Event()

    async def prefill(received: Received, wire: Wire) -> None:
        await go_on.wait()
        await says_and_resets()(received, wire)

    async def decode(_received: Received, wire: Wire) -> None:
        await wire.send(SSE_HEAD + chunk(event("hi")))
        go_on.set()
        await asyncio.sleep(0.05)
        await wire.send(chunk(event("!", "stop")) + END)

    async with pair(fleet_of, prefill=(prefill,), decode=(decode,), **SGLANG) as fleet:
        response = await fleet.ask(STREAM)
        assert 200 == response.status
        assert b"!" in response.body
        assert ["w0", "w1"] == sorted(fleet.requests)


async def test_a_client_of_both_leaves(fleet_of: FleetOf) -> None:
    async with (
        pair(fleet_of, prefill=(WAITS,), decode=(WAITS,), **SGLANG) as fleet,
        connected(fleet.url) as client,
    ):
        client.send(STREAM)
        await until(lambda: ["w0", "w1"] == sorted(fleet.requests))
        client.leave()
        await until(lambda: not any(wire.is_open for worker in fleet.workers for wire in worker.wires))
        await fleet.until_free()


@pytest.mark.parametrize(
    ("role", "lacks"), [("prefill", b"no decode worker"), ("decode", b"no prefill worker")]
)
async def test_half_of_a_pair_alone(fleet_of: FleetOf, role: str, lacks: bytes) -> None:
    """503 and the reason, and the worker gets no request."""
    async with fleet_of("--router-mode", "kv", scripts=(D,)) as fleet:
        fleet.announce(fleet.workers[0], role=role, kv_connector="sglang", started_at_us=2)
        (router,) = fleet.frontend.replica.routers.values()
        await until(lambda: not router.pool.has_live_target)
        response = await fleet.ask(STREAM)
        assert 503 == response.status
        assert f"role {role}" in response.json["error"]["message"]
        await until(lambda: fleet.frontend.replica.readiness.is_ready)
        fleet.frontend.audit.run()
        ready = (await fleet.get("/ready")).body
        assert lacks in ready
        assert b"it gets no requests" in ready
        assert [] == fleet.requests


@pytest.mark.parametrize("fields", WHOLE.values(), ids=WHOLE)
async def test_what_no_pair_serves(fleet_of: FleetOf, fields: dict[str, Any]) -> None:
    """503 says what a pair serves; a whole worker beside it serves the rest."""
    async with pair(fleet_of, decode=(OK, OK), **SGLANG) as fleet:
        response = await fleet.ask(BODY | fields)
        assert 503 == response.status
        assert "one prompt and one answer" in response.json["error"]["message"]
        assert [] == fleet.requests
        fleet.announce(fleet.workers[2], role="both", started_at_us=3)
        (router,) = fleet.frontend.replica.routers.values()
        await until(lambda: bool(router.pool.split.whole))
        assert 200 == (await fleet.ask(BODY | fields)).status
        assert ["w2"] == fleet.requests


async def test_pairs_and_whole_workers(fleet_of: FleetOf) -> None:
    """Prompts go to a pair as by the rule for other connectors; the last try is a whole worker."""
    async with pair(fleet_of, decode=(WAITS, OK), prefill=(says(FULL),), **SGLANG) as fleet:
        fleet.announce(fleet.workers[2], role="both", started_at_us=3)
        (router,) = fleet.frontend.replica.routers.values()
        await until(lambda: bool(router.pool.split.whole))
        assert 200 == (await fleet.ask(BODY)).status
        assert ["w0", "w1", "w2"] == sorted(fleet.requests)
        assert "bootstrap_room" not in fleet.workers[2].requests[0].json


async def test_a_decision_about_both(fleet_of: FleetOf) -> None:
    async with pair(fleet_of, decode=(OK,), **SGLANG) as fleet:
        planned = (await fleet.ask(BODY, path="/v1/route")).json
        response = await fleet.ask(BODY)
        kept = (await fleet.get(f"/decisions/{response.header('x-request-id')}")).json["decisions"][0]
        for one in (planned, kept):
            assert ("w1/0", "w0/0") == (one["winner"], one["prefill"]["winner"])
            assert {"whole_workers": 0} == one["remote"]
            assert [] == one["removed"]
