"""Engine routes that are passed on: which, to which worker, with which retries and limits."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from kvrouter.core.wire.heartbeats import WorkerBeat, encode
from kvrouter.core.wire.ids import PoolId, WorkerId
from kvrouter.core.wire.ops import VERSION
from kvrouter.frontend.requests.engine_routes import PASSED
from tests.core.worlds import card
from tests.frontend.fleet import BODY, Fleet, FleetOf
from tests.frontend.workers import (
    LAST_CHUNK,
    OK,
    OK_BODY,
    SSE_HEAD,
    Received,
    Wire,
    answer,
    chunk,
    in_turn,
    says,
    says_and_resets,
    says_and_stalls,
    until,
)

EMBED = {"model": "m", "input": "hello", "encoding_format": "float"}
CREATED = b'event: response.created\ndata: {"type": "response.created"}\n\n'
DELTA = b'event: response.output_text.delta\ndata: {"delta": "a"}\n\n'
BROKEN = b'event: error\ndata: {"type": "error", "error": {"code": 503, "message": "full"}}\n\n'
AUDIO = bytes(range(256)) * 2000


def form(boundary: str = "bound", **fields: str | bytes) -> tuple[bytes, str]:
    """A multipart body and its header. Values that are bytes become files."""
    parts = []
    for name, value in fields.items():
        of_file = b'; filename="a.wav"\r\nContent-Type: audio/wav' if isinstance(value, bytes) else b""
        content = value if isinstance(value, bytes) else value.encode()
        head = b'Content-Disposition: form-data; name="%s"%s\r\n\r\n' % (name.encode(), of_file)
        parts.append(b"--%s\r\n" % boundary.encode() + head + content + b"\r\n")
    end = b"--%s--\r\n" % boundary.encode()
    return b"".join(parts) + end, f"content-type: multipart/form-data; boundary={boundary}"


async def join_second_pool(fleet: Fleet, number: int = 1, **facts: Any) -> None:
    """Announce one of the workers, under its id, for a second model, `other`."""
    worker = fleet.workers[number]
    gone = WorkerBeat(VERSION, 1, "leave", "m-12345678", [], 1)
    fleet.bus.publish(fleet.subjects.live_worker(WorkerId(worker.id)), encode(gone))
    told = {"url": worker.url, "model": "other", "publishes_events": False, **facts}
    beat = WorkerBeat(VERSION, 2, "up", "other-1", [], 1, card(worker.id, **told))
    fleet.bus.publish(fleet.subjects.live_worker(WorkerId(worker.id)), encode(beat))
    routers = fleet.frontend.replica.routers
    await until(
        lambda: PoolId("other-1") in routers and routers[PoolId("other-1")].pool.targets, "second pool"
    )


SENT = [route for route in PASSED if route[0] != "GET"]
FETCHED = [path for method, path in PASSED if method == "GET"]


@pytest.mark.parametrize(("method", "path"), SENT)
async def test_passed(fleet_of: FleetOf, method: str, path: str) -> None:
    """Method, body and path reach the worker unchanged; the answer has the router's headers."""
    async with fleet_of() as fleet, fleet.connected() as client:
        client.send(EMBED, "x-request-id: r1", path=f"{path}?a=b", method=method)
        response = await client.response()

        (received,) = fleet.workers[0].requests
        assert (200, OK_BODY, "w0") == (response.status, response.body, response.header("x-kvrouter-worker"))
        assert received.head.startswith(f"{method} {path}?a=b HTTP/1.1".encode())
        assert EMBED == received.json
        assert ["r1"] == received.headers("x-request-id")


@pytest.mark.parametrize("path", FETCHED)
async def test_passed_get(fleet_of: FleetOf, path: str) -> None:
    """A GET without a body goes to the only model's workers."""
    async with fleet_of() as fleet:
        assert (200, OK_BODY) == ((response := await fleet.get(path)).status, response.body)
        assert fleet.workers[0].requests[0].head.startswith(f"GET {path} ".encode())


