"""The state of one replica: its pools, the feeds it follows, the members with a lease.

    live messages ──> worker_heartbeat / kv_frame / router_heartbeat / sync_frame
                              │
    feeds (one reader each) ──┴──> block index and bookings of the pool ──> Router.route
                              │
    due ──> replay requests to send;  work ──> snapshots loaded and dead slots swept, in slices

Pure: bytes and the time go in, bytes and requests come out. The shell in `kvrouter/replica` does the I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvrouter.core.feeds.buffers import HeldBudget
from kvrouter.core.feeds.lease import DEFAULT_ROUNDS, Leases
from kvrouter.core.feeds.reader import FeedReader
from kvrouter.core.feeds.receipt import REFUSED, STALE, TAKEN, FrameVerdict, Receipt, malformed
from kvrouter.core.feeds.sinks import KvSink
from kvrouter.core.fleet.following import MOST_SYNC_FEEDS, Following
from kvrouter.core.fleet.hellos import Hellos
from kvrouter.core.fleet.peers import Peers
from kvrouter.core.fleet.pool import Pool, PoolSettings
from kvrouter.core.fleet.pools import Pools, names_in_several
from kvrouter.core.fleet.readiness import AWAITED_MOST, Readiness
from kvrouter.core.fleet.refusals import (
    WORKER_BYTES,
    WORKERS_BYTES,
    Budget,
    Refusals,
    card_bytes,
    rank_bytes,
)
from kvrouter.core.fleet.router import Router, RouterRules
from kvrouter.core.fleet.routing_changes import follow, refused
from kvrouter.core.routing.worker import Worker
from kvrouter.core.tables.bookings import BookedBudget
from kvrouter.core.tables.claimed_losses import ClaimedLosses
from kvrouter.core.tables.deadly_prompts import DeadlyPrompts
from kvrouter.core.tables.early_ops import EarlyBudget
from kvrouter.core.tables.tenants import TenantTable
from kvrouter.core.wire.addresses import Network, host_error
from kvrouter.core.wire.heartbeats import (
    Heard,
    RouterBeat,
    RoutingChange,
    State,
    Traffic,
    WorkerBeat,
    decode_router_beat,
    decode_worker_beat,
    standing,
)
from kvrouter.core.wire.ids import PoolId, RouterId, Target, WorkerId
from kvrouter.core.wire.ops import VERSION, seq_of
from kvrouter.core.wire.senders import (
    AwaitedSource,
    Feed,
    KvSource,
    RouterSource,
    Source,
    SyncSource,
    WorkerSource,
)
from kvrouter.errors import MalformedFrameError, RefusedCardError

# Storing this many hashes of a snapshot takes about 0.7 ms.
SLICE_HASHES = 2048
# Sweeping one hash of a dropped booking costs as much as storing this many.
SWEPT_SHARE = 4
# Further members are ignored and counted: anybody who may publish can invent names. Targets: in any state.
WORKERS_MOST = 16_384
TARGETS_MOST = 65_536
# How long a refused sender is named: cards come every 10 s, two leases by default.
REFUSED_LEASES = 3
UNFOLLOWED = Heard(0, 0, 0, 0)
UNHEARD = "other replicas' bookings are not known: --router-replica-sync is off"


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """An operator's settings of one replica."""

    pool: PoolSettings = field(default_factory=PoolSettings)
    synced: bool = False
    lease_rounds: int = DEFAULT_ROUNDS
    heartbeat_s: float = 1.0
    worker_networks: tuple[Network, ...] = ()
    """Where workers may be; empty: anywhere but at addresses that are never allowed."""


@dataclass(slots=True)
class ReplicaCounters:
    """Events of one replica; the readers of feeds have counters of their own."""

    malformed_heartbeats: int = 0
    stale_heartbeats: int = 0
    unknown_messages: int = 0
    workers_lost: int = 0
    replicas_lost: int = 0
    pools_refused: int = 0
    """Messages that would have begun a pool beyond POOLS_MOST or UNSERVED_MOST."""
    members_refused: int = 0
    """Heartbeats of a worker or replica beyond WORKERS_MOST, TARGETS_MOST or PEERS_MOST."""


