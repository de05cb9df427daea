"""How many requests of a burst go to the one idle worker, if replicas decide before they exchange bookings.

Replicas of the real core, without processes: each burst is spread over them and routed in one
instant, then all bookings are exchanged. One worker is idle; the others have long requests.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median

from rich.table import Table

from kvrouter.core.fleet.pool import Pool, PoolSettings
from kvrouter.core.fleet.router import Router, RouterRules
from kvrouter.core.routing.policy import Prompt, RouteRequest
from kvrouter.core.tables.bookings import Booking, UnseenBookings
from kvrouter.core.wire.heartbeats import Card, RankBeat, WorkerBeat
from kvrouter.core.wire.ids import BookingKey, PoolId, RouterId, SequenceHash, Target, WorkerId
from kvrouter.core.wire.ops import VERSION, decode_frame
from kvrouter.policies.kv import Kv
from scripts.kit.script import new_console

POOL = PoolId("p")
WORKERS = [WorkerId(f"w{number}") for number in range(8)]
IDLE = WORKERS[0]
BLOCKS = 20
# Long requests on each worker except the idle one.
BUSY = 3
# Bursts one second apart, and how many of them replicas learn from before the measured ones.
BURSTS, LEARNING = 40, 20


class SeesNothing(UnseenBookings):
    """Disables the learning of unseen bookings: only ties are decided at random."""

    def booked_elsewhere(self, booking: Booking, now: float) -> None:
        """Ignore a peer's booking."""


@dataclass(frozen=True, slots=True)
class Placed:
    """The workers chosen for the requests of one burst."""

    to_idle: int
    # Requests on the fullest worker afterwards, earlier ones included.
    fullest: int


def new_request(rng: random.Random) -> RouteRequest:
    """A new prompt of 20 blocks."""
    hashes = [SequenceHash(rng.getrandbits(64)) for _ in range(BLOCKS)]
    return RouteRequest("x", (Prompt(hashes, 16 * BLOCKS),))


def new_router(number: int, busy: int, rng: random.Random, *, learns: bool = True) -> Router:
    """A replica with one idle worker and seven with `busy` long requests each."""
    pool = Pool(POOL, PoolSettings())
    for worker_id in WORKERS:
        card = Card(worker_id=worker_id, url="", model="m", block_size=16)
        pool.update(worker_id, WorkerBeat(VERSION, 1, "up", POOL, [RankBeat(0, 1, 0)], 1, card))
    for place, worker_id in enumerate(WORKERS[1:] * busy):
        hashes = [SequenceHash(rng.getrandbits(64)) for _ in range(BLOCKS)]
        key = BookingKey(RouterId("long ago"), place)
        pool.active.book(Booking(key, "long", Target(worker_id), hashes, 16 * BLOCKS, 0, 0))
    rules = RouterRules(Kv(), rng.random)
    router = Router(pool, rules, router_id=RouterId(f"r{number}"), incarnation=1, synced=True)
    if not learns:
        router.feed.unseen = SeesNothing()
    return router


def tell_peers(routers: Sequence[Router], now: float) -> None:
    """Deliver every replica's frames to all others."""
    for owner in routers:
        for frame in owner.feed.frames():
            for peer in routers:
                sink = peer.feed.copy_sink(owner.router_id)
                for op in decode_frame(frame).ops or () if peer is not owner else ():
                    sink.apply(op, now)


def place_bursts(
    replicas: int, burst: int, seed: int, *, busy: int = BUSY, learns: bool = True, bursts: int = BURSTS
) -> list[Placed]:
    """Route bursts. Bookings are exchanged after each burst, and freed before the next one."""
    rng = random.Random(seed)
    routers = [new_router(number, busy, rng, learns=learns) for number in range(replicas)]
    found = []
    for second in range(bursts):
        placed = []
        for number in range(burst):
            router = routers[number % replicas]
            placed.append((router, router.route(new_request(rng), float(second))))
        targets = [placement.target.worker_id for _, placement in placed]
        loads = [targets.count(worker) + (busy if worker != IDLE else 0) for worker in WORKERS]
        found.append(Placed(targets.count(IDLE), max(loads)))
        tell_peers(routers, second + 0.001)
        for router, placement in placed:
            router.bookings.free(placement.key)
        tell_peers(routers, second + 0.5)
    return found


@dataclass(frozen=True, slots=True)
class Figures:
    """Requests of one burst: on the idle worker, and on the fullest worker afterwards."""

    to_idle: float
    fullest: float


@dataclass(frozen=True, slots=True)
class Row:
    """One number of replicas and one size of burst."""

    replicas: int
    burst: int
    # Only ties are broken at random.
    ties: Figures
    learnt: Figures
    # For comparison: one replica routes the whole burst, and so has every booking.
    ideal: Figures


def measure(replicas: int, burst: int, runs: int) -> Row:
    """The bursts after the learning phase, with learning and without."""
    return Row(
        replicas,
        burst,
        ties=_figures([place_bursts(replicas, burst, seed, learns=False) for seed in range(runs)]),
        learnt=_figures([place_bursts(replicas, burst, seed) for seed in range(runs)]),
        ideal=_figures([place_bursts(1, burst, seed, learns=False) for seed in range(runs)]),
    )


def _figures(runs: Sequence[Sequence[Placed]]) -> Figures:
    """The median over the runs of each run's mean over its bursts."""
    later = [run[LEARNING:] for run in runs]
    return Figures(
        median(mean(each.to_idle for each in run) for run in later),
        median(mean(each.fullest for each in run) for run in later),
    )


def table(rows: Sequence[Row]) -> Table:
    """For people."""
    shown = Table("burst", "replicas", title="requests of a burst: on the idle worker, on the fullest in all")
    for place in ("idle", "fullest"):
        for name in ("ties", "learnt", "ideal"):
            shown.add_column(f"{place}\n{name}", justify="right")
    for row in rows:
        figures = (row.ties, row.learnt, row.ideal)
        cells = [f"{each.to_idle:.1f}" for each in figures] + [f"{each.fullest:.1f}" for each in figures]
        shown.add_row(str(row.burst), str(row.replicas), *cells)
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench herding", description=__doc__.split("\n", maxsplit=1)[0]
    )
    add = parser.add_argument
    add("--replicas", type=int, nargs="+", default=[1, 2, 4, 8], metavar="N", help="replicas (1 2 4 8)")
    add("--burst", type=int, nargs="+", default=[8, 32], metavar="N", help="concurrent requests (8 32)")
    add(
        "--runs",
        type=int,
        default=5,
        metavar="N",
        help="number of seeds; figures are medians (%(default)s)",
    )
    add("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    flags = parser.parse_args(arguments)
    if min(flags.runs, *flags.replicas, *flags.burst) < 1:
        parser.error("--replicas, --burst and --runs: use numbers of at least 1")
    rows = [measure(replicas, burst, flags.runs) for burst in flags.burst for replicas in flags.replicas]
    new_console().print(table(rows))
    if flags.json is not None:
        body = {
            "workers": len(WORKERS),
            "busy": BUSY,
            "runs": flags.runs,
            "rows": [asdict(row) for row in rows],
        }
        flags.json.write_text(json.dumps(body, indent=2) + "\n")
    return 0
