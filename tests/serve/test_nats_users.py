"""The embedded NATS of `kvrouter serve` has users, which commands of the same Unix user find."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

import aiohttp

from kvrouter import Client
from kvrouter.bus import NatsOptions
from kvrouter.bus.embedded import embedded_server
from kvrouter.lab.mocker.config import MockerConfig
from kvrouter.lab.mocker.engine import EngineConfig
from kvrouter.lab.mocker.server import running_mocker
from scripts.kit.ports import free_ports
from tests.serve.serving import PATIENCE_S, Serving, serving, until_ready

# It says hello, so it need not wait for heartbeats.
DOCTOR = ("doctor", "--listen-s=1", "--nats")
FAST = MockerConfig(engine=EngineConfig(num_blocks=2048 + 1), model_name="tiny", speedup=50.0)


async def started(*words: str, **environ: str) -> asyncio.subprocess.Process:
    """A command of kvrouter, with its output in one stream."""
    return await asyncio.create_subprocess_exec(
        sys.executable, *words, env={**os.environ, **environ},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip


async def ended(*words: str, **environ: str) -> tuple[int | None, str]:
    """The exit code of a command, and what it said."""
    process = await started("-m", "kvrouter", *words, **environ)
    async with asyncio.timeout(PATIENCE_S):
        said, _ = await process.communicate()
    return process.returncode, said.decode()


async def test_commands_of_the_same_host(free_port: Callable[[], int], tmp_path: Path) -> None:
    """The published line of a frontend joins; `verify`, `doctor` and the library need no flag for a user."""
    nats = f"nats://127.0.0.1:{free_port()}"
    ports = free_ports(4)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    own = ["--nats-port", nats.rpartition(":")[2], f"--port={ports[0]}", f"--admin-port={ports[1]}"]
    more = [f"--port={ports[2]}", f"--admin-port={ports[3]}", "--drain-grace-s=0"]
    published = ["-m", "kvrouter.frontend", "--router-mode", "kv", "--router-replica-sync"]
    async with (
        running_mocker(FAST) as mocker,
        serving(f"--engine={mocker.url}", "--router-replica-sync", *own) as served,
        aiohttp.ClientSession() as http,
    ):
        await until_ready(served, http, [urls[0]])
        second = await started(*published, *more, NATS_URL=nats)
        try:
            await until_ready(Serving(second), http, [urls[2]])
            async with Client("default", "tiny", nats=nats) as client:
                stream = client.round_robin({"prompt": [*range(100)], "max_tokens": 2})
                answer = [part async for part in stream]
            verified, examined, stranger = await asyncio.gather(
                ended("verify", "--owners", "--replica", urls[1], "--replica", urls[3], NATS_URL=nats),
                ended(*DOCTOR, nats),
                ended(*DOCTOR, nats, XDG_STATE_HOME=str(tmp_path)),
            )
        finally:
            second.terminate()
            await second.communicate()
        assert 0 == await served.end()

    assert 0 == second.returncode
    assert answer
    assert 0 == verified[0], verified[1]
    assert "2 replicas, 1 worker" in examined[1]
    assert "nats: the server answers" in examined[1]
    assert "nats.rejected" in stranger[1]


async def test_open(free_port: Callable[[], int], tmp_path: Path) -> None:
    """With --nats-open, everybody who reaches the port joins, as before."""
    nats = f"nats://127.0.0.1:{free_port()}"
    (port,) = free_ports(1)
    flags = ["--nats-open", "--nats-port", nats.rpartition(":")[2], f"--port={port}"]
    async with (
        running_mocker(FAST) as mocker,
        serving(f"--engine={mocker.url}", *flags) as served,
        aiohttp.ClientSession() as http,
    ):
        await until_ready(served, http, [f"http://127.0.0.1:{port}"])
        code, said = await ended(*DOCTOR, nats, XDG_STATE_HOME=str(tmp_path))

    assert "1 replica, 1 worker" in said
    assert "nats.rejected" not in said
    assert code in {0, 1}


async def test_port_of_another_unix_user(free_port: Callable[[], int], tmp_path: Path) -> None:
    """A second `serve` that finds a server with users of another Unix user ends, and names the ways out."""
    port = free_port()
    async with embedded_server(NatsOptions(), f"nats://127.0.0.1:{port}"):
        flags = ["--engine=http://127.0.0.1:9", f"--nats-port={port}", "--port=0", "--admin-port=0"]
        code, said = await ended("serve", *flags, XDG_STATE_HOME=str(tmp_path))

    assert 2 == code
    assert f"{tmp_path}/kvrouter/nats-{port}/frontend.nk: No such file or directory" in said
    assert "--nats-nkey" in said
