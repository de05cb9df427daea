"""Looks at every worker once in a while: which problems have begun, and which are over.

Each problem is told once when it begins and once when it ends, whatever its sentence counts by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from msgspec import Struct

from kvrouter.core.audit.problems import (
    NOT_COMPARED,
    Compared,
    Problem,
    name_conflicts,
    problems_of,
    problems_of_pool,
    shared_addresses,
)
from kvrouter.core.feeds.trust import FeedState
from kvrouter.core.fleet.pool import Pool
from kvrouter.core.fleet.replica import Replica
from kvrouter.core.wire.ids import PoolId, Target, WorkerId
from kvrouter.core.wire.senders import KvSource


class Told(Struct, frozen=True):
    """A problem of a worker, or of a whole pool (`worker` is empty)."""

    pool: str
    worker: str
    problem: Problem


MOST_STEPS = 40
"""How often between two looks it is seen which events have come: a small cache soon drops a block."""

FEWEST_STEPS = 4
"""The same where none is expected: a replica that has nothing to do should seldom wake up."""

WORKERS_A_STEP = 25

_Key = tuple[str, str, str]
"""Pool, worker, kind of problem."""


class Watch:
    """What one replica knows to be wrong with the workers it sees.

    `compared` tells what is known of the token ids of a pool's engines.
    """

    def __init__(
        self, replica: Replica, compared: Callable[[PoolId], Compared] = lambda _: NOT_COMPARED
    ) -> None:
        self._replica = replica
        self._compared = compared
        self._known: dict[_Key, Told] = {}
        self._found: dict[_Key, Told] = {}

    def steps(self) -> int:
        """In how many steps to look, and how often to `settle` meanwhile."""
        routers = self._replica.routers.values()
        if any(router.truth.is_waiting for router in routers):
            return MOST_STEPS
        workers = sum(len(router.pool.workers) for router in routers)
        return max(FEWEST_STEPS, min(MOST_STEPS, workers // WORKERS_A_STEP))

    def settle(self, now: float) -> None:
        """Which events have come that are expected. To be called often: engines forget blocks, too."""
        for router in self._replica.routers.values():
            router.truth.look(now, partial(self._holds, router.pool))

    def look(self) -> tuple[list[Told], list[Told]]:
        """The problems that have begun since the last look, and those that are over."""
        for _ in self.looking(1):
            pass
        return self.told()

    def looking(self, steps: int) -> Iterator[None]:
        """A look in so many steps at most: it is dear where there are thousands of workers."""
        for router in self._replica.routers.values():
            router.truth.keep(router.pool.workers)
        compared = {pool_id: self._compared(pool_id) for pool_id in self._replica.routers}
        found = [*self._of_pools(compared)]
        workers = [
            (pool_id, worker_id)
            for pool_id, router in self._replica.routers.items()
            for worker_id in router.pool.workers
        ]
        share = -(-len(workers) // steps) or 1
        for start in range(0, len(workers), share):
            for pool_id, worker_id in workers[start : start + share]:
                found += self._of_worker(pool_id, worker_id, compared[pool_id])
            if start + share < len(workers):
                yield
        self._found = {(told.pool, told.worker, told.problem.kind): told for told in found}
        yield

    def told(self) -> tuple[list[Told], list[Told]]:
        """What the last look has found that the one before it had not, and the other way round."""
        found, before = self._found, self._known
        self._known = found
        begun = [told for key, told in found.items() if key not in before]
        return begun, [told for key, told in before.items() if key not in found]

    def problems(self, pool_id: PoolId, worker_id: str) -> list[Problem]:
        """What was wrong with a worker at the last look; an empty id means the pool itself."""
        return [told.problem for key, told in self._known.items() if key[:2] == (pool_id, worker_id)]

    def is_firm(self, pool_id: PoolId, target: Target) -> bool:
        """Whether the index knows all that the target's engine holds."""
        if not self._replica.settings.pool.use_kv_events:
            return True
        return self._is_live(pool_id, target) and not self._is_partial(pool_id, target)

    def _of_pools(self, compared: dict[PoolId, Compared]) -> Iterator[Told]:
        pools = [router.pool for router in self._replica.routers.values()]
        for pool_id, sentences in name_conflicts(pools).items():
            yield Told(pool_id, "", Problem("name", sentences[0]))
        for pool in pools:
            for sentence in shared_addresses(pool)[:1]:
                yield Told(pool.id, "", Problem("address", sentence))
        for pool_id, known in compared.items():
            for problem in problems_of_pool(known):
                yield Told(pool_id, "", problem)

    def _of_worker(self, pool_id: PoolId, worker_id: WorkerId, compared: Compared) -> Iterator[Told]:
        router = self._replica.routers.get(pool_id)
        worker = router.pool.workers.get(worker_id) if router is not None else None
        if router is None or worker is None:
            return  # gone since the look began
        record = router.truth.records.get(worker_id)
        for problem in problems_of(router.pool, worker, record, compared):
            if router.needs_tokens:  # else no overlap is predicted
                yield Told(pool_id, worker_id, problem)

    def _holds(self, pool: Pool, target: Target, hash_: int) -> bool | None:
        """Whether events have named a block; None while that proves nothing."""
        if pool.index.holds(target, hash_, "disk"):
            return True
        if not self._is_live(pool.id, target):
            return None
        # what was cached before the agent knew it is not announced again
        return None if pool.index.blocks(target) and self._is_partial(pool.id, target) else False

    def _is_live(self, pool_id: PoolId, target: Target) -> bool:
        reader = self._replica.readers.get(KvSource(pool_id, target.worker_id, target.rank))
        return reader is not None and reader.state is FeedState.LIVE

    def _is_partial(self, pool_id: PoolId, target: Target) -> bool:
        worker = self._replica.routers[pool_id].pool.workers.get(target.worker_id)
        beat = worker.ranks.get(target.rank) if worker else None
        return beat is None or beat.partial