@pytest.mark.parametrize(
    "path",
    [
        "/reset_prefix_cache",
        "/v1/load_lora_adapter",
        "/sleep",
        "/collective_rpc",
        "/v1/embeddings/x",
        "/load",
    ],
)
async def test_not_passed(fleet_of: FleetOf, path: str) -> None:
    """An engine's administration, and routes that are not listed, are not reachable through the frontend."""
    async with fleet_of() as fleet:
        response = await fleet.ask({}, path=path)

        assert (404, "NotFoundError") == (response.status, response.json["error"]["type"])
        assert 405 == (await fleet.get("/v1/embeddings")).status
        assert not fleet.requests


async def test_least_load(fleet_of: FleetOf) -> None:
    """In mode kv such a request goes to the worker with the fewest requests, and is booked while it runs."""
    busy = says_and_stalls(SSE_HEAD, chunk(DELTA))
    async with fleet_of("--router-mode", "kv", scripts=(OK, OK)) as fleet, fleet.connected() as client:
        for worker in fleet.workers:
            worker.script = busy
        client.send({**EMBED, "stream": True}, path="/v1/embeddings")
        await client.read_until(b"delta")
        (first,) = fleet.requests
        assert 1 == fleet.bookings()
        for worker in fleet.workers:
            worker.script = OK
        for _ in range(5):
            await fleet.ask(EMBED, path="/v1/embeddings")

        assert {first} != set(fleet.requests[1:])
        assert [1, 5] == sorted(len(worker.requests) for worker in fleet.workers)
        client.leave()
        await fleet.until_free()


async def test_by_model(fleet_of: FleetOf) -> None:
    """The pool is found by the model in JSON, in a form or in the query."""
    async with fleet_of(scripts=(OK, OK)) as fleet:
        await join_second_pool(fleet)
        body, content_type = form(file=AUDIO, model="other")
        quoted, its_type = form('a"b', model="m", file=b'; name="model"\r\n\r\nother\r\n')
        asked = [
            await fleet.ask({"model": "other"}, path="/v1/embeddings"),
            await fleet.ask({"model": "m"}, path="/v1/embeddings"),
            await fleet.ask(body, content_type, path="/v1/audio/transcriptions"),
            await fleet.ask(
                quoted.replace(b'a"b', b"a_b"),
                its_type.replace('a"b', '"a_b"'),
                path="/v1/audio/translations",
            ),
            await fleet.get("/version?model=other"),
        ]

        assert ["w1", "w0", "w1", "w0", "w1"] == [each.header("x-kvrouter-worker") for each in asked]
        assert body == fleet.workers[1].requests[1].body


async def test_no_model_with_several(fleet_of: FleetOf) -> None:
    """If several models are served, a request must name one: 400, with the list."""
    async with fleet_of(scripts=(OK, OK)) as fleet:
        assert 200 == (await fleet.ask({"prompt": [1]})).status
        assert 200 == (await fleet.ask({"input": "x"}, path="/v1/embeddings")).status
        await join_second_pool(fleet, lora_names=("sql",))
        without_boundary = ("a", "content-type: multipart/form-data")
        asked = [
            await fleet.ask({"prompt": [1]}),
            await fleet.ask({"input": "x"}, path="/v1/embeddings"),
            await fleet.ask(form(file=b"x")[0], form()[1], path="/v1/audio/transcriptions"),
            await fleet.ask(
                without_boundary[0].encode(), without_boundary[1], path="/v1/audio/transcriptions"
            ),
            await fleet.get("/version"),
        ]

        assert [(400, "model")] * 5 == [(each.status, each.json["error"]["param"]) for each in asked]
        assert all("m, other, sql" in each.json["error"]["message"] for each in asked)
        assert 404 == (await fleet.ask({"model": "gpt"}, path="/v1/embeddings")).status


