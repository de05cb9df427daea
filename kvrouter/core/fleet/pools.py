"""The pools of one replica: from the first word of one until nobody needs it.

    a worker's card, a peer's bookings ──> begun      (bounded; a peer's empty feed begins none)
    no worker, no own booking for a lease ──> no longer told of in heartbeats
    nor anybody else's, nothing left to sweep ──> gone

A pool that is gone may come back. Its feed goes on from where it was: the incarnation is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Set

from kvrouter.core.feeds.lease import DEFAULT_ROUNDS
from kvrouter.core.fleet.models import pool_serving
from kvrouter.core.fleet.router import Router
from kvrouter.core.wire.ids import PoolId
from kvrouter.errors import NoWorkersError, UnknownModelError

POOLS_MOST = 256
"""At a time. What would begin another is ignored and counted. An empty pool takes some 0.3 MB."""
UNSERVED_MOST = 64
"""Of them without a worker: known by a peer's word only."""
NAMES_KEPT_S = 600.0
"""So long a model whose pool is gone is said to have no worker, rather than not to exist."""


class Pools:
    """Routers by pool. `new_router(pool, seq)` begins one whose feed has come as far as `seq`."""

    def __init__(
        self, new_router: Callable[[PoolId, int], Router], lease_rounds: int = DEFAULT_ROUNDS
    ) -> None:
        self.routers: dict[PoolId, Router] = {}
        self._new_router = new_router
        self._lease_rounds = lease_rounds
        self._idle_rounds: dict[PoolId, int] = {}
        self._reached: dict[PoolId, int] = {}
        """How far the feeds of pools that are gone have come, where anything was sent."""
        self._past_names: dict[str, float] = {}

    def open(self, pool_id: PoolId) -> Router:
        """The router of a pool; begun if there is none."""
        router = self.routers.get(pool_id)
        if router is None:
            router = self.routers[pool_id] = self._new_router(pool_id, self._reached.pop(pool_id, 0))
        return router

    def has_room(self, pool_id: PoolId, *, served: bool) -> bool:
        """Whether the pool is there or may be begun. `served`: by a worker that has shown its card."""
        if pool_id in self.routers:
            return True
        if len(self.routers) >= POOLS_MOST:
            return False
        return served or sum(not router.pool.workers for router in self.routers.values()) < UNSERVED_MOST

    def next_round(self, needed: Set[PoolId], now: float) -> list[PoolId]:
        """Give up, and return, what nobody has needed for a lease.

        `needed` are those whose feeds of peers say that there was something.
        """
        gone = []
        for pool_id, router in list(self.routers.items()):
            is_idle = not router.pool.workers and router.is_idle
            self._idle_rounds[pool_id] = self._idle_rounds.get(pool_id, 0) + 1 if is_idle else 0
            if self._is_over(pool_id) and router.pool.is_empty and pool_id not in needed:
                self._give_up(pool_id, router, now)
                gone.append(pool_id)
        self._past_names = {name: until for name, until in self._past_names.items() if until > now}
        return gone

    def told(self) -> dict[str, int]:
        """The last seq of each own feed that peers have to know of."""
        return {
            str(pool_id): router.source.seq
            for pool_id, router in self.routers.items()
            if not (router.source.seq and self._is_over(pool_id))
        }

    def router_for(self, model: str | None) -> Router:
        """The router of the pool that serves a model or LoRA name (core/fleet/models.py).

        One that was served until a while ago has no workers, rather than not to exist.
        """
        if len(self.routers) == 1:  # nearly always: there is nothing to choose from
            (only,) = self.routers.values()
            if model in only.pool.names:
                return only
        try:
            return self.routers[pool_serving(model, [router.pool for router in self.routers.values()]).id]
        except (UnknownModelError, NoWorkersError):
            if model not in self._past_names:
                raise
        raise NoWorkersError(f"no live worker for model {model!r}: all have left")

    def _is_over(self, pool_id: PoolId) -> bool:
        """Whether it has been idle for longer than peers need to have heard of its last booking's end."""
        return self._idle_rounds.get(pool_id, 0) > self._lease_rounds

    def _give_up(self, pool_id: PoolId, router: Router, now: float) -> None:
        del self.routers[pool_id], self._idle_rounds[pool_id]
        if router.source.seq:
            self._reached[pool_id] = router.source.seq
        self._past_names.update(dict.fromkeys(router.pool.names, now + NAMES_KEPT_S))
