"""What one replica knows of its fleet: /fleet, and what is read of /workers and its other routes.

    routers, readers, peers, audit, request metrics ──snapshot──> Fleet ──> GET /fleet
                                                                     └────> /fleet/stream (stream.py)
    replica.py ──> Fleet ──> top, doctor;  Workers ──> verify, index, doctor, analyze

Counters are totals since the replica's start: a reader takes differences. What is not known is null. The
numbers of /fleet are those of /workers and /metrics, read from the same tables. Fields with a default are
those that replicas of other versions, or without that part, may lack.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Struct

from kvrouter.core.audit.findings import Audit
from kvrouter.core.feeds.trust import FeedState
from kvrouter.core.fleet.pool import Pool
from kvrouter.core.fleet.replica import UNFOLLOWED, Replica
from kvrouter.core.fleet.router import Router
from kvrouter.core.routing.worker import Worker
from kvrouter.core.tables.predictions import WorkerRecord
from kvrouter.core.wire.heartbeats import Heard, RoutingChange, Traffic
from kvrouter.core.wire.ids import PoolId, RouterId, Target
from kvrouter.core.wire.senders import KvSource
from kvrouter.observe.dashboard.traffic import FleetTraffic
from kvrouter.relay.answer import Answer
from kvrouter.relay.request import Request
from kvrouter.replica.loop import ReplicaLoop
from kvrouter.telemetry.metrics import RequestMetrics
from kvrouter.version import __version__

# Rows are made in slices of this many, with other work in between: about half a millisecond.
SLICE = 50
# Of another process: exact as a float.
_MOST = 2**53


class PoolRow(Struct, frozen=True, gc=False):
    """One pool. The tokens are those of the requests routed here; see docs/metrics.md for the four caches."""

    pool: str
    model: str
    workers: int
    targets: int
    eligible: int
    block_size: int
    queue: int
    problems: list[str]
    reusable_tokens: int
    uncached_tokens: dict[str, int]
    later_s: float
    ttft_decisions: int
    prefill_tokens_per_s: float
    mode: str
    weight: str | None
    doubt: str
    """Why weight `auto` is not in use; empty if it is, or if another weight is set."""


class TargetRow(Struct, frozen=True, gc=False):
    """One target. What its agent or its engine has not reported is None."""

    pool: str
    worker: str
    rank: int
    url: str
    engine: str
    state: str
    eligible: bool
    problems: list[str]
    requests: int
    running: int | None
    waiting: int | None
    kv_usage: float | None
    active_blocks: int
    total_blocks: int | None
    charged_prefill_tokens: int
    blocks: int
    answers: int
    """This and the next three: of the requests that this replica has sent there."""
    errors: int
    ttft_sum_s: float
    ttft_count: int
    predicted_tokens: int | None
    """Of the whole worker, in the row of its first rank; None in the others. So are `reported_tokens`."""
    reported_tokens: int | None
    seq: int | None
    digest: str
    lag_frames: int | None
    """This and the next three: of the KV feed; None if it is not followed."""
    stale_s: float | None
    live: bool | None
    digest_mismatches: int | None
    prompt_tokens: int = 0
    """Of the requests that this replica has sent there; `overlap_tokens` were predicted to be cached."""
    overlap_tokens: int = 0
    started_s: float | None = None
    """When its agent started, by the agent's clock; None: it does not report it."""
    role: str = "both"
    """As its card has it. So is `kv_connector`."""
    kv_connector: str = ""


class FollowedFeeds(Struct, frozen=True, gc=False):
    """How a replica follows some feeds. `live`: feeds without a gap; `lag_frames`: sent, not yet applied."""

    feeds: int
    live: int
    lag_frames: int
    digest_mismatches: int


