"""Delay of a frontend's event loop while a large fleet publishes KV events.

One real frontend, a real nats-server, 1,000 mock workers in one other process that publish frames of 8 and
64 blocks in bursts, and requests of 4,000 token ids in mode kv, half of which some workers hold.
The lag is read from the frontend's `kvrouter_loop_lag_seconds`. Medians of several runs; each rate has
its own deployment.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from statistics import median

from rich.table import Table

from kvrouter.lab.simulate.percentiles import percentiles
from scripts.kit.bench.meter import conclude, cpu_ns, machine
from scripts.kit.bench.mock_fleet import BLOCK_SIZE, MODEL, PREFIX_BLOCKS, PREFIXES, prefix_tokens
from scripts.kit.bench.wire.routers import start_workers
from scripts.kit.deployment import Plan, Stage, open_stage, start_frontend
from scripts.kit.figures import MachineTime
from scripts.kit.fleet import FleetError, Process, wait_until_ok
from scripts.kit.load import LoadRequest, Outcome, SteadyLoad, check
from scripts.kit.script import table_of

PROMPT_TOKENS = 2 * PREFIX_BLOCKS * BLOCK_SIZE
PROMPTS = 256
SETTLE_S = 8.0
# The goals for the lag: its 99th percentile and its maximum.
P99_S, MAX_S = 0.005, 0.020
_LAG = "kvrouter_loop_lag_seconds_bucket"


@dataclass(frozen=True, slots=True)
class Run:
    """One run at one rate. Times in ms."""

    asked_blocks_s: float
    sent_blocks_s: float
    applied_blocks_s: float
    requests_s: float
    p50_ms: float
    p99_ms: float
    # The upper bound of the last bucket with an observation.
    max_ms: float
    # Share of the observations.
    over_5_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    # In cores.
    frontend_cpu: float
    # Share of the time in which the process was ready but had no core: this lag is caused by the machine.
    frontend_waited: float
    # The garbage collector's longest pause of the minute before the run's end.
    gc_longest_ms: float
    # Of the oldest message that was not applied at the end of the run.
    inbox_age_ms: float
    # Feeds that were not live at the end of the run.
    recoveries: float

    @classmethod
    def median(cls, runs: Sequence[Run]) -> Run:
        """The median of each figure; the maximum of the maxima."""
        whole = cls(*(median(values) for values in zip(*(asdict(run).values() for run in runs), strict=True)))
        return replace(whole, max_ms=max(run.max_ms for run in runs))


@dataclass(frozen=True, slots=True)
class Bench:
    """Shared by all rates."""

    stage: Stage
    engine_url: str
    flags: argparse.Namespace
    requests: Sequence[LoadRequest]

    async def at(self, blocks_s: float) -> Run:
        """A frontend and a mock fleet at this rate; the median of the runs."""
        stage, namespace = self.stage, f"lag-{blocks_s:.0f}"
        # It publishes no bookings: no replica would read them.
        plan = Plan("kv", stage.model_path, namespace=namespace, gives_model=False,
            frontend_flags=("--no-router-replica-sync", *self.flags.frontend_flag),
        )  # fmt: skip
        frontend, replica = await start_frontend(stage.fleet, stage.client, plan, stage.nats_url, 0)
        url = replica.url
        _prefer(frontend.pid, self.flags.nice)
        await wait_until_ok(stage.client, frontend, f"{url}/live")
        mocks = await stage.fleet.start(
            f"mock-{blocks_s:.0f}",
            [
                *(sys.executable, "-m", "scripts.kit.bench.mock_fleet"),
                *(f"--nats={stage.nats_url}", f"--namespace={namespace}", f"--engine={self.engine_url}"),
                *(f"--workers={self.flags.workers}", f"--blocks-s={blocks_s}"),
                f"--burst-ms={self.flags.burst_ms}",
            ],
            env={"PYTHONPATH": str(Path(__file__).parents[3])},
        )
        await wait_until_ok(stage.client, frontend, f"{url}/ready")
        await asyncio.sleep(SETTLE_S)
        runs = []
        async with SteadyLoad(self.requests, [url], rate=self.flags.rate) as load:
            await asyncio.sleep(2.0)
            for _ in range(self.flags.runs):
                runs.append(await self._run(frontend, url, mocks, load, blocks_s))
        check(load.outcomes)
        await stage.fleet.stop(mocks.name)
        await stage.fleet.stop(frontend.name)
        return Run.median(runs)

    async def _run(self, frontend: Process, url: str, mocks: Process, load: SteadyLoad, asked: float) -> Run:
        """One run. Costly requests for figures are made before and after it, not during it."""
        earlier = await self._samples(f"{url}/metrics")
        applied_at = time.perf_counter()
        await asyncio.sleep(1.0)  # the answer itself took CPU time of the frontend: start after it
        before, cpu, start = await self._lags(url), cpu_ns(frontend.pid), time.perf_counter()
        waited = _waited_ns(frontend.pid)
        sent, first = _sent(mocks), len(load.outcomes)
        await asyncio.sleep(self.flags.seconds)
        after, cpu, seconds = await self._lags(url), cpu_ns(frontend.pid) - cpu, time.perf_counter() - start
        outcomes = load.outcomes[first:]
        sent_blocks_s = _rate(sent, _sent(mocks))
        later = await self._samples(f"{url}/metrics")
        applied = _total(later, "stored", "removed") - _total(earlier, "stored", "removed")
        lags = {bound: after[bound] - before[bound] for bound in after}
        return Run(
            asked,
            sent_blocks_s,
            applied / (time.perf_counter() - applied_at),
            len(outcomes) / seconds,
            1000 * quantile(lags, 0.5),
            1000 * quantile(lags, 0.99),
            1000 * quantile(lags, 1.0),
            1 - lags[P99_S] / max(lags.values()),
            *_first_bytes(outcomes),
            cpu / 1e9 / seconds,
            (_waited_ns(frontend.pid) - waited) / 1e9 / seconds,
            1000 * later["kvrouter_gc_longest_seconds"],
            1000 * later["kvrouter_inbox_age_seconds"],
            sum(not value for name, value in later.items() if name.startswith("kvrouter_feed_live")),
        )

    async def _lags(self, url: str) -> dict[float, float]:
        """Bucket bound -> observations up to it."""
        samples = await self._samples(f"{url}/metrics?name[]={_LAG}")
        return {float(name.split('"')[1]): value for name, value in samples.items() if name.startswith(_LAG)}

    async def _samples(self, url: str) -> dict[str, float]:
        _, body = await self.stage.client.get(url)
        lines = [line.rpartition(" ") for line in body.decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}


def _total(samples: Mapping[str, float], *kinds: str) -> float:
    """Blocks by change, over all pools."""
    names = tuple(f'kvrouter_index_changes_total{{change="{kind}"' for kind in kinds)
    return sum(value for name, value in samples.items() if name.startswith(names))


def _sent(mocks: Process) -> dict[str, float]:
    """The last line of the mock fleet's output."""
    lines = mocks.log.read_text().splitlines()
    if not lines or not lines[-1].startswith("{"):
        raise FleetError(f"unexpected output of the mock fleet: {lines[-1:]}")
    last: dict[str, float] = json.loads(lines[-1])
    return last


