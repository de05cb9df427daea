"""Mutated and forged messages against real replicas and agents, then honest traffic.

The attacker receives everything published in a namespace, including answers to requests. It sends mutants of
it on the same subject or another one of its kind, false answers to requests before their owners answer, and
well-formed heartbeats, cards, frames and blocks of replicas and workers that do not exist (forged.py).
Load continues meanwhile. Agents that end because another process uses their name are restarted, as by a
supervisor.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, deque
from contextlib import AsyncExitStack
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg

from kvrouter.bus import Subjects
from kvrouter.core.wire.ids import PoolId, WorkerId
from kvrouter.core.wire.senders import KvSource, RouterSource, Source, SyncSource, WorkerSource
from scripts.kit.bench.meter import resident_bytes
from scripts.kit.chaos.judge import Damage, Leftovers
from scripts.kit.chaos.stage import Stage, open_stage
from scripts.kit.deployment import Plan
from scripts.kit.fleet import Process
from scripts.kit.load import SteadyLoad
from scripts.kit.workload import load_requests
from tests.fuzz.forged import Forger, Real
from tests.fuzz.mutate import Mutator
from tests.long import needs_long

NAMESPACE = "fuzz"
MESSAGES, RATE = 300_000, 2500.0
# Requests a second, before, during and after the attack.
LOAD_RATE = 4.0
WARM_S = 20.0
# A forged heartbeat may state the longest interval: an invented worker then has a lease of 50 s, and if its
# pool has no other it is probed for as long again.
HEAL_LIMIT_S = 150.0
# Time in which the allocator returns memory that is free.
SETTLE_S = 75.0
BURST = 100
# The part of the messages that is forged, not mutated.
FORGED_SHARE = 0.3
# Limits of an answer of /live, and of memory after the attack above that before it. The allocator's rest and
# tables that have grown with the honest load are within it.
LIVE_S, MORE_MIB = 1.0, 96.0
# Messages of each kind that the attacker remembers.
_KEPT = 200


@needs_long("six minutes")
@pytest.mark.timeout(1800)
async def test_replicas_outlive_an_attacker(tmp_path: Path) -> None:
    """Every replica then holds the blocks that the agents publish, and these hold their engines' blocks.

    /live answers all the time, memory returns, and no exception is logged.
    """
    async with AsyncExitStack() as stack:
        stage = await stack.enter_async_context(open_stage(tmp_path, _plan))
        client = await nats.connect(stage.deployed.nats_url, no_echo=True, pending_size=64 * 2**20)
        stack.push_async_callback(client.close)
        attacker = Attacker(client, 1, await _real(stage))
        await attacker.listen()
        async with SteadyLoad(load_requests(100, output_divisor=2), stage.urls, rate=LOAD_RATE):
            await asyncio.sleep(WARM_S)
            before = _memory_mib(stage)
            guard = asyncio.create_task(_guard(stage))
            await attacker.attack(MESSAGES, RATE)
            healed_s, reasons = await stage.until_clean(Damage(time.perf_counter()), HEAL_LIMIT_S)
            guard.cancel()
            slowest_s = await guard
        leftovers = await _leftovers(stage)
        await asyncio.sleep(SETTLE_S)
        grown = {name: now - before[name] for name, now in _memory_mib(stage).items()}
        metrics = [(await stage.client.get(f"{url}/metrics"))[1].decode() for url in stage.urls]
        logs = {one.name: one.log.read_text(errors="replace") for one in stage.fleet.processes.values()}

    assert healed_s is not None, reasons
    assert 0 == leftovers.total, leftovers
    assert slowest_s <= LIVE_S
    assert max(grown.values()) <= MORE_MIB, grown
    failed = 'kvrouter_bus_messages_total{event="failed"}'
    assert [] == [line for text in metrics for line in text.splitlines() if _counts(line, failed)]
    assert [] == [name for name, log in logs.items() if "Traceback" in log]


async def _leftovers(stage: Stage) -> Leftovers:
    """Once the last invented worker is gone: until then it is a target, which has no agent to ask."""
    async with asyncio.timeout(HEAL_LIMIT_S):
        while True:
            try:
                return await stage.leftovers()
            except RuntimeError:
                await asyncio.sleep(1.0)


def _counts(line: str, name: str) -> bool:
    return line.startswith(name) and float(line.rsplit(maxsplit=1)[-1]) > 0


class Attacker:
    """A NATS client that remembers messages and sends mutants of them."""

    def __init__(self, client: NatsClient, seed: int, real: Real) -> None:
        # Messages sent, by kind.
        self.sent: Counter[str] = Counter()
        self.is_answering = False
        self._client = client
        self._rng = random.Random(seed)
        self._mutator = Mutator(self._rng)
        self._forger = Forger(self._rng, real)
        self._subjects = Subjects(NAMESPACE)
        self._heard: dict[str, deque[tuple[str, bytes]]] = {}

    async def listen(self) -> None:
        """Subscribe to all messages of the namespace, answers included."""
        await self._client.subscribe(f"kvrouter.{NAMESPACE}.>", cb=self._hear)
        await self._client.flush()

    async def attack(self, messages: int, rate: float) -> None:
        """Send this many mutants, including false answers, at most `rate` per second."""
        self.is_answering = True
        started = time.monotonic()
        while (sent := self.sent.total()) < messages:
            for _ in range(min(BURST, messages - sent)):
                await self._strike()
            await self._client.flush(timeout=60)
            ahead_s = self.sent.total() / rate - (time.monotonic() - started)
            await asyncio.sleep(max(0.0, ahead_s))
        self.is_answering = False

    async def _hear(self, message: Msg) -> None:
        kind = message.subject.split(".")[2]
        if kind == "live":
            kind = message.subject.split(".")[3]
        self._heard.setdefault(kind, deque(maxlen=_KEPT)).append((message.subject, message.data))
        if self.is_answering and message.reply and self._rng.random() < 0.5 and "answer" in self._heard:
            _, answer = self._rng.choice(self._heard["answer"])
            await self._send("answer", message.reply, self._mutant(answer))

    async def _strike(self) -> None:
        rng = self._rng
        if rng.random() < FORGED_SHARE:
            source, payload = self._forger.message()
            await self._send("forged", _subject(self._subjects, source), payload)
            return
        kind = rng.choice([kind for kind in self._heard if kind != "answer"])
        subject, payload = rng.choice(self._heard[kind])
        if rng.random() < 0.1:
            subject, _ = rng.choice(self._heard[kind])
        if rng.random() < 0.05:
            subject = f"{subject}{rng.choice(('x', '.0', '9', '-'))}"
        await self._send(kind, subject, self._mutant(payload))

    def _mutant(self, payload: bytes) -> bytes:
        return payload if self._rng.random() < 0.1 else self._mutator.mutate(payload)

    async def _send(self, kind: str, subject: str, payload: bytes) -> None:
        self.sent[kind] += 1
        await self._client.publish(subject, payload)


def _subject(subjects: Subjects, source: Source) -> str:
    match source:
        case WorkerSource(worker_id):
            return subjects.live_worker(worker_id)
        case RouterSource(router_id):
            return subjects.live_router(router_id)
        case KvSource(pool, worker_id, _):
            return subjects.live_kv(pool, worker_id, 0)
        case SyncSource(pool, router_id):
            return subjects.live_sync(pool, router_id)
        case _:
            raise ValueError(f"nothing is published of {source}")


async def _real(stage: Stage) -> Real:
    """The members of the fleet, as its first replica knows them."""
    (replica, *_) = stage.deployed.replicas
    known = await stage.client.get_json(f"{replica.admin_url}/workers")
    targets = known["targets"]
    return Real(
        [PoolId(pool["pool"]) for pool in known["pools"]],
        [WorkerId(target["worker_id"]) for target in targets],
        [*stage.urls, *(target["url"] for target in targets)],
    )


def _plan(directory: Path) -> Plan:
    return Plan("kv", directory / "model", engines=3, replicas=2, num_blocks=2048, namespace=NAMESPACE)


def _watched(stage: Stage) -> list[Process]:
    return [one for name, one in stage.fleet.processes.items() if name.startswith(("frontend", "agent"))]


def _memory_mib(stage: Stage) -> dict[str, float]:
    return {one.name: resident_bytes(one.pid) / 2**20 for one in _watched(stage)}


async def _guard(stage: Stage) -> float:
    """Restart agents and poll /live until cancelled. Returns the slowest answer in s."""
    slowest_s = 0.0
    try:
        while True:
            await asyncio.sleep(1.0)
            for process in _watched(stage):
                if process.name.startswith("frontend"):
                    process.check()
                elif process.returncode is not None:
                    await stage.fleet.start_again(process.name)
            for url in stage.urls:
                asked = time.monotonic()
                await stage.client.get(f"{url}/live")
                slowest_s = max(slowest_s, time.monotonic() - asked)
    except asyncio.CancelledError:
        return slowest_s
