"""The admin listener: aiohttp reads its requests, and the same routes serve them."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable

import pytest

from tests.frontend.clients import connected
from tests.frontend.fleet import BODY, STREAM, FleetOf
from tests.frontend.workers import (
    OK_BODY,
    SSE_HEAD,
    Received,
    Wire,
    answer,
    chunk,
    event,
    in_turn,
    says,
    says_and_resets,
    says_and_stalls,
    stream,
    until,
    until_still,
)


async def test_completions(fleet_of: FleetOf) -> None:
    """It relays completions, whole and streamed, with the headers of the answer."""
    async with (
        fleet_of(scripts=(in_turn(says(answer()), says(stream("a"))),)) as fleet,
        connected(fleet.frontend.admin_url) as client,
    ):
        whole = await client.ask(BODY, "x-request-id: mine")
        events = await client.ask(STREAM)

        assert (200, OK_BODY, "mine") == (whole.status, whole.body, whole.header("x-request-id"))
        assert event("a") + b"data: [DONE]\n\n" == events.body
        assert "text/event-stream" in events.header("content-type")
        assert "w0" == events.header("x-kvrouter-worker")


async def test_events_one_by_one(fleet_of: FleetOf) -> None:
    """An event arrives before the next one exists."""
    go_on = asyncio.Event()

    async def script(_received: Received, wire: Wire) -> None:
        await wire.send(SSE_HEAD + chunk(event("a")))
        await go_on.wait()
        await wire.send(chunk(event("b")) + b"0\r\n\r\n")

    async with (
        fleet_of(scripts=(script,)) as fleet,
        connected(fleet.frontend.admin_url) as client,
    ):
        client.send(STREAM)
        await client.read_until(event("a"))
        go_on.set()

        await client.read_until(event("b"))


async def test_slow_client(fleet_of: FleetOf) -> None:
    """A client that reads nothing pauses the worker; when it reads, it gets everything."""
    size = 20_000_000
    head = b"HTTP/1.1 200 OK\r\ncontent-type: audio/mpeg\r\ncontent-length: %d\r\n\r\n" % size

    unsent: list[Callable[[], int]] = []

    async def script(_received: Received, wire: Wire) -> None:
        unsent.append(wire.writer.transport.get_write_buffer_size)
        await wire.send(head + b"x" * size)

    async with (
        fleet_of(scripts=(script,)) as fleet,
        connected(fleet.frontend.admin_url) as client,
    ):
        client.stop_reading()
        client.send(BODY)
        await until(lambda: unsent, "the worker answers")
        await until_still(unsent[0])
        assert unsent[0]() > size / 2, "the worker is paused"
        client.go_on_reading()

        assert size == len((await client.response()).body)


async def test_client_leaves(fleet_of: FleetOf) -> None:
    """When a client leaves, its worker's connection closes."""
    async with (
        fleet_of(scripts=(says_and_stalls(SSE_HEAD + chunk(event("a"))),)) as fleet,
        connected(fleet.frontend.admin_url) as client,
    ):
        client.send(STREAM)
        await client.read_until(event("a"))
        client.leave()

        await until(lambda: not fleet.workers[0].open_wires, "the worker's connection is closed")


