"""The request path: retries, errors of kvrouter itself, and what clients get."""

from __future__ import annotations

import asyncio
import errno
import json
import re
import socket
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from kvrouter.core.routing import rests
from kvrouter.frontend.records.readers import Readers
from kvrouter.frontend.records.record import Record
from kvrouter.relay.upstream import Upstream
from tests.frontend.fleet import BODY, POOL, STREAM, FleetOf
from tests.frontend.workers import (
    LAST_CHUNK,
    OK,
    OK_BODY,
    SSE_HEAD,
    FakeWorker,
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
    stream,
    until,
)

OVERLOADED = b'data: {"error": {"message": "full", "type": "ServiceUnavailable", "code": 503}}\n\n'
FAILED = b'{"choices":[{"index":0,"text":"","finish_reason":"error"}]}'
ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
ABORTED = b'{"choices":[{"index":0,"text":"h","finish_reason":"abort"}]}'

FAILURES: dict[str, Script] = {
    "500": says(answer(b'{"error":{}}', 500)),
    "503": says(answer(b'{"error":{}}', 503)),
    "503 without a length": says_and_closes(b"HTTP/1.1 503 Busy\r\n\r\nbusy"),
    "503 in chunks": says(
        b"HTTP/1.1 503 Busy\r\ntransfer-encoding: chunked\r\n\r\n", chunk(b"bu"), chunk(b"sy") + LAST_CHUNK
    ),
    "408": says(answer(b"{}", 408)),
    "429": says(answer(b"{}", 429)),
    "reset at once": says_and_resets(),
    "closed at once": says_and_closes(),
    "reset within the head": says_and_resets(b"HTTP/1.1 200 O"),
    "closed after the head": says_and_closes(SSE_HEAD),
    "closed within the first event": says_and_closes(SSE_HEAD + b"40\r\ndata: {"),
    "closed within a JSON body": says_and_closes(answer()[:-5]),
    "closed within chunks of JSON": says_and_closes(
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunk(OK_BODY[:20])
    ),
    "error event first": says(SSE_HEAD, chunk(OVERLOADED), chunk(b"data: [DONE]\n\n") + LAST_CHUNK),
    "error event in pieces": says(SSE_HEAD + b"%x\r\nda" % len(OVERLOADED), OVERLOADED[2:9], OVERLOADED[9:]),
    "error event without an end": says(SSE_HEAD + chunk(OVERLOADED.strip()) + LAST_CHUNK),
    "abort in JSON": says(answer(ABORTED)),
    "abort in JSON of two reads": says(answer(ABORTED)[:90], answer(ABORTED)[90:]),
    "abort in the first read of a stream": says(SSE_HEAD + chunk(event("", "abort")) + LAST_CHUNK),
    "error as the reason in JSON": says(answer(FAILED)),
    "error as the reason in a stream": says(SSE_HEAD + chunk(event("", "error")) + LAST_CHUNK),
    "error as the reason after the role": says(
        SSE_HEAD + chunk(ROLE), chunk(event("", "error")) + LAST_CHUNK
    ),
    "garbage": says(b"\x00\xff\r\n\r\n" * 9),
    "a head that does not end": says(b"HTTP/1.1 200 OK\r\nx: " + b"x" * 70_000),
    "a lone line feed in a header": says(b"HTTP/1.1 200 OK\r\nx: 1\nset-cookie: 2\r\n\r\n"),
    "a length of many digits": says(b"HTTP/1.1 200 OK\r\ncontent-length: %s\r\n\r\n" % (b"9" * 5000)),
    "an invalid chunk size": says(SSE_HEAD + b"zz\r\n"),
}


@pytest.mark.parametrize("failure", FAILURES)
async def test_another_worker(fleet_of: FleetOf, failure: str) -> None:
    """If a worker fails before its first good byte, another one serves the request."""
    scripts = in_turn(FAILURES[failure], OK)
    async with fleet_of(scripts=(scripts, scripts)) as fleet:
        response = await fleet.ask()

        first, second = sorted(
            fleet.workers, key=lambda worker: worker.id != response.headers("x-kvrouter-worker")[0]
        )
        assert (200, OK_BODY) == (response.status, response.body)
        assert [1, 1] == [len(first.requests), len(second.requests)]
        assert first.requests[0].body == second.requests[0].body
        assert 1 == len(fleet.logged("worker.failed_request"))
        await fleet.until_free()


