"""The client's side: connections that are kept, pipelined or closed, HTTP/1.0, clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import socket
import struct
from pathlib import Path
from typing import Any

import pytest

from kvrouter.relay import connection
from tests.frontend.clients import connected
from tests.frontend.fleet import BODY, STREAM, FleetOf
from tests.frontend.workers import (
    END,
    LAST_CHUNK,
    OK,
    OK_BODY,
    SSE_HEAD,
    Received,
    Wire,
    answer,
    chunk,
    event,
    says,
    says_and_closes,
    says_and_resets,
    says_and_stalls,
    stream,
    turns,
    until,
)

AT_ONCE_S = 10.0
"""How soon a worker's connection must close after its client has left: long before any timeout."""


async def test_keep_alive(fleet_of: FleetOf) -> None:
    """A client's connection serves several requests, and the worker's connection as well."""
    async with fleet_of(scripts=(says(stream("a")),)) as fleet, fleet.connected() as client:
        responses = [await client.ask(STREAM) for _ in range(5)]

        assert ["keep-alive"] * 5 == [response.header("connection") for response in responses]
        assert [5] == [wire.requests for wire in fleet.workers[0].wires]


async def test_errors_keep_alive(fleet_of: FleetOf) -> None:
    """After an error of the router, or a worker's rejection, the connection is usable."""
    bodies = (b"{", {**BODY, "model": "x"}, BODY, BODY)
    async with fleet_of(scripts=(says(answer(b"{}", 503)),)) as fleet, fleet.connected() as client:
        statuses = [(await client.ask(body)).status for body in bodies]

        assert [400, 404, 503, 503] == statuses


async def test_pipelined(fleet_of: FleetOf) -> None:
    """Requests sent without waiting are answered in order."""

    async def echo(received: Received, wire: Wire) -> None:
        await wire.send(answer(json.dumps(received.json["prompt"]).encode()))

    async with fleet_of(scripts=(echo,)) as fleet, fleet.connected() as client:
        for number in range(40):
            client.send({"model": "m", "prompt": [number]})
        answers = [(await client.response()).json for _ in range(40)]

        assert [[number] for number in range(40)] == answers


async def test_connection_close(fleet_of: FleetOf) -> None:
    """`Connection: close` is answered with the same."""
    async with fleet_of() as fleet, fleet.connected() as client:
        response = await client.ask(BODY, "connection: close")

        assert "close" == response.header("connection")
        assert await client.is_closed()


@pytest.mark.parametrize("whole", [answer(), stream("hi")])
async def test_http_10(fleet_of: FleetOf, whole: bytes) -> None:
    """An HTTP/1.0 client gets no chunks; its connection ends with the answer."""
    async with fleet_of(scripts=(says(whole),)) as fleet, fleet.connected() as client:
        client.send(STREAM, version="HTTP/1.0")
        response = await client.response()

        assert ([], "close") == (response.headers("transfer-encoding"), response.header("connection"))
        assert response.body in {OK_BODY, event("hi") + b"data: [DONE]\n\n"}


async def test_http_10_keep_alive(fleet_of: FleetOf) -> None:
    """An HTTP/1.0 client that asks for it keeps its connection if the answer has a length."""
    async with fleet_of() as fleet, fleet.connected() as client:
        for _ in range(2):
            client.send(BODY, "connection: keep-alive", version="HTTP/1.0")
            assert OK_BODY == (await client.response()).body


async def test_http_10_streams(fleet_of: FleetOf) -> None:
    """Nginx uses HTTP/1.0 by default: its events, too, arrive one by one."""
    go_on = asyncio.Event()

    async def script(_received: Received, wire: Wire) -> None:
        await wire.send(SSE_HEAD + b"%x\r\n" % len(event("a")), event("a"), b"\r\n")
        await go_on.wait()
        end = chunk(event("b", "stop"))
        await wire.send(end[:20], end[20:], LAST_CHUNK)

    async with fleet_of(scripts=(script,)) as fleet, fleet.connected() as client:
        client.send(STREAM, version="HTTP/1.0")
        await client.read_until(b"\r\n\r\n" + event("a"))
        go_on.set()

        assert event("b", "stop") == await client.reader.read()


