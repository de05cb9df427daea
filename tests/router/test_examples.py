"""The examples of docs/placement.md, run: a gateway of one's own, and HAProxy where it is installed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.fleet import Fleet, running_fleet
from tests.frontend.workers import until, until_found
from tests.router.routers import Router, running_router

EXAMPLES = Path(__file__).parents[2] / "docs/examples"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "the same words " * 60}], "max_tokens": 8}
HAPROXY = shutil.which("haproxy")


@contextlib.asynccontextmanager
async def fleet_and_router(nats: str, namespace: str, tiny: Path) -> AsyncIterator[tuple[Fleet, Router]]:
    """Two engines, a frontend that shares bookings, and a router that has seen them."""
    async with (
        running_fleet(nats, namespace, frontends=1, mockers=2, model_path=tiny) as fleet,
        running_router(nats, namespace, "--model-path", str(tiny)) as router,
    ):
        pools = router.running.replica.routers
        await until(lambda: 2 == sum(len(one.pool.targets) for one in pools.values()), "workers seen")
        yield fleet, router


@contextlib.asynccontextmanager
async def program(*words: str, directory: Path, **environ: str) -> AsyncIterator[None]:
    """A process that runs until the end of the block."""
    process = await asyncio.create_subprocess_exec(*words, cwd=directory, env={**os.environ, **environ})
    try:
        yield
    finally:
        process.terminate()
        await process.wait()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


async def until_answered(http: aiohttp.ClientSession, url: str) -> None:
    """Return when something accepts connections there."""

    async def is_answered() -> bool:
        with contextlib.suppress(aiohttp.ClientConnectionError):
            async with http.get(url):
                return True
        return False

    await until_found(is_answered, within_s=20)


async def chats(http: aiohttp.ClientSession, url: str, count: int) -> list[str]:
    """The texts of streamed answers to equal chats, one after the other."""
    found = []
    for _ in range(count):
        async with http.post(f"{url}/v1/chat/completions", json=CHAT | {"stream": True}) as answer:
            assert 200 == answer.status, await answer.text()
            found.append(await answer.text())
    return found


async def in_chunks(body: bytes) -> AsyncIterator[bytes]:
    """Makes aiohttp send it without a length."""
    yield body


async def test_the_gateway(nats_url: str, tiny: Path) -> None:
    """Equal chats go to one engine, their streams arrive whole, and no booking is left anywhere."""
    port = free_port()
    async with fleet_and_router(nats_url, uuid.uuid4().hex, tiny) as (fleet, router):
        environ = {"ROUTER": router.running.url, "PORT": str(port)}
        async with program(sys.executable, "gateway.py", directory=EXAMPLES, **environ):
            await until_answered(router.http, f"http://127.0.0.1:{port}/")
            for text in await chats(router.http, f"http://127.0.0.1:{port}", 6):
                assert text.rstrip().endswith("data: [DONE]")
        owners = [one.pool.active.owners() for one in fleet.frontends[0].replica.routers.values()]
        await until(lambda: not any(owners), "nothing is booked")
        assert 0 == len(router.site.placing.table)


@pytest.mark.skipif(HAPROXY is None, reason="HAProxy is not installed")
async def test_haproxy(nats_url: str, tiny: Path, tmp_path: Path) -> None:
    """HAProxy asks, and relays to the engine that holds the prompt; 503 where none can be chosen."""
    port = free_port()
    async with fleet_and_router(nats_url, uuid.uuid4().hex, tiny) as (_, router):
        for file in (EXAMPLES / "haproxy").iterdir():
            text = file.read_text().replace("http://127.0.0.1:8092", router.running.url)
            (tmp_path / file.name).write_text(text.replace("127.0.0.1:8080", f"127.0.0.1:{port}"))
        async with program(str(HAPROXY), "-db", "-f", "haproxy.cfg", directory=tmp_path):
            url = f"http://127.0.0.1:{port}"
            await until_answered(router.http, url)
            (pool,) = (one.pool for one in router.running.replica.routers.values())
            for _ in range(2):
                (text,) = await chats(router.http, url, 1)
                assert text.rstrip().endswith("data: [DONE]")
                await until(lambda: not any(map(pool.active.charged_tokens, pool.targets)), "no prefill")
                await until(lambda: any(map(pool.index.blocks, pool.targets)), "its blocks are known")
            table = router.site.placing.table
            (held,) = filter(None, map(table.of_worker, pool.workers))
            assert 2 == len(table) == len(held), "the second went where the first one was"
            for length in (300, 400_000):  # the second is longer than what HAProxy keeps
                asked = json.dumps({"model": "tiny", "user": "x" * length, "prompt": "hello"}).encode()
                async with router.http.post(
                    f"{url}/v1/completions",
                    data=in_chunks(asked),
                    headers={"content-type": "application/json"},
                ) as answer:
                    assert 200 == answer.status, await answer.text()
            unknown = CHAT | {"model": "other"}
            async with router.http.post(f"{url}/v1/chat/completions", json=unknown) as answer:
                assert 503 == answer.status
        for one in held:
            router.site.placing.free(one.id)
