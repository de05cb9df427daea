"""The frontend as a process: start, errors at the start, drain and end."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import socket
import ssl
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvrouter.bus import Bus, NatsOptions, Subjects
from kvrouter.errors import ConfigError
from kvrouter.frontend.__main__ import main
from kvrouter.frontend.run import running_frontend
from kvrouter.frontend.settings import parse_options
from tests.certificates import Authority
from tests.frontend.clients import Client, ask, connected, get
from tests.frontend.fleet import BODY, STREAM, Fleet, FleetOf, Trouble, no_trouble
from tests.frontend.workers import (
    LAST_CHUNK,
    SSE_HEAD,
    FakeWorker,
    Received,
    Script,
    Wire,
    answer,
    chunk,
    event,
    in_turn,
    says_and_stalls,
    until,
    until_found,
)

ONE = SSE_HEAD + chunk(event("a"))
SOON_S = 20.0


@dataclass
class Process:
    """`python -m kvrouter.frontend` with one worker."""

    process: asyncio.subprocess.Process
    url: str
    worker: FakeWorker

    async def ended(self, within_s: float = SOON_S) -> tuple[int, str]:
        """Its exit code and stderr."""
        async with asyncio.timeout(within_s):
            _, said = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, said.decode()

    def stop(self) -> None:
        """SIGTERM."""
        self.process.send_signal(signal.SIGTERM)


async def start(*flags: str) -> asyncio.subprocess.Process:
    """Start a frontend."""
    command = [sys.executable, "-m", "kvrouter.frontend", "--host=127.0.0.1", "--admin-port=0", *flags]
    pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    return await asyncio.create_subprocess_exec(*command, stdin=null, stdout=null, stderr=pipe)


@contextlib.asynccontextmanager
async def running(
    url: str, port: int, script: Script, *flags: str, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Process]:
    """A ready frontend process with a worker. `tls`: the trusted authorities, if it serves HTTPS."""
    namespace = uuid.uuid4().hex
    async with contextlib.AsyncExitStack() as stack:
        bus = await stack.enter_async_context(Bus.open(NatsOptions((url,)), name="test"))
        worker = FakeWorker("w0", script)
        await stack.enter_async_context(worker.serving())
        process = await start("--port", str(port), "--nats", url, "--namespace", namespace, *flags)
        stack.callback(kill, process)
        frontend = Process(process, f"{'https' if tls else 'http'}://127.0.0.1:{port}", worker)
        fleet = Fleet(bus, Subjects(namespace), Trouble())
        while not await is_ready(frontend.url, tls):
            fleet.announce(worker)
        yield frontend


def kill(process: asyncio.subprocess.Process) -> None:
    """Kill it, if it has not ended."""
    if process.returncode is None:
        process.kill()


async def is_ready(url: str, tls: ssl.SSLContext | None = None) -> bool:
    """Whether /ready is 200."""
    try:
        async with connected(url, tls) as client:
            return (await client.get("/ready")).status == 200
    except (OSError, EOFError):
        await asyncio.sleep(0.01)
        return False


@contextlib.asynccontextmanager
async def streaming(frontend: Process) -> AsyncIterator[Client]:
    """A client in the middle of a stream."""
    async with connected(frontend.url) as client:
        client.send(STREAM)
        await client.read_until(event("a") + b"\r\n")
        yield client


async def test_drain(nats_url: str, free_port: Callable[[], int]) -> None:
    """SIGTERM: /ready is 503 at once, requests are served during the grace, streams end, code 0."""
    go_on = asyncio.Event()

    async def script(_received: Received, wire: Wire) -> None:
        await wire.send(ONE)
        await go_on.wait()
        await wire.send(chunk(event("b", "stop")) + LAST_CHUNK)

    async with running(nats_url, free_port(), script, "--drain-grace-s", "0.3") as frontend:
        async with streaming(frontend) as client:
            frontend.stop()
            while (ready := await get(frontend.url, "/ready")).status == 200:
                pass
            in_grace = asyncio.ensure_future(ask(frontend.url, STREAM))
            await until(lambda: len(frontend.worker.requests) == 2, "served during the grace")
            await until_refused(frontend.url)
            go_on.set()
            rest = await client.reader.read()

            assert (503, "draining") == (ready.status, ready.json["status"])
            assert chunk(event("b", "stop")) + LAST_CHUNK == rest
            assert (await in_grace).is_whole
        code, said = await frontend.ended()

        assert 0 == code
        assert "frontend.stopped" in said
        assert "error" not in said.lower()


PROMPT = b'{"model":"m","prompt":"p"}'
SIZED = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: 26\r\n\r\n" + PROMPT
CHUNKED = (  # not plain
    b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n"
    + chunk(PROMPT)
    + LAST_CHUNK
)


@pytest.mark.parametrize(
    ("request_", "is_tls"), [(SIZED, True), (CHUNKED, False)], ids=["plain, https", "chunked, http"]
)
async def test_drain_waits_for_readers(
    nats_url: str, free_port: Callable[[], int], tmp_path: Path, is_tls: bool, request_: bytes
) -> None:
    """The drain waits for clients that have not read all of their answers."""
    whole, go_on = answer(b"x" * 900_000), asyncio.Event()
    authority = Authority(tmp_path)
    files, tls = authority.sign(), authority.trusted() if is_tls else None
    flags = ("--drain-grace-s=0", *((f"--tls-cert={files.cert}", f"--tls-key={files.key}") if is_tls else ()))

    async def script(_received: Received, wire: Wire) -> None:
        await go_on.wait()
        await wire.send(whole)

    async with running(nats_url, free_port(), script, *flags, tls=tls) as frontend:
        with await asyncio.to_thread(slow_reader, frontend.url, tls) as client:
            client.sendall(request_)
            await until(lambda: frontend.worker.requests, "the request is being served")
            frontend.stop()
            await until_refused(frontend.url, tls)
            go_on.set()
            await asyncio.wait([asyncio.ensure_future(frontend.process.wait())], timeout=0.5)
            got = await asyncio.to_thread(read_to_end, client)
        code, said = await frontend.ended()

    assert whole.partition(b"\r\n\r\n")[2] == got.partition(b"\r\n\r\n")[2]
    assert 0 == code
    assert "cut_off" not in said


def slow_reader(url: str, tls: ssl.SSLContext | None) -> socket.socket:
    """A connection with a small receive buffer."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1400)
    client.settimeout(SOON_S)
    client.connect(("127.0.0.1", int(url.rpartition(":")[2])))
    return tls.wrap_socket(client, server_hostname="localhost") if tls is not None else client


