"""A whole fleet on one event loop, over real sockets and a real nats-server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from kvrouter.frontend.run import RunningFrontend, running_frontend
from kvrouter.lab.mocker.config import MockerConfig
from kvrouter.lab.mocker.engine import EngineConfig
from kvrouter.lab.mocker.server import Mocker, running_mocker
from kvrouter.worker.agent import serve as serve_agent
from kvrouter.worker.options import AgentOptions, worker_id_of
from kvrouter.worker.zmq.sockets import EventEndpoints
from tests.frontend import workers
from tests.frontend.fleet import settings_of

PATIENCE_S = 20.0


@dataclass(frozen=True, slots=True)
class Fleet:
    """Frontends, and the mockers behind them."""

    frontends: Sequence[RunningFrontend]
    mockers: Sequence[Mocker]
    http: aiohttp.ClientSession

    async def workers(self, frontend: int) -> dict[str, Any]:
        """The /workers of one frontend."""
        async with self.http.get(f"{self.frontends[frontend].admin_url}/workers") as response:
            shown: dict[str, Any] = await response.json()
        return shown

    async def views(self) -> list[dict[str, Any]]:
        """The /workers of every frontend."""
        return [await self.workers(number) for number in range(len(self.frontends))]

    def router_ids(self) -> list[str]:
        """The id of each replica."""
        return [frontend.replica.router_id for frontend in self.frontends]


async def until(is_so: Callable[[], bool]) -> None:
    """Let the event loop run until `is_so` holds; bounded."""
    await workers.until(is_so, within_s=PATIENCE_S)


@contextlib.asynccontextmanager
async def running_fleet(
    nats_url: str,
    namespace: str,
    *,
    frontends: int = 2,
    mockers: int = 4,
    model_path: Path | None = None,
    engine_model: Path | None = None,
    flags: Sequence[str] = (),
    engine: EngineConfig | None = None,
    host_blocks: int = 0,
    max_num_queued_reqs: int | None = None,
    model_name: str = "tiny",
) -> AsyncIterator[Fleet]:
    """Start everything; yields when every frontend is ready and sees every worker and every peer.

    `model_path`: given to engines and frontends; `engine_model`: to the engines only.
    """
    async with contextlib.AsyncExitStack() as stack:
        engine = engine or EngineConfig(num_blocks=2048 + 1, host_blocks=host_blocks)
        config = MockerConfig(
            engine=engine,
            model_name=model_name,
            model_path=model_path or engine_model,
            speedup=20.0,
            max_num_queued_reqs=max_num_queued_reqs,
        )
        engines = [await stack.enter_async_context(running_mocker(config)) for _ in range(mockers)]
        for mocker in engines:
            await stack.enter_async_context(running_agent(mocker, nats_url, namespace))
        own = tuple(frontend_flags(nats_url, "default", model_path, flags))
        replicas = [
            await stack.enter_async_context(running_frontend(settings_of(namespace, own).settings))
            for _ in range(frontends)
        ]
        http = await stack.enter_async_context(aiohttp.ClientSession())
        fleet = Fleet(replicas, engines, http)
        await until(lambda: all(_is_complete(frontend, mockers, frontends) for frontend in replicas))
        yield fleet


def frontend_flags(
    nats_url: str, namespace: str, model_path: Path | None, more: Sequence[str] = ()
) -> list[str]:
    """The command line of a frontend."""
    flags = ["--host", "127.0.0.1", "--port", "0", "--nats", nats_url, "--namespace", namespace]
    model = ["--model-path", str(model_path)] if model_path else []
    # fastokens is compared at each start, for 0.3 s of CPU time: test_no_flags and test_fast_ids have it
    model += ["--tokenizer-backend", "huggingface"]
    return [*flags, "--router-replica-sync", "--drain-grace-s", "0", "--drain-timeout-s", "5", *model, *more]


@contextlib.asynccontextmanager
async def running_agent(mocker: Mocker, nats_url: str, namespace: str) -> AsyncIterator[None]:
    """The agent of one mocker."""
    stop = asyncio.Event()
    options = AgentOptions(
        engine_url=mocker.url,
        worker_id=worker_id_of(mocker.url),
        nats=nats_url,
        namespace=namespace,
        endpoints=[EventEndpoints(mocker.kv_events, mocker.kv_replay)],
    )
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(serve_agent(options, stop))
        try:
            yield
        finally:
            stop.set()


def _is_complete(frontend: RunningFrontend, workers: int, replicas: int) -> bool:
    replica = frontend.replica
    seen = sum(len(router.pool.targets) for router in replica.routers.values())
    ready = not replica.readiness.not_ready(asyncio.get_running_loop().time())
    return ready and seen == workers and len(replica.peers) == replicas - 1