class ReplicaRow(Struct, frozen=True):
    """One replica, this one included.

    `lag_frames` and the two behind it: how this replica follows its bookings; None: it does not.
    `hears`: the replicas that it hears itself, and how it follows their bookings; `caches`: how it follows
    the workers' caches; `requests` and `failed`: since its start. These four are as of its last heartbeat;
    None: its version does not report them.
    """

    router_id: str
    url: str
    is_me: bool
    silent_rounds: int
    revision: int
    bookings: int
    lag_frames: int | None = None
    live: bool | None = None
    digest_mismatches: int | None = None
    hears: dict[str, FollowedFeeds] | None = None
    caches: FollowedFeeds | None = None
    requests: int | None = None
    failed: int | None = None


class Fleet(Struct, frozen=True):
    """One snapshot."""

    time: float
    router_id: str
    version: str
    mode: str | None
    weight: str | None
    revision: int
    started_s: float
    status: str
    reasons: list[str]
    pools: list[PoolRow]
    targets: list[TargetRow]
    replicas: list[ReplicaRow]
    traffic: Traffic
    """What this replica has served since its start."""
    replicas_lost: int = 0
    """Since the start: their heartbeats ended without a last one. So are `workers_lost`."""
    workers_lost: int = 0
    fleet_traffic: Traffic | None = None
    """What all replicas have served since this one's start. None: by a version that does not add it up."""


def out_of_range(fleet: Fleet) -> str:
    """Which number of another process cannot be; empty: none."""
    for row in fleet.targets:
        counts = row.running, row.waiting, row.ttft_count, row.prompt_tokens, row.overlap_tokens
        for number in (*counts, row.kv_usage, row.ttft_sum_s):
            if number is not None and not 0 <= number <= _MOST:
                return f"{row.worker}/{row.rank} has {number:g}"
    return ""


class BlockSet(Struct, frozen=True):
    """A set of blocks. `tier`: none for resume points."""

    blocks: int
    digest: str
    tier: str = ""


class HeldTarget(Struct, frozen=True):
    """A target in /workers."""

    pool: str
    worker_id: str
    rank: int
    tiers: list[BlockSet]
    resume_points: BlockSet | None
    blocks: int = 0
    capacity_blocks: int = 0
    problems: list[str] = []


class LearntSpeed(Struct, frozen=True):
    """How fast a pool's engines compute prompts, as a replica has measured it."""

    tokens_per_s: float = 0.0
    samples: int = 0


class PoolState(Struct, frozen=True):
    pool: str
    block_size: int
    model: str = ""
    problems: list[str] = []
    prefill: LearntSpeed = LearntSpeed()


class FollowedFeed(Struct, frozen=True):
    """`owner`: a target, or of kind sync a replica. `flag`: why its content does not count."""

    kind: str
    pool: str
    owner: str
    state: str
    incarnation: int
    last_seq: int
    lag: int
    flag: str
    feed: str = ""
    counters: dict[str, float] = {}


class PeerState(Struct, frozen=True):
    router_id: str
    silent_rounds: int


class OwnFeed(Struct, frozen=True):
    incarnation: int
    seq: int


class Booked(Struct, frozen=True):
    count: int
    digest: str


class PoolBookings(Struct, frozen=True):
    """Bookings by the replica that owns them; `own_feed`: where this one publishes its own."""

    pool: str
    own_feed: OwnFeed
    owners: dict[str, Booked]


class ComparedTokens(Struct, frozen=True):
    state: str = ""
    reason: str = ""
    engine: str = ""
    prompt: str = ""
    difference: dict[str, Any] | None = None


class TokensWay(Struct, frozen=True):
    way: str = ""


class TokensState(Struct, frozen=True):
    """`ways`: by pool and kind of prompt; `compared`: by pool."""

    ways: dict[str, dict[str, TokensWay]] = {}
    compared: dict[str, ComparedTokens] = {}


class Workers(Struct, frozen=True):
    """What is read of /workers."""

    router_id: str
    replica_sync: bool
    namespace_peers: list[str]
    peers: list[PeerState]
    pools: list[PoolState]
    targets: list[HeldTarget]
    feeds: list[FollowedFeed]
    bookings: list[PoolBookings]
    tokens: TokensState = TokensState()