async def test_refused_connection(fleet_of: FleetOf) -> None:
    """A worker that refuses connections is skipped."""
    async with fleet_of(scripts=(OK,)) as fleet:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            gone = FakeWorker("gone", OK, f"http://127.0.0.1:{closed.getsockname()[1]}")
            fleet.announce(gone)
            while len(fleet.targets(fleet.frontend)) < 2:
                await fleet.get("/live")
            workers = [(await fleet.ask()).header("x-kvrouter-worker") for _ in range(4)]

        assert ["w0"] * 4 == workers
        assert fleet.logged("worker.failed_request")


async def test_name_that_cannot_be_looked_up(fleet_of: FleetOf) -> None:
    """A worker with a host name that DNS does not allow cannot be reached."""
    async with fleet_of(scripts=()) as fleet:
        fleet.announce(FakeWorker("odd", OK, "http://" + "x" * 70 + ".example"))
        while not fleet.targets(fleet.frontend):
            await fleet.get("/live")

        assert 502 == (await fleet.ask()).status


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "http://[", "file:///etc/passwd"])
async def test_senseless_address(fleet_of: FleetOf, url: str) -> None:
    """A card with an invalid address is rejected, and the reason is logged."""
    async with fleet_of(scripts=()) as fleet:
        fleet.announce(FakeWorker("odd", OK, url))
        while not (logged := fleet.logged("feed.malformed")):
            await fleet.get("/live")

        assert "url" in logged[0]["error"]
        assert not fleet.targets(fleet.frontend)


async def test_all_fail(fleet_of: FleetOf) -> None:
    """If all workers fail, the client gets the answer of the last one. Each is tried once."""
    refusal = says(answer(b'{"error":{"message":"full"}}', 503, b"retry-after: 7\r\n"))
    async with fleet_of(scripts=(refusal,) * 2) as fleet:
        response = await fleet.ask()

        assert (503, b'{"error":{"message":"full"}}') == (response.status, response.body)
        assert "application/json" == response.header("content-type")
        assert "7" == response.header("retry-after")
        assert ["w0", "w1"] == fleet.requests


async def test_bounded_attempts(fleet_of: FleetOf) -> None:
    """`--retries 2`: at most three workers are tried."""
    async with fleet_of("--retries", "2", scripts=(says_and_closes(answer(b"")),) * 6) as fleet:
        response = await fleet.ask()

        assert 502 == response.status
        assert "BadGatewayError" == response.json["error"]["type"]
        assert 3 == len(fleet.requests)


async def test_no_retries(fleet_of: FleetOf) -> None:
    """`--retries 0`: one attempt."""
    async with fleet_of(
        "--retries", "0", scripts=(says(answer(b"{}", 500)), says(answer(b"{}", 500)))
    ) as fleet:
        assert 500 == (await fleet.ask()).status
        assert 1 == len(fleet.requests)


async def test_another_worker_not_another_rank(fleet_of: FleetOf) -> None:
    """The ranks of a worker share its server: after one has failed, another worker is tried."""
    failing = in_turn(says_and_resets(), OK)
    async with fleet_of("--retries", "1", scripts=(failing, failing), ranks=8) as fleet:
        assert 200 == (await fleet.ask()).status
        assert ["w0", "w1"] == fleet.requests


async def test_more_ids_than_any_context(fleet_of: FleetOf) -> None:
    """A prompt with more token ids than any worker's context is rejected without a worker."""
    async with fleet_of(scripts=(OK, OK), max_model_len=4096) as fleet:
        response = await fleet.ask({**BODY, "prompt": [7] * 100_000})

        assert (400, "prompt") == (response.status, response.json["error"]["param"])
        assert "100000 token ids" in response.json["error"]["message"]
        assert not fleet.requests


