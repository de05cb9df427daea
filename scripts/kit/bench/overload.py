"""Goodput and rejections during a minute at twice the load that the engines can serve.

Two simulated engines, two replicas, prompts of 4,000 token ids without common prefixes. The peak is the
throughput of a closed loop; then requests are sent at twice that rate, independently of the answers.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvrouter.lab.simulate.percentiles import percentiles
from scripts.kit.bench.meter import conclude, machine
from scripts.kit.deployment import Plan, Stage, open_stage
from scripts.kit.load import LoadRequest, Outcome, closed_loop, run_load
from scripts.kit.script import table_of
from scripts.kit.workload import completion

ENGINES, REPLICAS = 2, 2
PROMPT_TOKENS, OUTPUT_TOKENS = 4_000, 8
# Batch size of the engines. Their agents get it as a flag, as vLLM does not report it.
BATCHED = dict.fromkeys(range(ENGINES), ("--max-num-batched-tokens=8192",))
# Concurrent requests of the closed loop that finds the peak.
CLOSED_LOOP = 24
QUEUE_FLAGS = ("--router-queue-threshold=1", "--router-queue-size=20", "--router-queue-timeout=5")
# An answer that takes longer counts as failed.
PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class Seen:
    """The results of the requests of some seconds."""

    outcomes: Sequence[Outcome]
    seconds: float

    @property
    def goodput(self) -> float:
        """Complete answers per second."""
        return sum(one.error is None for one in self.outcomes) / self.seconds

    def row(self, name: str) -> list[str]:
        took = percentiles(one.latency_s for one in self.outcomes if one.error is None)
        failed = Counter(str(one.status or one.error) for one in self.outcomes if one.error)
        refused = ", ".join(f"{count} x {status}" for status, count in failed.items()) or "none"
        return [name, f"{self.goodput:.1f}", f"{took.p50:.2f}, {took.p99:.2f}", refused]


def prompts(seed: int) -> Iterator[bytes]:
    """Without end."""
    rng = random.Random(seed)
    while True:
        yield completion([rng.randrange(100, 300) for _ in range(PROMPT_TOKENS)], OUTPUT_TOKENS)


async def _closed(urls: Sequence[str], bodies: Iterator[bytes], seconds: float) -> Seen:
    began, requests = time.perf_counter(), (LoadRequest(0.0, body) for body in bodies)
    outcomes = await closed_loop(
        requests, urls, concurrency=CLOSED_LOOP, seconds=seconds, timeout_s=PATIENCE_S
    )
    return Seen(outcomes, time.perf_counter() - began)


async def _open(urls: Sequence[str], bodies: Iterator[bytes], rate: float, seconds: float) -> Seen:
    requests = [LoadRequest(number / rate, next(bodies)) for number in range(int(rate * seconds))]
    began = time.perf_counter()
    outcomes = await run_load(requests, urls, request_timeout_s=PATIENCE_S)
    return Seen(outcomes, time.perf_counter() - began)


async def _poll_live(stage: Stage, urls: Sequence[str], took: list[float]) -> None:
    """Poll /live of every replica until cancelled."""
    while True:
        for url in urls:
            began = time.perf_counter()
            status, _ = await stage.client.get(f"{url}/live")
            assert status == 200, status
            took.append(time.perf_counter() - began)
        await asyncio.sleep(0.25)


async def run(flags: argparse.Namespace) -> int:
    """Peak, overload, and the table."""
    bodies, live = prompts(flags.seed), list[float]()
    async with open_stage("bench") as stage:
        plan = Plan(
            "kv", stage.model_path, engines=ENGINES, replicas=REPLICAS, namespace="overload",
            frontend_flags=() if flags.no_queue else QUEUE_FLAGS, mocker_flags=BATCHED, agent_flags=BATCHED,
        )  # fmt: skip
        urls = [replica.url for replica in (await stage.deploy(plan)).replicas]
        await _closed(urls, bodies, flags.peak_s / 4)  # until the caches are full
        peak = await _closed(urls, bodies, flags.peak_s)
        polling = asyncio.create_task(_poll_live(stage, urls, live))
        over = await _open(urls, bodies, 2 * peak.goodput, flags.seconds)
        polling.cancel()
        after = await _closed(urls, bodies, flags.peak_s / 4)
        stage.fleet.check()
    share = over.goodput / peak.goodput
    bare = sum(one.status not in {None, 200} and one.retry_after is None for one in over.outcomes)
    rows = {"peak, closed loop": peak, "twice the peak": over, "closed loop again": after}
    shown = [one.row(name) for name, one in rows.items()]
    table = table_of("", ("load", "requests/s answered", "p50, p99 s", "not answered"), shown)
    figures = {"share": share, "without_retry_after": bare, "live_s": max(live), "rows": shown}
    conclude(flags, [table], machine(), **figures)
    print(
        f"goodput under overload {share:.0%} of the peak; refused without Retry-After: {bare};"
        f" slowest /live of {len(live)}: {max(live) * 1000:.0f} ms"
    )
    return 0


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--seconds", type=float, default=60.0, help="seconds of overload (%(default)s)")
    add("--peak-s", type=float, default=20.0, help="seconds for the peak (%(default)s)")
    add("--no-queue", action="store_true", help="without the admission queue: no request is rejected")
    add("--seed", type=int, default=1)
