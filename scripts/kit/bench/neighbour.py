"""What a tenant that floods the fleet does to another one: its TTFT alone, and next to the flood.

The fleet is of real frontends and mockers. A request is 1,000 tokens of its own, and an answer of a few. A
share is one half of what engines compute. The neighbour sends a part of its own; the flood sends ten times
its own, and what the queue does not hold is refused.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.table import Table

from kvrouter.lab.mocker.engine import Timing
from kvrouter.lab.simulate.percentiles import Percentiles, percentiles
from scripts.kit.bench.keyring import keyring
from scripts.kit.bench.meter import conclude, machine
from scripts.kit.deployment import Plan, Stage, open_stage
from scripts.kit.figures import MachineTime
from scripts.kit.load import LoadRequest, Outcome, run_load
from scripts.kit.script import table_of
from scripts.kit.workload import completion

PROMPT_TOKENS, OUTPUT_TOKENS = 1000, 8
# Slow engines: then these take the time, not this machine.
SPEEDUP, STEP_TOKENS = 0.15, 2048
FLOOD = 10
WARM_S = 5.0
# Of answers after the last request. The queues hold a minute of the flood: that is cut off.
END_S = 10.0
START_S = 20.0  # of a fleet, on two cores


@dataclass(frozen=True, slots=True)
class Row:
    """One run: the neighbour's times to first byte in seconds, and how many of each were answered."""

    run: str
    sent_s: float
    """The neighbour's requests a second."""
    ttft_s: Percentiles
    failed: int
    flood: int
    refused: int


async def run(flags: argparse.Namespace) -> int:
    before, rows = MachineTime.now(), list[Row]()
    minutes = 2 * len(flags.part) * (START_S + flags.seconds + END_S) / 60
    print(f"{2 * len(flags.part)} runs: this takes {minutes:.0f} minutes", flush=True)
    async with open_stage("bench") as stage:
        keys, more = keyring(stage.directory, 2, {"weight": 1.0})
        for part in flags.part:
            for flood in (0, FLOOD):
                rows.append(await _measure(stage, flags, keys, more, part=part, flood=flood))
    conclude(flags, [table(rows)], machine(before), runs=[asdict(one) for one in rows])
    return 0


async def _measure(
    stage: Stage,
    flags: argparse.Namespace,
    keys: Sequence[str],
    more: Sequence[str],
    *,
    part: float,
    flood: int,
) -> Row:
    flow = (f"--router-queue-threshold={flags.threshold}", f"--router-queue-size={flags.queue}")
    size = range(flags.engines), (f"--max-num-batched-tokens={STEP_TOKENS}",)
    plan = Plan(
        "kv", stage.model_path, engines=flags.engines, replicas=flags.replicas, speedup=SPEEDUP,
        namespace=f"neighbour-{part}-{flood}".replace(".", "-"), frontend_flags=(*more, *flow, *flags.flag),
        mocker_flags=dict.fromkeys(*size), agent_flags=dict.fromkeys(*size),
    )  # fmt: skip
    deployed = await stage.deploy(plan)
    share_s = flags.engines / 2 / request_s()
    rates = {keys[0]: part * share_s, keys[1]: flood * share_s}
    requests = _requests(rates, flags.seconds)
    urls = [replica.url for replica in deployed.replicas]
    outcomes = await run_load(requests, urls, time_limit_s=flags.seconds + END_S)
    await stage.stop(deployed)
    mine = [one for one, sent in zip(outcomes, requests, strict=True) if sent.headers == _headers(keys[0])]
    others = [one for one, sent in zip(outcomes, requests, strict=True) if sent.headers != _headers(keys[0])]
    start_s = min(one.sent_at_s for one in outcomes if one.status is not None)
    times = [one.ttft_s for one in mine if one.error is None and one.sent_at_s > start_s + WARM_S]
    return Row(
        f"{part:g} of its share, {'next to the flood' if flood else 'alone'}",
        rates[keys[0]],
        percentiles(times),
        sum(one.error is not None for one in mine),
        sum(one.error is None for one in others),
        _refused(others),
    )


def request_s() -> float:
    """Seconds of an engine for one request, as if it was alone there."""
    timing = Timing().scaled(SPEEDUP)
    return timing.base_s + timing.prefill_token_s * PROMPT_TOKENS


def _refused(outcomes: Sequence[Outcome]) -> int:
    return sum(one.status == 503 for one in outcomes)


def _headers(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}", "content-type": "application/json"}


def _requests(rates: dict[str, float], seconds: float) -> list[LoadRequest]:
    """Requests of each key at random times, each with a prompt of its own."""
    rng, found = random.Random(1), list[LoadRequest]()
    for key, rate in rates.items():
        at = 0.0
        while rate and (at := at + rng.expovariate(rate)) < seconds:
            prompt = [rng.randrange(3, 250) for _ in range(PROMPT_TOKENS)]
            found.append(LoadRequest(at, completion(prompt, OUTPUT_TOKENS), headers=_headers(key)))
    return sorted(found, key=lambda one: one.at_s)


def table(rows: Sequence[Row]) -> Table:
    """One row a run; the ratio is to the run before it."""
    shown, alone = [], rows[0]
    for one in rows:
        alone = one if not one.flood and not one.refused else alone
        times = [f"{1000 * each:.0f} ms" for each in (one.ttft_s.p50, one.ttft_s.p90)]
        ratio = f"{one.ttft_s.p90 / alone.ttft_s.p90:.2f}"
        counts = [f"{count:,}" for count in (one.failed, one.flood, one.refused)]
        shown.append([one.run, f"{one.sent_s:.1f}", *times, ratio, *counts])
    columns = ("neighbour", "a second", "TTFT p50", "p90", "to alone", "failed", "flood: served", "refused")
    return table_of("a neighbour's time to first byte", columns, shown)


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--replicas", type=int, default=4, metavar="N", help="number (%(default)s)")
    add("--engines", type=int, default=4, metavar="N", help="number (%(default)s)")
    add("--part", type=float, nargs="+", default=[0.25, 0.5], metavar="X",
        help="of its share that the neighbour sends (0.25 0.5)")  # fmt: skip
    add("--seconds", type=float, default=120.0, metavar="S", help="of each run (%(default)g)")
    add("--threshold", type=float, default=0.5, metavar="X", help="--router-queue-threshold (%(default)g)")
    add("--queue", type=int, default=200, metavar="N", help="--router-queue-size (%(default)s)")
    add("--flag", action="append", default=[], metavar="FLAG", help="one more flag of the frontends")
