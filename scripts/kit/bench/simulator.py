"""Whether the simulator is the system: the same requests through real frontends and mockers, and simulated.

    chats ──┬──> NATS, four mockers with agents, two replicas ──> cached tokens, TTFT ──┐
            └──> simulator with the mocker's engines, two routers ──────────────────────┴──> differences

The mockers are slow, so that the times are the engines' and not those of HTTP and of this machine.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
from rich.table import Table

from kvrouter.lab.mocker.engine import EngineConfig, speed_up
from kvrouter.lab.simulate.cells import policy_of
from kvrouter.lab.simulate.engines import Arrival
from kvrouter.lab.simulate.fleet import Fleet as SimulatedFleet
from kvrouter.lab.simulate.fleet import mocker_kind
from kvrouter.lab.simulate.percentiles import Percentiles
from kvrouter.lab.simulate.placement import Replicas, Sync
from kvrouter.policies import PolicySettings
from kvrouter.tokens.tiny import build_tiny_model
from scripts.kit import deployment
from scripts.kit.demo import BLOCK_SIZE, ENGINES, NUM_BLOCKS, Stage, arrivals
from scripts.kit.fleet import Fleet, FleetError
from scripts.kit.http_client import Client, HttpError
from scripts.kit.script import log_directory, new_console, until_signalled
from scripts.kit.workload import Chats

# Not round-robin: where the turns of a replica begin is drawn, and decides which requests meet at an engine.
MODES = ("least-loaded", "kv", "kv:1")
REQUESTS = 600
SPEEDUP = 0.15
REQUESTS_PER_SECOND = 6.0
# Until a frame is with the other replica, or a KV event in its index, over a NATS on the same machine.
DELAY_S = 0.002
CACHED_WITHIN, TIME_WITHIN = 0.02, 0.15


@dataclass(frozen=True, slots=True)
class Both:
    """A mode, real and simulated."""

    mode: str
    cached: tuple[float, float]
    ttft_s: tuple[Percentiles, Percentiles]

    @property
    def is_equal(self) -> bool:
        """Within two points and 15 %."""
        real, simulated = self.ttft_s
        return abs(self.cached[0] - self.cached[1]) <= CACHED_WITHIN and all(
            abs(later / first - 1) <= TIME_WITHIN
            for first, later in ((real.p50, simulated.p50), (real.p90, simulated.p90))
        )


def simulated(mode: str, requests: Sequence[Arrival]) -> tuple[float, Percentiles]:
    """The share of cached tokens, and TTFT."""
    chance = random.Random(1)
    engine = speed_up(EngineConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE), SPEEDUP)
    run = SimulatedFleet(
        lambda agenda: Replicas(
            agenda,
            [policy_of(mode, PolicySettings(), turn) for turn in (0, chance.randrange(ENGINES))],
            chance,
            Sync(DELAY_S),
            kv_delay_s=DELAY_S,
            in_turn=True,
        ),
        mocker_kind(engine),
        [1.0] * ENGINES,
    ).run(requests)
    return run.hit_rate, run.ttft


async def _run(flags: argparse.Namespace) -> int:
    console = new_console()
    requests = Chats(flags.requests, flags.requests / REQUESTS_PER_SECOND, think_s=(6.0, 20.0)).drawn()
    found: list[Both] = []
    async with AsyncExitStack() as stack:
        directory = stack.enter_context(log_directory("simulator"))
        client = Client()
        stack.callback(client.close)
        fleet = await stack.enter_async_context(Fleet(directory))
        nats_url = await deployment.start_nats(fleet, client)
        build_tiny_model(directory / "model")
        stage = Stage(console, fleet, client, nats_url, directory / "model", SPEEDUP)
        for mode in flags.mode or MODES:
            real, deployed = await stage.measure(mode, requests)
            await deployment.stop(fleet, deployed)
            cached, ttft = simulated(mode, arrivals(requests))
            sums = real.figures
            found.append(Both(mode, (sums.cached_token_rate, cached), (sums.ttft_s, ttft)))
    console.print(table(found))
    if flags.json is not None:
        flags.json.write_text(json.dumps([_as_json(one) for one in found], indent=2) + "\n")
    return 0 if all(one.is_equal for one in found) else 1


def table(found: Sequence[Both]) -> Table:
    """Real → simulated."""
    rows = Table(title="real → simulated; equal: cached within 2 points, p50 and p90 within 15 %")
    rows.add_column("mode", no_wrap=True)
    for name in ("cached", "TTFT p50", "TTFT p90", "TTFT p99", "equal"):
        rows.add_column(name, justify="right", no_wrap=True)
    for one in found:
        real, other = one.ttft_s
        times = [(real.p50, other.p50), (real.p90, other.p90), (real.p99, other.p99)]
        shown = [f"{1000 * a:,.0f} → {1000 * b:,.0f} ms ({b / a - 1:+.0%})" for a, b in times]
        cached = f"{one.cached[0]:.1%} → {one.cached[1]:.1%}"
        rows.add_row(one.mode, cached, *shown, "yes" if one.is_equal else "no")
    return rows


def _as_json(one: Both) -> dict[str, Any]:
    real, other = one.ttft_s
    times = {"real": [real.p50, real.p90, real.p99], "simulated": [other.p50, other.p90, other.p99]}
    return {"mode": one.mode, "cached": one.cached, "ttft_s": times, "is_equal": one.is_equal}


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare; exit code 1 if a mode is not equal."""
    parser = argparse.ArgumentParser(prog="scripts/bench simulator", description=__doc__)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--mode", action="append", help=f"repeatable; default: {', '.join(MODES)}")
    parser.add_argument("--json", type=Path, metavar="FILE")
    flags = parser.parse_args(arguments)
    try:
        return uvloop.run(until_signalled("simulator", _run(flags)))
    except (FleetError, HttpError) as error:
        print(f"simulator: failed: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