def chat(text: str) -> list[dict[str, str]]:
    """The messages of a chat."""
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("mode", ["kv", "round-robin", "prefix-affinity"])
@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": [7] * 100}),
        ("/v1/completions", {"prompt": [7] * 90, "max_tokens": 11}),
        ("/v1/completions", {"prompt": [[7], [7] * 100]}),
        ("/v1/completions", {"prompt": "x" * 500}),
        ("/v1/chat/completions", {"messages": chat("x" * 500)}),
        ("/v1/chat/completions", {"messages": chat("x"), "max_tokens": 101}),
        ("/v1/chat/completions", {"messages": chat("x"), "max_completion_tokens": 101}),
        ("/v1/messages", {"messages": chat("x"), "max_tokens": 101}),
        ("/v1/responses", {"input": "x", "max_output_tokens": "101"}),
    ],
)
async def test_unequal_contexts(fleet_of: FleetOf, mode: str, path: str, asked: dict[str, Any]) -> None:
    """A request goes to an engine whose context holds it, in each API and mode, its tokens known or not."""
    async with fleet_of("--router-mode", mode, scripts=(OK, OK), max_model_len=100) as fleet:
        fleet.announce(fleet.workers[1], max_model_len=200)
        while fleet.frontend.replica.router(POOL).pool.has_equal_contexts:
            await fleet.get("/live")

        for _ in range(4):
            assert 200 == (await fleet.ask({"model": "m", **asked}, path=path)).status
        assert {"w1"} == set(fleet.requests)


@pytest.mark.parametrize("stream", [False, True])
async def test_another_model(fleet_of: FleetOf, stream: bool) -> None:
    """If a worker no longer has the model on its card, another one is tried."""
    gone = b'{"error":{"message":"The model `m` does not exist.","param":"model","code":404}}'
    body = STREAM if stream else BODY
    turns = in_turn(says(answer(gone, 404)), OK)
    async with fleet_of(scripts=(turns, turns)) as fleet:
        assert 200 == (await fleet.ask(body)).status
        assert ["w0", "w1"] == fleet.requests
        (failed,) = fleet.logged("worker.failed_request")
        assert "retried" == failed["reason"]


async def test_another_model_everywhere(fleet_of: FleetOf) -> None:
    """If no worker has the model, the client gets the answer of the last one."""
    async with fleet_of(scripts=(says(answer(b'{"detail":"no"}', 404)),) * 2) as fleet:
        response = await fleet.ask()

        assert (404, b'{"detail":"no"}') == (response.status, response.body)
        assert ["w0", "w1"] == fleet.requests


@pytest.mark.parametrize("status", [301, 400, 401, 422])
async def test_other_statuses_pass(fleet_of: FleetOf, status: int) -> None:
    """Errors of the client pass through and are not retried."""
    async with fleet_of(scripts=(says(answer(b'{"detail":"no"}', status)),) * 2) as fleet:
        response = await fleet.ask()

        assert (status, b'{"detail":"no"}') == (response.status, response.body)
        assert 1 == len(fleet.requests)
        assert not fleet.logged("worker.failed_request")


async def test_clients_fault_in_a_stream(fleet_of: FleetOf) -> None:
    """A first event with status 400 is an answer, not a failure of the worker."""
    body = SSE_HEAD + chunk(b'data: {"error": {"code": 400}}\n\n') + LAST_CHUNK
    async with fleet_of(scripts=(says(body),) * 2) as fleet:
        response = await fleet.ask(STREAM)

        assert [{"error": {"code": 400}}] == response.events
        assert 1 == len(fleet.requests)


async def test_idle_connection_dies(fleet_of: FleetOf) -> None:
    """A worker that closes an idle connection while a request is sent there does not count as failed."""

    async def once(_received: Received, wire: Wire) -> None:
        if wire.requests == 2:
            wire.close()  # the request was on its way
        else:
            await wire.send(answer())

    async with fleet_of(scripts=(once,)) as fleet:
        assert [200, 200, 200] == [(await fleet.ask()).status for _ in range(3)]
        assert [2, 2, 1] == [wire.requests for wire in fleet.workers[0].wires]
        assert not fleet.logged("worker.failed_request")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"a"', b"{}" + b"\x00"])
