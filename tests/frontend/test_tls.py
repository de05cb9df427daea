"""Clients over TLS: what holds for TCP holds here, on real sockets with real certificates."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import ssl
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import openai
import pytest

from kvrouter.bus import Bus, NatsOptions, Subjects
from kvrouter.observe.settings import ReplicaAccess
from kvrouter.observe.verify import compare
from kvrouter.relay.exchange import HELD_BYTES
from kvrouter.tls import CertificateFiles, server_context
from scripts.kit.ports import free_ports
from tests.certificates import Authority
from tests.frontend.clients import connected
from tests.frontend.fleet import BODY, STREAM, Fleet, FleetOf, Trouble
from tests.frontend.test_processes import kill, start
from tests.frontend.workers import (
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
    says_and_closes,
    says_and_resets,
    says_and_stalls,
    stream,
    until,
    until_found,
    until_still,
)

UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\ncontent-type: audio/mpeg\r\n\r\nsound"
"""An answer that ends where its connection ends."""
LINES = {"1.1": b"POST /v1/completions HTTP/1.1\r\n", "1.0": b"POST /v1/completions HTTP/1.0\r\n"}


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """Signs the frontend's certificate."""
    return Authority(tmp_path)


@pytest.fixture
def https(
    authority: Authority, fleet_of: FleetOf
) -> Callable[..., contextlib.AbstractAsyncContextManager[Fleet]]:
    """Opens a fleet whose frontend speaks HTTPS."""
    files = authority.sign()
    flags = (f"--tls-cert={files.cert}", f"--tls-key={files.key}")

    @contextlib.asynccontextmanager
    async def open_fleet(script: Script = OK, *more: str) -> AsyncIterator[Fleet]:
        async with fleet_of(*flags, *more, scripts=(script,)) as fleet:
            yield fleet

    return open_fleet


Https = Callable[..., contextlib.AbstractAsyncContextManager[Fleet]]


@contextlib.contextmanager
def raw(url: str, tls: ssl.SSLContext) -> Iterator[ssl.SSLSocket]:
    """A blocking socket that can distinguish an end with close_notify from one without."""
    address = urlsplit(url)
    with (
        socket.create_connection((address.hostname or "", address.port or 0), timeout=10) as plain,
        tls.wrap_socket(plain, server_hostname="localhost", suppress_ragged_eofs=False) as connection,
    ):
        yield connection


def post(body: object, line: bytes = LINES["1.1"]) -> bytes:
    """A request."""
    data = json.dumps(body).encode()
    return line + b"host: t\r\ncontent-length: %d\r\n\r\n" % len(data) + data


async def until_end(url: str, tls: ssl.SSLContext, request: bytes) -> tuple[bytes, bool]:
    """The bytes until the connection ends, and whether it ends with close_notify."""

    def read() -> tuple[bytes, bool]:
        got = b""
        with raw(url, tls) as connection:
            connection.sendall(request)
            try:
                while data := connection.recv(65536):
                    got += data
            except (ConnectionError, ssl.SSLEOFError):
                return got, False
            return got, True

    return await asyncio.to_thread(read)


async def test_answers(https: Https, authority: Authority) -> None:
    """Several requests on one connection; the replica reports its https:// address."""
    async with (
        https() as fleet,
        connected(fleet.url, authority.trusted()) as client,
        connected(fleet.frontend.admin_url, authority.trusted()) as operator,
    ):
        answers = [await client.ask(BODY) for _ in range(3)]
        workers = await operator.get("/workers")
        health = await client.get("/health")

    assert fleet.url.startswith("https://127.0.0.1:")
    assert [OK_BODY] * 3 == [each.body for each in answers]
    assert [200, 200] == [workers.status, health.status]


