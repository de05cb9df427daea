"""#589: several replicas that decide at the same moment all chose the one idle worker."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from kvrouter.core.fleet.pool import Pool, PoolSettings
from kvrouter.core.fleet.router import Router, RouterRules
from kvrouter.core.routing.policy import Prompt, RouteRequest
from kvrouter.core.tables.bookings import Booking, UnseenBookings
from kvrouter.core.wire.heartbeats import Card, RankBeat, WorkerBeat
from kvrouter.core.wire.ids import BookingKey, PoolId, RouterId, SequenceHash, Target, WorkerId
from kvrouter.core.wire.ops import VERSION, decode_frame
from kvrouter.policies.kv import Kv

POOL = PoolId("p")
WORKERS = [WorkerId(f"w{number}") for number in range(8)]
IDLE = WORKERS[0]
BLOCKS = 20
# Long requests on each worker except the idle one.
BUSY = 3
# Bursts one second apart.
BURSTS = 40


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


def worst_loads(replicas: int, burst: int, busy: int, seed: int) -> list[int]:
    """Requests on the fullest worker after each burst; bookings are published after it."""
    return [placed.fullest for placed in place_bursts(replicas, burst, seed, busy=busy)]


def mean(values: list[int]) -> float:
    """The average."""
    return sum(values) / len(values)


def test_several_routers_pick_the_same_best_worker() -> None:
    """The first burst of eight goes to the one idle worker; later bursts spread over all workers."""
    worst = worst_loads(replicas=8, burst=8, busy=3, seed=1)

    assert 8 == worst[0]
    assert mean(worst[20:]) < 6  # 4 is the best with complete knowledge


def test_random_ties_alone_do_not_help() -> None:
    """Replicas that do not learn send every burst of eight to the idle worker."""
    placed = place_bursts(replicas=8, burst=8, seed=1, learns=False)

    assert {8} == {each.to_idle for each in placed}


def test_large_bursts_level_out() -> None:
    """32 at once on 8 replicas: 16 on the idle worker at first, near the ideal of 7 later."""
    worst = worst_loads(replicas=8, burst=32, busy=3, seed=2)

    assert worst[0] >= 14
    assert mean(worst[20:]) < 10


@pytest.mark.parametrize("burst", [1, 8, 32])
def test_one_replica_is_not_moved(burst: int) -> None:
    """A single replica always takes the lowest cost."""
    ideal = max(3, -(-(7 * 3 + burst) // 8))

    assert {ideal} == set(worst_loads(replicas=1, burst=burst, busy=3, seed=3))
