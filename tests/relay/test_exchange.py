"""What reaches the client, byte for byte and in time, and what it gets when a worker fails late."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest

from kvrouter.relay.upstream import MOST_INTERIM_HEADS
from tests.frontend.fleet import BODY, STREAM, FleetOf
from tests.frontend.workers import (
    END,
    LAST_CHUNK,
    OK,
    OK_BODY,
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
    stream,
    turns,
    until,
    until_still,
)

pytestmark = pytest.mark.usefixtures("passes")
ONE = SSE_HEAD + chunk(event("a"))


def texts(events: list[Any]) -> list[str]:
    """The texts of the events, and the types of the errors."""
    return [each["error"]["type"] if "error" in each else each["choices"][0]["text"] for each in events]


async def test_plain_answer(fleet_of: FleetOf) -> None:
    """A complete answer reaches the client as the worker sent it, with the router's headers."""
    async with fleet_of() as fleet:
        response = await fleet.ask()

        assert (200, OK_BODY) == (response.status, response.body)
        assert ["w0", "0", "0"] == [
            response.header(f"x-kvrouter-{name}") for name in ("worker", "dp-rank", "overlap-blocks")
        ]
        assert fleet.frontend.replica.router_id == response.header("x-kvrouter-router")


async def test_streams_disable_buffering_in_proxies(fleet_of: FleetOf) -> None:
    """A stream has the header once, even if the worker sends it too; a complete answer does not have it."""
    streams = SSE_HEAD.replace(b"\r\n\r\n", b"\r\nx-accel-buffering: yes\r\n\r\n") + chunk(event("a")) + END
    async with fleet_of(scripts=(in_turn(says(streams), OK),)) as fleet:
        assert ["no"] == (await fleet.ask(STREAM)).headers("x-accel-buffering")
        assert [] == (await fleet.ask()).headers("x-accel-buffering")


async def test_byte_by_byte(fleet_of: FleetOf) -> None:
    """A worker may send its head and its body byte by byte."""
    whole = stream("a", "b")
    async with fleet_of(scripts=(says(*(bytes([byte]) for byte in whole)),)) as fleet:
        response = await fleet.ask(STREAM)

        assert ["a", "b"] == texts(response.events)
        assert response.is_whole


@pytest.mark.parametrize(
    "whole",
    [
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 102 Processing\r\nx: 1\r\n\r\n" + answer(),
        b"HTTP/1.1 103 Early\r\n\r\n" * MOST_INTERIM_HEADS + answer(),
        b"HTTP/1.0 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(OK_BODY), OK_BODY),
        b"HTTP/1.1 200\r\ncontent-length: %d\r\n\r\n%s" % (len(OK_BODY), OK_BODY),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\nContent-Length: 3\r\n\r\n"
        + b"%x;name=value\r\n%s\r\n0\r\nx-trailer: 1\r\n\r\n" % (len(OK_BODY), OK_BODY),
    ],
    ids=["1xx", "many 1xx", "HTTP/1.0", "no reason", "chunk extension and trailer"],
)
async def test_forms_of_answers(fleet_of: FleetOf, whole: bytes) -> None:
    """Every form that HTTP allows is understood, and the connection is used again where possible."""
    async with fleet_of(scripts=(says(whole),)) as fleet, fleet.connected() as client:
        responses = [await client.ask(BODY) for _ in range(2)]

        assert [OK_BODY, OK_BODY] == [response.body for response in responses]


async def test_until_close(fleet_of: FleetOf) -> None:
    """A body that ends with the worker's connection ends the client's connection as well."""
    body = says_and_closes(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n", event("a"), event("b", "stop")
    )
    async with fleet_of(scripts=(body,)) as fleet, fleet.connected() as client:
        response = await client.ask(STREAM)

        assert ("close", ["a", "b"]) == (response.header("connection"), texts(response.events))


async def test_no_content(fleet_of: FleetOf) -> None:
    """A 204 has no body, and the connection stays."""
    async with (
        fleet_of(
            scripts=(in_turn(says(b"HTTP/1.1 204 No Content\r\ncontent-length: 0\r\n\r\n"), OK),)
        ) as fleet,
        fleet.connected() as client,
    ):
        assert 204 == (await client.ask(BODY)).status
        assert 200 == (await client.ask(BODY)).status


async def test_more_than_the_body(fleet_of: FleetOf) -> None:
    """A connection with bytes after the answer is not used again."""
    async with fleet_of(scripts=(says(answer() + b"HTTP/1.1 200 stray\r\n"),)) as fleet:
        assert [OK_BODY] * 3 == [(await fleet.ask()).body for _ in range(3)]
        assert [1, 1, 1] == [wire.requests for wire in fleet.workers[0].wires]