def _prefer(pid: int, nice: int) -> None:
    """Set the niceness of the session as well: with Linux's autogroup, a process's own has little effect."""
    os.setpriority(os.PRIO_PROCESS, pid, nice)
    autogroup = Path(f"/proc/{pid}/autogroup")
    if nice and autogroup.exists():
        autogroup.write_text(f"{nice}")


def _waited_ns(pid: int) -> int:
    """Time in which its main thread was ready to run but had no core."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1])


def _rate(before: Mapping[str, float], after: Mapping[str, float]) -> float:
    seconds = after["at"] - before["at"]
    return (after["blocks"] - before["blocks"]) / seconds if seconds else 0.0


def _first_bytes(outcomes: Sequence[Outcome]) -> tuple[float, float]:
    seen = percentiles(outcome.ttft_s for outcome in outcomes)
    return 1000 * seen.p50, 1000 * seen.p99


def quantile(buckets: Mapping[float, float], share: float) -> float:
    """Interpolated within its bucket; for share 1, the upper bound of the last bucket with observations."""
    low = below = 0.0
    wanted = share * max(buckets.values())
    for bound in sorted(buckets):
        if buckets[bound] >= wanted:
            if share == 1.0 or buckets[bound] == below:
                return bound
            return low + (bound - low) * (wanted - below) / (buckets[bound] - below)
        low, below = bound, buckets[bound]
    return float("inf")


async def run(flags: argparse.Namespace) -> int:
    before, runs = MachineTime.now(), []
    async with open_stage("bench") as stage:
        more = ("--prompt-tokens", str(PROMPT_TOKENS))
        engine = await start_workers(stage.fleet, stage.client, pace_ms=0, count=1, more=more)
        bench = Bench(stage, engine.urls[0], flags, make_requests())
        for blocks_s in flags.blocks_s:
            print(f"{blocks_s:,.0f} blocks/s", flush=True)
            runs.append(await bench.at(blocks_s))
    known = ("workers", "rate", "runs", "seconds", "burst_ms", "nice")
    about = machine(before) | {name: getattr(flags, name) for name in known}
    about |= {"prompt_tokens": PROMPT_TOKENS}
    conclude(flags, [table(runs)], about, lag=[asdict(run) for run in runs])
    return 0


def table(runs: Sequence[Run]) -> Table:
    columns = (
        *("blocks/s asked", "sent", "applied", "requests/s", "lag p50", "p99", "max", "over 5 ms"),
        *("TTFT p50", "p99", "frontend cores", "no core", "longest gc", "oldest message"),
        "feeds not live",
    )
    formats = (
        *("{:,.0f}", "{:,.0f}", "{:,.0f}", "{:.0f}", "{:.2f} ms", "{:.2f} ms", "≤ {:g} ms", "{:.2%}"),
        *("{:.1f} ms", "{:.1f} ms", "{:.2f}", "{:.0%}", "{:.1f} ms", "{:.0f} ms", "{:,.0f}"),
    )
    rows = [[each.format(one) for each, one in zip(formats, astuple(run), strict=True)] for run in runs]
    return table_of("loop lag while events come", columns, rows)


def make_requests() -> list[LoadRequest]:
    """Prompts as token ids: the first half is the group's prefix, the rest is unique."""
    rng = random.Random(2)
    requests = []
    for number in range(PROMPTS):
        own = [rng.randrange(1, 30_000) for _ in range(PROMPT_TOKENS // 2)]
        body = {
            "model": MODEL,
            "prompt": prefix_tokens(number % PREFIXES) + own,
            "max_tokens": 4,
            "stream": True,
        }
        requests.append(LoadRequest(0.0, json.dumps(body, separators=(",", ":")).encode()))
    return requests


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--workers", type=int, default=1000, metavar="N", help="number (%(default)s)")
    add("--blocks-s", type=float, nargs="+", default=[0.0, 50_000.0, 200_000.0], metavar="N",
        help="rates of events (0 50000 200000)")  # fmt: skip
    add("--rate", type=float, default=200.0, metavar="N", help="requests/s (%(default)g)")
    add("--runs", type=int, default=3, metavar="N", help="number of runs; figures are medians (%(default)s)")
    add("--seconds", type=float, default=10.0, metavar="S", help="seconds of one run (%(default)g)")
    add("--burst-ms", type=float, default=10.0, metavar="MS", help="interval between bursts (%(default)g)")
    add("--nice", type=int, default=0, metavar="N", help="the frontend's niceness (0); below 0 only as root")
    add("--frontend-flag", action="append", default=[], metavar="FLAG",
        help="flag for the frontend; repeatable")  # fmt: skip
