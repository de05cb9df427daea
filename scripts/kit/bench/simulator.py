"""Whether the simulator is the system: the same requests through real frontends and mockers, and simulated.

    chats ──┬──> NATS, four mockers with agents, two replicas ──> cached tokens, TTFT ──┐
            └──> simulator with the step model of the mocker's times, two routers ──────┴──> differences

The mockers are slow, so that engines take the time, not HTTP and this machine.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from kvrouter.lab.simulate.cells import policy_of
from kvrouter.lab.simulate.engines import Arrival
from kvrouter.lab.simulate.fleet import SimulatedFleet
from kvrouter.lab.simulate.percentiles import Percentiles
from kvrouter.lab.simulate.placement import SimulatedReplicas, Sync
from kvrouter.lab.simulate.step_model import H100
from kvrouter.policies import PolicySettings
from scripts.kit.bench.meter import conclude, machine
from scripts.kit.demo import BLOCK_SIZE, ENGINES, NUM_BLOCKS, arrivals, measure
from scripts.kit.deployment import open_stage
from scripts.kit.script import new_console, table_of
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
    """A mode, real and simulated: the share of cached tokens, and TTFT in seconds."""

    mode: str
    cached: tuple[float, float]
    ttft_s: tuple[Percentiles, Percentiles]

    @property
    def is_equal(self) -> bool:
        """Within two points, and 15 % of p50 and p90."""
        real, other = self.ttft_s
        pairs = ((real.p50, other.p50), (real.p90, other.p90))
        is_close = all(abs(later / first - 1) <= TIME_WITHIN for first, later in pairs)
        return is_close and abs(self.cached[0] - self.cached[1]) <= CACHED_WITHIN

    def row(self) -> list[str]:
        real, other = self.ttft_s
        times = [(real.p50, other.p50), (real.p90, other.p90), (real.p99, other.p99)]
        shown = [f"{1000 * a:,.0f} → {1000 * b:,.0f} ms ({b / a - 1:+.0%})" for a, b in times]
        cached = f"{self.cached[0]:.1%} → {self.cached[1]:.1%}"
        return [self.mode, cached, *shown, "yes" if self.is_equal else "no"]


def simulated(mode: str, requests: Sequence[Arrival]) -> tuple[float, Percentiles]:
    """The share of cached tokens, and TTFT."""
    chance = random.Random(1)
    run = SimulatedFleet(
        lambda agenda: SimulatedReplicas(
            agenda,
            [policy_of(mode, PolicySettings(), turn) for turn in (0, chance.randrange(ENGINES))],
            chance,
            Sync(DELAY_S),
            kv_delay_s=DELAY_S,
            in_turn=True,
        ),
        replace(H100, block_size=BLOCK_SIZE, speed=SPEEDUP),
        NUM_BLOCKS,
        [1.0] * ENGINES,
    ).run(requests)
    return run.hit_rate, run.ttft


async def run(flags: argparse.Namespace) -> int:
    """Both, for each mode; 1 if they differ in one."""
    console, found = new_console(), list[Both]()
    requests = Chats(flags.requests, flags.requests / REQUESTS_PER_SECOND, think_s=(6.0, 20.0)).drawn()
    async with open_stage("bench") as stage:
        for mode in flags.mode or MODES:
            real, deployed = await measure(console, stage, mode, requests, SPEEDUP)
            await stage.stop(deployed)
            cached, ttft = simulated(mode, arrivals(requests))
            found.append(Both(mode, (real.figures.cached_token_rate, cached), (real.figures.ttft_s, ttft)))
    title = "real → simulated; equal: cached within 2 points, p50 and p90 within 15 %"
    columns = ("mode", "cached", "TTFT p50", "TTFT p90", "TTFT p99", "equal")
    table = table_of(title, columns, [one.row() for one in found])
    conclude(flags, [table], machine(), modes=[asdict(one) for one in found])
    return int(not all(one.is_equal for one in found))


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--mode", action="append", help=f"repeatable; default: {', '.join(MODES)}")
