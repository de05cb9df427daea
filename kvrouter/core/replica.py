"""One replica's whole state: its pools, the feeds it follows, and who is still there.

    live messages ──> worker_heard / kv_frame / router_heard / sync_frame
                              │
    feeds (one reader each) ──┴──> index and active table of the pool ──> Router.route
                              │
    due ──> replay requests to send;  work ──> snapshots loaded and dead slots swept, in slices

Pure: bytes and the time go in, bytes and requests come out. The shell in `frontend/` does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvrouter.core.beats import RouterBeat, State, WorkerBeat, decode_router_beat, decode_worker_beat
from kvrouter.core.events import VERSION, ReplayRequest
from kvrouter.core.feed import FeedReader
from kvrouter.core.feed_state import FeedState
from kvrouter.core.ids import PoolId, RouterId, Target, WorkerId
from kvrouter.core.lease import DEFAULT_ROUNDS, Leases
from kvrouter.core.models import pool_serving
from kvrouter.core.policy import Policy, PolicyState
from kvrouter.core.pool import Pool, PoolSettings, Worker
from kvrouter.core.router import Router
from kvrouter.core.sinks import KvSink
from kvrouter.core.sources import Feed, KvSource, RouterSource, Source, SyncSource, WorkerSource
from kvrouter.errors import MalformedFrameError

HELLO_S = 0.2
"""Everyone answers a hello within 50 ms; after this long, who has not spoken is not there."""
SLICE_HASHES = 4096
"""Loading this many hashes of a snapshot takes about 1 ms."""


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """What an operator sets for one replica."""

    pool: PoolSettings = field(default_factory=PoolSettings)
    synced: bool = False
    lease_rounds: int = DEFAULT_ROUNDS


@dataclass(slots=True)
class ReplicaCounters:
    """What happened, beside the feeds' own counters."""

    malformed_heartbeats: int = 0
    stale_heartbeats: int = 0
    unknown_messages: int = 0
    workers_lost: int = 0
    replicas_lost: int = 0