async def test_malformed_body(fleet_of: FleetOf, body: bytes) -> None:
    """A malformed body is a 400 in OpenAI's form."""
    async with fleet_of() as fleet:
        response = await fleet.ask(body)

        assert (400, "BadRequestError") == (response.status, response.json["error"]["type"])
        assert response.header("x-request-id")


async def test_body_that_cannot_be_edited(fleet_of: FleetOf) -> None:
    """A body that must be edited and cannot be parsed is a 400."""
    body = b'{"model":"m","prompt":[1],"vllm_xargs":{"kv_cache_report_mode":"full"},"x":%s}' % (b"[" * 9999)
    async with fleet_of() as fleet:
        assert 400 == (await fleet.ask(body)).status


async def test_torn_request_encoding(fleet_of: FleetOf) -> None:
    """A body with broken framing or compression is a 400, and logs no error."""
    async with fleet_of() as fleet, fleet.connected() as client:
        client.writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n\r\n"
        )
        assert 400 == (await client.response()).status
        assert 400 == (await fleet.ask(b"no gzip at all", "content-encoding: gzip")).status


async def test_bytes_that_are_not_http(fleet_of: FleetOf) -> None:
    """Bytes that are not HTTP get a 400, and log nothing."""
    async with fleet_of() as fleet, fleet.connected() as client:
        client.writer.write(b"\x16\x03\x01 hello\r\n\r\n")

        assert 400 == (await client.response()).status


async def test_unknown_model(fleet_of: FleetOf) -> None:
    """An unknown model is a 404 that lists the known ones."""
    async with fleet_of() as fleet:
        response = await fleet.ask({**BODY, "model": "other"})

        assert (404, "NotFoundError") == (response.status, response.json["error"]["type"])
        assert "served: m" in response.json["error"]["message"]


async def test_no_worker_seen(fleet_of: FleetOf) -> None:
    """Without workers the answer is 503, with Retry-After."""
    async with fleet_of(scripts=()) as fleet:
        response = await fleet.ask()

        assert (503, "1") == (response.status, response.header("retry-after"))
        assert "ServiceUnavailableError" == response.json["error"]["type"]


async def test_all_workers_down(fleet_of: FleetOf) -> None:
    """Workers that are down get nothing; the answer is 503, with Retry-After."""
    async with fleet_of() as fleet:
        fleet.announce(fleet.workers[0], state="down")
        while fleet.targets(fleet.frontend):
            await fleet.get("/live")
        response = await fleet.ask()

        assert (503, "1") == (response.status, response.header("retry-after"))


async def test_body_too_large(fleet_of: FleetOf) -> None:
    """A body above --max-body-mib is a 413 in OpenAI's form."""
    async with fleet_of("--max-body-mib", "1") as fleet:
        response = await fleet.ask(b" " * (1024 * 1024 + 1))

        assert (413, 413) == (response.status, response.json["error"]["code"])
        assert not fleet.requests


async def test_large_body(fleet_of: FleetOf) -> None:
    """10 MB of prompt reach the worker byte for byte."""
    body = json.dumps({"model": "m", "prompt": "x" * 10_000_000}).encode()
    async with fleet_of() as fleet:
        assert 200 == (await fleet.ask(body)).status
        assert body == fleet.workers[0].requests[0].body


async def test_large_body_refused_unread(fleet_of: FleetOf) -> None:
    """A worker that resets the connection amid a large body has failed."""

    async def refuse(_received: Received, wire: Wire) -> None:
        wire.reset()

    scripts = in_turn(refuse, OK)
    async with fleet_of(scripts=(scripts, scripts)) as fleet:
        body = {"model": "m", "prompt": "x" * 5_000_000}

        assert 200 == (await fleet.ask(body)).status


@pytest.mark.parametrize("weight", ["x", "-1", "nan", "inf"])
async def test_senseless_override(fleet_of: FleetOf, weight: str) -> None:
    """A header that sets a routing parameter must be a number."""
    async with fleet_of() as fleet:
        response = await fleet.ask(BODY, f"x-kvrouter-overlap-weight: {weight}")

        assert (400, "x-kvrouter-overlap-weight") == (response.status, response.json["error"]["param"])


