"""Ray's own KVTokenTracker over `SelectionService`: two ingress replicas in processes, one of them killed.

Runs where KVROUTER_RAY_WHEEL names the wheel of Ray 2.60: `pip download --no-deps 'ray==2.60.*'`, 79 MB.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvrouter.lab.mocker.config import MockerConfig
from kvrouter.lab.mocker.engine import EngineConfig
from kvrouter.lab.mocker.server import Mocker, running_mocker
from tests.frontend.workers import until_found

WHEEL = os.environ.get("KVROUTER_RAY_WHEEL", "")
pytestmark = pytest.mark.skipif(not WHEEL, reason="KVROUTER_RAY_WHEEL names no wheel of Ray")
ROOT = Path(__file__).parents[2]
PROMPT = list(range(320))


class Ingress:
    """One ingress replica. `peers`: who gets what it broadcasts."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.peers: list[Ingress] = []
        self._lock = asyncio.Lock()
        self._results: asyncio.Queue[Any] = asyncio.Queue()
        self.reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            said = json.loads(line)
            if "broadcast" in said:
                for peer in self.peers:
                    await peer.call(said["broadcast"], said["batch"])
            else:
                await self._results.put(said["result"])

    async def call(self, *words: Any) -> Any:
        """The result of a call of the tracker."""
        assert self.process.stdin is not None
        async with self._lock:
            self.process.stdin.write(json.dumps(words).encode() + b"\n")
            return await self._results.get()

    async def until(self, holds: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        """Its state, once this holds."""
        found: dict[str, Any] = await until_found(
            lambda: self.call("state"), lambda one: one and holds(one), what, 30
        )
        return found


@contextlib.asynccontextmanager
async def ingress(nats: str, namespace: str, rank: int) -> AsyncIterator[Ingress]:
    environ = {**os.environ, "KVROUTER_NATS": nats, "KVROUTER_NAMESPACE": namespace}
    words = (sys.executable, "-m", "tests.compat.ray_ingress", WHEEL, str(rank))
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *words, cwd=ROOT, env=environ, stdin=pipe, stdout=pipe, limit=1 << 24
    )
    one = Ingress(process)
    try:
        yield one
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        one.reader.cancel()


def described(name: str, engine: Mocker) -> dict[str, Any]:
    """As an LLMServer replica advertises itself."""
    facts = {"id": name, "dp_rank": 0, "block_size": 16, "max_num_batched_tokens": 8192}
    return {**facts, "endpoint": engine.kv_events, "replay_endpoint": engine.kv_replay}


async def acting(one: Ingress) -> list[str]:
    """The engines whose agent is in its process."""
    found: list[str] = (await one.call("state"))["acting"]
    return found


async def test_two_ingress_replicas_one_killed(nats_url: str) -> None:
    """They count each request once, choose by each other's load, and survive each other."""
    namespace, config = uuid.uuid4().hex, MockerConfig(EngineConfig(num_blocks=2049), model_name="tiny")
    async with (
        running_mocker(config) as first,
        running_mocker(config) as second,
        ingress(nats_url, namespace, 0) as a,
        ingress(nats_url, namespace, 1) as b,
        aiohttp.ClientSession() as http,
    ):
        a.peers, b.peers = [b], [a]
        engines = {"e1": first, "e2": second}
        described_engines = [described(name, one) for name, one in engines.items()]
        for one in (a, b):
            await one.call("targets", described_engines)
        ids = {await a.call("worker_id", name): engine for name, engine in engines.items()}
        for one in (a, b):
            await one.until(lambda found: 2 == len(found["workers"]), "both engines are known")

        async def both_act() -> list[str]:
            return sorted(await acting(a) + await acting(b))

        # both may begin at once; then one gives way
        await until_found(both_act, sorted(map(str, ids)).__eq__, within_s=20)

        chosen = await a.call("select_worker", "r1", PROMPT, [*ids], 100)
        assert chosen["worker_id"] in ids
        for one in (a, b):
            await one.until(lambda found: (1, 1) == (found["booked"], found["tracked"]), "counted once")
        other = await b.call("select_worker", "r2", list(range(5000, 5320)), [*ids], 100)
        assert other["worker_id"] != chosen["worker_id"], "b knows of a's request"
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1}
        async with http.post(f"{ids[chosen['worker_id']].url}/v1/completions", json=body) as answer:
            assert 200 == answer.status
        events = [["on_prefill_complete", ["r1"]], ["on_decode_progress", ["r1", 40]]]
        ends = [["on_request_completed", ["r1"]], ["on_request_completed", ["r2"]]]
        for one in (a, b):
            await one.until(lambda found: 2 == found["tracked"], "both were broadcast")
            await one.call("on_lifecycle_events", events)
            await one.until(lambda found: 20 == found["blocks"], "the prompt's blocks are known")
        for one in (a, b):
            await one.call("on_lifecycle_events", ends)
        for one in (a, b):
            await one.until(lambda found: (0, 0) == (found["booked"], found["tracked"]), "freed")
        again = await b.call("select_worker", "r3", PROMPT, [*ids], 100)
        assert (chosen["worker_id"], 320) == (again["worker_id"], again["overlap_tokens"])

        a.peers, b.peers = [], []
        await a.call("select_worker", "lost", PROMPT, [*ids], 100)
        await b.until(lambda found: 2 == found["booked"], "b knows of the request that will be lost")
        a.process.kill()
        await b.until(lambda found: 1 == found["booked"], "a's booking ended with its lease")
        all_ids = sorted(map(str, ids))
        await b.until(lambda found: all_ids == found["acting"], "b is the agent of both engines")
        await b.until(lambda found: 20 == found["blocks"], "their history was read again")
        found = await b.call("select_worker", "r4", PROMPT, [*ids], 100)
        assert 320 == found["overlap_tokens"]
