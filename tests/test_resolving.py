"""Names are resolved before a connection, and lead only to addresses that are allowed."""

from __future__ import annotations

import asyncio
from ipaddress import ip_network

import aiohttp
import pytest

from kvrouter import resolving
from kvrouter.bounded_answers import engine_connector, no_answer
from kvrouter.relay.upstream import Upstream, WorkerUnreachableError
from kvrouter.resolving import addresses_of
from kvrouter.tls import trusting
from tests.frontend.workers import until

ELSEWHERE = (ip_network("10.0.0.0/8"),)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What names resolve to in this process."""
    known: dict[str, list[str]] = {}

    async def resolved(host: str, _port: int) -> list[str]:
        return known[host]

    monkeypatch.setattr(resolving, "_resolved", resolved)
    return known


async def test_allowed_addresses(names: dict[str, list[str]]) -> None:
    """Of several addresses those that are refused are left out; with none left the reason names one."""
    names["engine"] = ["169.254.169.254", "127.0.0.1"]
    assert ["127.0.0.1"] == await addresses_of("engine", 80)
    assert ["10.0.0.1"] == await addresses_of("10.0.0.1", 80, ELSEWHERE)

    names["metadata"] = ["169.254.169.254"]
    with pytest.raises(OSError, match=r"metadata leads to 169\.254\.169\.254, which is link-local"):
        await addresses_of("metadata", 80)
    with pytest.raises(OSError, match=r"^127\.0\.0\.1 is in none of --worker-networks 10\.0\.0\.0/8"):
        await addresses_of("127.0.0.1", 80, ELSEWHERE)


async def test_no_connection_to_a_refused_address() -> None:
    """Neither the relay nor a session with engines connects where a name must not lead."""
    connected = []
    server = await asyncio.start_server(lambda *_: connected.append(1), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        with pytest.raises(WorkerUnreachableError, match="--worker-networks"):
            await Upstream(networks=ELSEWHERE).connect(f"http://localhost:{port}")
        connector = engine_connector(trusting(None), networks=ELSEWHERE)
        async with aiohttp.ClientSession(connector=connector) as session:
            with pytest.raises(aiohttp.ClientConnectorError) as raised:
                await session.get(f"http://localhost:{port}")
            assert "--worker-networks" in no_answer(raised.value)

    assert [] == connected


async def test_second_address(names: dict[str, list[str]]) -> None:
    """If the first address of a name refuses the connection, the next one is tried."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    names["engine"] = ["127.0.0.2", "127.0.0.1"]
    async with server:
        connection = await Upstream().connect(f"http://engine:{port}")
        assert connection.is_usable
        await until(lambda: not connection.is_usable, "the other side closes it")