async def test_protocols(https: Https, authority: Authority) -> None:
    """ALPN agrees on HTTP/1.1, TLS 1.2 is the minimum, and the certificate can be verified."""

    def agreed(url: str, least: ssl.TLSVersion, most: ssl.TLSVersion) -> tuple[str | None, str | None]:
        tls = authority.trusted()
        tls.set_ciphers("DEFAULT:@SECLEVEL=0")
        tls.minimum_version, tls.maximum_version = least, most
        tls.set_alpn_protocols(["h2", "http/1.1"])
        with raw(url, tls) as connection:
            return connection.version(), connection.selected_alpn_protocol()

    version = ssl.TLSVersion
    async with https() as fleet:
        newest = await asyncio.to_thread(agreed, fleet.url, version.TLSv1_2, version.TLSv1_3)
        older = await asyncio.to_thread(agreed, fleet.url, version.TLSv1_2, version.TLSv1_2)
        with (
            pytest.warns(DeprecationWarning, match="TLSv1_1"),
            pytest.raises((ssl.SSLError, ConnectionError)),
        ):
            await asyncio.to_thread(agreed, fleet.url, version.TLSv1_1, version.TLSv1_1)
        with pytest.raises(ssl.SSLCertVerificationError):
            await until_end(fleet.url, ssl.create_default_context(), b"")

    assert (("TLSv1.3", "http/1.1"), ("TLSv1.2", "http/1.1")) == (newest, older)


async def test_pipelined(https: Https, authority: Authority) -> None:
    """Pipelined requests are answered in order; the last one closes the connection."""
    last = post({**BODY, "n": 2}).replace(b"host:", b"connection: close\r\nhost:")
    async with https() as fleet:
        got, is_announced = await until_end(fleet.url, authority.trusted(), post(BODY) * 3 + last)

    assert (4, True) == (got.count(OK_BODY), is_announced)
    assert [None, None, None, 2] == [each.json.get("n") for each in fleet.workers[0].requests]


async def test_handed_over(https: Https, authority: Authority) -> None:
    """Requests that are not plain are served over TLS too: chunks, HTTP/1.0, `Expect`, other methods."""
    data = json.dumps(BODY).encode()
    head = b"host: t\r\ntransfer-encoding: chunked\r\n\r\n"
    async with https() as fleet, connected(fleet.url, authority.trusted()) as client:
        first = await client.ask(BODY)
        client.writer.write(LINES["1.1"] + head + chunk(data[:9]) + chunk(data[9:]) + b"0\r\n\r\n")
        chunked = await client.response()
        expecting = b"host: t\r\nexpect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(data)
        client.writer.write(LINES["1.1"] + expecting)
        invited = await client.read_until(b"\r\n\r\n")
        client.writer.write(data)
        expected = await client.response()
        models = await client.get("/v1/models")
        old, is_announced = await until_end(fleet.url, authority.trusted(), post(BODY, LINES["1.0"]))

    assert [OK_BODY] * 3 == [first.body, chunked.body, expected.body]
    assert b"HTTP/1.1 100 Continue\r\n\r\n" == invited
    assert "m" == models.json["data"][0]["id"]
    assert (True, True) == (old.endswith(OK_BODY), is_announced)


async def test_openai_client(https: Https, authority: Authority) -> None:
    """The `openai` package works over HTTPS, with streams and without."""

    async def script(received: Received, wire: Wire) -> None:
        await wire.send(stream("a", "b", "c") if received.json.get("stream") else answer())

    async with https(script) as fleet:
        http = openai.DefaultAsyncHttpxClient(verify=authority.trusted())
        async with openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="x", http_client=http) as client:
            models = [model.id async for model in client.models.list()]
            whole = await client.completions.create(model="m", prompt="p")
            chunks = [
                each async for each in await client.completions.create(model="m", prompt="p", stream=True)
            ]

    assert (["m"], "hi") == (models, whole.choices[0].text)
    assert ["a", "b", "c"] == [each.choices[0].text for each in chunks]


@pytest.mark.parametrize("version", ["1.1", "1.0"], ids=["plain", "HTTP/1.0"])
@pytest.mark.parametrize(("ends", "is_whole"), [(says_and_resets, False), (says_and_closes, True)])
async def test_incomplete_answer(
    https: Https, authority: Authority, version: str, ends: Callable[[bytes], Script], is_whole: bool
) -> None:
    """An answer that ends with its connection ends with close_notify only if it is complete."""
    async with https(ends(UNTIL_CLOSE)) as fleet:
        got, is_announced = await until_end(fleet.url, authority.trusted(), post(BODY, LINES[version]))

    assert is_whole == is_announced
    assert not is_whole or got.endswith(b"sound")


