"""Workers behind https:// URLs: verified, relayed completely, with clear errors for untrusted ones."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest

from kvrouter.relay.outcomes import Done
from kvrouter.relay.upstream import Upstream, WorkerUnreachableError, address_of
from kvrouter.tls import trusting
from tests.certificates import Authority
from tests.frontend.fleet import BODY, STREAM, FleetOf
from tests.frontend.workers import (
    OK,
    OK_BODY,
    FakeWorker,
    Received,
    Script,
    Wire,
    says,
    stream,
    turns,
    until,
    until_still,
)
from tests.relay.rig import FakeClient, attempt_on

UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\ncontent-type: audio/mpeg\r\n\r\n"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """Signs the workers' certificates."""
    return Authority(tmp_path)


def named(server: ssl.SSLContext, names: list[str | None]) -> ssl.SSLContext:
    """The same server context, which records the names that callers send (SNI)."""

    def keep(_handshake: ssl.SSLObject, name: str | None, _context: ssl.SSLContext) -> None:
        names.append(name)

    server.sni_callback = keep
    return server


async def test_answers(fleet_of: FleetOf, authority: Authority) -> None:
    """One verified connection serves several requests, streams too; `host` names the worker."""

    async def script(received: Received, wire: Wire) -> None:
        await (says(stream("a", "b")) if received.json.get("stream") else OK)(received, wire)

    flag = f"--worker-tls-ca={authority.file}"
    async with fleet_of(flag, scripts=(script,), worker_tls=authority.server()) as fleet:
        first, streamed, last = [await fleet.ask(body) for body in (BODY, STREAM, BODY)]
        (worker,) = fleet.workers

    assert [OK_BODY] * 2 == [first.body, last.body]
    assert ["a", "b"] == [each["choices"][0]["text"] for each in streamed.events]
    assert [3] == [wire.requests for wire in worker.wires]
    assert {worker.url.removeprefix("https://")} == {each.headers("host")[0] for each in worker.requests}


async def test_server_name(authority: Authority) -> None:
    """A worker announced by name is called with that name in SNI."""
    names: list[str | None] = []
    async with FakeWorker("w", OK, tls=named(authority.server(), names)).serving() as worker:
        upstream = Upstream(trusting(authority.file))
        connection = await upstream.connect(worker.url.replace("127.0.0.1", "localhost"))
        connection.close()

    assert ["localhost"] == names


@pytest.mark.parametrize(
    ("names", "is_expired", "is_trusted", "message"),
    [
        ((), False, False, "give --worker-tls-ca FILE, the authority that signed it"),
        (("other.example",), False, True, "IP address mismatch.*a name that its certificate has"),
        ((), True, True, "expired; renew it"),
    ],
    ids=["unknown authority", "other name", "expired"],
)
async def test_not_accepted(
    authority: Authority, names: tuple[str, ...], is_expired: bool, is_trusted: bool, message: str
) -> None:
    """A certificate that is not accepted makes the worker unreachable, and the error names the remedy."""
    server = authority.server(*names, is_expired=is_expired)
    async with FakeWorker("w", OK, tls=server).serving() as worker:
        with pytest.raises(WorkerUnreachableError, match=f"{worker.url} cannot be reached.*{message}"):
            await Upstream(trusting(authority.file if is_trusted else None)).connect(worker.url)


async def test_plain_http_behind_https() -> None:
    """A worker that speaks plain HTTP behind an https:// URL has an error of its own."""

    async def refuse(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(WorkerUnreachableError, match="announce it as http://"):
            await Upstream().connect(f"https://127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("https://engine.example", ("engine.example", 443, True)),
        ("https://[::1]:8443/", ("::1", 8443, True)),
        ("http://engine.example", ("engine.example", 80, False)),
    ],
)
def test_address(url: str, address: tuple[str, int, bool]) -> None:
    """Without a port https:// means 443."""
    assert address == address_of(url)


async def test_client_gets_the_remedy(fleet_of: FleetOf, authority: Authority) -> None:
    """Clients of a worker with an untrusted certificate get an OpenAI error that names the remedy."""
    async with fleet_of("--retries=0", worker_tls=authority.server()) as fleet:
        refused = await fleet.ask()

    assert 502 == refused.status
    assert "--worker-tls-ca" in refused.json["error"]["message"]