async def test_same_adapter_in_two_pools(fleet_of: FleetOf) -> None:
    """The requests go to one pool, the same at every replica; /workers and the log show the conflict."""
    async with fleet_of(scripts=(OK, OK), lora_names=("sql",)) as fleet:
        await join_second_pool(fleet, lora_names=("sql",))
        workers = [(await fleet.ask({**BODY, "model": "sql"})).header("x-kvrouter-worker") for _ in range(4)]
        await until(lambda: fleet.logged("worker.problem"), "it is logged")
        pools = {pool["pool"]: pool["problems"] for pool in (await fleet.get("/workers")).json["pools"]}

        assert ["w0"] * 4 == workers
        assert [] == pools["m-12345678"]
        assert "'sql' is also a name in pool m-12345678" in pools["other-1"][0]


async def test_models_are_merged(fleet_of: FleetOf) -> None:
    """/v1/models lists the base models and adapters of all pools, each once, in the fields of vLLM."""
    async with fleet_of(scripts=(OK, OK, OK), lora_names=("sql",), max_model_len=99) as fleet:
        await join_second_pool(fleet, 2, lora_names=("sql", "poet"), started_at_us=7_000_000)
        listed = (await fleet.get("/v1/models")).json

    def entry(name: str, created: int, root: str, parent: str | None, length: int | None) -> dict[str, Any]:
        facts = {"object": "model", "created": created, "owned_by": "kvrouter", "root": root}
        return {"id": name, **facts, "parent": parent, "max_model_len": length}

    assert "list" == listed["object"]
    assert [
        entry("m", 0, "m", None, 99),
        entry("sql", 0, "sql", "m", None),
        entry("other", 7, "other", None, None),
        entry("poet", 7, "poet", "other", None),
    ] == listed["data"]


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"kvrouter": 5}', b"[" * 20_000, b'"\xff"'])
async def test_malformed(fleet_of: FleetOf, body: bytes) -> None:
    """A body that is not a JSON object is a 400 of the router."""
    async with fleet_of() as fleet:
        response = await fleet.ask(body, path="/v1/embeddings")

        assert (400, "BadRequestError") == (response.status, response.json["error"]["type"])


IDS = list(range(1000, 1200))


@pytest.mark.parametrize("caches", [None, False])
async def test_embeddings(fleet_of: FleetOf, caches: bool | None) -> None:
    """Long inputs go where they were computed before, unless no engine caches them; all others by load."""
    bodies: list[dict[str, Any]] = [
        {"input": IDS},
        {"input": [IDS]},
        {"input": [IDS] * 5},
        {"input": IDS[:64]},
        {"input": IDS, "truncate_prompt_tokens": 100},
        {"input": [{"image": "x" * 600}]},
    ]
    flags = ("--router-mode", "kv", "--no-use-kv-events")
    async with fleet_of(*flags, scripts=(OK, OK)) as fleet:
        for worker in fleet.workers:
            fleet.announce(worker, prefix_caching=caches)
        workers = next(iter(fleet.frontend.replica.routers.values())).pool.workers
        await until(lambda: {caches} == {each.card.prefix_caching for each in workers.values()}, "cards")
        answers = [await fleet.ask({"model": "m", **body}, path="/v1/embeddings") for body in bodies]

    found = [int(one.header("x-kvrouter-overlap-blocks") or 0) for one in answers]
    assert [0, 0 if caches is False else 12, 0, 0, 0, 0] == found


async def test_retry(fleet_of: FleetOf) -> None:
    """A worker that fails before its first byte is replaced, as with completions."""
    scripts = in_turn(says_and_resets(), says(answer(b"{}", 503)), OK)
    async with fleet_of(scripts=(scripts,) * 3) as fleet:
        assert 200 == (await fleet.ask(EMBED, path="/v1/embeddings")).status
        assert ["w0", "w1", "w2"] == sorted(fleet.requests)


REFUSALS = {
    "in one read": (SSE_HEAD, chunk(BROKEN)),
    "in pieces": (SSE_HEAD + b"%x\r\neve" % len(BROKEN), BROKEN[3:13], BROKEN[13:16], BROKEN[16:]),
    "at the end": (SSE_HEAD, chunk(BROKEN.strip()) + LAST_CHUNK),
}


