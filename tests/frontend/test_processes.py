"""`--processes N`: several replicas on one port, as real processes that are killed and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from kvrouter.bus import Bus, NatsOptions, Subjects
from kvrouter.errors import ConfigError
from kvrouter.frontend.settings import parse_options
from kvrouter.observe.verify import compare
from scripts.kit.ports import free_ports
from tests.frontend.clients import Client, Response, ask, connected, get
from tests.frontend.fleet import BODY, STREAM, Fleet, Trouble
from tests.frontend.test_run import until_refused
from tests.frontend.workers import (
    LAST_CHUNK,
    OK,
    SSE_HEAD,
    FakeWorker,
    Received,
    Script,
    Wire,
    chunk,
    event,
    says_and_stalls,
    until,
    until_found,
)
from tests.serve.serving import bound, command_of, is_alive

ONE = SSE_HEAD + chunk(event("a"))
START_S = 20.0


@dataclass
class Parent:
    """`python -m kvrouter.frontend --processes 2`, with one worker that the test announces."""

    process: asyncio.subprocess.Process
    url: str
    admin_port: int
    worker: FakeWorker
    fleet: Fleet
    said: list[str] = field(default_factory=list)

    @property
    def admin_urls(self) -> list[str]:
        """The admin URLs of the processes."""
        return [f"http://127.0.0.1:{self.admin_port + number}" for number in (1, 2)]

    def children(self) -> list[int]:
        """The process ids of its replicas, in the order of their start."""
        tasks = Path(f"/proc/{self.process.pid}/task")
        found = [int(pid) for task in tasks.iterdir() for pid in (task / "children").read_text().split()]
        commands = {pid: command_of(pid) for pid in found}
        return sorted(
            (pid for pid in found if "kvrouter.frontend" in commands[pid]), key=commands.__getitem__
        )

    def announce(self) -> None:
        """Publish the worker's heartbeat."""
        self.fleet.announce(self.worker)

    async def until_ready(self, *urls: str) -> None:
        """Return when each URL is ready. Announces the worker meanwhile."""

        async def look(url: str) -> bool:
            self.announce()
            return await is_ready(url)

        for url in urls:
            await until_found(partial(look, url), within_s=START_S)

    async def ended(self) -> tuple[int, str]:
        """Its exit code and output."""
        async with asyncio.timeout(START_S):
            assert self.process.stderr is not None
            said = await self.process.stderr.read()
            return await self.process.wait(), said.decode()


@contextlib.asynccontextmanager
async def running(nats: str, script: Script, *flags: str) -> AsyncIterator[Parent]:
    """A parent whose processes are both ready."""
    namespace, (port, admin_port, *_) = uuid.uuid4().hex, free_ports(4)
    async with contextlib.AsyncExitStack() as stack:
        bus = await stack.enter_async_context(Bus.open(NatsOptions((nats,)), name="test"))
        worker = FakeWorker("w0", script)
        await stack.enter_async_context(worker.serving())
        process = await start(port, admin_port, "--nats", nats, "--namespace", namespace, *flags)
        stack.push_async_callback(kill, process)
        fleet = Fleet(bus, Subjects(namespace), Trouble())
        parent = Parent(process, f"http://127.0.0.1:{port}", admin_port, worker, fleet)
        await parent.until_ready(*parent.admin_urls)
        yield parent


async def start(port: int, admin_port: int, *flags: str) -> asyncio.subprocess.Process:
    """Start two processes on a port."""
    ports = [f"--port={port}", f"--admin-port={admin_port}"]
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvrouter.frontend", "--host=127.0.0.1", "--processes=2", *ports, *flags),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )


