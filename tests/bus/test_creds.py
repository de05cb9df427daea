""".creds files with a real nats-server in operator mode: which it accepts, and which it rejects."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog

from kvrouter.bus import Bus, NatsOptions
from kvrouter.errors import ConfigError
from tests.bus.operators import account, creds, operator, server_config, user
from tests.bus.watching import Connections, ask
from tests.conftest import NatsServer

SOON_S = 10.0
OURS = account("ours")
GOOD = creds(OURS, user("router"))


@pytest.fixture
def server(new_nats_server: Callable[..., NatsServer], tmp_path: Path) -> NatsServer:
    """A server that trusts one operator with one account."""
    config = tmp_path / "nats.conf"
    config.write_text(server_config(operator("owner"), OURS))
    running = new_nats_server(config)
    running.start()
    return running


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The path of the .creds file."""
    return tmp_path / "router.creds"


def write(path: Path, text: str) -> NatsOptions:
    """Write a .creds file; returns options that name it, without a server."""
    path.write_text(text)
    return NatsOptions(creds_file=path)


def answer(bus: Bus, reply: str, payload: bytes) -> None:
    """Answer a request."""
    bus.publish(reply, payload)


async def test_users_of_an_account_reach_each_other(server: NatsServer, file: Path, tmp_path: Path) -> None:
    """Two users with separate .creds files receive each other's messages."""
    router = replace(write(file, GOOD), servers=(server.url,))
    agent = replace(write(tmp_path / "agent.creds", creds(OURS, user("agent"))), servers=(server.url,))
    async with Bus.open(router, name="router") as bus, Bus.open(agent, name="agent") as other:
        await Connections(bus).reach(1)
        await Connections(other).reach(1)
        await bus.subscribe("a", lambda _subject, payload, reply: answer(bus, reply, payload[::-1]))
        await ask(bus, "a", b"")  # so the server has its subscription

        assert b"cba" == await ask(other, "a", b"abc")


@pytest.mark.parametrize(
    "strange",
    [creds(account("stranger"), user("router")), creds(OURS, user("router"), seed_of=user("thief"))],
    ids=["another account", "another seed"],
)
async def test_rejected_until_the_file_is_right(server: NatsServer, file: Path, strange: str) -> None:
    """The log names the rejected credentials; the bus retries, and reads a renewed file by itself."""
    rejections: asyncio.Queue[Any] = asyncio.Queue()

    def watch(_logger: object, _name: str, facts: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if "remedy" in facts:
            rejections.put_nowait(dict(facts))
        return facts

    options = replace(write(file, strange), servers=(server.url,))
    with structlog.testing.capture_logs(processors=[watch]):
        async with Bus.open(options, name="router") as bus, asyncio.timeout(SOON_S):
            connections = Connections(bus)
            entry = await rejections.get()
            assert not bus.connected
            write(file, GOOD)
            await connections.reach(1)

    assert "Authorization Violation" in entry["error"]
    assert "NATS rejects these credentials" in entry["remedy"]


@pytest.mark.parametrize("bad", ["", GOOD[:200]])
async def test_file_that_turns_bad(server: NatsServer, file: Path, bad: str) -> None:
    """If the file is empty or half written when the server restarts, the former content is used."""
    options = replace(write(file, GOOD), servers=(server.url,))
    async with Bus.open(options, name="router") as bus:
        connections = Connections(bus)
        await connections.reach(1)
        write(file, bad)
        server.stop()
        server.start()

        await connections.reach(2)


@pytest.mark.parametrize(
    "text", ["", "hello\n", GOOD.partition("-----BEGIN USER")[0], GOOD.replace("\nSU", "\nS")]
)
def test_invalid_file(file: Path, text: str) -> None:
    """An invalid file is rejected before the start, and the error does not quote it."""
    options = write(file, text)

    with pytest.raises(ConfigError, match=rf"--nats-creds {file}: it has no USER (JWT|NKEY SEED)") as raised:
        options.connect_arguments()
    assert user("router").seed.decode()[5:] not in str(raised.value)


def test_invalid_seed_file(file: Path) -> None:
    """An invalid --nats-nkey file is rejected in the same way."""
    file.write_text("hello\n")

    with pytest.raises(ConfigError, match=f"--nats-nkey {file}: it has no nkey seed"):
        NatsOptions(nkey_file=file).connect_arguments()
