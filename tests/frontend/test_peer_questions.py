"""Who answers at an address that a heartbeat names: whatever answers, a replica goes on."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from kvrouter.bounded_answers import engine_connector
from kvrouter.frontend.server import peer_questions
from kvrouter.frontend.server.peer_questions import router_at
from tests.frontend.workers import OK, FakeWorker, Received, Script, Wire, answer, says

NAMED = b'{"status":"starting","router_id":"r1"}'


async def asked(url: str, within_s: float = 5.0) -> str:
    """The id of the replica at the URL."""
    timeout = aiohttp.ClientTimeout(total=within_s)
    connector = engine_connector(False, force_close=True, networks=())
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session:
        return await router_at(session, url)


@pytest.mark.parametrize("status", [200, 503])
async def test_replica(status: int) -> None:
    """Ready or not, the id in the answer counts. Only /ready is asked, whatever path a heartbeat names."""
    async with FakeWorker("r", says(answer(NAMED, status))).serving() as worker:
        assert "r1" == await asked(f"{worker.url}/admin/delete")

        (request,) = worker.requests
        assert request.head.startswith(b"GET /ready HTTP/1.1")


async def endless(_received: Received, wire: Wire) -> None:
    """Heads of 1xx without end."""
    for _ in range(1000):
        await wire.send(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 50)


@pytest.mark.parametrize(
    "script",
    [
        OK,
        says(answer(b"<html>ready</html>")),
        says(answer(b"[" * 100_000)),
        says(answer(b'{"router_id": 7}')),
        says(answer(b"\xff\xfe")),
        says(answer(b'{"router_id": "r1", "x": "' + b"y" * peer_questions.MOST_BYTES + b'"}')),
        says(answer(NAMED, 302, b"location: http://127.0.0.1:1/\r\n").replace(NAMED, b"")),
        says(b"not HTTP\r\n\r\n"),
    ],
    ids=["engine", "page", "nested", "number", "bytes", "large", "redirect", "no HTTP"],
)
async def test_no_replica(script: Script) -> None:
    """An engine, a page, what is too large or no HTTP at all is no replica."""
    async with FakeWorker("r", script).serving() as worker:
        assert "" == await asked(worker.url)


async def test_heads_without_end() -> None:
    """Nor is a server whose interim responses do not end: the question times out."""
    async with FakeWorker("r", endless).serving() as worker:
        assert "" == await asked(worker.url, within_s=0.5)


@pytest.mark.parametrize("host", ["169.254.169.254", "[fe80::1]", "[::ffff:169.254.169.254]", "0.0.0.0"])
async def test_never_asked(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sent to link-local addresses."""

    async def never(*_: object, **__: object) -> None:
        raise AssertionError("it connects")

    monkeypatch.setattr(aiohttp.TCPConnector, "connect", never)

    assert "" == await asked(f"http://{host}:1")


async def test_nobody() -> None:
    """A refused connection, and a name that leads nowhere."""
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()

    assert ["", ""] == [await asked(f"http://127.0.0.1:{port}"), await asked("http://ghost.invalid:1")]