def read_to_end(client: socket.socket) -> bytes:
    """Everything up to the end."""
    return b"".join(iter(lambda: client.recv(65536), b""))


async def until_refused(url: str, tls: ssl.SSLContext | None = None) -> None:
    """Return when new connections are refused."""

    async def is_refused() -> bool:
        try:
            async with connected(url, tls):
                return False
        except ConnectionError:
            return True

    await until_found(is_refused, within_s=60)


CUT_OFF_FLAGS = ("--drain-grace-s", "0", "--drain-timeout-s", "0.2")


def streams_and_waits(*begun: bytes) -> Script:
    """Begins to answer the first request with this, and sends nothing to the others."""
    return in_turn(says_and_stalls(*begun), says_and_stalls())


async def test_drain_timeout(nats_url: str, free_port: Callable[[], int]) -> None:
    """After --drain-timeout-s a stream ends with an error event, and other requests get a 503."""
    script = streams_and_waits(ONE)
    async with running(nats_url, free_port(), script, *CUT_OFF_FLAGS) as frontend:
        async with connected(frontend.url) as begun, connected(frontend.url) as uploading:
            begun.send(STREAM)
            answer = asyncio.ensure_future(begun.response())
            await until(lambda: frontend.worker.requests, "the stream has begun")
            waiting = [asyncio.ensure_future(ask(frontend.url, body)) for body in (BODY, STREAM)]
            uploading.writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: 9\r\n\r\n{")
            await until(lambda: len(frontend.worker.requests) == 3, "all have been sent on")
            frontend.stop()
            whole = await answer
            others = [await each for each in waiting] + [await uploading.response()]
            is_closed = await begun.is_closed()
        code, said = await frontend.ended()
        await until(lambda: not frontend.worker.open_wires, "the worker's connection is closed")

    assert (200, True, True) == (whole.status, whole.is_whole, is_closed)
    text, error = whole.events
    assert ("a", 503) == (text["choices"][0]["text"], error["error"]["code"])
    assert [503] * 3 == [each.status for each in others]
    assert {"ServiceUnavailableError"} == {each.json["error"]["type"] for each in others}
    assert ["1"] * 3 == [each.header("retry-after") for each in others]
    assert "shutting down" in others[0].json["error"]["message"]
    assert 0 == code
    assert "frontend.cut_off" in said
    assert "error" not in [line.split()[2].strip("[]") for line in said.splitlines()]


async def test_cut_off_without_an_error_event(nats_url: str, free_port: Callable[[], int]) -> None:
    """If an error event does not fit an answer's framing, the client sees that it is incomplete."""
    no_chunks = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + event("a")
    cases = [(no_chunks, False), (ONE + b"ff\r\ndata: half", False), (ONE + chunk(event("b")), True)]
    script = in_turn(*(says_and_stalls(begun) for begun, _ in cases))
    async with (
        running(nats_url, free_port(), script, *CUT_OFF_FLAGS) as frontend,
        contextlib.AsyncExitStack() as stack,
    ):
        clients = [await stack.enter_async_context(connected(frontend.url)) for _ in cases]
        for client in clients:
            client.send(STREAM)
            await client.read_until(b"\r\n\r\n")
        frontend.stop()
        ends = [await read_all(client) for client in clients]
        code, _ = await frontend.ended()

    assert 0 == code
    assert [is_whole for _, is_whole in cases] == [not is_torn for _, is_torn in ends]
    for (_, is_whole), (rest, _) in zip(cases, ends, strict=True):
        assert is_whole == rest.endswith(b"}}\n\n\r\n" + LAST_CHUNK)


async def read_all(client: Client) -> tuple[bytes, bool]:
    """All bytes until the connection ends, and whether it was reset."""
    rest = b""
    try:
        async with asyncio.timeout(SOON_S):
            while data := await client.reader.read(65536):
                rest += data
    except ConnectionError:
        return rest, True
    return rest, False


async def test_second_signal(nats_url: str, free_port: Callable[[], int]) -> None:
    """A second signal ends the drain at once."""
    script, flags = says_and_stalls(ONE), ("--drain-grace-s", "60")
    async with running(nats_url, free_port(), script, *flags) as frontend, streaming(frontend) as client:
        frontend.stop()
        while await is_ready(frontend.url):
            pass
        frontend.stop()

        assert 0 == (await frontend.ended())[0]
        assert b"ServiceUnavailableError" in await client.reader.read()


async def test_waits_for_requests(nats_url: str, free_port: Callable[[], int]) -> None:
    """At its end it says how many requests it waits for, how long, and how not to wait."""
    script = says_and_stalls(ONE)
    async with running(nats_url, free_port(), script) as frontend, streaming(frontend):
        frontend.process.send_signal(signal.SIGINT)
        assert frontend.process.stderr is not None
        async with asyncio.timeout(SOON_S):
            said = await frontend.process.stderr.readuntil(b"a second signal")
        frontend.stop()
        code, rest = await frontend.ended()

    assert 0 == code
    assert re.search(rb"frontend\.waiting +requests=1 timeout_s=[\d.]+ remedy=", said)
    assert "frontend.waiting" not in rest


async def test_interrupt(nats_url: str, free_port: Callable[[], int]) -> None:
    """Ctrl-C has no grace: with no request in flight the process ends at once."""
    script, flags = says_and_stalls(ONE), ("--drain-grace-s", "60")
    async with running(nats_url, free_port(), script, *flags) as frontend:
        frontend.process.send_signal(signal.SIGINT)
        code, said = await frontend.ended(30.0)

    assert 0 == code
    assert re.search(r"frontend\.draining +grace_s=0\.0", said)


async def test_silent_about_clients_that_leave(nats_url: str, free_port: Callable[[], int]) -> None:
    """Clients that disconnect, or do not speak HTTP, write nothing to stderr."""
    flags = ("--drain-grace-s", "0", "--log-level", "warning")
    async with running(nats_url, free_port(), says_and_stalls(ONE), *flags) as frontend:
        async with streaming(frontend) as client:
            client.leave()
        async with connected(frontend.url) as client:
            client.send(BODY)
            await until(lambda: len(frontend.worker.requests) == 2)
            client.leave()
        async with connected(frontend.url) as client:
            client.writer.write(b"hello\r\n\r\n")
            assert 400 == (await client.response()).status
        await until(lambda: not frontend.worker.open_wires, "the worker's connection is closed")
        frontend.stop()
        code, said = await frontend.ended()

        assert 0 == code
        assert [] == [line for line in said.splitlines() if "no_tokenizer" not in line]


async def test_ends_without_nats(free_port: Callable[[], int]) -> None:
    """Without NATS a frontend starts and ends in order."""
    port = free_port()
    flags = ("--port", str(port), "--nats", f"nats://127.0.0.1:{free_port()}", "--drain-grace-s", "0")
    process = await start(*flags)
    frontend = Process(process, f"http://127.0.0.1:{port}", FakeWorker("none", says_and_stalls()))
    try:
        await until_live(frontend.url)
        frontend.stop()

        assert 0 == (await frontend.ended())[0]
    finally:
        kill(process)


async def until_live(url: str) -> None:
    """Return when /live answers."""

    async def is_live() -> bool:
        with contextlib.suppress(OSError):
            return (await get(url, "/live")).status == 200
        return False

    await until_found(is_live, within_s=60)


def test_port_taken(capsys: pytest.CaptureFixture[str], quiet_logs: None) -> None:
    """A port that is taken: code 2, and a message that names it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code = main(["--host", "127.0.0.1", "--port", str(port), "--admin-port", "0"])

    assert 2 == code
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in capsys.readouterr().err


def test_no_such_model(capsys: pytest.CaptureFixture[str], tmp_path: Path, quiet_logs: None) -> None:
    """A model directory without a tokenizer: code 2, and a message that says what is missing."""
    code = main(["--port", "0", "--model-path", str(tmp_path)])

    assert 2 == code
    assert "tokenizer.json" in capsys.readouterr().err


async def test_port_taken_in_process(fleet_of: FleetOf) -> None:
    """In a program a taken port is a ConfigError, and nothing stays open."""
    async with fleet_of() as fleet:
        port = fleet.url.rpartition(":")[2]
        flags = ["--host", "127.0.0.1", "--port", port, "--admin-port", "0"]
        with pytest.raises(ConfigError, match=rf"{port}: .* \(--port\)"):
            async with running_frontend(parse_options(flags)):
                pass


async def test_ipv6(nats_url: str) -> None:
    """It can listen on IPv6, and its URL can be used."""
    options = parse_options(["--host", "::1", "--port", "0", "--nats", nats_url, "--namespace", "six"])
    with no_trouble():
        async with running_frontend(options) as frontend:
            await until(lambda: frontend.replica.readiness.has_greeted, "NATS is found")
            assert frontend.url.startswith("http://[::1]:")
            assert 200 == (await get(frontend.url, "/live")).status


async def test_failed_draining_ends_the_service(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug in the inbox ends the service: the replica would only fall behind."""
    is_broken = asyncio.Event()

    def fail(_self: object, _now: float) -> bool:
        if is_broken.is_set():
            raise RuntimeError("broken")
        return False

    monkeypatch.setattr("kvrouter.core.fleet.replica.Replica.work", fail)
    options = parse_options(["--host", "127.0.0.1", "--port", "0", "--nats", nats_url])

    async def serve() -> None:
        async with running_frontend(options) as frontend:
            await until(lambda: frontend.replica.readiness.has_greeted, "NATS is found")
            is_broken.set()
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup):
        async with asyncio.timeout(10):
            await serve()