async def test_events_come_at_once(fleet_of: FleetOf) -> None:
    """Each event reaches the client before the worker sends the next."""
    asked = asyncio.Event()

    async def script(_received: Received, wire: Wire) -> None:
        await wire.send(ONE)
        await asked.wait()
        await wire.send(chunk(event("b")) + END)

    async with fleet_of(scripts=(script,)) as fleet, fleet.connected() as client:
        client.send(STREAM)
        first = await client.read_until(b'"text": "a"')
        asked.set()
        await client.read_until(LAST_CHUNK)

        assert first.startswith(b"HTTP/1.1 200 OK\r\n")


LATE: dict[str, Script] = {
    "reset": says_and_resets(ONE),
    "close": says_and_closes(ONE),
    "garbage": says(ONE, b"zz\r\n"),
    "abort": says(ONE, chunk(event("", "abort")), chunk(b"data: [DONE]\n\n") + LAST_CHUNK),
}


@pytest.mark.parametrize("failure", LATE)
async def test_death_between_chunks(fleet_of: FleetOf, failure: str) -> None:
    """If a worker dies between two chunks, the stream ends in order, with an error event."""
    async with fleet_of(scripts=(LATE[failure],) * 2) as fleet, fleet.connected() as client:
        response = await client.ask(STREAM)

        assert response.is_whole
        assert ["a", "BadGatewayError"] == texts(response.events)
        assert 1 == len(fleet.requests)
        assert ["broken"] == [one["outcome"] for one in fleet.logged("request.failed")]
        assert re.search(rb'outcome="broken",route="[^"]*"} 1.0', (await fleet.get("/metrics")).body)


ABORT, DONE = event("", "abort"), chunk(b"data: [DONE]\n\n")
HALF, REST = chunk(event("b")[:30]), chunk(event("b")[30:])
# Reads after the first event, and the texts that the client gets in a whole body; None: a body that is cut.
TROUBLES: dict[str, tuple[list[bytes], list[str] | None]] = {
    "text and abort in one read": ([chunk(event("b")) + chunk(ABORT) + DONE + LAST_CHUNK], ["a", "b"]),
    "half an event before": (
        [HALF, REST + chunk(event("c")) + chunk(ABORT) + LAST_CHUNK],
        ["a", "b", "c"],
    ),
    "half an event, then abort": ([HALF, chunk(event("b")[30:] + ABORT) + LAST_CHUNK], ["a", "b"]),
    "half an event, then an error": ([HALF, chunk(b'data: {"error":{"message":"m","code":500}}\n\n')], None),
    "an error in two chunks": (
        [chunk(b"data:"), chunk(b' {"error":{"message":"m"}}\n\n') + LAST_CHUNK],
        ["a"],
    ),
    "no finish reason": ([chunk(event("b")), LAST_CHUNK], ["a", "b"]),
    "the same after a long event": ([chunk(event("b" * 5000)), LAST_CHUNK], ["a", "b" * 5000]),
    "the same with an extension": ([chunk(event("b")) + b"0;x=y\r\n\r\n"], ["a", "b"]),
    "the same with trailers": ([chunk(event("b")), b"0\r\nx: y\r\n\r\n"], ["a", "b"]),
    "the same with a last chunk in two reads": ([chunk(event("b")) + b"0\r\n", b"\r\n"], None),
}


@pytest.mark.parametrize("trouble", TROUBLES)
async def test_no_failure_looks_whole(fleet_of: FleetOf, trouble: str) -> None:
    """The client has all events that came before, and an error event behind whole ones, or a cut body."""
    reads, expected = TROUBLES[trouble]
    async with fleet_of(scripts=(says(ONE, *reads),)) as fleet:
        response = await fleet.ask(STREAM)

        assert response.is_whole == (expected is not None)
        if expected is not None:
            assert expected == texts(response.events[:-1])
            assert "error" in response.events[-1]


OPEN_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
PING = b": ping\n\n"
BEGUN = {  # how a stream may begin: the client gets the engine's chunks, the router's, or none
    "chunks": [ONE],
    "ping before chunks": [SSE_HEAD + chunk(PING), chunk(event("a"))],
    "ping before no chunks": [OPEN_HEAD + PING, event("a")],
    "no chunks": [OPEN_HEAD, event("a")],
}
CUT: dict[str, tuple[Callable[..., Script], bytes]] = {  # how it ends, and what the engine says before
    "reset": (says_and_resets, b""),
    "close": (says_and_closes, b""),
    "silence": (says_and_stalls, b""),
    "error": (says_and_closes, b'data: {"error": {"message": "x", "code": 500}}\n\n'),
    "no end of the body": (says_and_stalls, b"data: [DONE]\n\n"),
    "part of an event": (says_and_resets, b"data: {"),
}


