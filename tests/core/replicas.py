"""Replicas in memory, and the heartbeats that they receive."""

from __future__ import annotations

import random
from collections.abc import Callable

from kvrouter.core.fleet.pool import PoolSettings
from kvrouter.core.fleet.replica import Replica, ReplicaSettings
from kvrouter.core.fleet.router import RouterRules
from kvrouter.core.routing.builtin_policy import BuiltInPolicy
from kvrouter.core.wire.heartbeats import Card, RankBeat, State, encode
from kvrouter.core.wire.ids import PoolId, RouterId, WorkerId
from kvrouter.policies.kv import Kv
from tests.core.worlds import POOL, worker_beat

ME, PEER = RouterId("me"), RouterId("peer")
ROUNDS = 5


def new_replica(
    router_id: RouterId = ME,
    *,
    incarnation: int = 1000,
    synced: bool = True,
    settings: PoolSettings | None = None,
    policy: Callable[[], BuiltInPolicy] = Kv,
    greets: bool = True,
) -> Replica:
    """A replica with seeded randomness that has sent its hello at 0.0, if it greets."""

    def new_rules(_pool: PoolId) -> RouterRules:
        return RouterRules(policy(), random.Random(1).random)

    replica = Replica(
        ReplicaSettings(settings or PoolSettings(), synced=synced), router_id, incarnation, new_rules,
        chance=lambda: 0.5,
    )  # fmt: skip
    if greets:
        replica.hello_sent(0.0)
    return replica


def receive_worker(
    replica: Replica,
    worker: Card | str = "w1",
    *,
    incarnation: int = 100,
    state: State = "up",
    seq: int = 0,
    rank_incarnation: int = 100,
    pool: PoolId = POOL,
) -> None:
    """Deliver a worker's heartbeat."""
    ranks = [RankBeat(0, rank_incarnation, seq)]
    beat = worker_beat(worker, incarnation=incarnation, state=state, ranks=ranks, pool=pool)
    replica.worker_heartbeat(
        WorkerId(worker if isinstance(worker, str) else worker.worker_id), encode(beat), 0.0
    )


def rounds(replica: Replica, count: int, *others: Replica, address: str = "") -> None:
    """Deliver the replica's own heartbeats back to it; it and `others` receive each other's in each round."""
    for _ in range(count):
        for one in (replica, *others):
            one.next_round(0.0)
            beat = encode(one.heartbeat("up", address))
            for listener in (replica, *others):
                listener.router_heartbeat(one.router_id, beat, 0.0)