async def test_http_10_worker_dies(fleet_of: FleetOf) -> None:
    """An HTTP/1.0 client gets an error event, without chunk framing, or a reset."""
    one = SSE_HEAD + chunk(event("a"))
    async with fleet_of(scripts=(says_and_resets(one),)) as fleet:
        async with fleet.connected() as client:
            client.send(STREAM, version="HTTP/1.0")
            response = await client.response()
            assert "BadGatewayError" == response.events[1]["error"]["type"]
        fleet.workers[0].script = says_and_resets(one, b"40\r\ndata")
        async with fleet.connected() as client:
            client.send(STREAM, version="HTTP/1.0")
            await client.read_until(event("a") + b"data")
            with pytest.raises(ConnectionResetError):
                await client.reader.read()


async def test_expect_continue(fleet_of: FleetOf) -> None:
    """Curl asks before it sends a large body. The worker does not get the question."""
    async with fleet_of() as fleet, fleet.connected() as client:
        body = json.dumps(BODY).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\nexpect: 100-continue\r\n"
        client.writer.write(head + b"content-length: %d\r\n\r\n" % len(body))
        assert (await client.read_until(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
        client.writer.write(body)

        assert 200 == (await client.response()).status
        assert [] == fleet.workers[0].requests[0].headers("expect")


async def test_no_delay(fleet_of: FleetOf) -> None:
    """TCP_NODELAY is set on both sides. Without it streams stall for 40 ms."""
    script = says_and_stalls(SSE_HEAD, chunk(event("a")))
    async with fleet_of(scripts=(script,)) as fleet, fleet.connected() as client:
        client.send(STREAM)
        await client.read_until(event("a"))
        (attempt,) = fleet.frontend.completions.in_flight.running
        sides: list[Any] = [attempt._connection, attempt._client]

        for side in sides:
            raw = side._transport.get_extra_info("socket")
            assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert raw.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        client.leave()


@pytest.mark.parametrize("said", [b"", SSE_HEAD, SSE_HEAD + chunk(event("a")), SSE_HEAD + b"40\r\ndata"])
async def test_client_leaves(fleet_of: FleetOf, said: bytes) -> None:
    """When a client leaves, before or after the first byte, its worker's connection closes at once."""
    async with fleet_of(scripts=(says_and_stalls(said),) * 2) as fleet, fleet.connected() as client:
        client.send(STREAM)
        await until(lambda: fleet.requests, "the worker has the request")
        if b"data:" in said and said != SSE_HEAD + b"40\r\ndata":
            await client.read_until(event("a"))
        client.leave()
        await until(
            lambda: not any(worker.open_wires for worker in fleet.workers),
            "the connection is closed",
            AT_ONCE_S,
        )
        await fleet.until_free(AT_ONCE_S)

        assert 1 == len(fleet.requests)
        assert re.search(rb'outcome="left",route="[^"]*"} 1.0', (await fleet.get("/metrics")).body)


@pytest.mark.parametrize("is_reset", [False, True])
async def test_client_leaves_behind_many_bytes(
    fleet_of: FleetOf, monkeypatch: pytest.MonkeyPatch, is_reset: bool
) -> None:
    """A client is seen to leave, too, when it has sent more behind its request than is read; not before."""
    monkeypatch.setattr(connection, "LOOK_EVERY_S", 0.05)
    async with fleet_of(scripts=(says_and_stalls(),)) as fleet, fleet.connected() as client:
        client.send(STREAM)
        for _ in range(3):
            client.send(b"x" * 40_000)
        await until(lambda: fleet.requests, "the worker has the request")
        await asyncio.sleep(0.2)
        assert 1 == fleet.bookings()
        if is_reset:
            linger_0_s = struct.pack("ii", 1, 0)
            client.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger_0_s)
        client.leave()
        await fleet.until_free()

        assert 1 == len(fleet.requests)


async def test_client_leaves_amid_its_request(fleet_of: FleetOf) -> None:
    """A client that leaves while it sends its body leaves nothing behind."""
    async with fleet_of() as fleet, fleet.connected() as client:
        client.writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: 99\r\n\r\n{")
        await until(lambda: not fleet.frontend.completions.in_flight.idle.is_set(), "the request has begun")
        client.leave()
        await fleet.frontend.completions.in_flight.idle.wait()

        assert not fleet.requests


async def test_client_leaves_during_tokenizing(fleet_of: FleetOf, tiny: Path) -> None:
    """The request of a client that leaves while its prompt is tokenized reaches no worker."""
    flags = ("--router-mode", "kv", "--model-path", str(tiny), "--tokenizer-workers", "1")
    async with fleet_of(*flags) as fleet, fleet.connected() as client:
        client.send({"model": "m", "prompt": "hello world " * 100_000})
        await until(lambda: not fleet.frontend.completions.in_flight.idle.is_set(), "the request has begun")
        client.leave()
        async with asyncio.timeout(AT_ONCE_S):
            await fleet.frontend.completions.in_flight.idle.wait()

        assert not fleet.requests
        assert re.search(rb'outcome="left",route="[^"]*"} 1.0', (await fleet.get("/metrics")).body)


async def test_client_leaves_between_two_attempts(fleet_of: FleetOf) -> None:
    """A client may leave between an attempt and the next one."""
    scripts = (says_and_closes(answer(b"")),) * 60
    async with fleet_of("--retries", "50", scripts=scripts) as fleet, fleet.connected() as client:
        client.send(STREAM)
        await until(lambda: len(fleet.requests) > 2, "the third attempt")
        client.leave()
        await fleet.until_free(AT_ONCE_S)


async def leave_early(url: str, seed: int) -> bool:
    """A client that leaves after a time that depends on `seed`; returns whether it stayed."""
    chance = random.Random(seed)
    async with connected(url) as client:
        client.send(STREAM)
        if seed % 4 == 0:
            return (await client.response()).is_whole
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(chance.random() * 0.3):
                await client.reader.read(-1)
    return False


async def test_many_come_and_go(fleet_of: FleetOf) -> None:
    """Of 200 streams at once most clients leave: no booking stays, on either of two replicas."""

    async def script(_received: Received, wire: Wire) -> None:
        await wire.send(SSE_HEAD)
        for number in range(20):
            await wire.send(chunk(event(str(number))))
        await wire.send(END)

    flags = ("--router-mode", "kv", "--router-replica-sync", "--heartbeat-s", "0.1", "--lease-s", "60")
    async with fleet_of(*flags, scripts=(script,) * 3, replicas=2) as fleet:
        urls = [frontend.url for frontend in fleet.frontends]
        stayed = await asyncio.gather(*(leave_early(urls[seed % 2], seed) for seed in range(200)))
        await fleet.until_free()

        assert 50 == sum(stayed)
        for frontend in fleet.frontends:
            (router,) = frontend.replica.routers.values()
            router.pool.active.check()
            assert {} == router.pool.active.owners()


async def test_nothing_is_written_twice(fleet_of: FleetOf) -> None:
    """Nothing is added to a relayed answer: the next bytes belong to the next response."""
    async with fleet_of(scripts=(OK,)) as fleet, fleet.connected() as client:
        for _ in range(3):
            client.send(BODY)
            whole = await client.read_until(OK_BODY)
            assert 1 == whole.count(b"HTTP/1.1 ")


async def test_client_that_reads_nothing(fleet_of: FleetOf) -> None:
    """A client that pipelines requests and reads no answers does not fill the memory: its requests wait."""
    large = answer(b"x" * 500_000)
    async with fleet_of(scripts=(says(large),)) as fleet, fleet.connected() as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        for _ in range(30):
            client.send(BODY)
        await until(lambda: len(fleet.requests) > 1 and fleet.bookings() == 0, "the next request waits")
        await turns(100)
        served = len(fleet.requests)
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]

        assert served < 30
        assert [500_000] * 30 == [len((await client.response()).body) for _ in range(30)]


async def test_client_that_never_reads(fleet_of: FleetOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that stops reading its answers is disconnected."""
    monkeypatch.setattr("kvrouter.frontend.server.http_server.KEEP_ALIVE_S", 0.05)
    large = answer(b"x" * 900_000)
    async with fleet_of(scripts=(says(large),)) as fleet, fleet.connected() as client:
        client.stop_reading()
        for _ in range(30):
            client.send(BODY, "expect: 100-continue")

        def is_reset() -> bool:
            client.writer.write(b" ")  # a client that does not read notices a reset only when it writes
            return client.writer.is_closing()

        await until(lambda: fleet.requests and not fleet.bookings(), "the answer is complete")
        await until(is_reset, "the connection is reset")
