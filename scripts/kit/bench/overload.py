"""Goodput and rejections during a minute at twice the load that the engines can serve.

Two simulated engines, two replicas, prompts of 4,000 token ids without common prefixes. The peak is the
throughput of a closed loop; then requests are sent at twice that rate, independently of the answers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import aiohttp
import uvloop
from rich.table import Table

from kvrouter.lab.simulate.percentiles import percentiles
from kvrouter.tokens.tiny import build_tiny_model
from scripts.kit import deployment
from scripts.kit.deployment import Deployment, Plan
from scripts.kit.fleet import Fleet, FleetError
from scripts.kit.http_client import Client
from scripts.kit.script import log_directory, new_console, until_signalled

ENGINES, REPLICAS = 2, 2
PROMPT_TOKENS, OUTPUT_TOKENS = 4_000, 8
# Batch size of the engines. Their agents get it as a flag, as vLLM does not report it.
BATCHED_TOKENS = 8_192
# Concurrent requests of the closed loop that finds the peak.
CLOSED_LOOP = 24
QUEUE_FLAGS = ("--router-queue-threshold=1", "--router-queue-size=20", "--router-queue-timeout=5")
# An answer that takes longer counts as failed.
PATIENCE_S = 30.0


@dataclass
class Seen:
    """The results of requests."""

    seconds: float = 0.0
    answered: int = 0
    # Statuses of requests without an answer.
    statuses: Counter[str] = field(default_factory=Counter)
    without_retry_after: int = 0
    latencies_s: list[float] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        """Complete answers per second."""
        return self.answered / self.seconds


class Clients:
    """Sends requests to the replicas in turn."""

    def __init__(self, http: aiohttp.ClientSession, urls: Sequence[str], seed: int) -> None:
        self._http = http
        self._urls = urls
        self._rng = random.Random(seed)
        self._number = 0

    async def ask(self, seen: Seen) -> None:
        """Send one request and record its result."""
        self._number += 1
        url = self._urls[self._number % len(self._urls)]
        prompt = [self._rng.randrange(100, 300) for _ in range(PROMPT_TOKENS)]
        body = {"model": "mock", "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
        began = time.perf_counter()
        try:
            async with self._http.post(f"{url}/v1/completions", json=body) as answer:
                await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            seen.statuses[type(error).__name__] += 1
            return
        if answer.status == 200:
            seen.answered += 1
            seen.latencies_s.append(time.perf_counter() - began)
        else:
            seen.statuses[str(answer.status)] += 1
            seen.without_retry_after += "retry-after" not in answer.headers

    async def closed_loop(self, seconds: float) -> Seen:
        """A closed loop with enough concurrent requests to keep the engines busy."""
        seen = Seen()
        ends = time.perf_counter() + seconds

        async def one_after_the_other() -> None:
            while time.perf_counter() < ends:
                await self.ask(seen)

        began = time.perf_counter()
        await asyncio.gather(*(one_after_the_other() for _ in range(CLOSED_LOOP)))
        seen.seconds = time.perf_counter() - began
        return seen

    async def open_loop(self, rate: float, seconds: float) -> Seen:
        """Send at a fixed rate, however slow the answers are; returns after the last answer."""
        seen = Seen()
        began = time.perf_counter()
        async with asyncio.TaskGroup() as asking:
            for number in range(int(rate * seconds)):
                await asyncio.sleep(began + number / rate - time.perf_counter())
                asking.create_task(self.ask(seen))
        seen.seconds = time.perf_counter() - began
        return seen

    async def live(self, every_s: float = 0.25) -> list[float]:
        """Poll /live of every replica until cancelled; returns the times of the answers."""
        took: list[float] = []
        try:
            while True:
                for url in self._urls:
                    began = time.perf_counter()
                    async with self._http.get(f"{url}/live") as answer:
                        assert answer.status == 200, answer.status
                    took.append(time.perf_counter() - began)
                await asyncio.sleep(every_s)
        except asyncio.CancelledError:
            return took


async def run(flags: argparse.Namespace) -> int:
    """Peak, overload, and the table."""
    console = new_console()
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(Fleet(stack.enter_context(log_directory("overload"))))
        deployed = await _set_up(stack, fleet, [] if flags.no_queue else QUEUE_FLAGS)
        timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
        connector = aiohttp.TCPConnector(limit=0)
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout, connector=connector))
        clients = Clients(http, [replica.url for replica in deployed.replicas], flags.seed)
        await clients.closed_loop(flags.peak_s / 4)  # until the caches are full
        peak = await clients.closed_loop(flags.peak_s)
        asking = asyncio.create_task(clients.live())
        over = await clients.open_loop(2 * peak.goodput, flags.seconds)
        asking.cancel()
        live = await asking
        after = await clients.closed_loop(flags.peak_s / 4)
        fleet.check()
    rows = {"peak, closed loop": peak, "twice the peak": over, "closed loop again": after}
    console.print(_table(rows))
    share = over.goodput / peak.goodput
    console.print(
        f"goodput under overload {share:.0%} of the peak; refused without Retry-After:"
        f" {over.without_retry_after}; slowest /live of {len(live)}: {max(live) * 1000:.0f} ms",
        highlight=False,
    )
    if flags.json is not None:
        body = {
            "share": share,
            "live_s": max(live),
            "rows": {name: asdict(row) for name, row in rows.items()},
        }
        flags.json.write_text(json.dumps(body, indent=2) + "\n")
    return 0


async def _set_up(stack: AsyncExitStack, fleet: Fleet, frontend_flags: Sequence[str]) -> Deployment:
    client = Client()
    stack.callback(client.close)
    model = fleet.directory / "model"
    build_tiny_model(model)
    nats_url = await deployment.start_nats(fleet, client)
    batched = dict.fromkeys(range(ENGINES), (f"--max-num-batched-tokens={BATCHED_TOKENS}",))
    plan = Plan(
        "kv",
        model,
        engines=ENGINES,
        replicas=REPLICAS,
        namespace="overload",
        frontend_flags=tuple(frontend_flags),
        mocker_flags=batched,
        agent_flags=batched,
    )
    return await deployment.deploy(fleet, client, plan, nats_url)


def _table(rows: dict[str, Seen]) -> Table:
    table = Table("load", "requests/s answered", "p50, p99 s", "not answered")
    for name, row in rows.items():
        took = percentiles(row.latencies_s)
        refused = ", ".join(f"{count} x {status}" for status, count in row.statuses.items()) or "none"
        table.add_row(name, f"{row.goodput:.1f}", f"{took.p50:.2f}, {took.p99:.2f}", refused)
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench overload", description=__doc__.split("\n", maxsplit=1)[0]
    )
    add = parser.add_argument
    add("--seconds", type=float, default=60.0, help="seconds of overload (%(default)s)")
    add("--peak-s", type=float, default=20.0, help="seconds for the peak (%(default)s)")
    add("--no-queue", action="store_true", help="without the admission queue: no request is rejected")
    add("--seed", type=int, default=1)
    add("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    try:
        return uvloop.run(until_signalled("bench overload", run(parser.parse_args(arguments))))
    except FleetError as error:
        print(f"bench overload: {error}", file=sys.stderr)
        return 1
