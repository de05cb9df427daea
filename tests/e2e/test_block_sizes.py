"""Engines change their block size, one after the other: each process is killed and started again."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import aiohttp

from kvrouter.core.fleet.pool import Pool
from kvrouter.core.wire.ids import WorkerId
from kvrouter.frontend.run import RunningFrontend, running_frontend
from kvrouter.frontend.settings import parse_options
from kvrouter.worker.agent import serve as serve_agent
from kvrouter.worker.options import AgentOptions
from kvrouter.worker.zmq.sockets import EventEndpoints
from tests.e2e.fleet import PATIENCE_S, frontend_flags, until

HEARTBEAT_S = 0.1
PROBE_S = 0.05


@dataclass
class EngineProcess:
    """`python -m kvrouter.mocker` on ports that it keeps across restarts."""

    worker_id: str
    ports: tuple[int, int, int]
    process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        """Its HTTP address."""
        return f"http://127.0.0.1:{self.ports[0]}"

    @property
    def endpoints(self) -> EventEndpoints:
        """Its event endpoints."""
        return EventEndpoints(f"tcp://127.0.0.1:{self.ports[1]}", f"tcp://127.0.0.1:{self.ports[2]}")

    async def start(self, block_size: int) -> None:
        """Return when the process runs; its agent notices when it serves."""
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvrouter.mocker", "--port", str(self.ports[0]),
            "--kv-events", self.endpoints.events, "--kv-replay", str(self.endpoints.replay),
            "--served-model-name", "tiny", "--block-size", str(block_size),
            stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip

    async def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None:
            self.process.kill()
            await self.process.wait()
            self.process = None


@contextlib.asynccontextmanager
async def running_agents(engines: list[EngineProcess], nats_url: str, namespace: str) -> AsyncIterator[None]:
    """An agent for each engine, which stays while its engine restarts."""
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        for engine in engines:
            options = AgentOptions(
                engine.url, engine.worker_id, nats_url, namespace, [engine.endpoints],
                heartbeat_s=HEARTBEAT_S, probe_s=PROBE_S,
            )  # fmt: skip
            tasks.create_task(serve_agent(options, stop))
        try:
            yield
        finally:
            stop.set()


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