async def test_booking_while_it_runs(fleet_of: FleetOf) -> None:
    """A request is booked, on its target and with its blocks, exactly while it runs."""
    async with fleet_of("--router-mode", "kv") as fleet, AsyncExitStack() as stack:
        pool = next(iter(fleet.frontend.replica.routers.values())).pool
        seen: list[tuple[int, int, int]] = []

        async def script(_received: Received, wire: Wire) -> None:
            target = next(iter(pool.targets))
            seen.append(
                (pool.active.requests(target), pool.active.blocks(target), pool.active.charged_tokens(target))
            )
            await wire.send(SSE_HEAD + chunk(b": wait\n\n"))
            seen.append(
                (pool.active.requests(target), pool.active.blocks(target), pool.active.charged_tokens(target))
            )
            await wire.send(chunk(event("a")))
            seen.append(
                (pool.active.requests(target), pool.active.blocks(target), pool.active.charged_tokens(target))
            )
            await wire.send(LAST_CHUNK)

        fleet.workers[0].script = script
        client = await stack.enter_async_context(fleet.connected())
        response = await client.ask(STREAM)

        assert response.is_whole
        assert [(1, 4, 64), (1, 4, 64), (1, 4, 0)] == seen
        assert 0 == fleet.bookings()


async def test_models_with_stream(fleet_of: FleetOf) -> None:
    """Without a tokenizer, a chat is placed by load alone."""
    async with fleet_of("--router-mode", "kv", scripts=(says(stream("a", "b")),)) as fleet:
        body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True}
        response = await fleet.ask(body, path="/v1/chat/completions")

        assert ["a", "b"] == [each["choices"][0]["text"] for each in response.events]
        assert "0" == response.header("x-kvrouter-overlap-blocks")


async def test_unknown_route(fleet_of: FleetOf) -> None:
    """An unknown path is a 404 in OpenAI's form."""
    async with fleet_of(scripts=()) as fleet:
        response = await fleet.get("/nope")

        error = json.loads(response.body)["error"]
        assert (404, "NotFoundError") == (response.status, error["type"])
        assert "/nope" in error["message"]


async def test_wrong_method(fleet_of: FleetOf) -> None:
    """A wrong method is a 405 in OpenAI's form that lists the right ones."""
    async with fleet_of(scripts=()) as fleet:
        got, posted = await fleet.get("/v1/completions"), await fleet.ask({}, path="/v1/models")

        for response, allowed in ((got, "POST"), (posted, "GET, HEAD")):
            error = json.loads(response.body)["error"]
            assert (405, "MethodNotAllowedError", 405) == (response.status, error["type"], error["code"])
            assert error["message"].endswith(f": use {allowed}")
            assert allowed == response.header("allow")


async def test_texts_that_no_model_takes_are_not_tokenized(fleet_of: FleetOf, tiny: Path) -> None:
    """A text of 30 MB is not tokenized: it would take 40 s, and the engine rejects it by its length."""
    async with fleet_of("--router-mode", "kv", "--model-path", str(tiny)) as fleet:
        fleet.announce(fleet.workers[0], max_model_len=100)
        while fleet.frontend.replica.router(POOL).pool.max_model_len != 100:
            await fleet.get("/live")

        for text in ("word " * 1200, "word " * 1400):  # 64 for each of the model's tokens lie between
            await fleet.ask({"model": "m", "prompt": text})

        assert b'kvrouter_step_seconds_count{step="tokenize"} 1.0' in (await fleet.get("/metrics")).body


