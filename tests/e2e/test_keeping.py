"""What replicas assume of workers, over processes that join, are killed and start again."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvrouter.core.fleet.router import Router
from kvrouter.core.wire.ids import Target, WorkerId
from kvrouter.frontend.run import RunningFrontend, running_frontend
from kvrouter.frontend.settings import parse_options
from kvrouter.lab.mocker.server import running_mocker
from tests.e2e.engine_process import HEARTBEAT_S, EngineProcess, running_agents
from tests.e2e.fleet import PATIENCE_S, frontend_flags, running_agent, until
from tests.e2e.test_worker_drain import CONFIG, agent_process
from tests.frontend.workers import until_found
from tests.long import needs_long

ASSUMING = ["--no-use-kv-events"]
TEXTS = {"x-kvrouter-mode": "prefix-affinity"}
PROMPTS = [[number] * 200 for number in range(1, 5)]
STORIES = [f"{number} once upon a time there was a router" for number in range(6)]


@contextlib.asynccontextmanager
async def frontend_process(
    flags: list[str], port: int, admin_port: int
) -> AsyncIterator[asyncio.subprocess.Process]:
    """`python -m kvrouter.frontend` on these ports, once it is ready; killed at the end."""
    words = [*flags, "--port", str(port), "--admin-port", str(admin_port)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvrouter.frontend", *words, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with aiohttp.ClientSession() as http:
            await until_found(lambda: is_ready(http, port), within_s=PATIENCE_S)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def is_ready(http: aiohttp.ClientSession, port: int) -> bool:
    """Whether the frontend takes requests."""
    try:
        async with http.get(f"http://127.0.0.1:{port}/ready") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


async def ask(http: aiohttp.ClientSession, url: str, prompt: Any, **headers: str) -> tuple[str, int]:
    """One streamed completion: its worker, and the predicted blocks."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "stream": True}
    async with http.post(f"{url}/v1/completions", json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        await response.read()
        return response.headers["x-kvrouter-worker"], int(response.headers["x-kvrouter-overlap-blocks"])


def router_of(frontend: RunningFrontend) -> Router:
    """The router of its only pool."""
    (router,) = frontend.replica.routers.values()
    return router


def holds(frontend: RunningFrontend, worker_id: str) -> tuple[int, int]:
    """Characters and blocks that a worker is assumed to hold."""
    target, routers = Target(WorkerId(worker_id)), frontend.replica.routers.values()
    chars = sum(router.tables.texts.chars(target) for router in routers)
    return chars, sum(router.pool.index.blocks(target) for router in routers)


async def test_snapshot_before_the_card(nats_url: str, tiny: Path) -> None:
    """A replica that joins while the agent is silent uses what its peer knew, once the agent is back."""
    namespace = uuid.uuid4().hex
    flags = frontend_flags(nats_url, namespace, tiny, ASSUMING)
    async with contextlib.AsyncExitStack() as stack:
        engine = await stack.enter_async_context(running_mocker(replace(CONFIG, model_path=tiny)))
        agent = await stack.enter_async_context(agent_process(engine, nats_url, namespace))
        first = await stack.enter_async_context(running_frontend(parse_options(flags)))
        await until(lambda: any(router.pool.targets for router in first.replica.routers.values()))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        worker_id, _ = await ask(http, first.url, PROMPTS[0])
        await ask(http, first.url, STORIES[0], **TEXTS)
        chars, blocks = holds(first, worker_id)
        assert min(chars, blocks) > 0

        agent.send_signal(signal.SIGSTOP)
        joiner = await stack.enter_async_context(running_frontend(parse_options(flags)))
        await until(lambda: any(router.feed.early.held_bytes for router in joiner.replica.routers.values()))
        assert (0, 0) == holds(joiner, worker_id)
        agent.send_signal(signal.SIGCONT)
        await until(lambda: bool(router_of(joiner).pool.targets))

        assert (chars, blocks) == holds(joiner, worker_id)
        assert (worker_id, 12) == await ask(http, joiner.url, PROMPTS[0])


@needs_long("ten seconds")
async def test_two_replicas_killed_in_turn(nats_url: str, tiny: Path, free_port: Callable[[], int]) -> None:
    """Two replicas are killed and started in turn: what the first has sent is known to the last."""
    namespace = uuid.uuid4().hex
    flags = frontend_flags(nats_url, namespace, tiny, ASSUMING)
    ports = [(free_port(), free_port()) for _ in range(4)]
    urls = [f"http://127.0.0.1:{port}" for port, _ in ports]
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(3):
            engine = await stack.enter_async_context(running_mocker(replace(CONFIG, model_path=tiny)))
            await stack.enter_async_context(running_agent(engine, nats_url, namespace))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        replicas = [await stack.enter_async_context(frontend_process(flags, *both)) for both in ports[:2]]
        told = [(await ask(http, urls[0], story, **TEXTS))[0] for story in STORIES]
        sent = [(await ask(http, urls[0], prompt))[0] for prompt in PROMPTS]
        peer = f"http://127.0.0.1:{ports[1][1]}"
        await until_found(lambda: _knows(http, peer, PROMPTS[-1]), within_s=PATIENCE_S)

        for replica, both in zip(replicas, ports[2:], strict=True):
            replica.kill()
            await replica.wait()
            await stack.enter_async_context(frontend_process(flags, *both))

        assert [(worker_id, 12) for worker_id in sent] == [
            await ask(http, urls[3], prompt) for prompt in PROMPTS
        ]
        assert told == [(await ask(http, urls[3], f"{story} again", **TEXTS))[0] for story in STORIES]


async def _knows(http: aiohttp.ClientSession, url: str, prompt: list[int]) -> bool:
    """Whether a dry run predicts that a worker holds the prompt."""
    async with http.post(f"{url}/v1/route", json={"model": "tiny", "prompt": prompt}) as response:
        return any(one["overlap_blocks"] for one in (await response.json())["candidates"])


@pytest.mark.parametrize("probe_s", [0.05, 60.0])
async def test_engine_that_dies_and_comes_back(
    nats_url: str, tiny: Path, free_port: Callable[[], int], probe_s: float
) -> None:
    """Its texts and blocks go at all replicas: when it is down, or when its agent sees another process."""
    namespace = uuid.uuid4().hex
    engine = EngineProcess("w0", (free_port(), free_port(), free_port()))
    more = [*ASSUMING, "--heartbeat-s", str(HEARTBEAT_S), "--lease-s", str(5 * HEARTBEAT_S)]
    flags = frontend_flags(nats_url, namespace, tiny, more)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(engine.kill)
        await engine.start(model_path=tiny)
        await stack.enter_async_context(running_agents([engine], nats_url, namespace, probe_s=probe_s))
        frontends = [
            await stack.enter_async_context(running_frontend(parse_options(flags))) for _ in range(2)
        ]
        http = await stack.enter_async_context(aiohttp.ClientSession())
        await until(lambda: all(is_up(one) for one in frontends))
        await ask(http, frontends[0].url, PROMPTS[0])
        await ask(http, frontends[0].url, STORIES[0], **TEXTS)
        await until(lambda: all(min(holds(one, "w0")) > 0 for one in frontends))

        await engine.kill()
        if probe_s < 1:
            await until(lambda: not any(is_up(one) for one in frontends))
            assert [(0, 0)] * 2 == [holds(one, "w0") for one in frontends]
        await engine.start(model_path=tiny)

        await until(lambda: all(is_up(one) and holds(one, "w0") == (0, 0) for one in frontends))


def is_up(frontend: RunningFrontend) -> bool:
    """Whether it has a target."""
    return any(router.pool.targets for router in frontend.replica.routers.values())
