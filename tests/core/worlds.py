"""Cards, heartbeats and pools for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvrouter.core.fleet.pool import Pool, PoolSettings
from kvrouter.core.routing.policy import Prompt, RouteRequest
from kvrouter.core.tables.bookings import Booking
from kvrouter.core.wire.heartbeats import Card, RankBeat, State, WorkerBeat
from kvrouter.core.wire.ids import BookingKey, PoolId, RouterId, Target, WorkerId
from kvrouter.core.wire.ops import VERSION

POOL = PoolId("llama-0a1b2c3d")
OTHER = RouterId("other")
W1, W2, W3 = WorkerId("w1"), WorkerId("w2"), WorkerId("w3")
T1, T2, T3 = Target(W1), Target(W2), Target(W3)


def card(worker_id: str = "w1", **facts: Any) -> Card:  # a Card's own fields
    """A worker's card with block size 16; `facts` are fields of Card."""
    fields: dict[str, Any] = {"url": f"http://{worker_id}:9000", "model": "llama", "block_size": 16} | facts
    return Card(worker_id=worker_id, **fields)


def worker_beat(
    worker: Card | str = "w1",
    *,
    incarnation: int = 100,
    state: State = "up",
    ranks: Sequence[RankBeat] = (RankBeat(0, 100, 0),),
    pool: str = POOL,
    card_version: int = 1,
) -> WorkerBeat:
    """A heartbeat; with a Card it carries the card, with a worker's id it does not."""
    carried = worker if isinstance(worker, Card) else None
    return WorkerBeat(VERSION, incarnation, state, pool, list(ranks), card_version, carried)


def new_pool(*workers: Card, **settings: Any) -> Pool:  # PoolSettings' own fields
    """A pool where these workers are up."""
    pool = Pool(POOL, PoolSettings(**settings))
    for one in workers:
        pool.update(WorkerId(one.worker_id), worker_beat(one))
    return pool


def prompt(chain: Sequence[int], isl: int | None = None) -> Prompt:
    """A prompt of full blocks of 16 tokens, or of `isl` tokens."""
    return Prompt(chain, len(chain) * 16 if isl is None else isl)


def request(*prompts: Prompt, **facts: Any) -> RouteRequest:  # RouteRequest's own fields
    """A request with these prompts."""
    return RouteRequest("req", prompts, **facts)


def chain_from(start: int, blocks: int) -> list[int]:
    """Hashes `start`, `start` + 1, …: a chain like any other."""
    return list(range(start, start + blocks))


def book(
    pool: Pool, target: Target, hashes: Sequence[int], prefill_tokens: int = 0, *, role: str = ""
) -> BookingKey:
    """Book a request of a peer on the target."""
    number = sum(pool.active.owners().values()) + 1
    key = BookingKey(OTHER, number)
    booking = Booking(key, "req", target, hashes, len(hashes) * 16, 0, prefill_tokens, role=role)
    pool.active.book(booking)
    return key


def fixed(chance: float) -> Callable[[], float]:
    """A source of chance that always returns the same number."""
    return lambda: chance
