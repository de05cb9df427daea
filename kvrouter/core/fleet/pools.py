"""The pools of one replica: when they begin and end, and which one serves a model.

    a worker's card, a peer's bookings ──> begun      (bounded; a peer's empty feed begins none)
    no worker, no own booking for a lease ──> no longer in the replica's heartbeats
    no booking of a peer either, nothing left to sweep ──> gone

A dropped pool may begin again. Its feed then continues with the next seq, because the incarnation is the
same.

A model name is looked up among base models first, then among LoRA adapters. If several pools match, the one
with most workers of that name serves it, of equal ones the one with the smallest id. So all replicas choose
the same pool, no matter which worker they saw first. The audit reports such a name (core/audit/problems.py),
and agents whose engines make the same token ids join one of the pools (worker/pool_choice.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Set

from kvrouter.core.feeds.lease import DEFAULT_ROUNDS
from kvrouter.core.fleet.block_size import NAMED_MOST
from kvrouter.core.fleet.pool import Pool
from kvrouter.core.fleet.router import Router
from kvrouter.core.fleet.split import refusal
from kvrouter.core.routing.worker import Worker
from kvrouter.core.wire.heartbeats import BOTH
from kvrouter.core.wire.ids import PoolId
from kvrouter.errors import BadRequestError, NoWorkersError, UnknownModelError

# The most pools at a time. A message that would begin another is ignored and counted. An empty pool takes
# about 0.3 MB: without a limit, anyone with permission to publish could fill the memory with invented pools.
POOLS_MOST = 256
# The most pools without a worker, which only a peer's feed has named.
UNSERVED_MOST = 64
# After its pool is gone, a model answers 503 (no worker) for this time and 404 (does not exist) after it.
NAMES_KEPT_S = 600.0
# Of these names: anyone with permission to publish can begin and end pools all the time.
PAST_NAMES_BYTES = 1024 * 1024
# Names in one error message.
LISTED_MOST = 50


class Pools:
    """Routers by pool. `new_router(pool, seq)` makes one whose sync feed continues after `seq`."""

    def __init__(
        self, new_router: Callable[[PoolId, int], Router], lease_rounds: int = DEFAULT_ROUNDS
    ) -> None:
        self.routers: dict[PoolId, Router] = {}
        self._new_router = new_router
        self._lease_rounds = lease_rounds
        self._idle_rounds: dict[PoolId, int] = {}
        self._reached: dict[PoolId, int] = {}  # last seq of the feeds of pools that are gone
        # The names of pools that are gone, and until when they are known: the last PAST_NAMES_BYTES of them.
        self._past: dict[PoolId, tuple[frozenset[str], float]] = {}

    def open(self, pool_id: PoolId) -> Router:
        """The router of a pool, made at the first call."""
        router = self.routers.get(pool_id)
        if router is None:
            router = self.routers[pool_id] = self._new_router(pool_id, self._reached.pop(pool_id, 0))
        return router

    def may_begin(self, pool_id: PoolId, *, served: bool) -> bool:
        """Whether the pool exists or may begin. `served`: by a worker whose card is known."""
        if pool_id in self.routers:
            return True
        if len(self.routers) >= POOLS_MOST:
            return False
        return served or sum(not router.pool.workers for router in self.routers.values()) < UNSERVED_MOST

    def has_names(self) -> bool:
        """Whether any model is known."""
        return bool(self._past) or any(router.pool.names for router in self.routers.values())

    def with_workers(self) -> list[Pool]:
        """The pools that have a worker, in any state."""
        return [router.pool for router in self.routers.values() if router.pool.workers]

    def serves(self) -> dict[str, int]:
        """The pools with a live target, and their block sizes."""
        pools = [router.pool for router in self.routers.values()]
        return {str(pool.id): pool.block_size for pool in pools if pool.has_live_target}

    def why_no_target(self, pool_id: PoolId) -> str:
        """The states of the pool's workers; of those that are up, why they serve no whole request."""
        router = self.routers.get(pool_id)
        workers = router.pool.workers if router is not None else {}
        states = [f"{name} {_state(one)}" for name, one in workers.items()]
        return ", ".join(states[:NAMED_MOST]) or "no worker is known"

    def has_met(self, pool_id: PoolId) -> bool:
        """Whether a worker's card of this pool has arrived here, NAMES_KEPT_S ago at most if it is gone."""
        router = self.routers.get(pool_id)
        return bool(router.pool.names) if router is not None else pool_id in self._past

    def next_round(self, needed: Set[PoolId], now: float) -> list[PoolId]:
        """Drop and return the pools not needed for a lease. In `needed` ones peers have bookings."""
        gone = []
        for pool_id, router in list(self.routers.items()):
            is_idle = not router.pool.workers and router.is_idle
            self._idle_rounds[pool_id] = self._idle_rounds.get(pool_id, 0) + 1 if is_idle else 0
            if self._is_over(pool_id) and router.pool.is_empty and pool_id not in needed:
                self._give_up(pool_id, router, now)
                gone.append(pool_id)
        self._past = {pool_id: past for pool_id, past in self._past.items() if past[1] > now}
        return gone

    def feed_seqs(self) -> dict[str, int]:
        """The last seq of each own feed that peers need to know."""
        return {
            str(pool_id): router.feed.last_seq()
            for pool_id, router in self.routers.items()
            if not (router.feed.source.seq and self._is_over(pool_id))
        }

    def router_for(self, model: str | None) -> Router:
        """The router of the pool that serves a model or LoRA name; see `pool_serving`.

        For NAMES_KEPT_S after a model's pool was dropped, this raises NoWorkersError instead of
        UnknownModelError.
        """
        if len(self.routers) == 1:  # nearly always: there is nothing to choose from
            (only,) = self.routers.values()
            if model in only.pool.names:
                return only
        try:
            return self.routers[pool_serving(model, [router.pool for router in self.routers.values()]).id]
        except (UnknownModelError, NoWorkersError):
            if not any(model in names for names, _ in self._past.values()):
                raise
        raise NoWorkersError(f"no live worker for model {model!r}: all have left")

    def _is_over(self, pool_id: PoolId) -> bool:
        """Whether it has been idle longer than a lease: by then peers know that its last booking ended."""
        return self._idle_rounds.get(pool_id, 0) > self._lease_rounds

    def _give_up(self, pool_id: PoolId, router: Router, now: float) -> None:
        router.feed.early.clear()
        del self.routers[pool_id], self._idle_rounds[pool_id]
        if router.feed.source.seq:
            self._reached[pool_id] = router.feed.source.seq
        if not router.pool.names:
            return
        self._past.pop(pool_id, None)
        self._past[pool_id] = (router.pool.names, now + NAMES_KEPT_S)
        while _size(names for names, _ in self._past.values()) > PAST_NAMES_BYTES:
            del self._past[next(iter(self._past))]