async def test_worker_dies(fleet_of: FleetOf) -> None:
    """An answer that its worker does not finish does not look complete."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: audio/mpeg\r\ncontent-length: 100\r\n\r\n"
    async with (
        fleet_of("--retries", "0", scripts=(says_and_resets(head + b"sound"),)) as fleet,
        connected(fleet.frontend.admin_url) as client,
    ):
        response = await client.ask(BODY)

        assert not response.is_whole


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("GET /nowhere", 404),
        ("POST /nowhere", 404),
        ("DELETE /live", 405),
        ("GET /v1/completions", 405),
        ("HEAD /version", 405),
    ],
)
@pytest.mark.parametrize("is_admin", [True, False])
async def test_no_route(fleet_of: FleetOf, request_line: str, status: int, is_admin: bool) -> None:
    """Both listeners give the same errors, and the connection stays usable."""
    async with (
        fleet_of() as fleet,
        connected(fleet.frontend.admin_url if is_admin else fleet.url) as client,
    ):
        client.writer.write(f"{request_line} HTTP/1.1\r\nhost: t\r\ncontent-length: 2\r\n\r\n{{}}".encode())
        head = await client.read_until(b"\r\n\r\n")
        if not request_line.startswith("HEAD"):
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            error = json.loads(await client.reader.readexactly(length))["error"]
            assert status == error["code"]
            assert error["message"].startswith(request_line)

        assert head.startswith(f"HTTP/1.1 {status} ".encode())
        assert (status == 405) == (b"allow: " in head.lower())
        assert 200 == (await client.ask(BODY)).status


@pytest.mark.parametrize("is_admin", [True, False])
@pytest.mark.parametrize("path", ["/live", "/v1/models", "/v1/models/m", "/metrics"])
async def test_head(fleet_of: FleetOf, path: str, is_admin: bool) -> None:
    """HEAD has the headers of GET and no body, on both listeners."""
    async with (
        fleet_of() as fleet,
        connected(fleet.frontend.admin_url if is_admin else fleet.url) as client,
    ):
        client.writer.write(f"HEAD {path} HTTP/1.1\r\nhost: t\r\n\r\n".encode())
        head = await client.read_until(b"\r\n\r\n")
        after = await client.get("/live")

        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"content-length: 0\r\n" not in head.lower()
        assert b"ok\n" == after.body


@pytest.mark.parametrize("is_admin", [True, False])
async def test_bodies(fleet_of: FleetOf, is_admin: bool) -> None:
    """Packed, chunked and expected bodies are read on both listeners."""
    data = json.dumps(BODY).encode()
    start = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\n"
    packed = gzip.compress(data)
    async with (
        fleet_of() as fleet,
        connected(fleet.frontend.admin_url if is_admin else fleet.url) as client,
    ):
        client.writer.write(
            start + b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(packed) + packed
        )
        answers = [await client.response()]
        client.writer.write(start + b"transfer-encoding: chunked\r\n\r\n" + chunk(data) + b"0\r\n\r\n")
        answers.append(await client.response())
        client.writer.write(start + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(data))
        invitation = await client.read_until(b"\r\n\r\n")
        client.writer.write(data)
        answers.append(await client.response())

        assert [200] * 3 == [each.status for each in answers]
        assert invitation.startswith(b"HTTP/1.1 100 Continue\r\n")
        assert [data] * 3 == [each.body for each in fleet.workers[0].requests]


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ("content-length: 2\r\n\r\n{}", 400),
        ("host: t\r\nhost: u\r\ncontent-length: 2\r\n\r\n{}", 400),
        ("host: t\r\ncontent-length: 9999999\r\n\r\n", 413),
        ("host: t\r\ncontent-length: 2\r\ncontent-encoding: gzip\r\n\r\n{}", 400),
        ("host: t\r\ntransfer-encoding: chunked\r\n\r\nx\r\n", 400),
        ("host: t\r\ncontent-length: 2\r\ncontent-length: 2\r\n\r\n{}", 400),
        ("host: t\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{}", 400),
        ("x : y\r\nhost: t\r\n\r\n", 400),
    ],
)
async def test_refused(fleet_of: FleetOf, lines: str, status: int) -> None:
    """What the clients' port refuses is refused here too, and nothing is logged as an error."""
    async with (
        fleet_of("--max-body-mib", "1") as fleet,
        connected(fleet.frontend.admin_url) as client,
    ):
        head = "POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\n"
        client.writer.write(f"{head}{lines}".encode())

        assert status == (await client.response()).status
        assert not fleet.requests


async def test_bug(fleet_of: FleetOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug in a view is a 500 in OpenAI's form and a line in the log, on both listeners."""
    async with fleet_of() as fleet:
        monkeypatch.delattr(fleet.frontend.admin, "bus")
        answers = [await fleet.get("/health")]
        async with connected(fleet.frontend.admin_url) as client:
            answers.append(await client.get("/health"))

        assert [500, 500] == [each.status for each in answers]
        assert "internal error" in answers[0].json["error"]["message"]
        assert ["/health"] * 2 == [entry["path"] for entry in fleet.logged("request.failed")]
        fleet.trouble.logs.clear()