class Replica:
    """All state and decisions of a replica.

    `new_rules(pool)` makes a new pool's policy, tables and filters. `chance()` returns a number in [0, 1).
    """

    def __init__(
        self,
        settings: ReplicaSettings,
        router_id: RouterId,
        incarnation: int,
        new_rules: Callable[[PoolId], RouterRules],
        *,
        chance: Callable[[], float],
    ) -> None:
        self.settings = settings
        self.router_id = router_id
        self.incarnation = incarnation
        self.counters = ReplicaCounters()
        self.deadly = DeadlyPrompts()
        self.claimed_losses = ClaimedLosses(self.deadly)
        self.pools = Pools(self._new_router, settings.lease_rounds)
        self.routers = self.pools.routers
        self.refusals = Refusals()
        """Senders whose cards or heartbeats are not taken."""
        self.worker_bytes: Budget[WorkerId] = Budget(WORKER_BYTES, WORKERS_BYTES)  # cards and heartbeats
        self.routing: RoutingChange | None = None
        """The change of routing that it follows, by an operator here or at a peer; the shell applies it."""
        self._worker_pools: dict[WorkerId, PoolId] = {}
        self._leases: Leases[Source] = Leases(settings.lease_rounds, settings.heartbeat_s)
        self.peers = Peers(router_id, incarnation, self._leases, settings.lease_rounds)
        self.tenants = TenantTable(router_id)
        self.held, self.early, self.booked = HeldBudget(), EarlyBudget(), BookedBudget(tenants=self.tenants)
        """What waiting frames, ops without a card and peers' bookings take in all pools, within bounds."""
        self.feeds = Following(self._leases, self._new_reader)
        self.readers = self.feeds.readers
        self.readiness = Readiness(self.pools, self.peers, self.readers)
        self._chance = chance
        self._new_rules = new_rules
        self._round = self._returned_round = 0
        self._hellos = Hellos(settings.lease_rounds)
        self._silent_removed_in = -1

    # Messages

    def worker_heartbeat(
        self, worker_id: WorkerId, data: bytes, now: float, *, settles: bool = True
    ) -> Receipt:
        """A worker's heartbeat: its card, its load, the seq of each of its feeds.

        `settles` False: no decision may be made before `settle`. Of messages that arrive together each
        would otherwise build the pool's targets anew.
        """
        try:
            beat = decode_worker_beat(data, worker_id)
        except MalformedFrameError as error:
            self.counters.malformed_heartbeats += 1
            if isinstance(error, RefusedCardError):
                self.refusals.refuse(f"worker {worker_id}", str(error))
            return malformed(error)
        return self.take_worker_beat(worker_id, beat, now, settles=settles)

    def take_worker_beat(
        self, worker_id: WorkerId, beat: WorkerBeat, now: float, *, settles: bool = True
    ) -> Receipt:
        """A decoded heartbeat."""
        pool_id = PoolId(beat.pool)
        known = self.worker(worker_id)
        # Late heartbeats of an agent's former life must not undo the present one. After the lease a lower
        # incarnation counts: the new agent's clock may be behind.
        if known is not None and not known.silent and beat.incarnation < known.incarnation:
            self.counters.stale_heartbeats += 1
            return STALE
        if beat.state == "leave" or self._worker_pools.get(worker_id, pool_id) != pool_id:
            self._remove_worker(worker_id)
        if beat.state == "leave":
            self._meet_awaited(worker_id)
            return TAKEN
        # nearly all heartbeats: thousands a second
        is_load = known is not None and known.differs_in_load(beat) and worker_id in self._worker_pools
        if not (is_load or self._may_take(worker_id, pool_id, beat)):
            return REFUSED
        if reason := self._why_refused(worker_id, beat):
            self.counters.members_refused += 1
            self.refusals.refuse(f"worker {worker_id}", reason)
            return REFUSED
        if self.refusals:
            self.refusals.accept(f"worker {worker_id}")
        if is_load:
            self.routers[pool_id].pool.update(worker_id, beat, settles=settles)
        elif not self._take_news(worker_id, pool_id, beat, now, settles=settles):
            return REFUSED
        if settles:
            self.routers[pool_id].report_workers()
        self._leases.renew(WorkerSource(worker_id), beat.interval_ms)
        self._follow_worker(pool_id, worker_id, beat, now)
        return TAKEN

    def _may_take(self, worker_id: WorkerId, pool_id: PoolId, beat: WorkerBeat) -> bool:
        """Whether a heartbeat with news is of a worker with a card, for whom there is room."""
        known = self.worker(worker_id)
        if beat.card is None and (known is None or not known.knows_card_of(beat)):
            self._hellos.lacks_card = True
        if self.readiness.is_waiting_for(worker_id):
            self._leases.renew(AwaitedSource(worker_id), beat.interval_ms)  # `hello` asks for its card
        # Without a card neither its URL nor its block size is known.
        has_card = beat.card is not None or known is not None
        return has_card and self._may_begin(pool_id, served=True) and self._may_add(worker_id, beat)

    def _take_news(
        self, worker_id: WorkerId, pool_id: PoolId, beat: WorkerBeat, now: float, *, settles: bool
    ) -> bool:
        """A heartbeat with a card, another state, or of another incarnation; False: it is not known."""
        known = self.worker(worker_id)
        has_lost_cache = known is not None and known.has_lost_cache(beat)
        router = self.router(pool_id)
        if not router.pool.update(worker_id, beat, settles=settles):
            return False
        self._worker_pools[worker_id] = pool_id
        self.readiness.has_met_worker = True
        if has_lost_cache:
            router.engine_lost(worker_id)
            self.claimed_losses.worker_ended(worker_id, now)
        if known is None:
            router.feed.card_arrived(worker_id, now)
        self._meet_awaited(worker_id)
        return True

    def settle(self) -> None:
        """Build the targets of the pools whose workers, or whose replicas' addresses, have changed."""
        if self.peers.places.changed(self.peers):
            for router in self.routers.values():
                router.pool.avoid(self.peers.places.names)
        for router in self.routers.values():
            router.pool.settle()
            router.report_workers()

    def listen_at(self, urls: Iterable[str]) -> None:
        """Where this replica listens: workers at these addresses are no targets."""
        self.peers.places.listen_at(urls)
        self.settle()

    def answered(self, url: str, router_id: str, now: float) -> None:
        """The router id that the address has answered with; empty: it did not answer as a replica."""
        if self.peers.reached.answered(url, router_id, now):
            self.peers.places.reached()
            self.settle()

    def router_heartbeat(
        self, router_id: RouterId, data: bytes, now: float, *, settles: bool = True
    ) -> Receipt:
        """A replica's heartbeat. The replica's own, returned by the bus, is a round of the leases.

        `settles` False: as of `worker_heartbeat`.
        """
        try:
            beat = decode_router_beat(data)
        except MalformedFrameError as error:
            self.counters.malformed_heartbeats += 1
            return malformed(error)
        if router_id == self.router_id:
            return self._take_own_heartbeat(beat, now)
        if beat.state == "leave":
            self._remove_router(router_id)
            if settles:
                self.settle()
            return TAKEN
        if reason := self.peers.take(router_id, beat, self._returned_round):
            return self._refuse_peer(router_id, reason)
        self.refusals.accept(f"replica {router_id}")
        if settles:
            self.settle()
        self.routing = follow(self.routing, {router_id: beat}, [standing(self.routing)])
        self._note_unheard()
        self._leases.renew(RouterSource(router_id), beat.interval_ms)
        self._wait_for_workers(beat, router_id)
        for pool_id, seq in beat.feeds.items() if self.settings.synced else ():
            self._follow_bookings(SyncSource(PoolId(pool_id), router_id), beat, seq, now)
        return TAKEN

    def _refuse_peer(self, router_id: RouterId, reason: str) -> Receipt:
        self.counters.members_refused += 1
        self.refusals.refuse(f"replica {router_id}", reason)
        return REFUSED

    def _take_own_heartbeat(self, beat: RouterBeat, now: float) -> Receipt:
        """A heartbeat of this replica came back: a round. One that it never sent is forged."""
        # Rounds do not count when they begin: a replica that is cut off or deaf would lose all its members.
        if beat.incarnation != self.incarnation or beat.round > self._round:
            self.counters.stale_heartbeats += 1
            return STALE
        self._lose(self._leases.round(beat.round), now)
        if beat.round > self._returned_round:
            self._returned_round = beat.round
            self._end_round()
        return TAKEN

    def _end_round(self) -> None:
        """One more round for block sizes and pools served elsewhere, which must hold for a lease."""
        sizes = self.peers.sizes_of_elders()
        for pool_id, router in self.routers.items():
            router.pool.next_round(self.settings.lease_rounds, sizes.get(pool_id, 0))
            router.feed.early.next_round(self.settings.lease_rounds)
        self.peers.next_round(self.pools.serves().keys())
        self.refusals.next_round(REFUSED_LEASES * self.settings.lease_rounds)
        self.routing = self.peers.routing(self.routing, self._returned_round)

    def _follow_bookings(self, source: SyncSource, beat: RouterBeat, seq: int, now: float) -> None:
        """A peer's heartbeat with the seq of its sync feed in one pool. An empty feed begins no pool here."""
        is_known = source.pool in self.routers
        if not (is_known or seq) or not self._may_begin(source.pool, served=False):
            return  # pool names in heartbeats cost nothing, so an attacker could send many
        if not self.feeds.heartbeat(source, beat.incarnation, seq, beat.interval_ms, now):
            most = f"{MOST_SYNC_FEEDS} feeds of bookings are followed, and no more"
            self._refuse_peer(source.router_id, f"{most}: its bookings are not known here")

    def _wait_for_workers(self, beat: RouterBeat, router_id: RouterId) -> None:
        """Await workers that only a peer knows, each for a lease: a joiner is not ready without them.

        Peers name them in answer to its hello. Names that come later than a lease are forged, or of no use.
        """
        if self.readiness.is_ready or self._returned_round > self.settings.lease_rounds:
            return
        unknown = [WorkerId(worker_id) for worker_id in beat.workers if worker_id not in self._worker_pools]
        for worker_id in self.readiness.wait_for(unknown, router_id):
            self._leases.renew(AwaitedSource(worker_id))

    def _meet_awaited(self, worker_id: WorkerId) -> None:
        self.readiness.met(worker_id)
        self._leases.forget(AwaitedSource(worker_id))

    def sync_frame(self, source: SyncSource, data: bytes, now: float) -> Receipt:
        """A frame of a peer's sync feed; one of this replica is refused, and only shows that it came back."""
        if source.router_id == self.router_id and self.tenants.awaits_echo:
            self.tenants.echoed(source.pool, seq_of(data), now)
        if source.router_id == self.router_id or not self.settings.synced:
            return REFUSED
        if not self._may_begin(source.pool, served=False):
            return REFUSED
        receipt = self.feeds.sync_frame(source, data, now)
        if receipt.verdict is FrameVerdict.TAKEN:
            self._leases.renew(RouterSource(source.router_id))
        elif source not in self.readers and (router := self.routers.get(source.pool)) is not None:
            router.feed.drop_peer(source.router_id)  # nothing is kept of a sender without a good frame
        return receipt

    # What to do

    def work(self, now: float) -> bool:
        """One slice of loading and sweeping, about 1 ms; returns whether there is more."""
        if self.feeds.load(SLICE_HASHES, now):
            return True  # loading first: a feed that loads holds frames in memory until it is done
        swept = SLICE_HASHES // SWEPT_SHARE
        return any(router.pool.sweep(swept) for router in self.routers.values())

    def next_round(self, now: float) -> None:
        """Once per heartbeat interval: a new round of the leases; pools that are not needed end."""
        self._round += 1
        for router in self.routers.values():
            router.pool.approx.expire(now)
        self.deadly.expire(now)
        self.claimed_losses.expire(now)
        needed = self.feeds.pools_with_bookings().union(self._worker_pools.values())
        self.feeds.end_pools(self.pools.next_round(needed, now))

    def heartbeat(
        self,
        state: State,
        address: str,
        *,
        names_workers: bool = False,
        traffic: Traffic | None = None,
        clients_url: str = "",
    ) -> RouterBeat:
        """The heartbeat of this replica. The answer to a hello also names its workers."""
        caches, bookings = self.feeds.heard()
        return RouterBeat(
            version=VERSION,
            incarnation=self.incarnation,
            state=state,
            address=address,
            feeds=self.pools.feed_seqs(),
            round=self._round,
            interval_ms=round(self.settings.heartbeat_s * 1000),
            workers=self._live_workers() if names_workers else [],
            # Peers that serve fewer pools become unready by this, so it must not promise too much.
            serves=self.pools.serves() if state == "up" and self.readiness.is_ready else {},
            routing=self.routing,
            hears={router_id: bookings.get(router_id, UNFOLLOWED) for router_id in self.peers},
            caches=caches,
            traffic=traffic,
            clients_url=clients_url,
        )

    def _live_workers(self) -> list[str]:
        pools = [router.pool for router in self.routers.values()]
        live = [name for pool in pools for name, worker in pool.workers.items() if not worker.silent]
        return [str(worker_id) for worker_id in live[:AWAITED_MOST]]

    def hello(self) -> bytes | None:
        """The hello to publish in this round, if one is due."""
        shared = names_in_several(router.pool for router in self.routers.values())
        return self._hellos.due(self._round, shared)

    def hello_sent(self, now: float) -> None:
        """A hello was published, maybe once more after a reconnect."""
        self.readiness.hello_sent(now)
        self.claimed_losses.began(now)

    # Questions

    def router(self, pool_id: PoolId) -> Router:
        """The router of a pool, which begins with the first call."""
        return self.pools.open(pool_id)

    def router_for(self, model: str | None) -> Router:
        """The router that serves a model; see Pools. Raises UnknownModelError or NoWorkersError."""
        return self.pools.router_for(model)

    def _new_router(self, pool_id: PoolId, seq: int) -> Router:
        router = Router(
            Pool(pool_id, self.settings.pool, self.booked),
            self._new_rules(pool_id),
            router_id=self.router_id,
            incarnation=self.incarnation,
            synced=self.settings.synced,
            seq=seq,
            is_elder=self.peers.is_elder,
            claimed=self.claimed_losses,
            early=self.early,
        )
        router.unheard = self._unheard()
        router.pool.avoid(self.peers.places.names)
        return router

    def _note_unheard(self) -> None:
        """Without sync, the queues at workers are longer than this replica knows."""
        if not self.settings.synced:
            for router in self.routers.values():
                router.unheard = self._unheard()

    def _unheard(self) -> str:
        return UNHEARD if self.peers and not self.settings.synced else ""

    def _may_begin(self, pool_id: PoolId, *, served: bool) -> bool:
        if pool_id in self.routers:
            return True
        may_begin = self.pools.may_begin(pool_id, served=served)
        if served and not may_begin:
            self._remove_silent_workers()
        self.counters.pools_refused += not may_begin
        return may_begin

    def silent_workers(self) -> list[tuple[Pool, Worker]]:
        """Workers whose leases have ended and that are kept because their pools have no other."""
        pools = [router.pool for router in self.routers.values() if not router.pool.has_live_target]
        return [(pool, worker) for pool in pools for worker in pool.workers.values() if worker.silent]

    def _remove_silent_workers(self) -> None:
        """Make room: pools whose workers are all silent end. At most once a round, as it walks all pools."""
        if self._silent_removed_in != self._round:
            self._silent_removed_in = self._round
            for _, worker in self.silent_workers():
                self._remove_worker(WorkerId(worker.card.worker_id))

    def _may_add(self, worker_id: WorkerId, beat: WorkerBeat) -> bool:
        """Whether the worker is known, or there is room for it and its ranks."""
        known, card = self.worker(worker_id), beat.card
        if card is None or (known is not None and known.card.ranks >= card.ranks):
            return True
        ranks = sum(router.pool.ranks for router in self.routers.values())
        fits = ranks + card.ranks - (known.card.ranks if known is not None else 0) <= TARGETS_MOST
        fits = fits and (known is not None or len(self._worker_pools) < WORKERS_MOST)
        self.counters.members_refused += not fits
        return fits

    def _why_refused(self, worker_id: WorkerId, beat: WorkerBeat) -> str:
        """Why nothing of this heartbeat is kept: where the worker is, or what it would take; empty: it is."""
        known = self.worker(worker_id)
        card = beat.card or (known.card if known is not None else None)
        if card is None:
            return ""
        if beat.card is not None and (trouble := host_error(card.url, self.settings.worker_networks)):
            return f"url {card.url}: {trouble}"
        size = card_bytes(card) if known is None or card is not known.card else known.card_bytes
        size += sum(map(rank_bytes, beat.ranks[: card.ranks]))
        return self.worker_bytes.take(worker_id, size)

    def refused_routing(self) -> dict[RouterId, RoutingChange]:
        """Peers' changes of routing that are too far ahead to be followed."""
        return refused(self.routing, self.peers)

    def has_workers(self) -> bool:
        """Whether any worker is known, in any state."""
        return bool(self.pools.with_workers())

    def sharing_peers(self) -> int:
        """How many peers compete with this replica for the same targets."""
        return len(self.peers.credible()) if self.settings.synced else 0

    # Members

    def _follow_worker(self, pool_id: PoolId, worker_id: WorkerId, beat: WorkerBeat, now: float) -> None:
        worker = self.routers[pool_id].pool.workers[worker_id]
        if beat.card is not None:
            self.feeds.end_ranks(pool_id, worker_id, worker.card.ranks)
            self.feeds.look_again(worker_id)
        if not (worker.card.publishes_events and self.settings.pool.use_kv_events):
            return
        for rank in beat.ranks:
            if rank.rank >= worker.card.ranks:
                continue  # forged, or from before the card: no target of this pool
            source = KvSource(pool_id, worker_id, rank.rank)
            self.feeds.heartbeat(source, rank.incarnation, rank.seq, beat.interval_ms, now)

    def _new_reader(self, source: Feed) -> FeedReader:
        router = self.router(source.pool)
        if isinstance(source, SyncSource):
            return FeedReader(source.pool, router.feed.copy_sink(source.router_id), self._chance, self.held)
        pool = router.pool
        worker = pool.workers[source.worker_id]
        sink = KvSink(pool.index, source.target, worker.tier_sets(), pool.workers)
        return FeedReader(source.rank, sink, self._chance, self.held)

    def _lose(self, sources: list[Source], now: float) -> None:
        """The leases of these sources have ended."""
        # Workers first, and those of a pool together: which of them stay depends on the others.
        silent_workers = {source.worker_id for source in sources if isinstance(source, WorkerSource)}
        self._lose_workers(silent_workers)
        for worker_id in silent_workers:
            self.claimed_losses.worker_ended(worker_id, now)
        for source in sources:
            if isinstance(source, RouterSource):
                self.counters.replicas_lost += 1
                self._remove_router(source.router_id)
            elif isinstance(source, KvSource):
                self._unfollow_blocks(source)
            elif isinstance(source, SyncSource):
                self._unfollow_bookings(source)
            elif isinstance(source, AwaitedSource):
                self.readiness.met(source.worker_id)

    def _lose_workers(self, worker_ids: set[WorkerId]) -> None:
        pools: dict[PoolId, set[WorkerId]] = {}
        for worker_id in worker_ids:
            pools.setdefault(self._worker_pools[worker_id], set()).add(worker_id)
        for pool_id, members in pools.items():
            router = self.routers[pool_id]
            lost = [router.pool.workers[worker_id] for worker_id in members & router.pool.workers.keys()]
            removed = router.pool.silence(members)
            self._drop_targets(pool_id, [target for worker in lost for target in worker.targets()])
            self.counters.workers_lost += len(removed)
            for worker_id in members:
                self.feeds.end_worker(worker_id)
            for worker_id in removed:
                del self._worker_pools[worker_id]
                self.worker_bytes.free(worker_id)
            for worker_id in members.difference(removed):
                self._leases.renew(WorkerSource(worker_id))  # after another lease this runs again

    def _remove_worker(self, worker_id: WorkerId) -> None:
        pool_id = self._worker_pools.pop(worker_id, None)
        if pool_id is not None:
            self.worker_bytes.free(worker_id)
            self._leases.forget(WorkerSource(worker_id))
            self.feeds.end_worker(worker_id)
            self._drop_targets(pool_id, self.routers[pool_id].pool.remove(worker_id))

    def _drop_targets(self, pool_id: PoolId, targets: list[Target]) -> None:
        self.routers[pool_id].forget(targets)
        self.routers[pool_id].report_workers()

    def _unfollow_blocks(self, source: KvSource) -> None:
        """End the feed of a rank that heartbeats no longer name, or name with another incarnation."""
        self.feeds.end(source)
        router = self.routers.get(source.pool)
        if router is not None:
            router.pool.index.drop(source.target)

    def _unfollow_bookings(self, source: SyncSource) -> None:
        """End a peer's feed whose heartbeats have ceased; the next one begins it again."""
        self.feeds.end(source)
        router = self.routers.get(source.pool)
        if router is not None:
            router.feed.drop_peer(source.router_id)

    def _remove_router(self, router_id: RouterId) -> None:
        self.peers.drop(router_id)
        self._note_unheard()
        self._leases.forget(RouterSource(router_id))
        for pool_id in self.feeds.end_router(router_id) & self.routers.keys():
            self.routers[pool_id].feed.drop_peer(router_id)

    def pool_of(self, worker_id: WorkerId) -> PoolId | None:
        """The pool of a known worker."""
        return self._worker_pools.get(worker_id)

    def worker(self, worker_id: WorkerId) -> Worker | None:
        """A known worker, in any state."""
        pool_id = self._worker_pools.get(worker_id)
        return self.routers[pool_id].pool.workers.get(worker_id) if pool_id else None
