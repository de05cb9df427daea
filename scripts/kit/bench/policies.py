"""CPU microseconds of a decision: each mode, 8 to 512 targets, a 562-block prompt (--blocks).

In this process: the pool's tables, the candidates, the filters and the policy, as called by the request
path, without booking. `candidates` is the part shared by all modes; a mode's own part is the difference.
`text` is the prompt's 36,000 characters, for the mode that uses them. `kv:auto, hot` is the
longest way through `kv:auto`: many requests share the prompt's deepest cached block, and one target
has it, so a place for a copy is searched each time.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import msgspec
from rich.table import Table

from kvrouter.core.fleet.pool import Pool, PoolSettings
from kvrouter.core.routing.builtin_policy import Moment, RoutingTables
from kvrouter.core.routing.filters import FilterSettings, new_filters
from kvrouter.core.routing.policy import Prompt, RouteRequest, Wanted
from kvrouter.core.routing.selection import Selection
from kvrouter.core.tables.bookings import Booking
from kvrouter.core.tables.prefill_speeds import Speed
from kvrouter.core.wire.heartbeats import Card, RankBeat, WorkerBeat
from kvrouter.core.wire.ids import BookingKey, PoolId, RouterId, Target, WorkerId
from kvrouter.core.wire.ops import VERSION
from kvrouter.lab.simulate.cells import policy_of
from kvrouter.policies import POLICIES, PolicySettings
from scripts.kit.bench.meter import conclude, machine
from scripts.kit.script import table_of

# 9,000 tokens: Heimdall's published prompt.
BLOCK_SIZE, BLOCKS = 16, 562
CHARACTERS = 36_000
POOL = PoolId("bench")
ACTIVE_REQUESTS = 4
GROUPS = 4
HOT_REQUESTS = 200
HOT = "kv:auto, hot"
# `kv` with both kinds of weight.
MODES = ["kv:1", "kv:auto", HOT, *(mode for mode in POLICIES if mode != "kv")]
KNOWN = Speed(samples=100)


@dataclass(frozen=True, slots=True)
class Figure:
    """One mode at one size; CPU microseconds for one decision, median and extremes of the runs."""

    mode: str
    targets: int
    us: float
    least: float
    most: float


def run(flags: argparse.Namespace) -> int:
    figures = [figure for count in flags.targets for figure in measure(count, flags)]
    about = machine() | {"blocks": flags.blocks, "runs": flags.runs, "seconds": flags.seconds}
    conclude(flags, [table(figures, flags)], about, figures=[asdict(one) for one in figures])
    return 0


def measure(count: int, flags: argparse.Namespace) -> list[Figure]:
    """Every mode with this number of targets, the shared part first."""
    rng = random.Random(count)
    chain = [rng.getrandbits(64) for _ in range(flags.blocks)]
    pool = new_pool(count, chain, rng)
    asked = new_request(pool, chain)
    figures = [figure("candidates", count, lambda: pool.candidates(asked), flags)]
    for mode in flags.modes:
        policy = policy_of("kv:auto" if mode == HOT else mode, PolicySettings())
        selection = Selection(policy, new_filters(FilterSettings()))
        tables = new_tables(pool, asked, rng)
        for _ in range(HOT_REQUESTS if mode == HOT else 0):
            tables.shares.count(*pool.candidates(asked).held_of(asked))
        act = partial(decide, selection, pool, shown(asked, selection), tables, rng)
        figures.append(figure(mode, count, act, flags))
    return figures


def shown(asked: RouteRequest, selection: Selection) -> RouteRequest:
    """The request with the fields that the frontend fills for this mode: tokens and text cost time."""
    prompts = asked.prompts if selection.policy.needs_tokens else ()
    text = asked.text if selection.policy.needs_text else ""
    return msgspec.structs.replace(asked, prompts=prompts, text=text)


def decide(
    selection: Selection, pool: Pool, asked: RouteRequest, tables: RoutingTables, rng: random.Random
) -> Target:
    """One decision, made like the router's."""
    moment = Moment(0.0, rng.random, tables, speed=KNOWN, arrivals_per_s=10.0)
    eligible = selection.eligible(asked, pool.candidates(asked), moment)
    choice = selection.choose(asked, eligible, moment)[0]
    selection.policy.routed(asked, choice, moment)
    return choice.target