async def test_two_ids(fleet_of: FleetOf) -> None:
    """Every replica has another id, new at each start."""
    async with fleet_of(replicas=2, scripts=()) as fleet:
        first, second = (frontend.replica.router_id for frontend in fleet.frontends)

        assert first != second


async def test_missing_tokenizer_is_logged(fleet_of: FleetOf) -> None:
    """Mode kv without a model directory logs one warning; other modes need no model."""
    async with fleet_of("--router-mode", "kv") as fleet:
        assert 1 == len(fleet.logged("frontend.no_tokenizer"))
    async with fleet_of("--router-mode", "random") as fleet:
        assert not fleet.logged("frontend.no_tokenizer")


async def test_failed_task_ends_the_service(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed background task ends the service: the replica's state would be wrong from then on."""
    is_broken = asyncio.Event()

    async def fail(_self: object) -> None:
        await is_broken.wait()
        raise RuntimeError("broken")

    monkeypatch.setattr("kvrouter.replica.loop.ReplicaLoop._tick_forever", fail)
    options = parse_options(["--host", "127.0.0.1", "--port", "0", "--nats", nats_url])

    async def serve() -> None:
        async with running_frontend(options) as frontend:
            await until(lambda: frontend.replica.readiness.has_greeted, "NATS is found")
            is_broken.set()
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup):
        await serve()


async def test_nothing_stays(fleet_of: FleetOf) -> None:
    """A frontend that has ended leaves no task."""
    before = asyncio.all_tasks()
    async with fleet_of() as fleet:
        await fleet.ask()
    await until(lambda: asyncio.all_tasks() <= before, "all tasks end")