@pytest.mark.parametrize("sends_close_notify", [True, False], ids=["close_notify", "vanishes"])
async def test_client_leaves(https: Https, authority: Authority, sends_close_notify: bool) -> None:
    """A client that leaves amid its stream, with close_notify or without, is no longer served."""
    left = asyncio.Event()

    async def script(_received: Received, wire: Wire) -> None:
        await wire.send(SSE_HEAD + chunk(event("a")))
        await wire.until_left()
        left.set()

    def begin(url: str) -> None:
        with raw(url, authority.trusted()) as connection:
            connection.sendall(post(STREAM))
            while b"data:" not in connection.recv(65536):
                pass
            if sends_close_notify:
                with contextlib.suppress(OSError):
                    connection.unwrap()

    async with https(script) as fleet:
        await asyncio.to_thread(begin, fleet.url)
        async with asyncio.timeout(2):
            await left.wait()
        await fleet.until_free()


@pytest.mark.parametrize("version", ["1.1", "1.0"], ids=["plain", "HTTP/1.0"])
async def test_slow_client(https: Https, authority: Authority, version: str) -> None:
    """A client that reads nothing pauses the worker; when it reads, it gets everything."""
    piece, pieces = b"x" * 65536, 400
    sent = 0

    async def script(_received: Received, wire: Wire) -> None:
        nonlocal sent
        await wire.send(
            b"HTTP/1.1 200 OK\r\ncontent-type: audio/mpeg\r\n"
            b"content-length: %d\r\n\r\n" % (len(piece) * pieces)
        )
        for _ in range(pieces):
            await wire.send(piece)
            sent += 1

    async with https(script) as fleet, connected(fleet.url, authority.trusted()) as client:
        client.stop_reading()
        client.writer.write(post(BODY, LINES[version]))
        await until_still(lambda: sent)
        held_at = sent
        client.go_on_reading()
        got = await client.response()

    assert held_at < pieces
    assert (True, len(piece) * pieces) == (got.is_whole, len(got.body))


async def test_refused_amid_its_body(https: Https, authority: Authority) -> None:
    """A client that is refused while it sends gets the answer and the end of the connection."""
    size = 65 * 1024 * 1024
    head = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: %d\r\n\r\n" % size
    async with https() as fleet, connected(fleet.url, authority.trusted()) as client:
        client.writer.write(head + b"x" * 1_000_000)
        response = await client.response()

        assert (413, "close") == (response.status, response.header("connection"))
        assert await client.is_closed()
        assert not fleet.requests


async def test_large_bodies(https: Https, authority: Authority) -> None:
    """Bodies of many TLS records arrive, in both directions."""
    large = answer(b'{"text":"' + b"y" * 3 * HELD_BYTES + b'"}')
    body = {"model": "m", "prompt": "z" * 3_000_000}

    async def script(_received: Received, wire: Wire) -> None:
        await wire.send(large)

    async with https(script) as fleet, connected(fleet.url, authority.trusted()) as client:
        answers = [await client.ask(body) for _ in range(2)]

    assert [3 * HELD_BYTES + 11] * 2 == [len(each.body) for each in answers]
    assert [body] * 2 == [each.json for each in fleet.workers[0].requests]


