"""Weight `auto` against fixed weights and least-loaded, over real frontends, at 70 % of saturation.

    closed loop, weight 8 ──> saturation (requests/s) ──> the same arrivals at 70 % of it for each mode

Two replicas with sync, six mockers, the conversation excerpt. Prompts, outputs and steps are an eighth as
long as real ones, and the mockers an eighth as fast: a prompt takes as long as on a real engine, for less CPU
time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from kvrouter.tokens.tiny import build_tiny_model
from scripts.kit import deployment
from scripts.kit.bench.meter import cpu_ns
from scripts.kit.deployment import Deployment, Plan
from scripts.kit.figures import Figures, MachineTime, figures
from scripts.kit.fleet import Fleet, FleetError
from scripts.kit.http_client import Client, HttpError
from scripts.kit.load import LoadRequest, Outcome, run_load, send
from scripts.kit.script import log_directory, new_console, until_signalled
from scripts.kit.workload import OUTPUT_DIVISOR, TOKENS_PER_ID, load_requests

SCALE = OUTPUT_DIVISOR
assert TOKENS_PER_ID * SCALE == 512, "prompts and outputs must shrink alike"
ENGINES = 6
# About half of the blocks of all prompts fit into the six caches.
NUM_BLOCKS = 4096
# A step of 2,048 tokens, vLLM's default for chunked prefill, in the scale of the prompts.
BATCHED_TOKENS = 2048 // SCALE
# Requests of the closed loop: enough that no mocker runs out of prompts to prefill.
CLOSED_LOOP = 12 * ENGINES
# The service level objective of docs/simulate.md. An output token stands for SCALE of them.
SLO_TTFT_S, SLO_ITL_S = 2.0, 0.050 * SCALE
REQUEST_TIMEOUT_S = 120.0

MODES = ("kv:auto", "kv:1", "kv:8", "least-loaded")
SATURATING = "kv:8"


@dataclass(frozen=True, slots=True)
class Row:
    """One run in numbers."""

    figures: Figures
    # Share of all requests that were answered within the objective.
    goodput: float
    # Requests of the worker with the most, divided by the mean of all workers.
    busiest: float
    # Shares of all cores: used by all that runs on the machine, and by this fleet alone.
    machine_busy: float | None
    own_busy: float
    # What each replica had learnt of prefill at the end, from /workers.
    prefill: list[Any]


def is_good(outcome: Outcome) -> bool:
    """Whether the answer met the objective: first byte in time, and output tokens fast enough on average."""
    if outcome.error is not None or outcome.ttft_s is None or outcome.latency_s is None:
        return False
    gaps = max(1, outcome.output_tokens - 1)
    return outcome.ttft_s <= SLO_TTFT_S and (outcome.latency_s - outcome.ttft_s) / gaps <= SLO_ITL_S


def row(outcomes: Sequence[Outcome], busy: float | None, own_busy: float, prefill: list[Any]) -> Row:
    """The figures of a run."""
    found = figures(outcomes)
    mean = sum(found.requests_per_worker.values()) / ENGINES
    busiest = max(found.requests_per_worker.values(), default=0) / mean if mean else 0.0
    goodput = sum(map(is_good, outcomes)) / len(outcomes)
    return Row(found, goodput, busiest, busy, own_busy, prefill)


def paced(requests: Sequence[LoadRequest], rate: float) -> list[LoadRequest]:
    """The same requests with their distances stretched, so that `rate` of them are sent per second."""
    factor = len(requests) / rate / requests[-1].at_s
    return [replace(request, at_s=request.at_s * factor) for request in requests]


def throughput(outcomes: Sequence[Outcome]) -> float:
    """Answers per second between the 20th and 80th percentile of ends: without filling and emptying."""
    ends = sorted(outcome.ended_at_s for outcome in outcomes if outcome.error is None and outcome.ended_at_s)
    first, last = len(ends) // 5, len(ends) * 4 // 5
    if last <= first:
        raise FleetError(f"{len(ends)} of {len(outcomes)} requests were answered: no throughput to measure")
    return (last - first) / (ends[last] - ends[first])


async def closed_loop(requests: Sequence[LoadRequest], urls: Sequence[str]) -> list[Outcome]:
    """Send the requests in order, CLOSED_LOOP of them at a time."""
    outcomes = [Outcome(n, urls[n % len(urls)]) for n in range(len(requests))]
    waiting = iter(zip(requests, outcomes, strict=True))
    client = Client()

    async def one_after_the_other() -> None:
        for request, outcome in waiting:
            await send(client, request, outcome, timeout_s=REQUEST_TIMEOUT_S)

    try:
        await asyncio.gather(*(one_after_the_other() for _ in range(CLOSED_LOOP)))
    finally:
        client.close()
    return outcomes


@dataclass(frozen=True, slots=True)
class Stage:
    """Shared by all runs."""

    fleet: Fleet
    client: Client
    nats_url: str

    async def saturation(self, requests: Sequence[LoadRequest]) -> float:
        """Requests per second that the mockers can serve."""
        deployed = await self._deploy(SATURATING, "saturation")
        outcomes = await closed_loop(requests, [replica.url for replica in deployed.replicas])
        await deployment.stop(self.fleet, deployed)
        return throughput(outcomes)

    async def measure(self, mode: str, requests: Sequence[LoadRequest]) -> Row:
        """One run with cold caches."""
        deployed = await self._deploy(mode, mode.replace(":", "-"))
        before, began_s, cpu_s = MachineTime.now(), time.perf_counter(), self._cpu_s()
        outcomes = await run_load(
            requests,
            [replica.url for replica in deployed.replicas],
            request_timeout_s=REQUEST_TIMEOUT_S,
            time_limit_s=requests[-1].at_s + REQUEST_TIMEOUT_S,
        )
        after = MachineTime.now()
        self.fleet.check()
        own_busy = (self._cpu_s() - cpu_s) / (time.perf_counter() - began_s) / (os.cpu_count() or 1)
        busy = after.busy_since(before) if before and after else None
        prefill = [await self._prefill(replica.admin_url) for replica in deployed.replicas]
        await deployment.stop(self.fleet, deployed)
        return row(outcomes, busy, own_busy, prefill)

    async def _deploy(self, mode: str, namespace: str) -> Deployment:
        router_mode, _, weight = mode.partition(":")
        steps = dict.fromkeys(range(ENGINES), (f"--max-num-batched-tokens={BATCHED_TOKENS}",))
        plan = Plan(
            router_mode,
            self.fleet.directory / "model",
            engines=ENGINES,
            num_blocks=NUM_BLOCKS,
            speedup=1 / SCALE,
            namespace=f"live-{namespace}",
            frontend_flags=(f"--kv-overlap-score-weight={weight}",) if weight else (),
            mocker_flags=steps,
        )
        return await deployment.deploy(self.fleet, self.client, plan, self.nats_url)

    async def _prefill(self, admin_url: str) -> Any:
        pools = (await self.client.get_json(f"{admin_url}/workers"))["pools"]
        return pools[0]["prefill"]

    def _cpu_s(self) -> float:
        return sum(cpu_ns(process.pid) for process in self.fleet.processes.values()) / 1e9


async def run(flags: argparse.Namespace) -> int:
    """Saturation, one run for each mode, and the table."""
    console = new_console()
    requests = load_requests(flags.requests)
    rows: dict[str, Row] = {}
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(Fleet(stack.enter_context(log_directory("live"))))
        client = Client()
        stack.callback(client.close)
        build_tiny_model(fleet.directory / "model")
        stage = Stage(fleet, client, await deployment.start_nats(fleet, client))
        saturation = await stage.saturation(requests)
        rate = flags.load * saturation
        console.print(f"saturation {saturation:.2f} requests/s; sending {rate:.2f}/s")
        for mode in flags.mode or MODES:
            rows[mode] = await stage.measure(mode, paced(requests, rate))
            _print_row(console, mode, rows[mode])
    console.print(table(rows))
    if flags.json is not None:
        _write(flags.json, saturation, rate, rows)
    return 0


def _print_row(console: Console, mode: str, one: Row) -> None:
    found = one.figures
    busy = "unknown" if one.machine_busy is None else f"{one.machine_busy:.0%}"
    console.print(
        f"{mode}: machine {busy} busy, the fleet {one.own_busy:.0%},"
        f" {found.errors} errors of {found.requests}, latest request {1000 * found.worst_late_s:.0f} ms late;"
        f" prefill {json.dumps(one.prefill)}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def table(rows: Mapping[str, Row]) -> Table:
    """One row for each mode."""
    title = f"goodput: TTFT at most {SLO_TTFT_S:g} s, mean ITL at most {1000 * SLO_ITL_S:g} ms"
    shown = Table("mode", title=title)
    for name in ("TTFT p50", "TTFT p90", "goodput", "cached", "busiest ÷ mean", "fleet busy"):
        shown.add_column(name, justify="right")
    for mode, one in rows.items():
        ttft = one.figures.ttft_s
        shown.add_row(
            mode,
            f"{ttft.p50:.2f} s",
            f"{ttft.p90:.2f} s",
            f"{one.goodput:.1%}",
            f"{one.figures.cached_token_rate:.1%}",
            f"{one.busiest:.2f}",
            f"{one.own_busy:.0%}",
        )
    return shown


def _write(path: Path, saturation: float, rate: float, rows: Mapping[str, Row]) -> None:
    body = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "saturation_requests_per_s": saturation,
        "requests_per_s": rate,
        "rows": {mode: asdict(one) for mode, one in rows.items()},
    }
    path.write_text(json.dumps(body, indent=2) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench live", description=__doc__.split("\n", maxsplit=1)[0]
    )
    add = parser.add_argument
    add("--requests", type=int, default=560, metavar="N", help="requests of each run (%(default)s)")
    add("--load", type=float, default=0.7, help="share of the saturation (%(default)s)")
    add("--mode", action="append", choices=MODES, help="repeatable; default: all")
    add("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    try:
        return uvloop.run(until_signalled("bench live", run(parser.parse_args(arguments))))
    except (FleetError, HttpError) as error:
        print(f"bench live: {error}", file=sys.stderr)
        return 1
