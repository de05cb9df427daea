"""What a client gets of streams that fail before, in, or after their first output, in each API."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from typing import Any

import pytest

from kvrouter.core.tables import deadly_prompts
from kvrouter.frontend.requests import lost_requests
from kvrouter.relay.events import EventKind, EventReader
from tests.frontend.fleet import BODY, STREAM, FleetOf
from tests.frontend.workers import (
    LAST_CHUNK,
    OK,
    SSE_HEAD,
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
    until,
)
from tests.relay.answers import APIS, DONE, QUIET, ApiStream, sse, typed

UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
by_api = pytest.mark.parametrize("api", APIS, ids=lambda api: api.path.rpartition("/")[2])


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses are judged at once: each retry behind a broken connection would take half a second."""
    for module in (deadly_prompts, lost_requests):
        monkeypatch.setattr(module, "SETTLE_S", 0.01)


def told(body: bytes) -> list[bytes]:
    """The events of a stream, without those that only keep a connection open."""
    events = EventReader().feed(body)
    return [event.text.strip() for event in events if event.kind not in {EventKind.COMMENT, EventKind.PING}]


def failures(api: ApiStream) -> dict[str, Script]:
    """Every way in which a stream ends before its first output, after every beginning without output."""
    openings = [b"".join(api.opening[:count]) for count in range(len(api.opening) + 1)]
    beginnings = [*openings, *[openings[-1] + quiet for quiet in QUIET[:4]], QUIET[0] + openings[-1]]
    ends: dict[str, Any] = {
        "resets": says_and_resets,
        "closes": says_and_closes,
        "ends": lambda *pieces: says(*pieces, LAST_CHUNK),
        "done": lambda *pieces: says(*pieces, chunk(DONE) + LAST_CHUNK),
    }
    for number, error in enumerate(api.errors):
        ends[f"error {number}"] = lambda *pieces, error=error: says(*pieces, chunk(error), LAST_CHUNK)
    found = {}
    for (number, begun), (how, fails) in itertools.product(enumerate(beginnings), ends.items()):
        pieces = [chunk(begun)] if begun else []
        found[f"{number} {how}"] = fails(SSE_HEAD, *pieces)
    return found


@by_api
async def test_another_worker_goes_on(fleet_of: FleetOf, api: ApiStream) -> None:
    """Before any output another worker goes on: its output, one opening and one end reach the client."""
    cases, tries = failures(api), dict[str, int]()
    good = says(SSE_HEAD, *map(chunk, (*api.opening, *api.outputs, *api.end)), LAST_CHUNK)

    async def script(received: Received, wire: Wire) -> None:
        (case,) = received.headers("x-case")
        tries[case] = tries.get(case, 0) + 1
        await (cases[case] if tries[case] == 1 else good)(received, wire)

    async with fleet_of(scripts=(script, script)) as fleet:
        for case in cases:
            response = await fleet.ask(api.body, f"x-case: {case}", path=api.path)

            assert (200, True, 2) == (response.status, response.is_whole, tries[case]), case
            assert told(api.whole) == told(response.body), case
        assert not fleet.logged("request.failed")


def byte_by_byte(text: bytes) -> list[bytes]:
    """Pieces of one byte each."""
    return [bytes([byte]) for byte in text]