class ReplicaHealth(Struct, frozen=True):
    """What is read of /health. `url`: the clients' port."""

    router_id: str
    version: str = ""
    url: str = ""


class ReplicaReady(Struct, frozen=True):
    """What is read of /ready."""

    status: str = ""
    reasons: list[str] = []


class Routing(Struct, frozen=True):
    """What is read of /routing."""

    revision: int
    by: str = ""
    not_applied: dict[str, str] = {}
    epoch: int = 0
    refused: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class FleetView:
    """Makes snapshots. `readiness` returns the body of /ready; `queue` a pool's queue, as in /workers."""

    replica: Replica
    loop: ReplicaLoop
    audit: Audit
    metrics: RequestMetrics
    traffic: FleetTraffic
    address: str
    readiness: Callable[[], Mapping[str, Any]]
    queue: Callable[[PoolId], Mapping[str, Any]]

    async def view(self, _request: Request) -> Answer:
        """GET /fleet."""
        return Answer(200, msgspec.json.encode(await self.snapshot()) + b"\n", {"cache-control": "no-store"})

    async def snapshot(self) -> Fleet:
        """The fleet, as of now: its rows as of moments that are some milliseconds apart."""
        replica = self.replica
        problems, rows = self.audit.sentences(), []
        pools = [self._pool(router, problems) for router in replica.routers.values()]
        for number, row in enumerate(self._targets(problems), 1):
            rows.append(row)
            if not number % SLICE:
                await asyncio.sleep(0)
        readiness, served = self.readiness(), self.traffic.own()
        return Fleet(
            time=round(time.time(), 3),
            router_id=replica.router_id,
            version=__version__,
            mode=pools[0].mode if pools else None,
            weight=pools[0].weight if pools else None,
            revision=_revision(replica.routing),
            started_s=round(self.traffic.started_s, 3),
            status=readiness["status"],
            reasons=readiness.get("reasons", []),
            pools=pools,
            targets=rows,
            replicas=self._replicas(served),
            traffic=served,
            replicas_lost=replica.counters.replicas_lost,
            workers_lost=replica.counters.workers_lost,
            fleet_traffic=self.traffic.total(),
        )

    def _pool(self, router: Router, problems: Mapping[tuple[str, str], list[str]]) -> PoolRow:
        pool, policy = router.pool, router.selection.policy
        weight = policy.overlap_weight
        return PoolRow(
            pool=pool.id,
            model=pool.model,
            workers=len(pool.workers),
            targets=sum([worker.card.ranks for worker in pool.workers.values()]),
            eligible=len(pool.split.serving),
            block_size=pool.block_size,
            queue=self.queue(pool.id)["waiting"],
            problems=problems.get((pool.id, ""), []),
            reusable_tokens=router.reuse.prompt_tokens,
            uncached_tokens=router.reuse.uncached(),
            later_s=round(router.bookings.calibration.later_s, 6),
            ttft_decisions=router.bookings.calibration.decisions,
            prefill_tokens_per_s=round(1 / router.tables.speeds.speed.seconds_per_token, 1),
            mode=router.selection.mode,
            weight=weight if weight is None or isinstance(weight, str) else f"{weight:g}",
            doubt=router.doubt if policy.compares_seconds else "",
        )

    def _targets(self, problems: Mapping[tuple[str, str], list[str]]) -> Iterator[TargetRow]:
        # Copies of the tables: members come and go while the rows are made.
        now = asyncio.get_running_loop().time()
        for router in list(self.replica.routers.values()):
            pool, records = router.pool, router.predictions.records
            for worker_id, worker in list(pool.workers.items()):
                texts, record = problems.get((pool.id, worker_id), []), records.get(worker_id)
                for target in worker.targets():
                    own_record = record if target.rank == 0 else None
                    yield self._target(pool, worker, target, problems=texts, record=own_record, now=now)

    def _replicas(self, served: Traffic) -> list[ReplicaRow]:
        caches, bookings = self.replica.feeds.heard()
        heard = {each: bookings.get(each, UNFOLLOWED) for each in sorted(self.replica.peers)}
        me = self.replica.router_id
        own = ReplicaRow(
            router_id=me,
            url=self.address,
            is_me=True,
            silent_rounds=0,
            revision=_revision(self.replica.routing),
            bookings=self._bookings(me),
            hears={router_id: _following(each) for router_id, each in heard.items()},
            caches=_following(caches),
            requests=served.requests,
            failed=served.failed,
        )
        return [own, *(self._peer(router_id, each) for router_id, each in heard.items())]

    def _peer(self, router_id: RouterId, heard: Heard) -> ReplicaRow:
        beat = self.replica.peers[router_id]
        hears, traffic, is_followed = beat.hears, beat.traffic, heard.feeds > 0
        return ReplicaRow(
            router_id=router_id,
            url=beat.address,
            is_me=False,
            silent_rounds=self.loop.members.silent_rounds(router_id),
            revision=_revision(beat.routing),
            bookings=self._bookings(router_id),
            lag_frames=heard.lag if is_followed else None,
            live=heard.live == heard.feeds if is_followed else None,
            digest_mismatches=heard.mismatches if is_followed else None,
            hears={name: _following(each) for name, each in hears.items()} if hears is not None else None,
            caches=_following(beat.caches) if beat.caches is not None else None,
            requests=traffic.requests if traffic is not None else None,
            failed=traffic.failed if traffic is not None else None,
        )

    def _target(
        self,
        pool: Pool,
        worker: Worker,
        target: Target,
        *,
        problems: list[str],
        record: WorkerRecord | None,
        now: float,
    ) -> TargetRow:
        beat, card, counts = worker.ranks.get(target.rank), worker.card, self.metrics.targets.get(target)
        reader = self.replica.readers.get(KvSource(pool.id, target.worker_id, target.rank))
        charged_tokens, active_blocks, requests = pool.active.load(target)
        received_at = reader.received_at if reader is not None else None
        return TargetRow(
            pool=pool.id,
            worker=target.worker_id,
            rank=target.rank,
            url=card.url,
            engine=f"{card.engine} {card.engine_version}".strip(),
            state="silent" if worker.silent else worker.state,
            eligible=target in pool.split.serving,
            problems=problems,
            requests=requests,
            running=beat.running if beat else None,
            waiting=beat.waiting if beat else None,
            kv_usage=beat.kv_usage if beat else None,
            active_blocks=active_blocks,
            total_blocks=worker.capacity_blocks or None,
            charged_prefill_tokens=charged_tokens,
            blocks=pool.index.blocks(target),
            answers=sum(counts.answers.values()) if counts else 0,
            errors=counts.errors if counts else 0,
            ttft_sum_s=round(counts.first_byte_s, 6) if counts else 0.0,
            ttft_count=counts.first_bytes if counts else 0,
            predicted_tokens=record.predicted_tokens if record else None,
            reported_tokens=record.reported_tokens if record else None,
            seq=reader.seq if reader else None,
            digest=f"{pool.index.digest(target)[1]:016x}",
            lag_frames=reader.lag if reader else None,
            stale_s=round(now - received_at, 3) if received_at is not None else None,
            live=reader.state is FeedState.LIVE if reader else None,
            digest_mismatches=reader.counters.digest_mismatches if reader else None,
            prompt_tokens=counts.prompt_tokens if counts else 0,
            overlap_tokens=counts.overlap_tokens if counts else 0,
            started_s=card.started_at_us / 1e6 or None,
            role=card.role,
            kv_connector=card.kv_connector,
        )

    def _bookings(self, router_id: RouterId) -> int:
        pools = [router.pool for router in self.replica.routers.values()]
        return sum([pool.active.owners().get(router_id, 0) for pool in pools])


def _following(heard: Heard) -> FollowedFeeds:
    return FollowedFeeds(heard.feeds, heard.live, heard.lag, heard.mismatches)


def _revision(routing: RoutingChange | None) -> int:
    return routing.revision if routing is not None else 0