def _size(pools: Iterable[Set[str]]) -> int:
    return sum(len(name) for names in pools for name in names)


def pool_serving(model: str | None, pools: Iterable[Pool]) -> Pool:
    """The pool that serves a model or LoRA name. If only one pool has workers, the name may be None.

    Raises UnknownModelError, BadRequestError where a name is needed, or NoWorkersError before the first
    worker.
    """
    serving = [pool for pool in pools if pool.names]
    if not serving:
        raise NoWorkersError("no worker has been seen yet")
    if model is None and len(live := [pool for pool in serving if pool.workers] or serving) == 1:
        return live[0]
    found = [pool for pool in serving if model in pool.names]
    if len(found) == 1:
        return found[0]
    if found:
        return min(found, key=lambda pool: (model in pool.lora_names, -pool.servers[str(model)], pool.id))
    served = listed({name for pool in serving for name in pool.names})
    if model is None:
        raise BadRequestError(f"`model` must be given, as several are served: {served}", param="model")
    raise UnknownModelError(f"The model `{model}` does not exist; served: {served}", param="model")


def names_in_several(pools: Iterable[Pool]) -> dict[str, int]:
    """Names of base models that more than one pool serves now, and how many workers serve each."""
    live = [pool.servers for pool in pools if pool.workers]
    counts = Counter(name for servers in live for name in servers)
    return {name: sum(servers[name] for servers in live) for name, count in counts.items() if count > 1}


def listed(names: Set[str]) -> str:
    """The first LISTED_MOST names, for a sentence."""
    first = sorted(names)[:LISTED_MOST]
    return ", ".join([*first, *([f"… {len(names)} in all"] if len(names) > len(first) else [])])


def _state(worker: Worker) -> str:
    if worker.silent or worker.state != "up":
        return "silent" if worker.silent else worker.state
    return refusal(worker.card) if worker.card.role != BOTH else worker.state