@by_api
async def test_cut_anywhere(fleet_of: FleetOf, api: ApiStream) -> None:
    """A stream that two reads cut at any place, also in a chunk's size, is the same, or the next worker's."""
    good = b"".join(map(chunk, (*api.opening, *api.outputs, *api.end))) + LAST_CHUNK
    bad = b"".join(map(chunk, (*api.opening, api.errors[0]))) + LAST_CHUNK
    cases = [
        (beginning + text, at)
        for beginning in (b"", chunk(b": keep-alive\n\n"))
        for text in (good, bad)
        for at in [*range(1, len(text), 13), *range(len(text) - 12, len(text))]
    ]
    tries = [0] * len(cases)

    async def script(received: Received, wire: Wire) -> None:
        case = int(received.headers("x-case")[0])
        (text, at), tries[case] = cases[case], tries[case] + 1
        await wire.send(*((SSE_HEAD + text[:at], text[at:]) if tries[case] == 1 else (SSE_HEAD + good,)))

    async with fleet_of("--idle-timeout-s", "5", scripts=(script, script)) as fleet:
        for case, (text, at) in enumerate(cases):
            response = await fleet.ask(api.body, f"x-case: {case}", path=api.path)

            assert (200, True) == (response.status, response.is_whole), (text, at)
            is_bad = text.endswith(bad)
            assert 1 + is_bad == tries[case], (text, at)
            # of the openings of two workers a client gets some from each
            begins = (
                sum(event.kind is EventKind.OPENING for event in EventReader().feed(api.whole))
                if is_bad
                else 0
            )
            wanted = told(api.whole)[begins:]
            assert wanted == told(response.body)[-len(wanted) :], (text, at)
        assert not fleet.logged("request.failed")


@by_api
async def test_after_the_end(fleet_of: FleetOf, api: ApiStream) -> None:
    """Nothing is added behind an API's last event, whatever the worker does with the end of the body."""
    whole = [SSE_HEAD, *map(chunk, (*api.opening, *api.outputs, *api.end))]
    last = b"".join(map(chunk, api.end)) + LAST_CHUNK
    endings = [
        says(*whole, *[chunk(b": bye\n\n")] * 5, LAST_CHUNK),
        says(*whole, *[chunk(b"\n")] * 5, LAST_CHUNK),
        says(*whole[: -len(api.end)], *byte_by_byte(last)),
        says(SSE_HEAD, *map(chunk, byte_by_byte(api.whole)), LAST_CHUNK),
        says_and_closes(*whole),
        says_and_resets(*whole),
        says_and_stalls(*whole),
    ]
    for ending in endings:
        async with fleet_of("--idle-timeout-s", "0.2", scripts=(ending,)) as fleet:
            response = await fleet.ask(api.body, path=api.path)

            assert (200, True) == (response.status, response.is_whole)
            assert told(api.whole) == told(response.body)
            assert not fleet.logged("request.failed")


@by_api
async def test_errors_after_output(fleet_of: FleetOf, api: ApiStream) -> None:
    """After output an error is the client's, and counts as a failure; so does a stream without an end."""
    begun = (SSE_HEAD, *map(chunk, (*api.opening, *api.outputs)))
    endings: list[tuple[bytes, ...]] = [(LAST_CHUNK,), (chunk(b": bye\n\n"), LAST_CHUNK)]
    for error in api.errors:
        endings += [(chunk(error) + LAST_CHUNK,), (chunk(error), chunk(DONE), LAST_CHUNK)]
        endings += [(chunk(error), *[chunk(b": bye\n\n")] * 4, chunk(DONE), LAST_CHUNK)]
        endings += [(chunk(error), *map(chunk, (*api.outputs, *api.end)), LAST_CHUNK)]
        endings += [(*byte_by_byte(chunk(error)), chunk(DONE), LAST_CHUNK)]
    long = sse({"error": {"message": "x" * 9000, "code": 500}})
    endings += [(chunk(long)[:20], chunk(long)[20:], chunk(DONE), LAST_CHUNK)]
    for ending in endings:
        async with fleet_of("--circuit-breaker", scripts=(says(*begun, *ending),)) as fleet:
            response = await fleet.ask(api.body, path=api.path)

            (failed,) = fleet.logged("request.failed")
            (router,) = fleet.frontend.replica.routers.values()
            assert response.is_whole
            assert b'error"' in response.body or b"failed" in response.body
            assert ("broken", 200) == (failed["outcome"], failed["status"])
            assert router.circuits is not None
            assert [1] == [circuit.failures for circuit in router.circuits._circuits.values()]
            assert re.search(rb'outcome="broken",route="[^"]*"} 1.0', (await fleet.get("/metrics")).body)


