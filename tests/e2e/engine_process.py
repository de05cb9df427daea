"""Engines as processes, which tests kill and start again, and agents that outlive them."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from kvrouter.worker.agent import serve as serve_agent
from kvrouter.worker.options import AgentOptions
from kvrouter.worker.zmq.sockets import EventEndpoints

HEARTBEAT_S = 0.1
PROBE_S = 0.05


@dataclass
class EngineProcess:
    """`python -m kvrouter.lab.mocker` on ports that it keeps across restarts."""

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

    async def start(self, block_size: int = 16, model_path: Path | None = None) -> None:
        """Return when the process runs; its agent notices when it serves."""
        model = ["--model-path", str(model_path)] if model_path is not None else []
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvrouter.lab.mocker", "--port", str(self.ports[0]),
            "--kv-events", self.endpoints.events, "--kv-replay", str(self.endpoints.replay),
            "--served-model-name", "tiny", "--block-size", str(block_size), *model,
            stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip

    async def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None:
            self.process.kill()
            await self.process.wait()
            self.process = None


@contextlib.asynccontextmanager
async def running_agents(
    engines: list[EngineProcess], nats_url: str, namespace: str, *, probe_s: float = PROBE_S
) -> AsyncIterator[None]:
    """An agent for each engine, which stays while its engine restarts."""
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        for engine in engines:
            options = AgentOptions(
                engine.url, engine.worker_id, nats_url, namespace, [engine.endpoints],
                heartbeat_s=HEARTBEAT_S, probe_s=probe_s,
            )  # fmt: skip
            tasks.create_task(serve_agent(options, stop))
        try:
            yield
        finally:
            stop.set()