async def test_no_tls(https: Https, authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client without TLS, or with an unfinished handshake, is disconnected, and nothing is logged."""
    monkeypatch.setattr("kvrouter.frontend.server.http_server.HANDSHAKE_S", 0.05)
    async with https() as fleet:
        async with connected(fleet.url) as plain:
            plain.send(BODY)
            assert await plain.is_closed()
        async with connected(fleet.url) as silent:
            assert await silent.is_closed()
        async with connected(fleet.url, authority.trusted()) as client:
            assert 200 == (await client.ask(BODY)).status


async def test_cut_off(https: Https, authority: Authority) -> None:
    """A stream that the replica cannot finish ends in order, with an error event."""
    async with https(says_and_stalls(SSE_HEAD + chunk(event("a")))) as fleet:
        reading = asyncio.create_task(until_end(fleet.url, authority.trusted(), post(STREAM)))
        running = fleet.frontend.completions.in_flight.running
        await until(lambda: any(attempt.is_committed for attempt in running), "the answer has begun")
        fleet.frontend.completions.in_flight.cut_off()
        got, is_announced = await reading

    assert b"shutting down" in got
    assert is_announced


async def test_processes(nats_url: str, authority: Authority) -> None:
    """Each of several processes has the certificate, on the shared port and on its admin port."""
    files, namespace = authority.sign("kvrouter.test"), uuid.uuid4().hex
    port, admin_port, *_ = free_ports(4)
    tls = authority.trusted()
    tls.check_hostname = False
    own = [f"https://127.0.0.1:{admin_port + number}" for number in (1, 2)]
    flags = (
        "--nats",
        nats_url,
        "--namespace",
        namespace,
        f"--tls-cert={files.cert}",
        f"--tls-key={files.key}",
    )
    async with contextlib.AsyncExitStack() as stack:
        bus = await stack.enter_async_context(Bus.open(NatsOptions((nats_url,)), name="test"))
        fleet = Fleet(bus, Subjects(namespace), Trouble())
        worker = await stack.enter_async_context(FakeWorker("w0", OK).serving())
        process = await start(port, admin_port, *flags)
        stack.push_async_callback(kill, process)

        async def is_found(url: str) -> bool:
            fleet.announce(worker)
            return await is_ready(url, tls)

        for url in own:
            await until_found(partial(is_found, url), within_s=20)
        async with asyncio.timeout(20):
            served: set[str] = set()
            while len(served) < 2:
                async with connected(f"https://127.0.0.1:{port}", tls) as client:
                    served.add((await client.ask(BODY)).header("x-kvrouter-router"))
        async with connected(f"https://127.0.0.1:{port}", tls) as client:
            metrics = await client.get("/metrics")
        async with connected(own[0], tls) as client:
            view = (await client.get("/workers")).json
        access = ReplicaAccess(tls_ca=authority.file, tls_name="kvrouter.test")
        report = await compare(own, timeout_s=10.0, access=access)

    assert [own[1]] == [peer["url"] for peer in view["peers"]]
    assert {b"1", b"2"} == set(
        re.findall(rb'^kvrouter_replicas\{process="(\d)"\}', metrics.body, re.MULTILINE)
    )
    assert report.is_equal, report.differences


async def is_ready(url: str, tls: ssl.SSLContext) -> bool:
    """Whether /ready is 200."""
    try:
        async with connected(url, tls) as client:
            return (await client.get("/ready")).status == 200
    except (OSError, EOFError):
        return False


@pytest.fixture
def clients(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Signs the certificates of clients."""
    return Authority(tmp_path_factory.mktemp("clients"))


async def test_client_certificates(fleet_of: FleetOf, authority: Authority, clients: Authority) -> None:
    """--tls-client-ca: --port serves who has a certificate of that authority, also after a renewal.

    The admin listener, which probes and operators use, asks for none.
    """
    files, ca = authority.sign(), clients.file
    flags = (f"--tls-cert={files.cert}", f"--tls-key={files.key}", f"--tls-client-ca={ca}")

    def tls(own: CertificateFiles | None) -> ssl.SSLContext:
        context = authority.trusted()
        if own is not None:
            own.load_into(context)
        return context

    async with fleet_of(*flags, scripts=(OK,)) as fleet:
        for _ in range(2):
            async with connected(fleet.url, tls(clients.sign(stem="client"))) as client:
                assert 200 == (await client.ask(BODY)).status
            for own in (None, authority.sign(stem="other"), clients.sign(stem="old", is_expired=True)):
                with pytest.raises((OSError, EOFError)):  # ssl.SSLError among them
                    async with connected(fleet.url, tls(own)) as client:
                        await client.ask(BODY)
            async with connected(fleet.frontend.admin_url, tls(None)) as client:
                assert 200 == (await client.get("/live")).status
            authority.sign()
            assert fleet.frontend.reload is not None
            assert {"tls-cert": "changed"} == (await fleet.frontend.reload.reload()).applied
        assert 2 == len(fleet.requests)


async def test_certificate_for_engines(fleet_of: FleetOf, authority: Authority, clients: Authority) -> None:
    """--worker-tls-cert: engines that ask for a certificate get it, and serve nobody without."""
    server, own = server_context(authority.sign(stem="server"), clients.file), clients.sign(stem="own")
    server.verify_mode = ssl.CERT_REQUIRED
    ca = f"--worker-tls-ca={authority.file}"
    for flags, status in (((f"--worker-tls-cert={own.cert}", f"--worker-tls-key={own.key}"), 200), ((), 502)):
        async with fleet_of(ca, *flags, "--retries=0", scripts=(OK,), worker_tls=server) as fleet:
            assert status == (await fleet.ask()).status