async def kill(process: asyncio.subprocess.Process) -> None:
    """Kill it and its children, if it has not ended."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.communicate()


async def is_ready(url: str) -> bool:
    """Whether /ready is 200."""
    try:
        return (await get(url, "/ready")).status == 200
    except (OSError, EOFError):
        return False


async def many(url: str, count: int) -> list[Response]:
    """`count` requests at once, each on a new connection."""
    return await asyncio.gather(*(ask(url, BODY) for _ in range(count)))


def routers(answers: list[Response]) -> Counter[str]:
    """The number of answers by replica."""
    assert {200} == {answer.status for answer in answers}
    return Counter(answer.header("x-kvrouter-router") for answer in answers)


async def both_serve(parent: Parent) -> None:
    """Both serve on one port and share their bookings. Each has an admin listener."""
    served = routers([answer for _ in range(10) for answer in await many(parent.url, 20)])
    views = [(await get(url, "/workers")).json for url in parent.admin_urls]
    report = await compare(parent.admin_urls, timeout_s=10.0)
    metrics = await get(parent.url, "/metrics")
    own = [await get(url, "/metrics") for url in parent.admin_urls]

    assert {view["router_id"] for view in views} == set(served)
    assert 2 == len(served), served
    assert [True, True] == [view["replica_sync"] for view in views]
    assert [parent.admin_urls[1]] == [peer["url"] for peer in views[0]["peers"]]
    assert report.is_equal, report.differences
    counts = [
        line for line in metrics.body.decode().splitlines() if "_requests_total{" in line and "/v1" in line
    ]
    assert {"1", "2"} == {re.findall(r'process="(\d)"', line)[0] for line in counts}
    assert 200 == sum(float(line.split()[-1]) for line in counts)
    assert not any("process=" in each.body.decode() for each in own)


async def test_two_on_one_port(nats_url: str) -> None:
    """They serve, and die one after the other; then the parent is killed, and leaves no process behind."""

    async def script(received: Received, wire: Wire) -> None:
        await (says_and_stalls(ONE) if b'"stream": true' in received.body else OK)(received, wire)

    async with running(nats_url, script) as parent:
        await both_serve(parent)
        await killed_while_connections_queue(parent)
        await killed_under_load(parent)
        await one_is_restarted(parent)
        pids = parent.children()
        parent.process.kill()

        await until(lambda: not any(is_alive(pid) for pid in pids), "all are gone")


async def killed_while_connections_queue(parent: Parent) -> None:
    """If a process is killed while connections wait to be accepted, the other one answers them all.

    The restarted process accepts none before it is ready, and then its share.
    """
    first, second = parent.children()
    for pid in (first, second):
        os.kill(pid, signal.SIGSTOP)
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connected(parent.url)) for _ in range(40)]
        for client in clients:
            client.send(BODY)
        os.kill(first, signal.SIGKILL)
        os.kill(second, signal.SIGCONT)
        queued = routers([await client.response() for client in clients])
    survivor = (await get(parent.admin_urls[1], "/workers")).json["router_id"]
    await until(lambda: len(set(parent.children()) - {first}) == 2, "another one is started", START_S)
    while (starting := await answer_of(parent.admin_urls[0], "/ready")) is None:
        pass
    meanwhile = routers([answer for _ in range(5) for answer in await many(parent.url, 10)])
    await parent.until_ready(*parent.admin_urls)
    async with asyncio.timeout(START_S):
        while len(routers(await many(parent.url, 20))) < 2:
            pass
    report = await compare(parent.admin_urls, timeout_s=10.0)

    assert {survivor: 40} == queued
    assert 503 == starting.status
    assert {survivor: 50} == meanwhile
    assert report.is_equal, report.differences


async def answer_of(url: str, path: str) -> Response | None:
    """The answer; None while no process listens there."""
    try:
        return await get(url, path)
    except (OSError, EOFError):
        await asyncio.sleep(0.01)
        return None


async def killed_under_load(parent: Parent) -> None:
    """Under load only connections of the killed process are lost."""
    broken: list[Exception] = []
    ended = asyncio.Event()

    async def load() -> None:
        while not ended.is_set():
            try:
                assert 200 == (await ask(parent.url, BODY)).status
            except (OSError, EOFError) as error:
                broken.append(error)

    at_once = 16
    tasks = [asyncio.create_task(load()) for _ in range(at_once)]
    before = len(parent.worker.requests)
    await until(lambda: len(parent.worker.requests) > before + 200, "load")
    os.kill(parent.children()[0], signal.SIGKILL)
    one_left = await get(parent.admin_urls[1], "/metrics?processes=all&name[]=kvrouter_process_scraped")
    await parent.until_ready(parent.admin_urls[0])
    ended.set()
    await asyncio.gather(*tasks)

    assert {"1": "0.0", "2": "1.0"} == dict(
        re.findall(r'process_scraped\{process="(\d)"\} (\S+)', one_left.body.decode())
    )
    assert len(broken) <= at_once
    assert not [error for error in broken if isinstance(error, ConnectionRefusedError)]


@contextlib.asynccontextmanager
async def streaming(*urls: str) -> AsyncIterator[list[Client]]:
    """A client in the middle of a stream at each URL."""
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connected(url)) for url in urls]
        for client in clients:
            client.send(STREAM)
            await client.read_until(event("a") + b"\r\n")
        yield clients


async def test_drain(nats_url: str) -> None:
    """SIGTERM drains all: /ready is 503, requests are served during the grace, streams end, code 0."""
    go_on = asyncio.Event()

    async def script(_received: Received, wire: Wire) -> None:
        await wire.send(ONE)
        await go_on.wait()
        await wire.send(chunk(event("b", "stop")) + LAST_CHUNK)

    async with running(nats_url, script, "--drain-grace-s", "2") as parent:
        pids = parent.children()
        async with streaming(*parent.admin_urls) as clients:
            parent.process.send_signal(signal.SIGTERM)
            for url in parent.admin_urls:
                while (await get(url, "/ready")).status == 200:
                    pass
            in_grace = asyncio.ensure_future(ask(parent.url, STREAM))
            await until(lambda: len(parent.worker.requests) == 3, "served during the grace")
            await until_refused(parent.url)
            go_on.set()
            rests = [await client.reader.read() for client in clients]
            assert (await in_grace).is_whole
        code, said = await parent.ended()

    assert [chunk(event("b", "stop")) + LAST_CHUNK] * 2 == rests
    assert 0 == code
    assert 3 == said.count("frontend.stopped")
    assert not [line for line in said.splitlines() if not line.startswith(("process-", "parent "))]
    assert not any(is_alive(pid) for pid in pids)


async def test_second_signal(nats_url: str) -> None:
    """A second signal ends the drain of all, also in the grace: streams end with an error event."""
    async with running(nats_url, says_and_stalls(ONE), "--drain-grace-s", "60") as parent:
        async with streaming(*parent.admin_urls) as clients:
            parent.process.send_signal(signal.SIGTERM)
            while (await get(parent.admin_urls[0], "/ready")).status == 200:
                pass
            parent.process.send_signal(signal.SIGTERM)
            rests = [await client.reader.read() for client in clients]
        code, _ = await parent.ended()

    assert 0 == code
    assert all(b"ServiceUnavailableError" in rest for rest in rests)


async def test_signals(nats_url: str, tmp_path: Path) -> None:
    """SIGUSR1, SIGUSR2 and SIGALRM end neither the parent nor a process; SIGUSR1 drains a process.

    SIGHUP to the parent reaches all processes; with a wrong file it reaches none. Ctrl-C has no grace: with
    no request in flight all end at once.
    """
    file = tmp_path / "kvrouter.toml"
    file.write_text("[frontend]\nretries = 1\n")
    async with running(nats_url, OK, f"--config={file}", "--drain-grace-s", "60") as parent:
        assert parent.process.stderr is not None
        file.write_text("[frontend]\nretries = many\n")
        parent.process.send_signal(signal.SIGHUP)
        lines = await read_until(parent.process.stderr, ["settings.not_reloaded"])
        file.write_text('[frontend]\nretries = 3\nlog-level = "debug"\n')
        parent.process.send_signal(signal.SIGHUP)
        each = ["parent ", "process-1 ", "process-2 "]
        lines += await read_until(parent.process.stderr, [f"{name}.*retries: 1 → 3" for name in each])

        before = parent.children()
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
            parent.process.send_signal(number)
            os.kill(before[0], number)
        assert routers(await many(parent.url, 20))
        assert before == parent.children()

        parent.process.send_signal(signal.SIGINT)
        code, said = await parent.ended()

    lines += said.splitlines()
    assert 0 == code
    assert 1 == sum("not_reloaded" in line for line in lines)
    # by process: under load uvloop (0.23) may call a handler twice for one signal
    assert 2 == len({line.split()[0] for line in lines if "signal=SIGUSR2" in line})
    assert re.search(r"parent .*frontend\.draining +processes=2 grace_s=0\.0", said)
    assert 3 == said.count("frontend.stopped")


async def read_until(stream: asyncio.StreamReader, patterns: list[str]) -> list[str]:
    """The lines until each pattern was found."""
    lines: list[str] = []
    async with asyncio.timeout(START_S):
        while not all(any(re.search(pattern, line) for line in lines) for pattern in patterns):
            lines.append((await stream.readline()).decode())
    return lines


async def one_is_restarted(parent: Parent) -> None:
    """A process that gets SIGTERM finishes its requests, accepts no more, and is replaced."""
    first, second = parent.children()
    async with streaming(parent.admin_urls[0]) as (client,):
        os.kill(first, signal.SIGTERM)
        while (await get(parent.admin_urls[0], "/ready")).status == 200:
            pass
        for _ in range(10):  # its loop runs, and it has stopped accepting
            assert 503 == (await get(parent.admin_urls[0], "/ready")).status
        for _ in range(20):
            assert 200 == (await get(parent.url, "/ready")).status
        client.leave()
    await until(lambda: first not in parent.children() and len(parent.children()) == 2, "a new one", 20)
    await parent.until_ready(parent.admin_urls[0])

    assert second in parent.children()


async def test_admin_port_taken(nats_url: str) -> None:
    """A process that cannot start ends the others."""
    port, admin_port, *_ = free_ports(4)
    with bound(admin_port + 2) as taken:
        taken.listen()
        process = await start(port, admin_port, "--nats", nats_url, "--drain-grace-s", "60")
        async with asyncio.timeout(START_S):
            _, said = await process.communicate()

    assert 2 == process.returncode
    assert f"process-2 | kvrouter frontend: cannot listen on 127.0.0.1:{admin_port + 2}" in said.decode()


async def test_port_taken() -> None:
    """The parent opens the port, and reports that it is taken."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = await start(taken.getsockname()[1], free_ports(3)[0])
        _, said = await process.communicate()

    assert 2 == process.returncode
    assert b"parent    | kvrouter frontend: cannot listen on" in said
    assert b"process-" not in said


