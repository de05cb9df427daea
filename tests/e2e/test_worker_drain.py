"""A draining worker: mockers, agents and a frontend over real sockets, the draining agent as a process."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import uuid
from collections.abc import AsyncIterator
from typing import Any

import openai

from kvrouter.core.wire.ids import Target, WorkerId
from kvrouter.core.wire.senders import KvSource
from kvrouter.frontend.run import RunningFrontend, running_frontend
from kvrouter.frontend.settings import parse_options
from kvrouter.lab.mocker.config import MockerConfig
from kvrouter.lab.mocker.engine import EngineConfig
from kvrouter.lab.mocker.server import Mocker, running_mocker
from kvrouter.worker.options import worker_id_of
from tests.e2e.fleet import PATIENCE_S, frontend_flags, running_agent, until

CONFIG = MockerConfig(engine=EngineConfig(num_blocks=4097), model_name="tiny", speedup=20.0)
# Tokens that the draining worker still has to send: some seconds.
LONG = 4000


@contextlib.asynccontextmanager
async def agent_process(
    mocker: Mocker, nats_url: str, namespace: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """`python -m kvrouter.worker` for a mocker; killed at the end if it still runs."""
    assert mocker.kv_events
    assert mocker.kv_replay
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvrouter.worker", "--engine-url", mocker.url,
        "--kv-events", mocker.kv_events, "--kv-replay", mocker.kv_replay,
        "--nats", nats_url, "--namespace", namespace,
        stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def targets(frontend: RunningFrontend) -> list[Target]:
    """The targets that take new requests."""
    return [target for router in frontend.replica.routers.values() for target in router.pool.targets]


def workers(frontend: RunningFrontend) -> dict[str, str]:
    """Every known worker, and its state."""
    pools = [router.pool for router in frontend.replica.routers.values()]
    return {str(name): worker.state for pool in pools for name, worker in pool.workers.items()}


def last_seq(frontend: RunningFrontend, target: Target) -> int:
    """The number of applied KV frames of a target."""
    readers = frontend.replica.readers.items()
    return sum(
        reader.seq for source, reader in readers if isinstance(source, KvSource) and source.target == target
    )


async def ask(client: openai.AsyncOpenAI, number: int) -> str:
    """A short request; returns the worker that served it."""
    prompt = [number] * 64
    answer = await client.completions.with_raw_response.create(model="tiny", prompt=prompt, max_tokens=4)
    return answer.headers["x-kvrouter-worker"]


async def read_to_the_end(stream: openai.AsyncStream[Any]) -> list[Any]:
    """The finish reasons of a stream's events. Raises if the stream breaks or has an error event."""
    return [event.choices[0].finish_reason async for event in stream]


async def test_worker_that_drains(nats_url: str) -> None:
    """A's stream continues while new requests go to B; A's agent leaves when it has ended, with code 0."""
    namespace = uuid.uuid4().hex
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(running_mocker(CONFIG))
        second = await stack.enter_async_context(running_mocker(CONFIG))
        a, b = (Target(WorkerId(worker_id_of(mocker.url))) for mocker in (first, second))
        agent = await stack.enter_async_context(agent_process(first, nats_url, namespace))
        flags = parse_options(frontend_flags(nats_url, namespace, None))
        frontend = await stack.enter_async_context(running_frontend(flags))
        await until(lambda: targets(frontend) == [a])
        client = openai.AsyncOpenAI(base_url=f"{frontend.url}/v1", api_key="none", max_retries=0)
        stack.push_async_callback(client.close)
        stream = await client.completions.create(model="tiny", prompt=[7] * 64, max_tokens=LONG, stream=True)
        reading = asyncio.create_task(read_to_the_end(stream))
        await stack.enter_async_context(running_agent(second, nats_url, namespace))
        await until(lambda: set(targets(frontend)) == {a, b})

        agent.send_signal(signal.SIGTERM)
        await until(lambda: targets(frontend) == [b])
        frames = last_seq(frontend, a)
        served_by = [await ask(client, number) for number in range(12)]
        await until(lambda: last_seq(frontend, a) > frames)  # its events are still published
        while_draining = (workers(frontend), reading.done(), agent.returncode)
        async with asyncio.timeout(PATIENCE_S):
            reasons = await reading
            code = await agent.wait()
        await until(lambda: list(workers(frontend)) == [b.worker_id])

    assert {b.worker_id} == set(served_by)
    assert ({a.worker_id: "draining", b.worker_id: "up"}, False, None) == while_draining
    assert [None] * (LONG - 1) + ["length"] == reasons
    assert 0 == code