@pytest.mark.parametrize("case", REFUSALS)
async def test_named_error_event_first(fleet_of: FleetOf, case: str) -> None:
    """A stream of named events whose first is an error is a rejection: another worker is tried."""
    good = says(SSE_HEAD, chunk(CREATED), chunk(DELTA) + LAST_CHUNK)
    scripts = in_turn(says(*REFUSALS[case]), good)
    async with fleet_of(scripts=(scripts, scripts)) as fleet:
        response = await fleet.ask({**EMBED, "stream": True}, path="/v1/embeddings")

        assert CREATED + DELTA == response.body
        assert 2 == len(fleet.requests)


async def test_named_events_come_at_once(fleet_of: FleetOf) -> None:
    """The first named event reaches the client before the second exists."""
    asked = asyncio.Event()

    async def script(_received: Received, wire: Wire) -> None:
        await wire.send(SSE_HEAD, chunk(CREATED))
        await asked.wait()
        await wire.send(chunk(DELTA) + LAST_CHUNK)

    async with fleet_of(scripts=(script,)) as fleet, fleet.connected() as client:
        client.send({**EMBED, "stream": True}, path="/v1/embeddings")
        await client.read_until(CREATED)
        asked.set()
        await client.read_until(LAST_CHUNK)


async def test_audio_is_not_held(fleet_of: FleetOf) -> None:
    """Audio is relayed from its first byte."""
    asked = asyncio.Event()

    async def script(_received: Received, wire: Wire) -> None:
        await wire.send(b"HTTP/1.1 200 OK\r\ncontent-type: audio/wav\r\ntransfer-encoding: chunked\r\n\r\n")
        await wire.send(chunk(b"RIFF"))
        await asked.wait()
        await wire.send(chunk(AUDIO) + LAST_CHUNK)

    async with fleet_of(scripts=(script,)) as fleet, fleet.connected() as client:
        client.send({"model": "m", "input": "say it"}, path="/v1/audio/speech")
        await client.read_until(b"RIFF")
        asked.set()
        await client.read_until(AUDIO[-100:])


async def test_client_leaves(fleet_of: FleetOf) -> None:
    """If the client leaves, the worker's connection is closed at once."""
    async with fleet_of(scripts=(says_and_stalls(),)) as fleet, fleet.connected() as client:
        client.send(EMBED, path="/v1/embeddings")
        await until(lambda: fleet.requests, "the worker has the request")
        client.leave()

        await until(lambda: not fleet.workers[0].open_wires, "the worker's connection is closed", 1.0)
        await fleet.until_free()


async def test_report_mode(fleet_of: FleetOf) -> None:
    """The argument that would corrupt reference counts is removed from JSON; a form is unchanged."""
    asks = {"model": "m", "vllm_xargs": {"kv_cache_report_mode": "full", "a": 1}}
    body, content_type = form(model="m", file=json.dumps(asks).encode())
    async with fleet_of() as fleet:
        await fleet.ask(asks, path="/v1/embeddings")
        await fleet.ask(body, content_type, path="/v1/audio/transcriptions")

        assert {"a": 1} == fleet.workers[0].requests[0].json["vllm_xargs"]
        assert body == fleet.workers[0].requests[1].body


async def test_head(fleet_of: FleetOf) -> None:
    """HEAD is 405 on routes to a worker, since its answer would have a length and no body."""
    async with fleet_of(scripts=(OK,)) as fleet, fleet.connected() as client:
        client.writer.write(b"HEAD /version HTTP/1.1\r\nhost: test\r\n\r\n")

        assert b" 405 " in await client.read_until(b"\r\n\r\n")
        assert not fleet.requests


@pytest.mark.parametrize("kvrouter", [{"mode": [[]] * 50_000}, [], 5])
async def test_invalid_overrides(fleet_of: FleetOf, kvrouter: Any) -> None:
    """Overrides that are not an object are rejected, large ones before they are decoded."""
    async with fleet_of() as fleet:
        body = {"model": "m", "input": "x", "kvrouter": kvrouter}
        response = await fleet.ask(body, path="/v1/embeddings")

        assert (400, "kvrouter") == (response.status, response.json["error"]["param"])
        assert not fleet.requests
