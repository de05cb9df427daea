"""Cost of replica sync: CPU and bytes per request, at the replica that serves it and at the others.

Real frontends, simulated engines, requests at a fixed rate: all to one replica, or to all in turn.
The same with --no-router-replica-sync shows how much of a peer's cost is due to KV events. The usage of
an idle replica (heartbeats) is measured first and subtracted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import uvloop

from kvrouter.tokens.tiny import VOCABULARY_SIZE, build_tiny_model
from scripts.kit import deployment
from scripts.kit.bench import visibility
from scripts.kit.bench.meter import Usage, machine, usage
from scripts.kit.bench.sync_report import Cost, Visibility, median_cost, summary, tables
from scripts.kit.deployment import Deployment, Plan
from scripts.kit.figures import MachineTime
from scripts.kit.fleet import Fleet, FleetError
from scripts.kit.http_client import Client, HttpError
from scripts.kit.load import LoadRequest
from scripts.kit.script import log_directory, new_console, until_signalled
from scripts.kit.steady import SteadyLoad

PROMPT_TOKENS, OUTPUT_TOKENS = 1024, 16
PROMPTS = 400
# Smaller than all prompts together: each request stores its blocks and evicts as many.
NUM_BLOCKS = 4096
ENGINES = 2
SPEEDUP = 20.0
WARM_S = 1.5
# Bookings/s of further measurements of a peer's cost: a busier process needs less CPU time for each.
HIGHER_RATES = (250.0, 1000.0)


@dataclass(frozen=True, slots=True)
class Options:
    """The command line."""

    replicas: Sequence[int]
    rate: float
    runs: int
    seconds: float
    json: Path | None


@dataclass(frozen=True, slots=True)
class Bench:
    """Shared by all measurements."""

    fleet: Fleet
    client: Client
    nats_url: str
    options: Options
    requests: Sequence[LoadRequest]

    async def costs(self, replicas: int, *, synced: bool) -> list[Cost]:
        """Deploy, measure the idle usage, then each way of spreading the load."""
        plan = Plan(
            "kv",
            self.fleet.directory / "model",
            engines=ENGINES,
            replicas=replicas,
            num_blocks=NUM_BLOCKS,
            speedup=SPEEDUP,
            namespace=f"bench-{replicas}-{synced}",
            frontend_flags=() if synced else ("--no-router-replica-sync",),
        )
        deployed = await deployment.deploy(self.fleet, self.client, plan, self.nats_url)
        costs = []
        for spread in (False, True) if synced and replicas > 1 else (False,):
            urls = [replica.url for replica in deployed.replicas]
            runs = await self._runs(deployed, urls if spread else urls[:1])
            costs.append(median_cost(runs, replicas=replicas, spread=spread, synced=synced))
        await deployment.stop(self.fleet, deployed)
        return costs

    async def _runs(self, deployed: Deployment, urls: Sequence[str]) -> list[tuple[int, list[Usage]]]:
        """For each run, the number of requests and every replica's usage for them."""
        await asyncio.sleep(WARM_S)
        idle = await self._used(deployed, self.options.seconds)
        async with SteadyLoad(self.requests, urls, rate=self.options.rate) as load:
            await asyncio.sleep(WARM_S)
            runs = []
            for _ in range(self.options.runs):
                before = len(load.outcomes)
                used = await self._used(deployed, self.options.seconds)
                runs.append(
                    (len(load.outcomes) - before, [one - rest for one, rest in zip(used, idle, strict=True)])
                )
        failed = [outcome.error for outcome in load.outcomes if outcome.error]
        if failed:
            raise FleetError(f"{len(failed)} requests failed; the first: {failed[0]}")
        return runs

    async def _used(self, deployed: Deployment, seconds: float) -> list[Usage]:
        before = await self._usages(deployed)
        await asyncio.sleep(seconds)
        return [now - then for now, then in zip(await self._usages(deployed), before, strict=True)]

    async def _usages(self, deployed: Deployment) -> list[Usage]:
        pairs = zip(deployed.frontends, deployed.replicas, strict=True)
        return [await usage(self.client, process.pid, replica.url) for process, replica in pairs]

    async def visibilities(self) -> list[Visibility]:
        """Visibility for each number of replicas above one, and with two replicas at higher rates."""
        settings = [(replicas, self.options.rate) for replicas in self.options.replicas if replicas > 1]
        found = []
        for replicas, rate in [*settings, *((2, rate) for rate in HIGHER_RATES)]:
            runs = [
                await visibility.measure(
                    self.fleet, self.nats_url, replicas=replicas, rate=rate, seconds=self.options.seconds
                )
                for _ in range(self.options.runs)
            ]
            found.append(Visibility.median(replicas, self.options.seconds, runs))
        return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; returns the exit code."""
    options = _options(arguments)
    try:
        return uvloop.run(until_signalled("bench", _run(options)))
    except (FleetError, HttpError) as error:
        print(f"bench: failed: {error}", file=sys.stderr)
        return 1


async def _run(options: Options) -> int:
    console = new_console()
    async with AsyncExitStack() as stack:
        directory = stack.enter_context(log_directory("bench"))
        client = Client()
        stack.callback(client.close)
        fleet = await stack.enter_async_context(Fleet(directory))
        nats_url = await deployment.start_nats(fleet, client)
        build_tiny_model(directory / "model")
        bench = Bench(fleet, client, nats_url, options, make_requests())
        before = MachineTime.now()
        costs = []
        for replicas in options.replicas:
            for synced in (True, False) if replicas > 1 else (True,):
                console.print(f"{replicas} replicas, sync {'on' if synced else 'off'}", highlight=False)
                costs += await bench.costs(replicas, synced=synced)
        console.print("from booking to visibility")
        visibilities = await bench.visibilities()
        after = MachineTime.now()
    for table in tables(costs, visibilities):
        console.print(table)
    about = machine() | {"rate": options.rate, "runs": options.runs, "seconds": options.seconds}
    about |= {"prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS}
    if before and after:
        about["machine_busy"] = round(after.busy_since(before), 3)
    console.print(json.dumps(about), soft_wrap=True, highlight=False)
    if options.json is not None:
        body = {**about, **summary(costs, visibilities)}
        options.json.write_text(json.dumps(body, indent=2) + "\n")
    return 0


def make_requests() -> list[LoadRequest]:
    """Prompts without common prefixes, as token ids."""
    rng = random.Random(1)
    return [
        LoadRequest(
            0.0, _body([rng.randrange(1, VOCABULARY_SIZE) for _ in range(PROMPT_TOKENS)]), OUTPUT_TOKENS
        )
        for _ in range(PROMPTS)
    ]


def _body(prompt: list[int]) -> bytes:
    body = {
        "model": "mock",
        "prompt": prompt,
        "max_tokens": OUTPUT_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(body, separators=(",", ":")).encode()


def _options(arguments: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(
        prog="scripts/bench sync", description=__doc__.split("\n", maxsplit=1)[0]
    )
    add = parser.add_argument
    add("--replicas", type=int, nargs="+", default=[1, 2, 4, 8], metavar="N", help="replicas (1 2 4 8)")
    add("--rate", type=float, default=60.0, metavar="N", help="requests/s over all replicas (%(default)g)")
    add("--runs", type=int, default=3, metavar="N", help="number of runs; figures are medians (%(default)s)")
    add("--seconds", type=float, default=4.0, metavar="S", help="seconds of one run (%(default)g)")
    add("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    flags = parser.parse_args(arguments)
    return Options(flags.replicas, flags.rate, flags.runs, flags.seconds, flags.json)