def sends_and(end: Callable[[Wire], None], *pieces: bytes) -> Script:
    """Answers without a length, and ends the connection with `end`."""

    async def script(_received: Received, wire: Wire) -> None:
        await wire.send(UNTIL_CLOSE, *pieces)
        end(wire)

    return script


def cut(wire: Wire) -> None:
    """End the connection without TLS's close_notify."""
    wire.writer.transport.abort()


@pytest.mark.parametrize(("end", "is_whole"), [(Wire.close, True), (cut, False)])
async def test_cut_short(
    fleet_of: FleetOf, authority: Authority, end: Callable[[Wire], None], is_whole: bool
) -> None:
    """An answer that ends with its connection is complete only after close_notify: anyone can cut TCP."""
    flag, script = f"--worker-tls-ca={authority.file}", sends_and(end, b"sound")
    fleet_open = fleet_of(flag, scripts=(script,), worker_tls=authority.server())
    async with fleet_open as fleet, fleet.connected() as client:
        client.send(BODY)
        await client.read_until(b"sound")
        try:
            rest = await client.reader.read()
        except ConnectionError:
            rest = None

    assert is_whole == (rest == b"")


async def test_slow_client(fleet_of: FleetOf, authority: Authority) -> None:
    """A slow client pauses a worker over TLS, and gets everything."""
    pieces, sent = [b"%08d" % number * 8192 for number in range(400)], 0

    async def script(_received: Received, wire: Wire) -> None:
        nonlocal sent
        await wire.send(UNTIL_CLOSE)
        for piece in pieces:
            await wire.send(piece)
            sent += 1
        wire.close()

    flag = f"--worker-tls-ca={authority.file}"
    fleet_open = fleet_of(flag, scripts=(script,), worker_tls=authority.server())
    async with fleet_open as fleet, fleet.connected() as client:
        client.stop_reading()
        client.send(BODY)
        await until_still(lambda: sent)
        held_at = sent
        client.go_on_reading()
        await client.read_until(b"\r\n\r\n")
        got = await client.reader.read()

    assert held_at < len(pieces)
    assert b"".join(pieces) == got


@pytest.mark.parametrize("size", [1, 20_000, 200_000])
async def test_close_behind_unread_bytes(authority: Authority, size: int) -> None:
    """What a worker sent before it closed is not lost if its client was slow at that moment."""
    begun, rest = b"begun" * 1000, b"x" * size

    async def script(_received: Received, wire: Wire) -> None:
        await wire.send(UNTIL_CLOSE, begun)
        await until(lambda: client.got.endswith(begun), "the first part is relayed")
        await wire.send(rest)
        wire.close()
        await turns(50)
        with socket.socket(fileno=os.dup(wire.writer.get_extra_info("socket").fileno())) as raw:
            raw.shutdown(socket.SHUT_WR)  # as servers do that do not wait for our close_notify

    async with FakeWorker("w", script, tls=authority.server()).serving() as worker:
        upstream, client = Upstream(trusting(authority.file)), FakeClient()
        client.is_slow = True
        attempt = attempt_on(await upstream.connect(worker.url), client)
        attempt.send(b"POST / HTTP/1.1\r\ncontent-length: 0\r\n\r\n")
        await until(lambda: worker.wires and not worker.wires[0].is_open, "the worker has closed")
        await turns(200)
        client.catch_up()
        outcome = await attempt.outcome

    assert Done(200, keeps_alive=False) == outcome
    assert client.got.endswith(begun + rest)


async def test_cancelled_connects(authority: Authority) -> None:
    """Cancelled at any moment, connecting over TLS leaves no connection open."""
    tls = trusting(authority.file)
    async with FakeWorker("w", OK, tls=authority.server()).serving() as worker:
        upstream = Upstream(tls)
        for turns_before in range(40):
            task = asyncio.ensure_future(upstream.connect(worker.url))
            await turns(turns_before)
            if task.cancel():
                await asyncio.wait([task])
            if not task.cancelled():
                task.result().close()
        del task
        gc.collect()
        await until(lambda: not worker.open_wires, "no connection is open")
