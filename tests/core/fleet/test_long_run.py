"""A booking costs the same after a long run: two replicas and their engines in virtual time, at steady load.

    prompts that share beginnings ──> route ──> first byte ──> end        at one replica, then at the other
                                        │           │
                                      frames      engines: an LRU of blocks

Only calls of the core are measured, including the peer's and the timers', in bytecode instructions.
"""

from __future__ import annotations

import heapq
import random
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import ParamSpec, TypeVar

import pytest

from kvrouter.core.fleet.pool import Pool, PoolSettings
from kvrouter.core.fleet.router import Router, RouterRules
from kvrouter.core.routing.builtin_policy import RoutingTables
from kvrouter.core.routing.decisions import DecisionRing
from kvrouter.core.routing.filters import FilterSettings, new_filters
from kvrouter.core.routing.policy import Prompt, RouteRequest, Wanted
from kvrouter.core.tables.sessions import SessionTable
from kvrouter.core.tables.text_index import TRIM_CHARS, TextIndex, TextIndexSettings
from kvrouter.core.wire.heartbeats import Card, RankBeat, WorkerBeat
from kvrouter.core.wire.ids import BookingKey, PoolId, RouterId, Target, WorkerId
from kvrouter.core.wire.ops import VERSION, decode_frame
from kvrouter.policies import POLICIES, PolicySettings, new_policy
from scripts.kit.bench.meter import instructions
from tests.long import IS_LONG

P = ParamSpec("P")
R = TypeVar("R")

POOL = PoolId("bench")
BLOCK_SIZE = 16
CHARS_A_BLOCK = 64
# The modes that use an index; the others are measured without one.
MODES_OF_BLOCKS = ("kv", "kv-score", "scored", "sticky", "two-stage")
INDEXES = ("exact", "assumed by time", "assumed by capacity")
TEXTS = ("texts", "texts, evicted")


@dataclass(frozen=True, slots=True)
class Load:
    """The load and the limits of tables. Blocks of 16 tokens, times in virtual seconds."""

    targets: int = 2
    # Bookings a second, over both replicas.
    rate: int = 10
    groups: int = 2
    shared_blocks: int = 12
    # Blocks of a first turn. One booking in four is a later turn, which adds this many to the last one's.
    own_blocks: int = 4
    turns: int = 2
    ttl_s: float = 5.0
    capacity_blocks: int = 150
    eviction_chars: int = 8000
    eviction_s: float = 1.0