@pytest.mark.parametrize(
    ("flags", "port"),
    [
        ([], 8100),
        (["--port", "9000"], 9100),
        (["--port", "0"], 0),
        (["--admin-port", "9000"], 9000),
        (["--admin-port", "0"], 0),
        (["--port", "8000", "--process-number", "1"], 8101),
        (["--admin-port", "9000", "--process-number", "2"], 9002),
        (["--admin-port", "0", "--process-number", "2"], 0),
    ],
)
def test_admin_ports(flags: list[str], port: int) -> None:
    """The default is --port + 100. Process i of several has that plus i. 0 is a free port."""
    assert port == parse_options(flags).process.own_admin_port


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--port", "65500"], "--port [+] 100 by default: there is no port 65600; give a lower one, or 0"),
        (["--admin-port", "65534", "--processes", "2"], "--admin-port 65534: there is no port 65536"),
    ],
)
def test_admin_ports_beyond_the_last(flags: list[str], said: str) -> None:
    """Ports above 65535 are rejected, also if they come from the default."""
    with pytest.raises(ConfigError, match=said):
        parse_options(flags)


def test_sync_comes_with_processes() -> None:
    """Several processes share their bookings; --no-router-replica-sync is rejected."""
    assert parse_options(["--processes", "2"]).replica.synced
    assert not parse_options(["--processes", "1"]).replica.synced
    with pytest.raises(ConfigError, match="drop one of the two flags"):
        parse_options(["--processes", "2", "--no-router-replica-sync"])
    with pytest.raises(ConfigError, match="from 1 to 256"):
        parse_options(["--processes", "0"])