@pytest.mark.parametrize("begins", BEGUN)
@pytest.mark.parametrize("cut", CUT)
async def test_next_request_after_a_cut_stream(fleet_of: FleetOf, begins: str, cut: str) -> None:
    """If the body is complete and its head keeps the connection, the next request on it is answered.

    Clients send it at once, so it would be lost if the connection were closed behind the body.
    """
    ends, last = CUT[cut]
    said = [chunk(last) if "no chunks" not in begins else last] if last else []
    dying = ends(*BEGUN[begins], *said)
    flags = ("--idle-timeout-s", "0.3") if ends is says_and_stalls else ()
    own = ("--deadly-prompt-ttl-s", "0")  # the same prompt need not wait until its loss is explained
    async with fleet_of(*flags, *own, scripts=(in_turn(dying, OK),)) as fleet, fleet.connected() as client:
        response = await client.ask(STREAM)
        stays = response.is_whole and response.header("connection") == "keep-alive"
        assert stays == (begins != "no chunks") or cut == "part of an event"
        if stays:
            assert 200 == (await client.ask(BODY)).status
        else:
            assert await client.is_closed()


@pytest.mark.parametrize("dies", [says_and_resets, says_and_closes])
@pytest.mark.parametrize("rest", [b"4", b"40\r", b"40\r\ndata: {", b"5\r\nhello", b"0\r\n"])
async def test_death_within_a_chunk(fleet_of: FleetOf, rest: bytes, dies: Callable[..., Script]) -> None:
    """If a worker dies within a chunk, the client's connection is reset, so nothing looks complete."""
    async with fleet_of(scripts=(dies(ONE, rest),)) as fleet:
        response = await fleet.ask(STREAM)

        assert not response.is_whole
        assert ["broken"] == [one["outcome"] for one in fleet.logged("request.failed")]


