"""A frontend and an agent with --nats-creds, as processes, on a NATS server with one account."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from kvrouter.frontend.__main__ import main
from tests.bus.operators import account, creds, operator, server_config, user
from tests.conftest import NatsServer
from tests.frontend.clients import get
from tests.frontend.test_run import is_ready, kill, start, until_live
from tests.worker.fake_engine import EngineServer

SOON_S = 20.0
OURS = account("ours")


@pytest.fixture
def server(new_nats_server: Callable[..., NatsServer], tmp_path: Path) -> NatsServer:
    """A server that trusts one operator with one account."""
    config = tmp_path / "nats.conf"
    config.write_text(server_config(operator("owner"), OURS))
    running = new_nats_server(config)
    running.start()
    return running


def write(path: Path, text: str) -> Path:
    """A file with this text."""
    path.write_text(text)
    return path


@contextlib.asynccontextmanager
async def agent(engine: EngineServer, *flags: str) -> AsyncIterator[None]:
    """An agent process next to an engine."""
    command = [sys.executable, "-m", "kvrouter.worker", "--engine-url", engine.url, *flags]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        await process.wait()


async def test_frontend_with_creds(server: NatsServer, tmp_path: Path, free_port: Callable[[], int]) -> None:
    """Rejected by NATS it is not ready and reports the reason; with the right file it connects."""
    file = write(tmp_path / "router.creds", creds(account("stranger"), user("router")))
    agents_file = write(tmp_path / "agent.creds", creds(OURS, user("agent")))
    port, admin_port = free_port(), free_port()
    url = f"http://127.0.0.1:{port}"
    async with (
        EngineServer.open(free_port()) as engine,
        agent(engine, "--nats", server.url, "--nats-creds", str(agents_file)),
    ):
        ports = (f"--port={port}", f"--admin-port={admin_port}")
        process = await start(*ports, "--nats", server.url, "--nats-creds", str(file))
        try:
            assert process.stderr is not None
            async with asyncio.timeout(SOON_S):
                while b"NATS rejects these credentials" not in (line := await process.stderr.readline()):
                    assert line
                await until_live(url)
                before = await get(url, "/ready")
                write(file, creds(OURS, user("router")))
                while not await is_ready(url):
                    pass
            workers = (await get(f"http://127.0.0.1:{admin_port}", "/workers")).json["targets"]
        finally:
            kill(process)
            await process.communicate()

    assert (503, "starting") == (before.status, before.json["status"])
    assert "not connected to NATS yet" in before.json["reasons"]
    assert [engine.url] == [worker["url"] for worker in workers]


def test_file_without_credentials(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file without credentials ends the start with code 2 and a message."""
    file = write(tmp_path / "router.creds", "hello\n")

    assert 2 == main(["--port=0", "--nats-creds", str(file)])
    assert f"--nats-creds {file}: it has no USER JWT" in capsys.readouterr().err