def new_pool(count: int, chain: Sequence[int], rng: random.Random) -> Pool:
    """Workers that hold prefixes of the prompt of various lengths, and have some requests in flight."""
    pool = Pool(POOL, PoolSettings())
    for number in range(count):
        worker_id = WorkerId(f"w{number:03d}")
        card = Card(
            worker_id=str(worker_id),
            url="",
            model="bench",
            block_size=BLOCK_SIZE,
            tiers={"device": 10_000},
            labels={"group": str(number % GROUPS)},
        )
        load = RankBeat(0, 1, 0, running=rng.randrange(8), waiting=rng.randrange(8), kv_usage=rng.random())
        pool.update(worker_id, WorkerBeat(VERSION, 1, "up", str(POOL), [load], 1, card))
        target = Target(worker_id)
        pool.index.store(target, chain[: rng.randrange(len(chain) or 1)])
        for place in range(rng.randrange(1, ACTIVE_REQUESTS)):
            hashes = [rng.getrandbits(64) for _ in range(20)]
            key = BookingKey(RouterId("peer"), number * ACTIVE_REQUESTS + place)
            pool.active.book(Booking(key, "r", target, hashes, 320, 0, 320))
    return pool


def new_request(pool: Pool, chain: list[int]) -> RouteRequest:
    """The whole chain, its text, and the last target by name."""
    return RouteRequest(
        "bench",
        (Prompt(chain, len(chain) * BLOCK_SIZE + 8),),
        text=_text(0),
        wanted=Wanted(list(pool.targets)[-1].worker_id),
    )


def new_tables(pool: Pool, asked: RouteRequest, rng: random.Random) -> RoutingTables:
    """Tables in which every target has texts and a prefill rate."""
    tables = RoutingTables()
    for number, target in enumerate(pool.targets):
        tables.texts.insert(target, asked.text[: rng.randrange(CHARACTERS)] + _text(number + 1)[:500], 0.0)
        tables.rates.observe(target, 9000, 0.5)
    return tables


def figure(mode: str, targets: int, act: Callable[[], object], flags: argparse.Namespace) -> Figure:
    """The median of the runs, each of the requested length."""
    act()
    runs = sorted(_microseconds(act, flags.seconds) for _ in range(flags.runs))
    return Figure(mode, targets, statistics.median(runs), runs[0], runs[-1])


def _microseconds(act: Callable[[], object], seconds: float) -> float:
    calls, began = 0, time.process_time()
    while (now := time.process_time()) - began < seconds:
        for _ in range(10):
            act()
        calls += 10
    return (now - began) / calls * 1e6


def table(figures: Sequence[Figure], flags: argparse.Namespace) -> Table:
    modes = dict.fromkeys(one.mode for one in figures)
    rows = [[mode, *(f"{one.us:,.1f}" for one in figures if one.mode == mode)] for mode in modes]
    columns = ["mode", *(f"{count} targets" for count in flags.targets)]
    return table_of(f"CPU µs per decision, {flags.blocks} blocks", columns, rows)


def _text(number: int) -> str:
    return "".join(random.Random(number).choices("abcdefghij ", k=CHARACTERS))


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--targets", type=int, nargs="+", default=[8, 64, 512], metavar="N", help="targets (8 64 512)")
    add("--blocks", type=int, default=BLOCKS, metavar="N", help="blocks of the prompt (%(default)s)")
    add("--modes", nargs="+", default=MODES, choices=MODES, metavar="MODE", help="router modes (all)")
    add("--runs", type=int, default=5, metavar="N", help="number of runs; figures are medians (%(default)s)")
    add("--seconds", type=float, default=0.2, metavar="S", help="seconds of one run (%(default)g)")