async def test_death_of_a_body_without_length(fleet_of: FleetOf) -> None:
    """An answer that ends with its connection must not end in order when the worker's is reset."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    async with fleet_of(scripts=(says_and_resets(head, event("a")),)) as fleet, fleet.connected() as client:
        client.send(STREAM)
        await client.read_until(event("a"))

        with pytest.raises(ConnectionResetError):
            await client.reader.read()


async def test_death_within_a_long_body(fleet_of: FleetOf) -> None:
    """An answer too long to be held is reset if the worker dies."""
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 3000000\r\n\r\n"
    async with fleet_of(scripts=(says_and_resets(head, b"x" * 2_000_000),) * 2) as fleet:
        response = await fleet.ask()

        assert not response.is_whole
        assert 1 == len(fleet.requests)


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 O", SSE_HEAD, SSE_HEAD + b"6\r\ndata"])
async def test_first_byte_timeout(fleet_of: FleetOf, said: bytes) -> None:
    """A worker that does not begin its answer in time: 504, its connection closed, no other worker tried."""
    async with fleet_of("--first-byte-timeout-s", "0.05", scripts=(says_and_stalls(said),) * 2) as fleet:
        response = await fleet.ask(STREAM)

        assert (504, "GatewayTimeoutError") == (response.status, response.json["error"]["type"])
        assert 1 == len(fleet.requests)
        await until(
            lambda: not any(worker.open_wires for worker in fleet.workers),
            "the worker's connection is closed",
        )


async def test_idle_timeout(fleet_of: FleetOf) -> None:
    """A worker that falls silent amid a stream: an error event after the idle timeout."""
    flags = ("--idle-timeout-s", "0.05", "--first-byte-timeout-s", "600")
    async with fleet_of(*flags, scripts=(says_and_stalls(ONE),)) as fleet:
        response = await fleet.ask(STREAM)

        assert ["a", "GatewayTimeoutError"] == texts(response.events)
        assert response.is_whole
        await until(lambda: not fleet.workers[0].open_wires, "the worker's connection is closed")


async def test_idle_timeout_within_a_chunk(fleet_of: FleetOf) -> None:
    """After silence within a chunk the connection is reset."""
    async with fleet_of("--idle-timeout-s", "0.05", scripts=(says_and_stalls(ONE + b"40\r\ndata"),)) as fleet:
        assert not (await fleet.ask(STREAM)).is_whole


async def test_comments_do_not_count(fleet_of: FleetOf) -> None:
    """Comments pass at once and do not end the prefill; neither does a header that looks like data."""
    go_on = asyncio.Event()

    async def script(_received: Received, wire: Wire) -> None:
        await wire.send(
            SSE_HEAD.replace(b"\r\n\r\n", b"\r\nx-data: 1\r\n\r\n") + chunk(b": no data: yet\n\n")
        )
        await go_on.wait()
        await wire.send(b"%x\r\nda" % len(event("a")), event("a")[2:] + b"\r\n" + END)

    async with fleet_of("--router-mode", "kv", scripts=(script,)) as fleet, fleet.connected() as client:
        pool = next(iter(fleet.frontend.replica.routers.values())).pool
        target = next(iter(pool.targets))
        client.send(STREAM)
        await client.read_until(b"yet\n\n")
        charged_before = pool.active.charged_tokens(target)
        go_on.set()
        await client.read_until(b'"text": "a"')

        assert (64, 0) == (charged_before, pool.active.charged_tokens(target))


async def test_slow_client(fleet_of: FleetOf) -> None:
    """A client that does not read pauses the worker, in bounded memory; when it reads, it gets everything."""
    big, sent = chunk(event("x" * 65_000)), 0
    count = 400  # 26 MB: more than all socket buffers on the way

    async def script(_received: Received, wire: Wire) -> None:
        nonlocal sent
        wire.writer.write(SSE_HEAD)
        for _ in range(count):
            wire.writer.write(big)
            await wire.writer.drain()
            sent += 1
        wire.writer.write(chunk(event("", "stop")) + LAST_CHUNK)

    async with fleet_of(scripts=(script,)) as fleet, fleet.connected() as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.send(STREAM)
        await until_still(lambda: sent)
        assert sent < count / 2, "the worker is paused"
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        response = await client.response()

        assert response.is_whole
        assert (count, count + 1) == (sent, len(response.events))


async def test_client_that_never_reads(fleet_of: FleetOf) -> None:
    """A client that never reads holds its worker and booking no longer than the idle timeout."""

    async def script(_received: Received, wire: Wire) -> None:
        wire.writer.write(SSE_HEAD)
        while True:
            wire.writer.write(chunk(event("x" * 65_000)))
            await wire.writer.drain()

    async with fleet_of("--idle-timeout-s", "0.3", scripts=(script,)) as fleet, fleet.connected() as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.send(STREAM)
        await until(lambda: fleet.bookings() > 0, "the request is booked")
        await fleet.until_free()

        (broken,) = fleet.logged("request.failed")
        assert "read nothing" in broken["error"]


async def test_paused_connection_is_resumed(fleet_of: FleetOf) -> None:
    """A connection whose answer ended while it was paused serves the next request."""
    large = SSE_HEAD + chunk(event("x" * 800_000))

    async def script(_received: Received, wire: Wire) -> None:
        if wire.requests == 1:
            wire.writer.write(large + END)
        else:
            await wire.send(stream("again"))

    async with fleet_of(scripts=(script,)) as fleet, fleet.connected() as client:
        (worker,) = fleet.workers
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.send(STREAM)
        await until(
            lambda: worker.requests and not fleet.frontend.completions.in_flight.running,
            "the answer is relayed",
        )
        others = [await fleet.ask(STREAM) for _ in range(2)]
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]

        assert (await client.response()).is_whole
        assert [["again"]] * 2 == [texts(other.events) for other in others] or len(worker.wires) > 1


async def test_failover_leaves_no_trace(fleet_of: FleetOf) -> None:
    """A stream that fails over shows the client nothing of the first worker."""
    scripts = in_turn(says_and_resets(SSE_HEAD, b"10\r\n"), says(stream("good")))
    async with fleet_of(scripts=(scripts, scripts)) as fleet:
        response = await fleet.ask(STREAM)

        assert (["good"], 1) == (texts(response.events), len(response.headers("x-kvrouter-worker")))


async def test_two_streams_do_not_mix(fleet_of: FleetOf) -> None:
    """Two streams at the same time do not mix."""
    async with fleet_of(scripts=(says(*[ONE, *[chunk(event(str(i))) for i in range(50)], END]),)) as fleet:
        responses = await asyncio.gather(*(fleet.ask(STREAM) for _ in range(20)))
        await turns()

        assert all(texts(each.events) == ["a", *map(str, range(50))] for each in responses)
