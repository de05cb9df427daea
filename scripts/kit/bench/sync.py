"""Cost of replica sync: CPU and bytes per request, at the replica that serves it and at the others.

Real frontends, simulated engines, requests at a fixed rate: all to one replica, or to all in turn.
The same with --no-router-replica-sync shows how much of a peer's cost is due to KV events. The usage of
an idle replica (heartbeats) is measured first and subtracted. Then the delay until a booking is visible at
the others (visibility.py).
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from statistics import mean, median

from rich.table import Table

from kvrouter.lab.simulate.percentiles import percentiles
from kvrouter.tokens.tiny import VOCABULARY_SIZE
from scripts.kit.bench import visibility
from scripts.kit.bench.meter import Usage, conclude, machine, usage
from scripts.kit.bench.visibility import Seen
from scripts.kit.deployment import Deployment, Plan, Stage, open_stage
from scripts.kit.figures import MachineTime
from scripts.kit.load import LoadRequest, SteadyLoad, check
from scripts.kit.script import table_of
from scripts.kit.workload import completion

PROMPT_TOKENS, OUTPUT_TOKENS, PROMPTS = 1024, 16, 400
# Smaller than all prompts together: each request stores its blocks and evicts as many.
NUM_BLOCKS = 4096
ENGINES, SPEEDUP, WARM_S = 2, 20.0, 1.5
# Bookings/s of further measurements of a peer's cost: a busier process needs less CPU time for each.
HIGHER_RATES = (250.0, 1000.0)
# The number of requests of a run, and each replica's usage for them.
Run = tuple[int, Sequence[Usage]]


@dataclass(frozen=True, slots=True)
class Cost:
    """Per request, the median of the runs: `serving` at replicas that receive requests, `peer` at the others.

    If `spread`, each replica serves one of N requests and receives the bookings of the rest.
    """

    replicas: int
    spread: bool
    synced: bool
    serving: Usage
    peer: Usage | None

    @classmethod
    def of(cls, runs: Sequence[Run], *, replicas: int, spread: bool, synced: bool) -> Cost:
        serving = replicas if spread else 1
        peers = range(serving, replicas)
        return cls(
            replicas, spread, synced, _usage(runs, range(serving)), _usage(runs, peers) if peers else None
        )


def _usage(runs: Sequence[Run], numbers: range) -> Usage:
    means = [
        [mean(figures) / requests for figures in zip(*(astuple(used[n]) for n in numbers), strict=True)]
        for requests, used in runs
    ]
    return Usage(*map(median, zip(*means, strict=True)))


@dataclass(frozen=True, slots=True)
class Visibility:
    """One replica's bookings as seen by the others, without HTTP and KV events; medians of the runs."""

    replicas: int
    rate: float
    """Bookings/s that were achieved."""
    samples: int
    p50_ms: float
    p90_ms: float
    p99_ms: float
    cpu_us: float
    """For a booking at a peer."""

    @classmethod
    def median(cls, replicas: int, seconds: float, runs: Sequence[Seen]) -> Visibility:
        times = [percentiles(run.latencies_ms) for run in runs]
        p50, p90, p99 = (median(getattr(one, name) for one in times) for name in ("p50", "p90", "p99"))
        samples = round(median(len(run.latencies_ms) for run in runs))
        cpu_us = median(run.cpu_us for run in runs)
        return cls(replicas, samples / (replicas - 1) / seconds, samples, p50, p90, p99, cpu_us)


async def _costs(
    stage: Stage, flags: argparse.Namespace, replicas: int, requests: Sequence[LoadRequest], *, synced: bool
) -> list[Cost]:
    """Deploy, measure the idle usage, then each way of spreading the load."""
    plan = Plan(
        "kv", stage.model_path, engines=ENGINES, replicas=replicas, num_blocks=NUM_BLOCKS, speedup=SPEEDUP,
        namespace=f"bench-{replicas}-{synced}",
        frontend_flags=() if synced else ("--no-router-replica-sync",),
    )  # fmt: skip
    deployed, costs = await stage.deploy(plan), []
    for spread in (False, True) if synced and replicas > 1 else (False,):
        urls = [replica.url for replica in deployed.replicas][: None if spread else 1]
        await asyncio.sleep(WARM_S)
        idle = await _used(stage, deployed, flags.seconds)
        async with SteadyLoad(requests, urls, rate=flags.rate) as load:
            await asyncio.sleep(WARM_S)
            runs: list[Run] = []
            for _ in range(flags.runs):
                before = len(load.outcomes)
                used = await _used(stage, deployed, flags.seconds)
                own = [one - rest for one, rest in zip(used, idle, strict=True)]
                runs.append((len(load.outcomes) - before, own))
        check(load.outcomes)
        costs.append(Cost.of(runs, replicas=replicas, spread=spread, synced=synced))
    await stage.stop(deployed)
    return costs