@by_api
@pytest.mark.parametrize("how", ["one read", "parts", "until close"])
async def test_good_streams(fleet_of: FleetOf, api: ApiStream, how: str) -> None:
    """A stream that ends well reaches the client byte for byte, and counts as served."""
    parts = (*api.opening, *api.outputs, *api.end)
    scripts = {
        "one read": says(SSE_HEAD + chunk(api.whole) + LAST_CHUNK),
        "parts": says(SSE_HEAD, *map(chunk, parts), LAST_CHUNK),
        "until close": says_and_closes(UNTIL_CLOSE, *parts),
    }
    async with fleet_of(scripts=(scripts[how],)) as fleet:
        response = await fleet.ask(api.body, path=api.path)

        assert (200, api.whole, "w0") == (
            response.status,
            response.body,
            response.header("x-kvrouter-worker"),
        )
        assert not fleet.logged("request.failed")


async def test_without_a_finish_reason(fleet_of: FleetOf) -> None:
    """A stream with neither a reason nor [DONE] ends in an error event, whatever its framing."""
    for body in (
        says(SSE_HEAD, chunk(event("a")), LAST_CHUNK),
        says(SSE_HEAD + chunk(event("a")) + LAST_CHUNK),
        says_and_closes(UNTIL_CLOSE, event("a")),
    ):
        async with fleet_of(scripts=(body,)) as fleet:
            response = await fleet.ask(STREAM)

            assert "without a finish reason" in response.events[-1]["error"]["message"]
            assert response.is_whole


@pytest.mark.parametrize("silence", [*QUIET, APIS[0].opening[0], b"retry: 1\n\n"])
async def test_silence_before_output(fleet_of: FleetOf, silence: bytes) -> None:
    """What has no output does not put off the limit for the first one; the error reaches the client."""

    async def script(_received: Received, wire: Wire) -> None:
        await wire.send(SSE_HEAD)
        while True:
            await wire.send(chunk(silence))
            await asyncio.sleep(0.01)

    async with fleet_of("--first-byte-timeout-s", "0.1", scripts=(script,)) as fleet:
        response = await fleet.ask(APIS[0].body, path=APIS[0].path)

        assert b"GatewayTimeoutError" in response.body
        (failed,) = fleet.logged("request.failed")
        assert (response.status, "sent no output" in failed["error"]) in {(504, True), (200, True)}


PINGS = [typed("ping"), typed("keepalive")]


@pytest.mark.parametrize("silence", [b": keep-alive\n\n", b": ping\n", b"retry: 1\n\n", *PINGS])
async def test_silence_amid_output(fleet_of: FleetOf, silence: bytes) -> None:
    """Comments amid a stream pass, but do not put off the idle limit."""

    async def script(_received: Received, wire: Wire) -> None:
        await wire.send(SSE_HEAD, chunk(event("a")))
        while True:
            await wire.send(chunk(silence))
            await asyncio.sleep(0.01)

    async with fleet_of("--idle-timeout-s", "0.1", scripts=(script,)) as fleet:
        response = await fleet.ask(STREAM)

        assert silence in response.body
        assert b"GatewayTimeoutError" in response.body


@pytest.mark.parametrize(
    "body", [b"", b"  \r\n", b"{}", b'{"choices":[]}', b'{"id":"x","choices":[{"ind', b"<html>busy</html>"]
)
async def test_nothing_in_it(fleet_of: FleetOf, body: bytes) -> None:
    """A whole answer with status 200 and nothing in it is a failure that another worker makes good."""
    scripts = in_turn(says(answer(body)), OK)
    async with fleet_of(scripts=(scripts, scripts)) as fleet:
        assert (200, 2) == ((await fleet.ask()).status, len(fleet.requests))


async def test_nothing_in_messages(fleet_of: FleetOf) -> None:
    """Of /v1/messages an end alone is nothing, too: its last event does not say how the answer ended."""
    (api,) = [api for api in APIS if api.path == "/v1/messages"]
    good = says(SSE_HEAD, *map(chunk, (*api.opening, *api.outputs, *api.end)), LAST_CHUNK)
    scripts = in_turn(says(SSE_HEAD, *map(chunk, (*api.opening, api.end[-1])), LAST_CHUNK), good)
    async with fleet_of(scripts=(scripts, scripts)) as fleet:
        response = await fleet.ask(api.body, path=api.path)

        assert (told(api.whole), 2) == (told(response.body), len(fleet.requests))


