"""An agent whose engine sends anything, over real sockets: a small form of `scripts.kit.fuzz zmq`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from kvrouter.bus import Bus, NatsOptions, Subjects
from kvrouter.observe.verify import VerifyError
from kvrouter.observe.verify.agents import Requests
from kvrouter.worker import rank as rank_module
from kvrouter.worker.agent import serve
from kvrouter.worker.options import AgentOptions
from kvrouter.worker.zmq.sockets import EventEndpoints
from scripts.kit.chaos.truth import agent_blocks
from scripts.kit.fuzz.engine import CAPACITY_BLOCKS, HonestEngine, Kind, ServedEngine
from scripts.kit.fuzz.zmq import hostile


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_agent_outlives_its_engine(
    kind: Kind, nats_url: str, free_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After hostile events, replays and metrics it publishes the engine's blocks."""
    monkeypatch.setattr(rank_module, "READ_AGAIN_S", 0.02)
    monkeypatch.setattr(rank_module, "MOST_READ_AGAIN_S", 0.1)
    namespace = f"fuzz-{kind}-{free_port()}"
    stop = asyncio.Event()
    async with ServedEngine.open(kind, seed=7) as engine, Bus.open(NatsOptions((nats_url,)), name="t") as bus:
        feed = EventEndpoints(engine.events, engine.replay, replay_timeout_s=0.2, verify_after_s=0.1)
        options = AgentOptions(engine.url, "w", nats_url, namespace, [feed], heartbeat_s=0.05, probe_s=0.5)
        task = asyncio.create_task(serve(options, stop))
        await engine.until_subscribed()
        await hostile(engine, 300)
        await engine.publish_honest()
        requests = Requests(bus, Subjects(namespace))
        await requests.begin()
        async with asyncio.timeout(30):
            while not await equal(requests, engine.engine):
                assert not task.done(), task
                await asyncio.sleep(0.02)
        stop.set()
        await task


async def equal(requests: Requests, engine: HonestEngine) -> bool:
    """Whether the agent publishes the engine's blocks; False while it does not answer."""
    try:
        return await agent_blocks(requests, "w") == engine.held()
    except (VerifyError, RuntimeError):
        return False


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_honest_engine(kind: Kind) -> None:
    """The reference of the fuzz: a full cache that evicts leaves, repeatable by its seed."""
    engines = [HonestEngine(random.Random(3), kind) for _ in range(2)]
    for _ in range(400):
        for engine in engines:
            engine.step()

    assert engines[0].batches == engines[1].batches
    assert CAPACITY_BLOCKS - 16 <= len(engines[0].held()) <= CAPACITY_BLOCKS
