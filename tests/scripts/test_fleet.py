"""Processes that start and end with a script."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts.kit.fleet import Fleet, FleetError, wait_until_ok
from scripts.kit.http_client import Client, HttpError

WAIT = "import signal; print('here', flush=True); signal.pause()"
SERVE = """
import http.server, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response({status}, "x")
        self.end_headers()
        self.wfile.write(b"status {status}")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
CONNECT = "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); s.recv(1)"
CONNECT_IN_CHILD = f"""
import subprocess, sys
subprocess.Popen([sys.executable, "-c", {CONNECT!r}, sys.argv[1]]).wait()
"""


def python(code: str, *arguments: object) -> list[str]:
    """A command that runs `code` in Python."""
    return [sys.executable, "-c", code, *map(str, arguments)]


@dataclass(frozen=True)
class Guests:
    """A process's connection to this test, which ends with the process."""

    port: int
    came: asyncio.Event
    went: asyncio.Event


@pytest.fixture
async def guests() -> AsyncIterator[Guests]:
    """A listener for the processes' connections."""
    came, went = asyncio.Event(), asyncio.Event()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.set()
        with suppress(ConnectionError):
            await reader.read()
        went.set()
        writer.close()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        yield Guests(server.sockets[0].getsockname()[1], came, went)


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    """Closed after the test."""
    client = Client()
    yield client
    await client.close()


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    """A fleet whose processes all end with the test."""
    async with Fleet(tmp_path) as fleet:
        yield fleet


async def test_stop(fleet: Fleet, guests: Guests) -> None:
    """SIGTERM ends an ordinary process, and the fleet forgets it."""
    await fleet.start("guest", python(CONNECT, guests.port))
    await guests.came.wait()

    assert -signal.SIGTERM == await fleet.stop("guest")
    assert {} == fleet.processes


async def test_stop_what_does_not_listen(fleet: Fleet, client: Client, free_port: Callable[[], int]) -> None:
    """A process that ignores SIGTERM is killed after the grace period."""
    port = free_port()
    process = await fleet.start("deaf", python(SERVE.format(status=200), port))
    await wait_until_ok(client, process, f"http://127.0.0.1:{port}/")

    assert -signal.SIGKILL == await process.stop(grace_s=0.05)


async def test_stop_what_has_ended(fleet: Fleet) -> None:
    """`wait` returns the exit code of a process that ends by itself."""
    process = await fleet.start("brief", python("raise SystemExit(3)"))
    await process.wait()

    assert 3 == await fleet.stop("brief")


async def test_stop_what_is_paused(fleet: Fleet, guests: Guests) -> None:
    """A process paused by SIGSTOP is ended, too."""
    process = await fleet.start("paused", python(CONNECT, guests.port))
    await guests.came.wait()
    process.send(signal.SIGSTOP)

    assert await process.stop(grace_s=0.05) in {-signal.SIGTERM, -signal.SIGKILL}


async def test_kill_leaves_nothing(fleet: Fleet, guests: Guests) -> None:
    """The children of a process end with it."""
    process = await fleet.start("parent", python(CONNECT_IN_CHILD, guests.port))
    await guests.came.wait()

    await process.kill()

    await guests.went.wait()


async def test_error_leaves_nothing(tmp_path: Path, guests: Guests) -> None:
    """If a script fails, its fleet ends."""

    async def fail() -> None:
        async with Fleet(tmp_path) as fleet:
            await fleet.start("guest", python(CONNECT, guests.port))
            await guests.came.wait()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()

    await guests.went.wait()


SCRIPT = f"""
import asyncio, pathlib, sys
from scripts.kit.fleet import Fleet
async def main():
    async with Fleet(pathlib.Path(sys.argv[2])) as fleet:
        process = await fleet.start("guest", [sys.executable, "-c", {CONNECT!r}, sys.argv[1]])
        await process.wait()
asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")
async def test_killed_script_leaves_nothing(fleet: Fleet, guests: Guests, tmp_path: Path) -> None:
    """The fleet ends even if only the script is killed, by SIGKILL."""
    root = str(Path(__file__).parents[2])
    script = await fleet.start("script", python(SCRIPT, guests.port, tmp_path), {"PYTHONPATH": root})
    await guests.came.wait()

    script.send(signal.SIGKILL)

    await guests.went.wait()


async def test_ends_before_it_is_ready(fleet: Fleet, client: Client, free_port: Callable[[], int]) -> None:
    """The error shows the process's output."""
    process = await fleet.start("broken", python("import sys; sys.exit('no such model')"))

    with pytest.raises(FleetError, match=r"broken ended with exit code 1; last output:\nno such model"):
        await wait_until_ok(client, process, f"http://127.0.0.1:{free_port()}/ready")
    with pytest.raises(FleetError, match="broken ended"):
        fleet.check()


async def test_never_ready(fleet: Fleet, client: Client, free_port: Callable[[], int]) -> None:
    """The error shows the last answer."""
    port = free_port()
    process = await fleet.start("slow", python(SERVE.format(status=503), port))
    await wait_until_it_answers(client, port)

    with pytest.raises(FleetError, match=r"slow is not ready after 0.1 s: .*503 status 503"):
        await wait_until_ok(client, process, f"http://127.0.0.1:{port}/ready", timeout_s=0.1)
    await process.kill()


async def wait_until_it_answers(client: Client, port: int) -> None:
    """Any status other than 200 means not ready."""
    while True:
        with suppress(HttpError):
            await client.get(f"http://127.0.0.1:{port}/")
            return


async def test_name_in_use(fleet: Fleet) -> None:
    """A name is used by one process at a time."""
    process = await fleet.start("a", python(WAIT))

    with pytest.raises(FleetError, match="a is already running"):
        await fleet.start("a", python(WAIT))

    await process.kill()
    await fleet.start("a", python(WAIT))


async def test_start_again(fleet: Fleet, client: Client, free_port: Callable[[], int]) -> None:
    """A restart uses the same command line and directory."""
    port = free_port()
    first = await fleet.start("server", python(SERVE.format(status=200), port))
    await wait_until_ok(client, first, f"http://127.0.0.1:{port}/")
    await first.kill()
    second = await fleet.start_again("server")
    await wait_until_ok(client, second, f"http://127.0.0.1:{port}/")

    assert first.pid != second.pid
    assert second is fleet.processes["server"]
    await second.kill()


async def test_paused(fleet: Fleet) -> None:
    """The process is paused inside, and continues afterwards."""
    process = await fleet.start("a", python(WAIT))

    with process.paused():
        _until_state(process.pid, "T")
    _until_state(process.pid, "S")


def _until_state(pid: int, state: str) -> None:
    stat = Path(f"/proc/{pid}/stat")
    while stat.read_text().rpartition(")")[2].split()[0] != state:
        os.sched_yield()


async def test_silent_process(fleet: Fleet) -> None:
    """A log may be empty."""
    process = await fleet.start("mute", python("pass"))
    await process.wait()

    assert "(no output)" == process.tail()
