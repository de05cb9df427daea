"""`kvrouter serve` with TLS on all connections: clients to frontends, frontends and agents to engines."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest

from kvrouter.lab.mocker.config import MockerConfig
from kvrouter.lab.mocker.engine import EngineConfig
from kvrouter.lab.mocker.server import running_mocker
from scripts.kit.ports import free_ports
from tests.certificates import Authority
from tests.serve.serving import serving, until_known, until_ready


@contextlib.asynccontextmanager
async def behind_tls(url: str, door: ssl.SSLContext) -> AsyncIterator[str]:
    """The URL of a proxy that speaks TLS for a server that does not."""
    inner = urlsplit(url)
    open_ends: set[asyncio.StreamWriter] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_ends.add(writer)
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()
        open_ends.discard(writer)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inside, outside = await asyncio.open_connection(inner.hostname, inner.port)
        await asyncio.gather(pump(reader, outside), pump(inside, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=door)
    try:
        yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for end in open_ends:
            end.transport.abort()


@pytest.mark.parametrize("tokenizer", ["local", "remote"])
async def test_everywhere(tiny: Path, tmp_path: Path, tokenizer: str) -> None:
    """The engine is queried, announced, asked for tokens and sent requests, all over TLS."""
    config = MockerConfig(
        engine=EngineConfig(num_blocks=2049), model_name="tiny", model_path=tiny, speedup=50.0
    )
    authority, (port, admin_port, nats_port) = Authority(tmp_path), free_ports(3)
    files = authority.sign()
    async with contextlib.AsyncExitStack() as stack:
        mocker = await stack.enter_async_context(running_mocker(config))
        engine = await stack.enter_async_context(behind_tls(mocker.url, authority.server()))
        connector = aiohttp.TCPConnector(ssl=authority.trusted())
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        ports = (f"--port={port}", f"--admin-port={admin_port}", f"--nats-port={nats_port}")
        tls = (f"--tls-cert={files.cert}", f"--tls-key={files.key}", f"--worker-tls-ca={authority.file}")
        flags = (f"--engine={engine},id=w", *ports, *tls, f"--tokenizer={tokenizer}")
        served = await stack.enter_async_context(serving(*flags))
        url, admin_url = f"https://127.0.0.1:{port}", f"https://127.0.0.1:{admin_port}"
        await until_ready(served, http, [url])

        for _ in range(2):
            body = {"model": "tiny", "prompt": "the same words again and again " * 20, "max_tokens": 2}
            async with http.post(f"{url}/v1/completions", json=body) as response:
                await response.read()
            await until_known(served, http, admin_url, "w")
        async with http.get(f"{admin_url}/workers") as view:
            (target,) = (await view.json())["targets"]

    assert (200, "w") == (response.status, response.headers["x-kvrouter-worker"])
    assert int(response.headers["x-kvrouter-overlap-blocks"]) > 5
    assert (engine, "up") == (target["url"], target["state"])