async def test_error_with_status_200(fleet_of: FleetOf) -> None:
    """An error of the client's in a whole answer reaches it, and is no success."""
    wrong = b'{"error":{"message":"no","type":"BadRequestError","code":400}}'
    async with fleet_of(scripts=(says(answer(wrong)),)) as fleet:
        assert (200, wrong) == ((found := await fleet.ask()).status, found.body)
        (failed,) = fleet.logged("request.failed")
        assert "broken" == failed["outcome"]


# --sse-keep-alive-s


async def test_keep_alive_in_prefill(fleet_of: FleetOf) -> None:
    """While a worker computes, its client gets comments, then the stream. No header names a worker."""
    go_on = asyncio.Event()

    async def script(_received: Received, wire: Wire) -> None:
        await go_on.wait()
        await wire.send(SSE_HEAD, chunk(event("a")), chunk(event("", "stop")) + LAST_CHUNK)

    async with (
        fleet_of("--sse-keep-alive-s", "0.02", scripts=(script,)) as fleet,
        fleet.connected() as client,
    ):
        client.send(STREAM, "x-request-id: r1")
        head = await client.read_until(b": keep-alive\n\n\r\n")
        await client.read_until(b": keep-alive\n\n\r\n")
        go_on.set()
        rest = await client.read_until(LAST_CHUNK)
        again = await client.get("/live")

        assert head.startswith(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream")
        assert b"x-request-id: r1\r\n" in head
        assert b"x-kvrouter-router: " in head
        assert b"x-kvrouter-worker" not in head
        assert event("a") in rest
        assert 200 == again.status  # the connection serves the next request


async def test_keep_alive_in_the_queue(fleet_of: FleetOf) -> None:
    """A stream that waits in the queue gets comments, and an error event if it waits for too long."""
    flags = ("--sse-keep-alive-s", "0.02", "--max-ongoing-requests", "1", "--router-queue-threshold", "0.001")
    async with (
        fleet_of(*flags, "--router-queue-timeout-s", "0.2", scripts=(says_and_stalls(),)) as fleet,
        fleet.connected() as first,
    ):
        first.send(STREAM)
        await until(lambda: fleet.requests, "the first request is at the worker")
        response = await fleet.ask(STREAM)

        assert (200, True) == (response.status, response.is_whole)
        assert response.body.startswith(b": keep-alive\n\n")
        assert response.events[-1]["error"]["code"] == 503


def late(script: Script) -> Script:
    """It says nothing at first, while comments go to the client."""

    async def waits(received: Received, wire: Wire) -> None:
        await asyncio.sleep(0.05)
        await script(received, wire)

    return waits


@by_api
async def test_keep_alive_goes_on_behind_retries(fleet_of: FleetOf, api: ApiStream) -> None:
    """Workers may fail behind the comments; the last one's refusal becomes an event of the API."""

    async def in_turn(received: Received, wire: Wire) -> None:
        await refusals[len(fleet.requests) - 1](received, wire)

    good = says(SSE_HEAD + chunk(api.whole) + LAST_CHUNK)
    refused = says(answer(b'{"error":{"message":"too full","type":"Busy","code":503}}', 503))
    refusals = [refused, says_and_resets(), good]
    async with fleet_of("--sse-keep-alive-s", "0.02", scripts=(late(in_turn),) * 3) as fleet:
        response = await fleet.ask(api.body, path=api.path)
        assert response.body.replace(b": keep-alive\n\n", b"") == api.whole
    for last, text in (
        (refused, b"too full"),
        (says(answer(b'{"detail":"wrong"}', 400)), b"wrong"),
        (says(answer()), b"did not answer with a stream"),
    ):
        refusals = [last] * 9
        async with fleet_of("--sse-keep-alive-s", "0.02", scripts=(late(in_turn),) * 2) as fleet:
            response = await fleet.ask(api.body, path=api.path)

            assert (200, True) == (response.status, response.is_whole)
            assert text in response.body
            assert b'"error"' in response.body
            assert ["broken"] == [one["outcome"] for one in fleet.logged("request.failed")]


async def test_keep_alive_is_for_streams(fleet_of: FleetOf) -> None:
    """An answer that is not a stream is not begun."""
    async with fleet_of("--sse-keep-alive-s", "0.01", scripts=(late(says(answer(b"{}", 400))),)) as fleet:
        assert 400 == (await fleet.ask(BODY)).status


@pytest.mark.parametrize("path", ["/generate", "/inference/v1/generate", "/cohere/v2/chat", "/invocations"])
async def test_keep_alive_where_engines_stream(fleet_of: FleetOf, path: str) -> None:
    """Streams of routes that are passed on get comments, too."""
    whole = b'data: {"text": "a"}\n\n'

    async with fleet_of(
        "--sse-keep-alive-s", "0.01", scripts=(late(says(SSE_HEAD, chunk(whole) + LAST_CHUNK)),)
    ) as fleet:
        response = await fleet.ask(STREAM, path=path)

        assert response.body.startswith(b": keep-alive\n\n")
        assert response.body.endswith(whole)


@pytest.mark.parametrize(
    "path", ["/v1/embeddings", "/v1/audio/speech", "/api/chat", "/v1/chat/completions/render"]
)
async def test_keep_alive_where_no_events_come(fleet_of: FleetOf, path: str) -> None:
    """Elsewhere `stream` does not mean server-sent events: an answer stays what it is."""
    async with fleet_of("--sse-keep-alive-s", "0.01", scripts=(late(says(answer(b'{"a": 1}'))),)) as fleet:
        assert b'{"a": 1}' == (await fleet.ask(STREAM, path=path)).body


async def test_keep_alive_for_http_10(fleet_of: FleetOf) -> None:
    """A client that knows no chunks gets the comments and the stream without them."""
    script = late(says(SSE_HEAD, chunk(event("a")), chunk(event("", "stop")) + LAST_CHUNK))
    async with (
        fleet_of(
            "--sse-keep-alive-s",
            "0.02",
            scripts=(script,),
        ) as fleet,
        fleet.connected() as client,
    ):
        client.send(STREAM, version="HTTP/1.0")
        response = await client.response()

        assert response.body.startswith(b": keep-alive\n\n")
        assert response.body.endswith(event("a") + event("", "stop"))


# Retry-After


async def test_busy_workers_rest(fleet_of: FleetOf) -> None:
    """A worker that asks for a rest gets none of the next requests, unless there is no other one."""
    busy = {"w0": True, "w1": False}

    def script(name: str) -> Script:
        async def answers(_received: Received, wire: Wire) -> None:
            refusal = answer(b"{}", 429, b"retry-after: 30\r\nx-should-retry: true\r\n")
            await wire.send(refusal if busy[name] else answer())

        return answers

    async with fleet_of(scripts=(script("w0"), script("w1"))) as fleet:
        assert [200] * 8 == [(await fleet.ask()).status for _ in range(8)]
        assert 1 == fleet.requests.count("w0")
        busy["w1"] = True
        refused = await fleet.ask()
        assert (429, "30", "true") == (
            refused.status,
            refused.header("retry-after"),
            refused.header("x-should-retry"),
        )
        busy["w0"] = busy["w1"] = False
        assert 200 == (await fleet.ask()).status  # all rest: then all are tried


@pytest.mark.parametrize("status", [400, 500])
async def test_others_do_not_rest(fleet_of: FleetOf, status: int) -> None:
    """Only 429 and 503 ask for a rest."""
    script = says(answer(json.dumps({"error": {"code": status}}).encode(), status, b"retry-after: 30\r\n"))
    async with fleet_of(scripts=(script,)) as fleet:
        await fleet.ask()

        (router,) = fleet.frontend.replica.routers.values()
        assert not router.tables.rests.until