async def _used(stage: Stage, deployed: Deployment, seconds: float) -> list[Usage]:
    pairs = [*zip(deployed.frontends, deployed.replicas, strict=True)]
    before = [await usage(stage.client, process.pid, replica.url) for process, replica in pairs]
    await asyncio.sleep(seconds)
    after = [await usage(stage.client, process.pid, replica.url) for process, replica in pairs]
    return [now - then for now, then in zip(after, before, strict=True)]


async def _visibilities(stage: Stage, flags: argparse.Namespace) -> list[Visibility]:
    """For each number of replicas above one, and with two replicas at higher rates."""
    settings = [(replicas, flags.rate) for replicas in flags.replicas if replicas > 1]
    found = []
    for replicas, rate in [*settings, *((2, rate) for rate in HIGHER_RATES)]:
        runs = [
            await visibility.measure(
                stage.fleet, stage.nats_url, replicas=replicas, rate=rate, seconds=flags.seconds
            )
            for _ in range(flags.runs)
        ]
        found.append(Visibility.median(replicas, flags.seconds, runs))
    return found


async def run(flags: argparse.Namespace) -> int:
    """Measure; returns the exit code."""
    before, costs, requests = MachineTime.now(), [], make_requests()
    async with open_stage("bench") as stage:
        for replicas in flags.replicas:
            for synced in (True, False) if replicas > 1 else (True,):
                print(f"{replicas} replicas, sync {'on' if synced else 'off'}", flush=True)
                costs += await _costs(stage, flags, replicas, requests, synced=synced)
        print("from booking to visibility", flush=True)
        seen = await _visibilities(stage, flags)
    about = machine(before) | {"rate": flags.rate, "runs": flags.runs, "seconds": flags.seconds}
    about |= {"prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS}
    figures = {"costs": [asdict(one) for one in costs], "visibility": [asdict(one) for one in seen]}
    conclude(flags, tables(costs, seen), about, **figures)
    return 0


def make_requests() -> list[LoadRequest]:
    """Prompts without common prefixes, as token ids."""
    rng = random.Random(1)
    prompts = [[rng.randrange(1, VOCABULARY_SIZE) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]
    return [LoadRequest(0.0, completion(prompt, OUTPUT_TOKENS), OUTPUT_TOKENS) for prompt in prompts]


def tables(costs: Sequence[Cost], seen: Sequence[Visibility]) -> list[Table]:
    """For people."""
    rows = []
    for cost in costs:
        where = (cost.replicas, "all" if cost.spread else "one", "on" if cost.synced else "off")
        shares = {"each" if cost.spread else "serving": cost.serving, "peer": cost.peer}
        rows += [[*where, which, *_cells(share)] for which, share in shares.items() if share]
    columns = ["replicas", "load to", "sync", "which", "CPU µs", "messages sent", "bytes sent"]
    columns += ["received", "bytes received"]
    per_request = table_of("per request of the fleet, at one replica", columns, rows)
    rows = [
        [one.replicas, f"{one.rate:.0f}", *(f"{ms:.2f} ms" for ms in (one.p50_ms, one.p90_ms, one.p99_ms)),
         f"{one.cpu_us:.0f}", one.samples]
        for one in seen
    ]  # fmt: skip
    columns = ["replicas", "bookings/s", "visible after p50", "p90", "p99", "CPU µs at a peer", "samples"]
    return [per_request, table_of("a booking at another replica", columns, rows)]


def _cells(one: Usage) -> list[str]:
    figures = (one.sent, one.sent_bytes, one.received, one.received_bytes)
    return [f"{one.cpu_ns / 1000:,.0f}", *(f"{figure:,.1f}" for figure in figures)]


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--replicas", type=int, nargs="+", default=[1, 2, 4, 8], metavar="N", help="replicas (1 2 4 8)")
    add("--rate", type=float, default=60.0, metavar="N", help="requests/s over all replicas (%(default)g)")
    add("--runs", type=int, default=3, metavar="N", help="number of runs; figures are medians (%(default)s)")
    add("--seconds", type=float, default=4.0, metavar="S", help="seconds of one run (%(default)g)")
