"""Agents whose engines send anything, over real sockets: one on this loop, and a process with two engines.

One engine publishes vLLM's events, one SGLang's: honest batches among hostile ones, with bad answers to
replays and scrapes.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kvrouter.bus import Bus, NatsOptions, Subjects
from kvrouter.observe.verify import VerifyError
from kvrouter.observe.verify.agents import Requests
from kvrouter.worker.agent import serve
from kvrouter.worker.options import AgentOptions
from kvrouter.worker.zmq.sockets import EventEndpoints
from scripts.kit.bench.meter import resident_bytes
from scripts.kit.chaos.truth import agent_blocks
from scripts.kit.fleet import Fleet
from tests.frontend.workers import until_found
from tests.fuzz.engine import CAPACITY_BLOCKS, HonestEngine, Kind, ServedEngine
from tests.long import needs_long

KINDS: tuple[Kind, ...] = ("vllm", "sglang")
ROUNDS, FRAMES, HONEST_ONE_IN = 10, 100_000, 50
# Messages per second: slow enough for the agent to keep up and to request replays while these are hostile.
BURST, PAUSE_S = 100, 0.04
EQUAL_WITHIN_S = 60.0
# Memory allowed above that after the first round: the allocator's rest after a burst varies by this much.
MORE_BYTES = 32 * 1024 * 1024


async def hostile(engine: ServedEngine, frames: int) -> None:
    """Publish hostile messages with honest ones among them."""
    engine.is_hostile = True
    for number in range(frames):
        if number % HONEST_ONE_IN == 0:
            await engine.publish_honest()
        await engine.publish_hostile()
        if number % BURST == 0:
            await asyncio.sleep(PAUSE_S)
    engine.is_hostile = False


@pytest.mark.usefixtures("reads_again_soon")
@pytest.mark.parametrize("kind", KINDS)
async def test_agent_outlives_its_engine(kind: Kind, nats_url: str, free_port: Callable[[], int]) -> None:
    """After hostile events, replays and metrics it publishes the engine's blocks."""
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

        async def is_equal() -> bool:
            assert not task.done(), task
            return await equal(requests, "w", engine)

        await until_found(is_equal, within_s=30)
        stop.set()
        await task


@needs_long("two minutes")
@pytest.mark.timeout(1800)
async def test_process_of_two_engines(nats_url: str, tmp_path: Path, free_port: Callable[[], int]) -> None:
    """After each round it publishes the engines' blocks; it uses no more memory, and logs no error."""
    namespace, resident = f"fuzz-{free_port()}", list[int]()
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(Fleet(tmp_path))
        engines, listed = dict[str, ServedEngine](), ""
        for seed, kind in enumerate(KINDS):
            engines[kind] = await stack.enter_async_context(ServedEngine.open(kind, seed))
            listed += f"[[engine]]\nengine-url = '{engines[kind].url}'\nworker-id = '{kind}'\n"
        (tmp_path / "engines.toml").write_text(listed)
        flags = [f"--engines={tmp_path}/engines.toml", f"--nats={nats_url}", f"--namespace={namespace}"]
        agent = await fleet.start("agent", [sys.executable, "-m", "kvrouter.worker", *flags])
        await asyncio.wait_for(asyncio.gather(*(one.until_subscribed() for one in engines.values())), 60)
        bus = await stack.enter_async_context(Bus.open(NatsOptions((nats_url,)), name="t"))
        requests = Requests(bus, Subjects(namespace))
        await requests.begin()

        async def all_equal() -> bool:
            agent.check()
            return all([await equal(requests, kind, one) for kind, one in engines.items()])

        for _ in range(ROUNDS):
            await asyncio.gather(*(hostile(one, FRAMES // ROUNDS) for one in engines.values()))
            await asyncio.gather(*(honest(one) for one in engines.values()))
            await until_found(all_equal, within_s=EQUAL_WITHIN_S)
            resident.append(resident_bytes(agent.pid))
        log = agent.log.read_text(errors="replace")

    assert [] == [word for word in ("Traceback", "engine.events_failed", "worker.failed") if word in log]
    assert resident[-1] - resident[0] <= MORE_BYTES, resident


async def honest(engine: ServedEngine) -> None:
    """Publish as an engine does for a second."""
    for _ in range(20):
        await engine.publish_honest()
        await asyncio.sleep(0.05)


async def equal(requests: Requests, worker_id: str, engine: ServedEngine) -> bool:
    """Whether the agent publishes the engine's blocks; False while it does not answer."""
    try:
        return await agent_blocks(requests, worker_id) == engine.engine.held()
    except (VerifyError, RuntimeError):
        return False


@pytest.mark.parametrize("kind", KINDS)
def test_honest_engine(kind: Kind) -> None:
    """The reference of the fuzz: a full cache that evicts leaves, repeatable by its seed."""
    engines = [HonestEngine(random.Random(3), kind) for _ in range(2)]
    for _ in range(400):
        for engine in engines:
            engine.step()

    assert engines[0].batches == engines[1].batches
    assert CAPACITY_BLOCKS - 16 <= len(engines[0].held()) <= CAPACITY_BLOCKS
