"""Audits every worker about once a second: which problems have begun, and which are over.

A problem is reported once when it begins and once when it ends, even if the figures in its text change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from msgspec import Struct

from kvrouter.core.audit.pairs import problems_of_pairs
from kvrouter.core.audit.problems import (
    NOT_COMPARED,
    Problem,
    TokenComparison,
    name_conflicts,
    problem_of_address,
    problem_of_answers,
    problem_of_prompts,
    problems_of,
    problems_of_pool,
    problems_of_queue,
)
from kvrouter.core.feeds.trust import FeedState
from kvrouter.core.fleet.pool import Pool
from kvrouter.core.fleet.replica import Replica
from kvrouter.core.wire.ids import PoolId, Target, WorkerId
from kvrouter.core.wire.senders import KvSource


class AuditFinding(Struct, frozen=True):
    """A problem of a worker, of a whole pool (`worker` is empty), or of no known pool (`pool` is empty)."""

    pool: str
    worker: str
    problem: Problem


# How often an audit checks for expected events. Once is not enough: a small cache soon evicts a block again,
# and an event that has come and gone in between would count as missing.
MOST_STEPS = 40
# While no event is expected, few steps let an idle replica sleep.
FEWEST_STEPS = 4
WORKERS_A_STEP = 25

_Key = tuple[str, str, str]  # pool, worker, kind of problem


class Audit:
    """Problems of the workers that one replica sees.

    `compared` returns what is known about the token ids of a pool's engines. `has_queue`: requests wait
    while workers are full (--router-queue-threshold).
    """

    def __init__(
        self,
        replica: Replica,
        compared: Callable[[PoolId], TokenComparison] = lambda _: NOT_COMPARED,
        *,
        has_queue: bool = False,
    ) -> None:
        self._replica = replica
        self._compared = compared
        self._has_queue = has_queue
        self._known: dict[_Key, AuditFinding] = {}
        self._found: dict[_Key, AuditFinding] = {}
        self._now = 0.0

    def step_count(self) -> int:
        """Into how many steps to divide an audit. The caller calls `check_events` at each step."""
        routers = self._replica.routers.values()
        if any(router.predictions.is_waiting for router in routers):
            return MOST_STEPS
        workers = sum(len(router.pool.workers) for router in routers)
        return max(FEWEST_STEPS, min(MOST_STEPS, workers // WORKERS_A_STEP))

    def check_events(self, now: float) -> None:
        """Record which expected blocks the events have named by now."""
        self._now = now
        for router in self._replica.routers.values():
            router.predictions.look(now, partial(self._holds, router.pool))

    def run(self) -> tuple[list[AuditFinding], list[AuditFinding]]:
        """Run all steps without a pause; returns the problems that have begun and the problems that ended."""
        for _ in self.steps(1):
            pass
        return self.changes()

    def steps(self, count: int) -> Iterator[None]:
        """Audit in at most `count` steps: thousands of workers at once would delay requests."""
        for router in self._replica.routers.values():
            router.predictions.keep(router.pool.workers)
        compared = {pool_id: self._compared(pool_id) for pool_id in self._replica.routers}
        found = [*self._of_senders(), *self._of_pools(compared)]
        workers = [
            (pool_id, worker_id)
            for pool_id, router in self._replica.routers.items()
            for worker_id in router.pool.workers
        ]
        share = -(-len(workers) // count) or 1
        for start in range(0, len(workers), share):
            for pool_id, worker_id in workers[start : start + share]:
                found += self._of_worker(pool_id, worker_id, compared[pool_id])
            if start + share < len(workers):
                yield
        self._found = {(one.pool, one.worker, one.problem.kind): one for one in found}
        yield

    def changes(self) -> tuple[list[AuditFinding], list[AuditFinding]]:
        """Problems that have begun since the audit before, and problems that ended."""
        found, before = self._found, self._known
        self._known = found
        begun = [one for key, one in found.items() if key not in before]
        return begun, [one for key, one in before.items() if key not in found]

    def problems(self, pool_id: PoolId, worker_id: str) -> list[Problem]:
        """A worker's problems in the last audit; an empty id stands for the pool itself."""
        return [one.problem for key, one in self._known.items() if key[:2] == (pool_id, worker_id)]

    def strangers(self) -> list[str]:
        """Problems of senders that belong to no known pool."""
        return [found.problem.text for key, found in self._known.items() if not key[0]]

    def sentences(self) -> dict[tuple[str, str], list[str]]:
        """The problems of the last audit by pool and worker; an empty worker stands for the pool itself."""
        texts: dict[tuple[str, str], list[str]] = {}
        for (pool, worker, _kind), found in self._known.items():
            texts.setdefault((pool, worker), []).append(found.problem.text)
        return texts

    def degrading(self) -> list[str]:
        """Sentences about workers that serve nothing or are unwanted, deadly prompts, and others' claims."""
        return [
            f"{pool}: {worker and f'worker {worker} '}{found.problem.text}" if pool else found.problem.text
            for (pool, worker, kind), found in self._known.items()
            if kind in {"not_found", "address", "loop", "deadly_prompt", "role", "partner", "pair"}
            or not pool
        ] + list(self._eventless())

    def _eventless(self) -> Iterator[str]:
        """Pools placed by KV events in which each worker's card, or its answers, show that none come.

        An idle fleet has no events either: without requests that alone is no problem.
        """
        silent = {key[:2] for key in self._known if key[2] == "no_events"}
        for pool_id, router in self._replica.routers.items():
            workers = {worker_id for worker_id, one in router.pool.workers.items() if one.state == "up"}
            if router.needs_tokens and workers and all((pool_id, one) in silent for one in workers):
                yield (
                    f"pool {pool_id}: no worker publishes KV events, so no overlap is predicted and requests "
                    "are placed by load alone: see the problem `no_events` of each in /workers"
                )

    def is_firm(self, pool_id: PoolId, target: Target) -> bool:
        """Whether a wrong prediction for this target is a problem, because no known reason explains it.

        An index that may lack blocks of the engine is such a reason. Without KV events the index has
        assumed blocks only, and predictions that differ show that the assumptions are wrong.
        """
        if not self._replica.settings.pool.use_kv_events:
            return True
        return self._is_live(pool_id, target) and not self._is_partial(pool_id, target)

    def _of_senders(self) -> Iterator[AuditFinding]:
        """Members that are not known here, and claims of replicas that are not believed."""
        for sender, reason in self._replica.refusals.named().items():
            yield AuditFinding("", sender, Problem("refused", f"{sender} is refused: {reason}"))
        if doubts := self._replica.readiness.doubts():
            yield AuditFinding("", "", Problem("claims", "; ".join(doubts)))

    def _of_pools(self, compared: dict[PoolId, TokenComparison]) -> Iterator[AuditFinding]:
        pools = [router.pool for router in self._replica.routers.values()]
        for pool_id, sentences in name_conflicts(pools).items():
            yield AuditFinding(pool_id, "", Problem("name", sentences[0]))
        for pool_id, router in self._replica.routers.items():
            for worker_id, problem in problems_of_pairs(router.pool, router.tables.transfers, self._now):
                yield AuditFinding(pool_id, worker_id, problem)
        for pool in pools:
            for problem in problems_of_queue(pool) if self._has_queue else ():
                yield AuditFinding(pool.id, "", problem)
            if (lost := problem_of_prompts(self._replica.deadly.entries(pool.id))) is not None:
                yield AuditFinding(pool.id, "", lost)
        for pool_id, known in compared.items():
            for problem in problems_of_pool(known):
                yield AuditFinding(pool_id, "", problem)

    def _of_worker(
        self, pool_id: PoolId, worker_id: WorkerId, compared: TokenComparison
    ) -> Iterator[AuditFinding]:
        router = self._replica.routers.get(pool_id)
        worker = router.pool.workers.get(worker_id) if router is not None else None
        if router is None or worker is None:
            return  # removed between two steps
        for problem in (problem_of_answers(worker), problem_of_address(router.pool, worker)):
            if problem is not None:
                yield AuditFinding(pool_id, worker_id, problem)
        record = router.predictions.records.get(worker_id)
        for problem in problems_of(router.pool, worker, record, compared):
            if router.needs_tokens:  # without tokens no overlap is predicted, so nothing can be wrong with it
                yield AuditFinding(pool_id, worker_id, problem)

    def _holds(self, pool: Pool, target: Target, hash_: int) -> bool | None:
        """Whether events have named a block; None while a missing block proves nothing."""
        if pool.index.holds(target, hash_, "disk"):
            return True
        if not self._is_live(pool.id, target):
            return None
        # An engine does not announce again what it had cached before its agent started.
        return None if pool.index.blocks(target) and self._is_partial(pool.id, target) else False

    def _is_live(self, pool_id: PoolId, target: Target) -> bool:
        reader = self._replica.readers.get(KvSource(pool_id, target.worker_id, target.rank))
        return reader is not None and reader.state is FeedState.LIVE

    def _is_partial(self, pool_id: PoolId, target: Target) -> bool:
        worker = self._replica.routers[pool_id].pool.workers.get(target.worker_id)
        beat = worker.ranks.get(target.rank) if worker else None
        # Before a heartbeat names the rank, it may be partial, so a missing block proves nothing. `/workers`
        # shows False then, because it shows only what the agent has reported.
        return beat is None or beat.partial
