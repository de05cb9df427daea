"""Logs each worker and replica that joins, leaves or is lost, and each change of a pool's block size.

Nothing else reports a loss: with one of two workers gone, requests still succeed and readiness holds.
"""

from __future__ import annotations

from typing import NamedTuple

import structlog

from kvrouter.core.fleet.replica import Replica
from kvrouter.core.routing.worker import Worker
from kvrouter.core.wire.ids import PoolId, RouterId, WorkerId

log = structlog.get_logger()

# Per round of the heartbeat. The others are counted in one more line: when a thousand workers join together,
# a thousand lines would delay requests and hide everything else.
MOST_LINES = 50


class _Seen(NamedTuple):
    pool: PoolId
    incarnation: int
    silent: bool
    capacity_blocks: int


class Members:
    """Compares the members a replica knows now with those it knew before. It changes nothing."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._workers: dict[WorkerId, _Seen] = {}
        self._replicas: dict[RouterId, int] = {}  # rounds since the last heartbeat
        self._sizes: dict[PoolId, int] = {}
        self._weights: dict[PoolId, bool] = {}  # whether `auto` is in use
        self._lines = 0

    def worker_heartbeat(self, worker_id: WorkerId) -> None:
        """Called after each heartbeat of a worker."""
        found, seen = self._find(worker_id), self._workers.get(worker_id)
        if found is None:
            if self._workers.pop(worker_id, None) is not None:
                self._log("worker.left", worker=worker_id, reason="left")
            return
        pool_id, worker = found
        now = _Seen(pool_id, worker.incarnation, worker.silent, worker.capacity_blocks)
        if now == seen:
            return
        self._workers[worker_id] = now
        if seen is not None and 0 < now.capacity_blocks < seen.capacity_blocks:
            before, blocks = seen.capacity_blocks, now.capacity_blocks
            self._warn("worker.capacity_fell", worker=worker_id, pool=pool_id, before=before, now=blocks)
        if seen is None or seen._replace(capacity_blocks=now.capacity_blocks) != now:
            facts = {"worker": worker_id, "pool": pool_id, "url": worker.card.url, **worker.card.part()}
            self._log("worker.joined", **facts, reason=_why_joined(seen, now))

    def replica_heartbeat(self, router_id: RouterId) -> None:
        """Called after each heartbeat of another replica."""
        peer = self._replica.peers.get(router_id)
        if peer is None:
            if self._replicas.pop(router_id, None) is not None:
                self._log("replica.left", replica=router_id, reason="left")
            return
        if router_id not in self._replicas:
            self._log("replica.joined", replica=router_id, url=peer.address)
        self._replicas[router_id] = 0

    def silent_rounds(self, router_id: RouterId) -> int:
        """Rounds since the last heartbeat of a replica."""
        return self._replicas.get(router_id, 0)

    def round_ended(self) -> None:
        """Called after each round of the leases: a member that is gone and has not left is lost."""
        if self._lines > MOST_LINES:
            log.warning("members.more", came_or_went=self._lines - MOST_LINES, see="/workers")
        self._lines = 0
        for worker_id, seen in list(self._workers.items()):
            self._check_worker(worker_id, seen)
        for router_id in self._replicas.keys() - self._replica.peers.keys():
            del self._replicas[router_id]
            reason = "silent for longer than its lease: its bookings are dropped"
            self._warn("replica.lost", replica=router_id, reason=reason)
        for router_id in self._replicas:
            self._replicas[router_id] += 1
        self._check_sizes()
        self._check_weights()

    def _check_sizes(self) -> None:
        sizes = {pool_id: router.pool.block_size for pool_id, router in self._replica.routers.items()}
        for pool_id, size in sizes.items():
            before = self._sizes.get(pool_id)
            if before and before != size:
                self._log("pool.block_size", pool=pool_id, before=before, now=size)
        self._sizes = sizes

    def _check_weights(self) -> None:
        """Pools whose mode is kv with weight `auto`: whether it is in use, or why not."""
        doubts = {
            pool_id: router.doubt
            for pool_id, router in self._replica.routers.items()
            if router.selection.policy.compares_seconds and router.pool.workers
        }
        for pool_id, doubt in doubts.items():
            if self._weights.get(pool_id) != (not doubt):
                weight, reason = ("8", doubt) if doubt else ("auto", "prefill times are known")
                self._log("pool.weight", pool=pool_id, weight=weight, reason=reason)
        self._weights = {pool_id: not doubt for pool_id, doubt in doubts.items()}

    def _check_worker(self, worker_id: WorkerId, seen: _Seen) -> None:
        found = self._find(worker_id)
        if found is None:
            del self._workers[worker_id]
            reason = "silent for longer than its lease: it gets no requests, its blocks are dropped"
            self._warn("worker.lost", worker=worker_id, pool=seen.pool, reason=reason)
        elif found[1].silent and not seen.silent:
            self._workers[worker_id] = seen._replace(silent=True)
            reason = (
                "silent for longer than its lease; its pool has no other, so it stays while its port answers"
            )
            self._warn("worker.lost", worker=worker_id, pool=seen.pool, reason=reason)

    def _find(self, worker_id: WorkerId) -> tuple[PoolId, Worker] | None:
        pool_id, worker = self._replica.pool_of(worker_id), self._replica.worker(worker_id)
        return (pool_id, worker) if pool_id is not None and worker is not None else None

    def _log(self, event: str, **facts: object) -> None:
        self._lines += 1
        if self._lines <= MOST_LINES:
            log.info(event, **facts)

    def _warn(self, event: str, **facts: object) -> None:
        self._lines += 1
        if self._lines <= MOST_LINES:
            log.warning(event, **facts)


def _why_joined(seen: _Seen | None, now: _Seen) -> str:
    if seen is None:
        return "new"
    if seen.pool != now.pool:
        return f"moved from pool {seen.pool}"
    return "its agent was restarted" if seen.incarnation != now.incarnation else "its heartbeats are back"
