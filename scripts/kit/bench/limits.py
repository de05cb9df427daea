"""Limits of keys in a burst: how many requests pass, through several replicas, each a process.

In each round the requests of one tenant are sent at once, spread over all replicas or to one of them.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import aiohttp
from rich.table import Table

from scripts.kit.bench.keyring import keyring
from scripts.kit.bench.meter import conclude, machine
from scripts.kit.bench.wire.stage import Stage, open_stage
from scripts.kit.bench.wire.targets import OURS
from scripts.kit.bench.wire.works import SHORT_BODIES, raise_descriptor_limit
from scripts.kit.figures import MachineTime
from scripts.kit.script import table_of

# Bookings of the last round have ended, and replicas know each other.
SETTLE_S = 3.0


@dataclass(frozen=True, slots=True)
class Round:
    """One burst."""

    where: str
    sent: int
    passed: int
    refused: int
    slowest_ms: float
    """Of the requests that passed."""


async def run(flags: argparse.Namespace) -> int:
    """Measure; returns the exit code."""
    raise_descriptor_limit()
    before, rounds = MachineTime.now(), []
    async with open_stage() as stage:
        rights = {"requests-per-minute": flags.limit}
        keys, more = keyring(stage.directory, 2 * flags.runs, rights)
        ports = await _replicas(stage, flags.replicas, [*more, "--router-replica-sync"])
        await asyncio.sleep(SETTLE_S)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            for number, key in enumerate(keys):
                is_spread = number % 2 == 0
                targets = ports if is_spread else ports[:1]
                where = f"all {flags.replicas}" if is_spread else "one"
                count = flags.requests if is_spread else flags.limit
                rounds.append(await _burst(session, where, targets, key, count))
                await asyncio.sleep(SETTLE_S)
    conclude(flags, [table(rounds, flags.limit)], machine(before), rounds=[asdict(one) for one in rounds])
    return 0


async def _replicas(stage: Stage, count: int, more: Sequence[str]) -> list[int]:
    workers = await stage.workers(pace_ms=5)
    return [(await stage.ours(OURS, workers, None, more)).port for _ in range(count)]


async def _burst(
    session: aiohttp.ClientSession, where: str, ports: Sequence[int], key: str, count: int
) -> Round:
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    took: list[float] = []

    async def one(number: int) -> int:
        url, began = f"http://127.0.0.1:{ports[number % len(ports)]}/v1/completions", time.monotonic()
        body = SHORT_BODIES[number % len(SHORT_BODIES)]
        async with session.post(url, data=body, headers=headers) as response:
            await response.read()
        if response.status == 200:
            took.append(time.monotonic() - began)
        return response.status

    statuses = Counter(await asyncio.gather(*(one(number) for number in range(count))))
    return Round(where, count, statuses[200], statuses[429], 1000 * max(took))


def table(rounds: Sequence[Round], limit: int) -> Table:
    """One row a burst."""
    rows = [
        [
            one.where,
            f"{one.sent:,}",
            f"{one.passed:,}",
            f"{one.passed / limit - 1:+.1%}",
            f"{one.slowest_ms:.0f} ms",
        ]
        for one in rounds
    ]
    return table_of(
        f"bursts under a limit of {limit:,} requests a minute",
        ("replicas", "sent", "passed", "above", "slowest"),
        rows,
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--replicas", type=int, default=4, metavar="N", help="number (%(default)s)")
    add("--limit", type=int, default=600, metavar="N", help="requests a minute (%(default)s)")
    add("--requests", type=int, default=2400, metavar="N", help="of a burst at all replicas (%(default)s)")
    add("--runs", type=int, default=5, metavar="N", help="bursts at all replicas, and at one (%(default)s)")