class Meter:
    """Calls the core, and adds up bytecode instructions while it is on: counting is slow."""

    cost = 0.0
    is_on = True

    def __call__(self, act: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """The call's answer."""
        if not self.is_on:
            return act(*args, **kwargs)
        answers: list[R] = []
        self.cost += instructions(lambda: answers.append(act(*args, **kwargs)))
        return answers[0]


@dataclass(frozen=True, slots=True)
class Memory:
    """The number of entries in the table of this row, and its bound."""

    what: str
    entries: int
    bound: int


class Engine:
    """The blocks in one engine's cache. The least recently used are evicted, the deepest of them first."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity = capacity_blocks
        self._held: OrderedDict[int, None] = OrderedDict()

    def compute(self, chain: array[int]) -> tuple[array[int], list[int]]:
        """Add a prompt; returns the stored blocks, parent first, and the evicted ones."""
        new = array("Q", [hash_ for hash_ in chain if hash_ not in self._held])
        for hash_ in reversed(chain):
            self._held[hash_] = None
            self._held.move_to_end(hash_)
        excess = len(self._held) - self._capacity
        return new, [self._held.popitem(last=False)[0] for _ in range(max(0, excess))]


@dataclass(frozen=True, slots=True)
class Turn:
    """Remember a prompt for the next turn of its conversation."""

    chain: array[int]
    text: str
    session: str
    number: int = 1


class World:
    """One mode with one index."""

    def __init__(self, mode: str, index: str, load: Load) -> None:
        self.load = load
        self.meter = Meter()
        self._index = index
        self._rng = random.Random(f"{mode} {index}")
        self._second = 0
        self._bookings = 0
        self._waiting: list[tuple[float, int, Callable[[float], None]]] = []
        self._groups = [self._first_turn(load.shared_blocks) for _ in range(load.groups)]
        self._turns: deque[Turn] = deque(maxlen=1000)
        self._routers = [self._new_router(mode, number) for number in range(2)]
        self._sinks = [
            peer.feed.copy_sink(owner.router_id)
            for owner, peer in zip(self._routers, reversed(self._routers), strict=True)
        ]
        self._engines = {target: Engine(load.capacity_blocks) for target in self._routers[0].pool.targets}

    def run_second(self) -> float:
        """One second of load with its timers; returns the cost per booking."""
        self.meter.cost = 0.0
        for number in range(self.load.rate):
            now = self._second + number / self.load.rate
            while self._waiting and self._waiting[0][0] <= now:
                at, _, act = heapq.heappop(self._waiting)
                act(at)
            self._book(now)
        self._second += 1
        for place in (0, 1):
            self.meter(self._upkeep, place, float(self._second))
        return self.meter.cost / self.load.rate

    def memory(self) -> Memory:
        """The first replica's."""
        pool, load = self._routers[0].pool, self.load
        room = load.targets * load.capacity_blocks
        if self._index == "exact":
            return Memory("blocks held", pool.index.holders(), room)
        if self._index in INDEXES:
            most = room if self._index == "assumed by capacity" else pool.index.holders()
            return Memory("blocks and heap", sum(pool.approx.listed()), 2 * most)
        if self._index in TEXTS:
            chars = sum(self._routers[0].tables.texts.chars(target) for target in pool.targets)
            most = TRIM_CHARS if self._index == "texts" else load.eviction_chars
            new = (
                load.rate * max(1.0, load.eviction_s) * (load.own_blocks + load.shared_blocks) * CHARS_A_BLOCK
            )
            return Memory("characters", chars, load.targets * most + int(new))
        bookings = sum(pool.active.owners().values())
        return Memory("bookings", bookings, load.rate * 10)

    # Events

    def _book(self, now: float) -> None:
        self._bookings += 1
        place = self._bookings % 2
        turn = self._next_turn()
        router, rng = self._routers[place], self._rng
        request = RouteRequest(
            f"r{self._bookings}",
            (Prompt(turn.chain, len(turn.chain) * BLOCK_SIZE + 8),) if router.selection.needs_tokens else (),
            text=turn.text if router.selection.policy.needs_text else "",
            session=turn.session if turn.number > 1 else "",
            wanted=Wanted(WorkerId(f"w{rng.randrange(self.load.targets)}")),
        )
        is_streamed = rng.random() < 0.5
        placed = self.meter(router.route, request, now, streamed=is_streamed)
        self._exchange(place, now)
        first = now + rng.uniform(0.05, 0.5)
        if is_streamed:
            self._later(first, partial(self._first_byte, place, placed.key))
        self._later(first, partial(self._compute, placed.target, turn.chain))
        self._later(now + rng.uniform(2.0, 8.0), partial(self._end, place, placed.key))

    def _first_byte(self, place: int, key: BookingKey, now: float) -> None:
        self.meter(self._routers[place].bookings.first_byte, key, now)
        self._exchange(place, now)

    def _compute(self, target: Target, chain: array[int], now: float) -> None:
        """Deliver the engine's events to both replicas."""
        if self._index != "exact":
            return
        stored, removed = self._engines[target].compute(chain)
        for router in self._routers:
            self.meter(router.pool.index.store, target, stored)
            self.meter(router.pool.index.remove, target, removed)

    def _end(self, place: int, key: BookingKey, now: float) -> None:
        self.meter(self._routers[place].bookings.free, key)
        self._exchange(place, now)

    def _upkeep(self, place: int, now: float) -> None:
        """The work of a replica's timers, once per second."""
        router = self._routers[place]
        for key in router.bookings.due(now):
            router.bookings.mark_prefill_completed(key, now)
        router.pool.approx.expire(now)
        for _ in router.tables.texts.eviction(now):
            pass
        for data in router.feed.check_frames(now):
            self._hear(place, data, now)
        while router.pool.sweep(512):
            pass

    def _exchange(self, place: int, now: float) -> None:
        for data in self.meter(self._routers[place].feed.frames):
            self.meter(self._hear, place, data, now)

    def _hear(self, place: int, data: bytes, now: float) -> None:
        """The peer applies a frame."""
        for op in decode_frame(data).ops or ():
            self._sinks[place].apply(op, now)

    def _later(self, at: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._waiting, (at, len(self._waiting) + self._bookings * 1000, act))

    # Requests

    def _next_turn(self) -> Turn:
        """The next turn of a recent conversation, or the first one of a new conversation."""
        rng, load = self._rng, self.load
        last = rng.choice(self._turns) if self._turns and rng.random() < 0.25 else None
        own = self._first_turn(load.own_blocks)
        if last is None or last.number == load.turns:
            group = rng.choice(self._groups)
            blocks = rng.randrange(1, load.shared_blocks) if rng.random() < 0.1 else load.shared_blocks
            chain, text = group.chain[:blocks] + own.chain, group.text[: blocks * CHARS_A_BLOCK] + own.text
            turn = Turn(chain, text, own.session)
        else:
            turn = Turn(last.chain + own.chain, last.text + own.text, last.session, last.number + 1)
        self._turns.append(turn)
        return turn

    def _first_turn(self, blocks: int) -> Turn:
        rng = self._rng
        chain = array("Q", rng.randbytes(8 * blocks))
        text = rng.randbytes(blocks * CHARS_A_BLOCK // 2).hex() if self._index in TEXTS else ""
        return Turn(chain, text, f"{chain[0]:x}")

    # State

    def _new_router(self, mode: str, number: int) -> Router:
        load, index = self.load, self._index
        settings = PoolSettings(
            use_kv_events=index not in INDEXES[1:],
            ttl_s=0.0 if index == "assumed by capacity" else load.ttl_s,
            approx_capacity_blocks=0 if index == "assumed by capacity" else 1_000_000,
            placement_secret=number + 1,
        )
        pool = Pool(POOL, settings)
        for name in (f"w{one}" for one in range(load.targets)):
            card = Card(
                worker_id=name,
                url="",
                model="bench",
                block_size=BLOCK_SIZE,
                tiers={"device": load.capacity_blocks},
                labels={"group": name[-1:]},
            )
            pool.update(WorkerId(name), WorkerBeat(VERSION, 1, "up", str(POOL), [RankBeat(0, 1, 0)], 1, card))
        rules = RouterRules(
            new_policy(mode, PolicySettings()),
            self._rng.random,
            RoutingTables(texts=TextIndex(self._text_settings()), sessions=SessionTable(load.ttl_s)),
            new_filters(FilterSettings(session_affinity="soft")),
            decisions=DecisionRing(1000),
        )
        return Router(pool, rules, router_id=RouterId(f"r{number}"), incarnation=1, synced=True)

    def _text_settings(self) -> TextIndexSettings:
        most = self.load.eviction_chars
        return TextIndexSettings(
            1, self._index == "texts, evicted", most, most * 9 // 10, self.load.eviction_s
        )


MOST_RATIO = 1.3
# Seconds of a sample: forty bookings.
SAMPLE_S = 4


def all_cases() -> list[tuple[str, str]]:
    """Every mode, with every index that it uses."""
    kinds: dict[str, tuple[str, ...]] = dict.fromkeys(POLICIES, ("none",))
    kinds |= dict.fromkeys(MODES_OF_BLOCKS, INDEXES) | {"prefix-affinity": TEXTS}
    return [(mode, index) for mode, indexes in kinds.items() for index in indexes]


CASES = all_cases()
if not IS_LONG:  # every mode once, every index once
    CASES = [case for case in CASES if case[0] == "kv" or not case[1].startswith("assumed")]


@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_a_booking_costs_the_same_after_a_long_time(case: tuple[str, str]) -> None:
    """With full tables, later bookings cost the same as the first ones, and memory is bounded."""
    world = World(*case, Load())
    samples = [range(20, 20 + SAMPLE_S), range(41, 41 + SAMPLE_S)]
    costs: dict[int, float] = {}
    for second in range(45):
        world.meter.is_on = any(second in sample for sample in samples)
        costs[second] = world.run_second()

    first, last = (fmean(costs[second] for second in sample) for sample in samples)
    assert last <= MOST_RATIO * first
    memory = world.memory()
    assert 0 < memory.entries <= memory.bound