class Replica:
    """Everything a replica knows and decides.

    `new_policy()` makes a policy and its state for a new pool; `chance()` returns a number in [0, 1).
    """

    def __init__(
        self,
        settings: ReplicaSettings,
        router_id: RouterId,
        incarnation: int,
        new_policy: Callable[[], tuple[Policy, PolicyState]],
        *,
        chance: Callable[[], float],
    ) -> None:
        self.settings = settings
        self.router_id = router_id
        self.incarnation = incarnation
        self.counters = ReplicaCounters()
        self.routers: dict[PoolId, Router] = {}
        self.readers: dict[Feed, FeedReader] = {}
        self.peers: dict[RouterId, RouterBeat] = {}
        self._worker_pools: dict[WorkerId, PoolId] = {}
        self._leases: Leases[Source] = Leases(settings.lease_rounds)
        self._new_policy = new_policy
        self._chance = chance
        self._round = 0
        self._hello_at: float | None = None
        self._is_ready = False
        self._lacks_card = False
        self._hello_again_round = 0

    # Messages

    def worker_heard(self, worker_id: WorkerId, data: bytes, now: float) -> None:
        """A worker's heartbeat: its card, its load, and how far its feeds are."""
        try:
            beat = decode_worker_beat(data)
        except MalformedFrameError:
            self.counters.malformed_heartbeats += 1
            return
        pool_id = PoolId(beat.pool)
        known = self._worker(worker_id)
        if known is not None and not known.silent and beat.incarnation < known.incarnation:
            self.counters.stale_heartbeats += 1
            return
        if beat.state == "leave" or self._worker_pools.get(worker_id, pool_id) != pool_id:
            self._remove_worker(worker_id)
        if beat.state == "leave":
            return
        self._lacks_card = self._lacks_card or _is_card_missing(known, beat)
        if not self.router(pool_id).pool.update(worker_id, beat):
            return
        self._worker_pools[worker_id] = pool_id
        self._leases.heard(WorkerSource(worker_id))
        self._follow_worker(pool_id, worker_id, beat, now)

    def kv_frame(self, source: KvSource, data: bytes, now: float) -> None:
        """A frame of a KV feed; ignored until the worker's card has been seen."""
        reader = self.readers.get(source)
        if reader is None:
            self.counters.unknown_messages += 1
            return
        reader.frame(data, now)

    def router_heard(self, router_id: RouterId, data: bytes, now: float) -> None:
        """A replica's heartbeat; one's own, come back, is a round of the leases."""
        try:
            beat = decode_router_beat(data)
        except MalformedFrameError:
            self.counters.malformed_heartbeats += 1
            return
        if router_id == self.router_id:
            self._lose(self._leases.round(beat.round))
            return
        if beat.state == "leave":
            self._remove_router(router_id)
            return
        self.peers[router_id] = beat
        self._leases.heard(RouterSource(router_id))
        for pool_id, seq in beat.feeds.items() if self.settings.synced else ():
            source = SyncSource(PoolId(pool_id), router_id)
            self._reader(source).heartbeat(beat.incarnation, seq, now)

    def sync_frame(self, source: SyncSource, data: bytes, now: float) -> None:
        """A frame of a replica's sync feed; one's own is ignored."""
        if source.router_id == self.router_id or not self.settings.synced:
            return
        self._leases.heard(RouterSource(source.router_id))
        self._reader(source).frame(data, now)

    # What to do

    def due(self, now: float, most: int) -> list[tuple[Feed, ReplayRequest]]:
        """The replay requests to send now, at most `most`; report back with `answered` or `failed`."""
        requests: list[tuple[Feed, ReplayRequest]] = []
        for source, reader in self.readers.items():
            if len(requests) == most:
                break
            request = reader.due(now)
            if request is not None:
                requests.append((source, request))
        return requests

    def answered(self, source: Feed, data: bytes, now: float) -> None:
        """A replay request was answered; the source may have left meanwhile."""
        reader = self.readers.get(source)
        if reader is not None:
            reader.answer(data, now)

    def failed(self, source: Feed, now: float) -> None:
        """A replay request was not answered."""
        reader = self.readers.get(source)
        if reader is not None:
            reader.failed(now)

    def work(self, now: float) -> bool:
        """One slice of loading and sweeping, about 1 ms; returns whether there is more."""
        for reader in self.readers.values():
            if reader.is_loading:
                reader.work(SLICE_HASHES, now)
                return True
        return any(router.pool.index.sweep() for router in self.routers.values())

    def next_round(self, now: float) -> None:
        """Once per heartbeat interval: a new round of the leases; what was assumed for too long goes."""
        self._round += 1
        for router in self.routers.values():
            router.pool.approx.expire(now)

    def heartbeat(self, state: State, address: str) -> RouterBeat:
        """What this replica says of itself, each round and to every hello."""
        feeds = {str(pool_id): router.source.seq for pool_id, router in self.routers.items()}
        return RouterBeat(VERSION, self.incarnation, state, address, feeds, self._round)

    def wants_hello(self) -> bool:
        """Whether to say hello in this round: somebody is heard whose card is missing here.

        Cards travel every 10 s only, and one may be lost. Not asked for in every round: all answer.
        """
        if not self._lacks_card or self._round < self._hello_again_round:
            return False
        self._lacks_card = False
        self._hello_again_round = self._round + self.settings.lease_rounds
        return True

    def said_hello(self, now: float) -> None:
        """A hello has gone out (again, after a reconnect)."""
        if self._hello_at is None:
            self._hello_at = now

    # Questions

    def router(self, pool_id: PoolId) -> Router:
        """The router of a pool; begun when the pool is first heard of."""
        router = self.routers.get(pool_id)
        if router is None:
            policy, state = self._new_policy()
            router = self.routers[pool_id] = Router(
                Pool(pool_id, self.settings.pool),
                policy,
                state,
                router_id=self.router_id,
                incarnation=self.incarnation,
                synced=self.settings.synced,
            )
        return router

    def router_for(self, model: str | None) -> Router:
        """The router of the pool that serves a model or LoRA name (core/models.py)."""
        return self.routers[pool_serving(model, [router.pool for router in self.routers.values()]).id]

    def not_ready(self, now: float) -> list[str]:
        """Why this replica should not get traffic yet; empty once it was ready, and for ever after."""
        if not self._is_ready:
            reasons = list(self._missing(now))
            self._is_ready = not reasons
            return reasons
        return []

    def give_up_waiting(self) -> None:
        """Be ready with what there is: `--ready-timeout` has passed."""
        self._is_ready = True

    def degraded(self) -> list[str]:
        """What is wrong now, although requests are served."""
        reasons = [f"{name(source)}: {reader.flag}" for source, reader in self.readers.items() if reader.flag]
        reasons += [
            f"{name(source)}: {reader.state.value}, {reader.lag} frames behind"
            for source, reader in self.readers.items()
            if reader.state is not FeedState.LIVE
        ]
        pools = [router.pool for router in self.routers.values()]
        reasons += [
            f"pool {pool.id}: no live worker"
            for pool in pools
            if pool.workers and all(worker.silent for worker in pool.targets.values())
        ]
        return reasons or ([] if any(pool.workers for pool in pools) else ["no worker is known"])

    def _missing(self, now: float) -> Iterable[str]:
        if self._hello_at is None:
            yield "not connected to NATS yet"
        elif now < self._hello_at + HELLO_S:
            yield "waiting for the answers to hello"
        if not self._worker_pools:
            yield "no worker has been seen"
        for source, reader in self.readers.items():
            if reader.state is not FeedState.LIVE:
                yield f"{name(source)}: {reader.state.value}, {reader.lag} frames behind"

    # Members

    def _follow_worker(self, pool_id: PoolId, worker_id: WorkerId, beat: WorkerBeat, now: float) -> None:
        worker = self.routers[pool_id].pool.workers[worker_id]
        if beat.card is not None:
            self._unfollow_lost_ranks(pool_id, worker_id, worker.card.ranks)
        if not (worker.card.publishes_events and self.settings.pool.use_kv_events):
            return
        for rank in beat.ranks[: worker.card.ranks]:
            source = KvSource(pool_id, worker_id, rank.rank)
            if self._reader(source).heartbeat(rank.incarnation, rank.seq, now):
                self._leases.heard(source)

    def _unfollow_lost_ranks(self, pool_id: PoolId, worker_id: WorkerId, ranks: int) -> None:
        """A worker that came back with fewer ranks has no feeds for the others any more."""
        for source in list(self.readers):
            if isinstance(source, KvSource) and source[:2] == (pool_id, worker_id) and source.rank >= ranks:
                self._unfollow(source)

    def _reader(self, source: Feed) -> FeedReader:
        reader = self.readers.get(source)
        if reader is None:
            reader = self.readers[source] = self._new_reader(source)
        return reader

    def _new_reader(self, source: Feed) -> FeedReader:
        router = self.router(source.pool)
        if isinstance(source, SyncSource):
            return FeedReader(source.pool, router.copy_sink(source.router_id), self._chance)
        pool, worker_id = router.pool, source.worker_id
        worker = pool.workers[worker_id]

        def capacity() -> int:
            return pool.workers[worker_id].capacity_blocks()

        sink = KvSink(pool.index, source.target, worker.tier_sets(), capacity)
        return FeedReader(source.rank, sink, self._chance)

    def _lose(self, sources: list[Source]) -> None:
        """Leases have ended."""
        silent_workers = {source.worker_id for source in sources if isinstance(source, WorkerSource)}
        self._lose_workers(silent_workers)
        for source in sources:
            if isinstance(source, RouterSource):
                self.counters.replicas_lost += 1
                self._remove_router(source.router_id)
            elif isinstance(source, KvSource):
                self._unfollow(source)

    def _lose_workers(self, worker_ids: set[WorkerId]) -> None:
        for pool_id in {self._worker_pools[worker_id] for worker_id in worker_ids}:
            members = {worker_id for worker_id in worker_ids if self._worker_pools.get(worker_id) == pool_id}
            router = self.routers[pool_id]
            lost = [router.pool.workers[worker_id] for worker_id in members & router.pool.workers.keys()]
            removed = router.pool.silence(members)
            self._forget_targets(pool_id, [target for worker in lost for target in worker.targets()])
            self.counters.workers_lost += len(removed)
            for worker_id in members:
                self._unfollow_worker(worker_id)
            for worker_id in removed:
                del self._worker_pools[worker_id]
            for worker_id in members.difference(removed):
                self._leases.heard(WorkerSource(worker_id))  # looked at again after another lease

    def _remove_worker(self, worker_id: WorkerId) -> None:
        pool_id = self._worker_pools.pop(worker_id, None)
        if pool_id is not None:
            self._leases.forget(WorkerSource(worker_id))
            self._unfollow_worker(worker_id)
            self._forget_targets(pool_id, self.routers[pool_id].pool.remove(worker_id))

    def _forget_targets(self, pool_id: PoolId, targets: list[Target]) -> None:
        for target in targets:
            self.routers[pool_id].forget(target)

    def _unfollow_worker(self, worker_id: WorkerId) -> None:
        for source in list(self.readers):
            if isinstance(source, KvSource) and source.worker_id == worker_id:
                self._unfollow(source)

    def _unfollow(self, source: Feed) -> None:
        """Its reader goes. A heartbeat begins a new one, which takes any incarnation."""
        self._leases.forget(source)
        reader = self.readers.pop(source, None)
        if reader is not None:
            reader.close()

    def _remove_router(self, router_id: RouterId) -> None:
        self.peers.pop(router_id, None)
        self._leases.forget(RouterSource(router_id))
        for source in list(self.readers):
            if isinstance(source, SyncSource) and source.router_id == router_id:
                self._unfollow(source)
        for router in self.routers.values():
            router.pool.active.free_owner(router_id)

    def _worker(self, worker_id: WorkerId) -> Worker | None:
        pool_id = self._worker_pools.get(worker_id)
        return self.routers[pool_id].pool.workers.get(worker_id) if pool_id else None


def _is_card_missing(known: Worker | None, beat: WorkerBeat) -> bool:
    """Whether the heartbeat speaks of a card that has not been seen."""
    if beat.card is not None:
        return False
    return known is None or known.card_seen != (beat.incarnation, beat.card_version)


def name(source: Feed) -> str:
    """A feed's name for people: `kv w1/0`, `sync 3f2a`."""
    if isinstance(source, KvSource):
        return f"kv {source.target}"
    return f"sync {source.router_id} in {source.pool}"
