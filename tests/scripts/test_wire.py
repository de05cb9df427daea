"""The fake worker and the load generator in C, against each other."""

from __future__ import annotations

import json
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from scripts.kit.bench.wire.build import binary
from scripts.kit.bench.wire.load import Load, run_load
from scripts.kit.fleet import Fleet, FleetError, Process, wait_until_ok
from scripts.kit.http_client import Client
from scripts.kit.ports import free_ports

PACE_MS = 5


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    """Ends the processes that a test started."""
    async with Fleet(tmp_path) as fleet:
        yield fleet


async def start_worker(fleet: Fleet, client: Client) -> tuple[Process, int]:
    """A fake worker and its port."""
    (port,) = free_ports(1)
    command = [str(binary("worker")), "--port", str(port), "--pace-ms", str(PACE_MS), "--seconds", "60"]
    process = await fleet.start("worker", command)
    await wait_until_ok(client, process, f"http://127.0.0.1:{port}/health")
    return process, port


def body(**more: object) -> bytes:
    """A small request."""
    return json.dumps({"model": "mock", "prompt": "hello", "max_tokens": 8, **more}).encode()


async def test_short_requests(fleet: Fleet) -> None:
    """Every request is answered, over as many connections as requests in flight."""
    client = Client()
    _, port = await start_worker(fleet, client)
    await client.close()

    report = await run_load(Load(port, [body()], concurrency=4, requests=200), fleet.directory)

    assert (200, 0) == (report.requests, report.errors)
    assert 0 < report.latency_p50_us <= report.latency_p99_us
    assert report.cpu_s > 0


async def test_streams(fleet: Fleet) -> None:
    """A stream has as many events as it asked for, and they keep their pace."""
    client = Client()
    _, port = await start_worker(fleet, client)
    await client.close()

    load = Load(port, [body(stream=True, max_tokens=20)], concurrency=3, requests=6, is_stream=True)
    report = await run_load(load, fleet.directory)

    assert (6, 0, 120) == (report.requests, report.errors, report.events)
    assert 3 == report.streams_open
    assert 0 < report.ttft_p50_us < report.latency_p50_us
    assert 19 * 1000 * PACE_MS <= report.latency_p50_us


async def test_bodies_in_turn(fleet: Fleet) -> None:
    """Bodies are sent in turn: of 9 requests each of three streams is asked for three times."""
    client = Client()
    _, port = await start_worker(fleet, client)
    await client.close()
    bodies = [body(stream=True, max_tokens=count) for count in (1, 2, 6)]

    report = await run_load(Load(port, bodies, requests=9, is_stream=True), fleet.directory)

    assert (9, 0, 27) == (report.requests, report.errors, report.events)


async def test_failures_are_counted(fleet: Fleet) -> None:
    """Another status, a stream that breaks off, a refused connection are errors, with the first reason."""

    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({"error": {}}, status=503)

    async def break_off(_: web.Request) -> web.Response:
        return web.Response(text="data: {}\n\n", content_type="text/event-stream")

    app = web.Application()
    app.router.add_post("/v1/completions", refuse)
    app.router.add_post("/v1/chat/completions", break_off)
    async with TestServer(app) as server:
        port = server.port
        assert port
        refused = await run_load(Load(port, [body()], requests=3), fleet.directory)
        broken = await run_load(
            Load(port, [body()], path="/v1/chat/completions", requests=2, is_stream=True), fleet.directory
        )
    gone = await run_load(Load(port, [body()], requests=2), fleet.directory)

    assert (0, 3) == (refused.requests, refused.errors)
    assert "503" in refused.first_error
    assert (0, 2) == (broken.requests, broken.errors)
    assert "DONE" in broken.first_error
    assert (0, 2) == (gone.requests, gone.errors)


async def test_time_is_bounded(fleet: Fleet) -> None:
    """A request that has not ended at the limit is an error, and the generator ends."""
    client = Client()
    _, port = await start_worker(fleet, client)
    await client.close()

    load = Load(port, [body(stream=True, max_tokens=100_000)], requests=1, is_stream=True, limit_s=0.3)
    report = await run_load(load, fleet.directory)

    assert (0, 1) == (report.requests, report.errors)
    assert "limit" in report.first_error


async def test_a_bad_call_is_an_error(fleet: Fleet) -> None:
    """The generator's message is passed on."""
    with pytest.raises(FleetError, match="no body"):
        await run_load(Load(1, []), fleet.directory)


def test_compiled_once(tmp_path: Path) -> None:
    """A program is compiled at its first use and found again at the next."""
    first = binary("load", tmp_path)
    made_at = first.stat().st_mtime_ns

    assert first == binary("load", tmp_path)
    assert made_at == first.stat().st_mtime_ns
    assert first.stat().st_mode & stat.S_IXUSR


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a C compiler the message says what to install."""
    monkeypatch.setenv("CC", "no-such-compiler")

    with pytest.raises(FleetError, match=r"no C compiler .*apt-get install gcc"):
        binary("load", tmp_path)
