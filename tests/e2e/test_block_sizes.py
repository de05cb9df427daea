"""Engines change their block size, one after the other: each process is killed and started again."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import Awaitable, Callable
from functools import partial

import aiohttp

from kvrouter.core.fleet.pool import Pool
from kvrouter.core.wire.ids import WorkerId
from kvrouter.frontend.run import RunningFrontend, running_frontend
from kvrouter.frontend.settings import parse_options
from tests.e2e.engine_process import HEARTBEAT_S, EngineProcess, running_agents
from tests.e2e.fleet import PATIENCE_S, frontend_flags, until


def pools(frontends: list[RunningFrontend]) -> list[Pool]:
    """The pool at each replica."""
    return [router.pool for one in frontends for router in one.replica.routers.values()]


def shows(frontends: list[RunningFrontend], worker_id: str, state: str, size: int) -> bool:
    """Whether all replicas show the worker with these values."""
    found = [pool.workers.get(WorkerId(worker_id)) for pool in pools(frontends)]
    return len(found) == len(frontends) and all(
        one is not None and (one.state, one.card.block_size) == (state, size) for one in found
    )


async def ask(http: aiohttp.ClientSession, url: str, number: int, **headers: str) -> tuple[int, int]:
    """One request of some blocks: its status, and the predicted blocks."""
    body = {"model": "tiny", "prompt": [number % 1000] * 200, "max_tokens": 2}
    async with http.post(f"{url}/v1/completions", json=body, headers=headers) as response:
        await response.read()
        return response.status, int(response.headers.get("x-kvrouter-overlap-blocks", -1))


async def load(http: aiohttp.ClientSession, urls: list[str], statuses: list[int]) -> None:
    """Requests to the replicas in turn, until cancelled."""
    for number in itertools.count():
        statuses.append((await ask(http, urls[number % len(urls)], number))[0])
        await asyncio.sleep(0.01)


async def until_predicted(ask_again: Callable[[], Awaitable[tuple[int, int]]]) -> None:
    """Send requests until the whole prompt is predicted to be cached: 6 blocks of 32 tokens."""
    async with asyncio.timeout(PATIENCE_S):
        while await ask_again() != (200, 6):
            pass


async def test_rolling_change(nats_url: str, free_port: Callable[[], int]) -> None:
    """No request fails, every engine serves all the time, and in the end blocks decide the routing."""
    namespace = uuid.uuid4().hex
    engines = [EngineProcess(f"w{n}", (free_port(), free_port(), free_port())) for n in range(2)]
    lease = ["--heartbeat-s", str(HEARTBEAT_S), "--lease-s", str(5 * HEARTBEAT_S)]
    flags = frontend_flags(nats_url, namespace, None, lease)
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            stack.push_async_callback(engine.kill)
            await engine.start(16)
        await stack.enter_async_context(running_agents(engines, nats_url, namespace))
        frontends = [
            await stack.enter_async_context(running_frontend(parse_options(flags))) for _ in range(2)
        ]
        http = await stack.enter_async_context(aiohttp.ClientSession())
        urls, statuses = [one.url for one in frontends], list[int]()
        for engine in engines:
            await until(lambda: shows(frontends, engine.worker_id, "up", 16))  # noqa: B023  # awaited here
        loaded = asyncio.create_task(load(http, urls, statuses))
        stack.callback(loaded.cancel)

        for engine in engines:
            await engine.kill()
            await until(lambda: shows(frontends, engine.worker_id, "down", 16))  # noqa: B023
            await engine.start(32)
            await until(lambda: shows(frontends, engine.worker_id, "up", 32))  # noqa: B023
            assert all(2 == len(pool.targets) for pool in pools(frontends))
        await until(lambda: {32} == {pool.block_size for pool in pools(frontends)})
        loaded.cancel()

        assert {200} == set(statuses)
        for url, engine in itertools.product(urls, engines):
            direct = {"x-kvrouter-mode": "direct", "x-kvrouter-target": engine.worker_id}
            await until_predicted(partial(ask, http, url, 7, **direct))
