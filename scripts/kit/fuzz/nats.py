"""Mutated and forged messages against real replicas and agents, then honest traffic.

The attacker receives everything published in a namespace, including answers to requests. It sends mutants of
it on the same subject or another one of its kind, false answers to requests before their owners answer, and
well-formed heartbeats, cards, frames and blocks of replicas and workers that do not exist (forged.py).
Load continues meanwhile. Agents that end because another process uses their name are restarted, as by a
supervisor. Afterwards every replica must hold the blocks that the agents publish, and these the blocks that
their engines hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import nats
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg
from rich.console import Console
from rich.table import Table

from kvrouter.bus import Subjects
from kvrouter.core.wire.ids import PoolId, WorkerId
from kvrouter.core.wire.senders import KvSource, RouterSource, Source, SyncSource, WorkerSource
from scripts.kit.bench.meter import resident_bytes
from scripts.kit.chaos.judge import Damage
from scripts.kit.chaos.stage import Stage, open_stage
from scripts.kit.deployment import Plan
from scripts.kit.fleet import Process
from scripts.kit.fuzz.forged import Forger, Real
from scripts.kit.fuzz.mutate import Mutator
from scripts.kit.load import SteadyLoad
from scripts.kit.script import new_console, table_of
from scripts.kit.workload import load_requests

NAMESPACE = "fuzz"
REPLICAS, ENGINES = 2, 3
# Requests a second, before, during and after the attack.
LOAD_RATE = 4.0
WARM_S = 20.0
# A forged heartbeat may state the longest interval: an invented worker then has a lease of 50 s, and if its
# pool has no other it is probed for as long again.
HEAL_LIMIT_S = 150.0
# So long the memory that is free goes back.
SETTLE_S = 75.0
BURST = 100
# The part of the messages that is forged, not mutated.
FORGED_SHARE = 0.3
# What may not be exceeded: an answer of /live, and memory after the attack above that before it. The
# allocator's rest and tables that have grown with the honest load are within it.
LIVE_S, MORE_MIB = 1.0, 96.0
# Messages of each kind that the attacker remembers.
_KEPT = 200


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


class Memory:
    """The resident memory of processes in MiB, at named moments."""

    def __init__(self) -> None:
        self.columns: dict[str, dict[str, float]] = {}

    def note(self, moment: str, processes: Sequence[Process]) -> None:
        """Record the current memory; a repeated moment keeps the maximum."""
        column = self.columns.setdefault(moment, {})
        for process in processes:
            resident = resident_bytes(process.pid) / 2**20
            column[process.name] = max(resident, column.get(process.name, 0.0))

    def grown_mib(self) -> float:
        """By how much the process that grew most has grown from the first moment to the last."""
        first, *_, last = self.columns.values()
        return max(last[name] - first[name] for name in last.keys() & first.keys())

    def table(self) -> Table:
        """A row for each process."""
        names = dict.fromkeys(name for column in self.columns.values() for name in column)
        rows = [[name, *(f"{one.get(name, 0):.0f}" for one in self.columns.values())] for name in names]
        return table_of("memory", ["MiB resident", *self.columns], rows)


async def run(messages: int, rate: float, seed: int, flags: Sequence[str]) -> int:
    """The whole run; 0 if all checks passed."""
    console = new_console()
    async with AsyncExitStack() as stack:
        stage = await stack.enter_async_context(open_stage("fuzz", lambda directory: _plan(directory, flags)))
        client = await nats.connect(stage.deployed.nats_url, no_echo=True, pending_size=64 * 2**20)
        stack.push_async_callback(client.close)
        attacker = Attacker(client, seed, await _real(stage))
        await attacker.listen()
        memory = Memory()
        async with SteadyLoad(load_requests(100, output_divisor=2), stage.urls, rate=LOAD_RATE):
            await asyncio.sleep(WARM_S)
            memory.note("before", _watched(stage))
            started = time.monotonic()
            guard = asyncio.create_task(_guard(stage, memory))
            await attacker.attack(messages, rate)
            seconds = time.monotonic() - started
            healed_s, reasons = await stage.until_clean(Damage(time.perf_counter()), HEAL_LIMIT_S)
            guard.cancel()
            restarted, slowest_s = await guard
            console.print(
                f"{attacker.sent.total():,} messages in {seconds:.0f} s: {dict(attacker.sent)};"
                f" {restarted} agents restarted; slowest /live {slowest_s:.2f} s",
                highlight=False,
                soft_wrap=True,
            )
        is_slow = slowest_s > LIVE_S
        return await _judge(console, stage, memory, healed_s, reasons) or int(is_slow)


async def _real(stage: Stage) -> Real:
    """The members of the fleet, as its first replica knows them."""
    (replica, *_) = stage.deployed.replicas
    _, body = await stage.client.get(f"{replica.admin_url}/workers")
    known = json.loads(body)
    targets = known["targets"]
    return Real(
        [PoolId(pool["pool"]) for pool in known["pools"]],
        [WorkerId(target["worker_id"]) for target in targets],
        [*stage.urls, *(target["url"] for target in targets)],
    )


def _plan(directory: Path, flags: Sequence[str]) -> Plan:
    return Plan(
        "kv",
        directory / "model",
        engines=ENGINES,
        replicas=REPLICAS,
        num_blocks=2048,
        namespace=NAMESPACE,
        frontend_flags=tuple(flags),
    )


def _watched(stage: Stage) -> list[Process]:
    return [one for name, one in stage.fleet.processes.items() if name.startswith(("frontend", "agent"))]


async def _guard(stage: Stage, memory: Memory) -> tuple[int, float]:
    """Restart agents and poll /live until cancelled. Returns the restarts and the slowest answer in s."""
    restarted, slowest_s = 0, 0.0
    try:
        while True:
            await asyncio.sleep(1.0)
            memory.note("at most", _watched(stage))
            for process in _watched(stage):
                if process.name.startswith("frontend"):
                    process.check()
                elif process.returncode is not None:
                    await stage.fleet.start_again(process.name)
                    restarted += 1
            for url in stage.urls:
                asked = time.monotonic()
                await stage.client.get(f"{url}/live")
                slowest_s = max(slowest_s, time.monotonic() - asked)
    except asyncio.CancelledError:
        return restarted, slowest_s


async def _judge(
    console: Console, stage: Stage, memory: Memory, healed_s: float | None, reasons: Sequence[str]
) -> int:
    """Print the leftovers; 0 if there are none."""
    leftovers = await stage.leftovers()
    await asyncio.sleep(SETTLE_S)
    memory.note("after", _watched(stage))
    errors, dropped = 0.0, 0.0
    for url in stage.urls:
        text = (await stage.client.get(f"{url}/metrics"))[1].decode()
        errors += _metric(text, 'kvrouter_bus_messages_total{event="failed"}')
        dropped += _metric(text, 'kvrouter_bus_messages_total{event="dropped"}')
    grown = memory.grown_mib()
    logs = [process.log.read_text(errors="replace") for process in stage.fleet.processes.values()]
    tracebacks = sum(log.count("Traceback") for log in logs)
    console.print(memory.table())
    healed = "never: " + "; ".join(reasons) if healed_s is None else f"after {healed_s:.1f} s"
    console.print(
        f"equal to the owners {healed}; left over: {leftovers}; exceptions: {errors:g};"
        f" tracebacks in logs: {tracebacks}; messages the replicas dropped: {dropped:g};"
        f" memory grew by {grown:.0f} MiB at most",
        highlight=False,
        soft_wrap=True,
    )
    is_wrong = healed_s is None or leftovers.total or errors or tracebacks or grown > MORE_MIB
    return int(bool(is_wrong))


def _metric(text: str, name: str) -> float:
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `fuzz nats`."""
    parser.add_argument("--messages", type=int, default=1_000_000, help="number of messages (%(default)s)")
    parser.add_argument("--rate", type=float, default=4000.0, help="most messages per second (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the mutations")
    parser.add_argument(
        "--core", choices=("native", "python"), default="native", help="version of the replicas' tables"
    )


def main(flags: argparse.Namespace) -> int:
    """Run it; exit code 0 if all checks passed."""
    return asyncio.run(run(flags.messages, flags.rate, flags.seed, [f"--core={flags.core}"]))