async def test_no_descriptor_left(fleet_of: FleetOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a free descriptor the client gets a 503, and the worker does not count as failed."""
    flags = ("--circuit-breaker", "--circuit-breaker-failures", "1")
    async with fleet_of(*flags) as fleet, fleet.connected() as client:
        with monkeypatch.context() as patch:
            full = OSError(errno.EMFILE, "Too many open files")
            patch.setattr(Upstream, "_open", AsyncMock(side_effect=full))
            refused = await client.ask(BODY)

        assert (503, "1") == (refused.status, refused.header("retry-after"))
        assert "Too many open files" in refused.json["error"]["message"]
        assert 200 == (await client.ask(BODY)).status


@pytest.mark.parametrize("framing", ["content-length: 1000000", "transfer-encoding: chunked"])
async def test_unfinished_bodies_are_bounded_together(fleet_of: FleetOf, framing: str) -> None:
    """Unfinished bodies take at most 8 times the largest one: of nine clients one gets a 503."""
    head = f"POST /v1/completions HTTP/1.1\r\nhost: test\r\n{framing}\r\n\r\n".encode()
    part = b" " * 990_000
    piece = head + (b"%x\r\n%s\r\n" % (len(part), part) if "chunked" in framing else part)
    async with fleet_of("--max-body-mib", "1") as fleet:
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(fleet.connected()) for _ in range(9)]
            answers = [asyncio.create_task(client.response()) for client in clients]
            for client in clients:
                client.writer.write(piece)
            (answered,), waiting = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
            refused = await answered
            for answer in waiting:
                answer.cancel()

            assert (503, "1") == (refused.status, refused.header("retry-after"))
            assert "unfinished" in refused.json["error"]["message"]
        await until(fleet.frontend.completions.in_flight.idle.is_set, "all have left")
        assert 200 == (await fleet.ask({**BODY, "user": "u" * 990_000})).status


async def test_failed_requests_leave_no_ring(fleet_of: FleetOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error's traceback leads to its request's record. If that led back, the body would stay an hour."""
    records: list[Record] = []
    ended = Readers.ended

    def seen(self: Readers, record: Record) -> None:
        assert record.error is not None
        records.append(record)
        ended(self, record)

    monkeypatch.setattr(Readers, "ended", seen)
    async with fleet_of(scripts=(OK,)) as fleet:
        assert 404 == (await fleet.ask({"model": "unknown", "prompt": "hi"})).status

    assert [None] == [record.error for record in records]


@pytest.mark.parametrize(("retries", "dead", "failed"), [("2", 12, 0), ("1", 12, 0), ("0", 3, 3)])
async def test_workers_that_refuse_connections(
    fleet_of: FleetOf, retries: str, dead: int, failed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Addresses at which nothing listens use up no request's tries, and draw no requests for long."""
    monkeypatch.setattr(rests, "FIRST_S", 600.0)
    monkeypatch.setattr(rests, "LONGEST_S", 600.0)
    async with fleet_of("--retries", retries, scripts=(OK,) * (dead + 2)) as fleet:
        for worker in fleet.workers[:dead]:
            worker.die()
        answers = [(await fleet.ask({**BODY, "prompt": f"{n} " * 40})).status for n in range(30)]

        assert failed >= answers.count(502) == 30 - answers.count(200)
        metrics = (await fleet.get("/metrics")).body.decode()
        (lost,) = re.findall(r'kvrouter_failed_attempts_total\{reason="lost"\} (\d+)', metrics)
        assert int(lost) <= dead


async def test_a_worker_that_is_back_is_used_again(fleet_of: FleetOf) -> None:
    """The first connection that it accepts ends the rest; so does its agent's report of a new engine."""
    async with fleet_of("--retries", "2", scripts=(OK, OK)) as fleet:
        table = fleet.frontend.replica.routers[POOL].tables.rests
        (target, other) = fleet.targets(fleet.frontend)
        table.refused(target, asyncio.get_running_loop().time(), 0.0)
        assert {other.worker_id} == {(await fleet.ask()).header("x-kvrouter-worker") for _ in range(4)}
        (last,) = [worker for worker in fleet.workers if worker.id == other.worker_id]
        last.die()
        response = await fleet.ask()

        assert (200, target.worker_id) == (response.status, response.header("x-kvrouter-worker"))
        assert target not in {*table.until, *table.refusals}
        table.refused(target, asyncio.get_running_loop().time(), 0.0)
        fleet.frontend.replica.routers[POOL].engine_lost(target.worker_id)
        assert target not in {*table.until, *table.refusals}
