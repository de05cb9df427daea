"""Hostile KV events over real sockets, to the agents of two engines in one real process.

One engine publishes vLLM's events, one SGLang's. In each round both publish honest batches among hostile
ones and answer replays and scrapes badly; then they are honest again. The agent must survive, publish the
blocks that the engines hold, use no more memory than after the first round, and log no error.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from rich.console import Console

from kvrouter.bus import Subjects
from kvrouter.bus.rights import VERIFY
from kvrouter.config import open_bus
from kvrouter.observe.verify import VerifyError
from kvrouter.observe.verify.agents import Requests
from scripts.kit.bench.meter import resident_bytes
from scripts.kit.chaos.truth import agent_blocks
from scripts.kit.deployment import start_nats
from scripts.kit.fleet import Fleet, FleetError, Process
from scripts.kit.fuzz.engine import ServedEngine
from scripts.kit.http_client import Client
from scripts.kit.script import log_directory, new_console, run, table_of

ROUNDS = 10
HONEST_ONE_IN = 50
# Messages per second: slow enough for the agent to keep up and to request replays while these are hostile.
BURST, PAUSE_S = 100, 0.04
EQUAL_WITHIN_S = 60.0
# Memory allowed above that after the first round: the allocator's rest after a burst varies by this much.
MORE_BYTES = 32 * 1024 * 1024
NAMESPACE = "fuzz"


@dataclass(frozen=True, slots=True)
class Round:
    """The result of one round."""

    frames: int
    sent_s: float
    equal_s: float
    resident_bytes: int


@dataclass(frozen=True, slots=True)
class Scene:
    """The agent's process, its engines, and requests to it."""

    agent: Process
    engines: Sequence[ServedEngine]
    requests: Requests

    async def round(self, frames: int) -> Round:
        """Run one round. Raises FleetError if the agent ends, or does not equal the engines in time."""
        started = time.monotonic()
        await asyncio.gather(*(hostile(engine, frames // len(self.engines)) for engine in self.engines))
        sent = time.monotonic()
        await asyncio.gather(*(honest(engine) for engine in self.engines))
        for worker_id, engine in zip(_WORKERS, self.engines, strict=True):
            await self._until_equal(worker_id, engine)
        self.agent.check()
        return Round(frames, sent - started, time.monotonic() - sent, resident_bytes(self.agent.pid))

    async def _until_equal(self, worker_id: str, engine: ServedEngine) -> None:
        published: set[int] = set()
        try:
            async with asyncio.timeout(EQUAL_WITHIN_S):
                while True:
                    self.agent.check()
                    with contextlib.suppress(VerifyError, RuntimeError):  # no answer, or a malformed one
                        published = await agent_blocks(self.requests, worker_id)
                        if published == engine.engine.held():
                            return
                    await asyncio.sleep(0.2)
        except TimeoutError:
            held = engine.engine.held()
            raise FleetError(
                f"worker {worker_id} lacks {len(held - published)} blocks and has {len(published - held)} "
                f"too many, {EQUAL_WITHIN_S:g} s after the attack; its last output:\n{self.agent.tail()}"
            ) from None


_WORKERS = ("vllm", "sglang")


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


async def honest(engine: ServedEngine, batches: int = 20) -> None:
    """Publish as an engine does for a second."""
    for _ in range(batches):
        await engine.publish_honest()
        await asyncio.sleep(0.05)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `fuzz zmq`."""
    parser.add_argument(
        "--frames", type=int, default=200_000, help="number of hostile messages (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the messages")


def main(flags: argparse.Namespace) -> int:
    """Run it; exit code 0 if all checks passed."""
    return run("fuzz", _run(flags.frames, flags.seed, new_console()))


async def _run(frames: int, seed: int, console: Console) -> int:
    with log_directory("fuzz") as directory:
        async with Fleet(directory) as fleet, _scene(fleet, seed) as scene:
            rounds = [await scene.round(frames // ROUNDS) for _ in range(ROUNDS)]
            log = scene.agent.log.read_text(errors="replace")
    return _report(rounds, log, console)


@contextlib.asynccontextmanager
async def _scene(fleet: Fleet, seed: int) -> AsyncIterator[Scene]:
    async with contextlib.AsyncExitStack() as stack:
        nats_url = await start_nats(fleet, await stack.enter_async_context(Client()))
        vllm = await stack.enter_async_context(ServedEngine.open("vllm", seed))
        sglang = await stack.enter_async_context(ServedEngine.open("sglang", seed + 1))
        engines = fleet.directory / "engines.toml"
        engines.write_text(
            "".join(
                f"[[engine]]\nengine-url = '{engine.url}'\nworker-id = '{worker_id}'\n"
                for worker_id, engine in zip(_WORKERS, (vllm, sglang), strict=True)
            )
        )
        agent = await fleet.start(
            "agent",
            [sys.executable, "-m", "kvrouter.worker", f"--engines={engines}", f"--nats={nats_url}",
             f"--namespace={NAMESPACE}"],
        )  # fmt: skip
        async with asyncio.timeout(EQUAL_WITHIN_S):
            await asyncio.gather(vllm.until_subscribed(), sglang.until_subscribed())
        bus = await stack.enter_async_context(open_bus(nats_url, name="fuzz", user=VERIFY))
        requests = Requests(bus, Subjects(NAMESPACE))
        await requests.begin()
        yield Scene(agent, (vllm, sglang), requests)


def _report(rounds: Sequence[Round], log: str, console: Console) -> int:
    rows = [
        [number, f"{one.frames:,}", f"{one.sent_s:.1f} s", f"{one.equal_s:.1f} s",
         f"{one.resident_bytes / 2**20:.0f} MiB"]
        for number, one in enumerate(rounds, 1)
    ]  # fmt: skip
    console.print(table_of("", ("round", "frames", "sent in", "equal after", "resident"), rows))
    faults = [word for word in ("Traceback", "engine.events_failed", "worker.failed") if word in log]
    grown = rounds[-1].resident_bytes - rounds[0].resident_bytes
    if grown > MORE_BYTES:
        faults.append(f"{grown / 2**20:.0f} MiB more than after the first round")
    console.print("the agent's log and memory: " + (", ".join(faults) or "no problem"))
    return 1 if faults else 0
