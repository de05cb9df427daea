"""Views of one replica: /live, /ready, /health, /metrics, /v1/models; for operators /workers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Literal

from msgspec import Struct
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from kvrouter.bodies.models import ModelEntry, ModelList, model_entries
from kvrouter.bus import Bus
from kvrouter.core.audit.findings import Audit
from kvrouter.core.feeds.reader import FeedReader
from kvrouter.core.fleet.pool import Pool
from kvrouter.core.fleet.pools import listed
from kvrouter.core.fleet.replica import Replica
from kvrouter.core.fleet.router import Router
from kvrouter.core.native import versions
from kvrouter.core.routing.worker import Worker
from kvrouter.core.tables.ghosts import Reuse
from kvrouter.core.wire.ids import PoolId, Target
from kvrouter.core.wire.ops import TIERS
from kvrouter.core.wire.senders import Feed, KvSource, SyncSource, name
from kvrouter.errors import UnknownModelError
from kvrouter.frontend.keys.keys_file import Key
from kvrouter.frontend.operators.state_metrics import samples
from kvrouter.frontend.operators.views import TEXT, json_answer
from kvrouter.frontend.server.sockets import Listeners
from kvrouter.relay.answer import Answer
from kvrouter.relay.request import Request
from kvrouter.replica.awaited import NO_WORKER
from kvrouter.replica.loop import ReplicaLoop
from kvrouter.telemetry.exposition import Registry, exposition
from kvrouter.telemetry.metrics import StateCollector
from kvrouter.version import __version__

# Up to this many feeds, /ready lists all; above it, only feeds that are behind: load balancers ask often.
MOST_FEEDS = 100

# Of one worker in /workers, and characters of each. Agents write a few, of two lines at most.
MOST_NOTES, MOST_NOTE_CHARACTERS = 16, 500

MODEL_PATH = "/v1/models/"


class Health(Struct, frozen=True):
    """/health. `url`: the clients' address; `peers`: router ids.

    `pid` of the process shows its parent that the child, and no other program, has the port.
    """

    status: Literal["ok", "degraded"]
    reasons: list[str]
    version: str
    router_id: str
    pid: int
    url: str
    nats_connected: bool
    peers: list[str]
    workers: int


class Admin:
    def __init__(
        self,
        replica: Replica,
        replica_loop: ReplicaLoop,
        audit: Audit,
        bus: Bus,
        registry: Registry,
        *,
        tokens: Callable[[], dict[str, Any]],
        untokenized: Callable[[], Iterable[str]],
        queue: Callable[[PoolId], dict[str, Any]],
        aliases: Callable[[], Mapping[str, str]],
        listeners: Listeners,
        ready_timeout_s: float,
        wait_for_workers_s: float,
    ) -> None:
        self.is_draining = False
        self._replica = replica
        self._loop = replica_loop
        self._audit = audit
        self.bus = bus
        self._registry = registry
        self._tokens = tokens
        self._untokenized = untokenized
        self._queue = queue
        self._aliases = aliases
        self._listeners = listeners
        self._ready_timeout_s = ready_timeout_s
        self._wait_for_workers_s = wait_for_workers_s
        self._gave_up_waiting = False
        self._started_at = asyncio.get_running_loop().time()
        registry.register(StateCollector(lambda: samples(replica, replica_loop, audit, bus)))

    def drain(self) -> None:
        """Make /ready 503 from now on."""
        self.is_draining = True

    async def live(self, _request: Request) -> Answer:
        """200 while the event loop runs."""
        return Answer(200, b"ok\n", {"content-type": TEXT})

    async def ready(self, request: Request, *, sees: Callable[[Request], bool]) -> Answer:
        """503 until the first recovery is complete, while draining, and while only peers serve anything.

        Otherwise 200, degraded or not. `sees`: whether the client may see names of workers and peers.
        """
        status, body = self._readiness()
        body["router_id"] = self._replica.router_id
        if not sees(request):
            return json_answer(body | {"reasons": _counted(body.get("reasons", ()))}, status=status)
        return json_answer(body | self._feed_states("verbose" in request.query), status=status)

    def readiness(self) -> dict[str, Any]:
        """Status and reasons, as /ready has them."""
        return self._readiness()[1]

    def ready_facts(self) -> tuple[int, dict[str, Any]]:
        """The HTTP status of /ready, with status and reasons."""
        return self._readiness()

    def is_connected(self) -> bool:
        """Whether NATS is connected."""
        return self.bus.connected

    def may_open(self) -> bool:
        """Whether to accept connections on a port that others accept, too: ready, or waited long enough."""
        return self._readiness()[0] == 200 or self._has_waited()

    def _has_waited(self) -> bool:
        return asyncio.get_running_loop().time() - self._started_at > self._ready_timeout_s

    def _readiness(self) -> tuple[int, dict[str, Any]]:
        now = asyncio.get_running_loop().time()
        missing = self._replica.readiness.not_ready(now)
        # Ready in part is better than never: a worker that died during the start must not block a rollout.
        # Ready with nothing is worse: a wrong password or namespace would be rolled out pod after pod.
        timed_out = bool(missing) and self._has_waited() and self._replica.readiness.has_met_worker
        if timed_out:
            self._gave_up_waiting = True
            self._replica.readiness.give_up_waiting()
        if self.is_draining:
            return 503, {"status": "draining"}
        if missing and not timed_out and not self._waits_for_first():
            return 503, {"status": "starting", "reasons": [*self._why_no_worker(), *missing]}
        if unserved := self._replica.readiness.unserved():
            return 503, {"status": "unserved", "reasons": unserved}
        reasons = self._degraded()
        if missing and not timed_out:  # ready, as requests wait for a first worker
            reasons = list(dict.fromkeys([*reasons, *self._why_no_worker()]))
        if timed_out or (self._gave_up_waiting and reasons):  # reported until no reason is left
            limit = f"--ready-timeout-s {self._ready_timeout_s:g} s"
            reasons.insert(0, f"not all workers and feeds are known, but {limit} passed")
        return 200, {"status": "degraded" if reasons else "ready", "reasons": reasons}

    def _waits_for_first(self) -> bool:
        """Whether requests wait here for the first worker (--wait-for-workers-s)."""
        has_none = not self._replica.readiness.has_met_worker
        return self._wait_for_workers_s > 0 and has_none and self._replica.readiness.has_greeted

    def _why_no_worker(self) -> Iterator[str]:
        """What is missing for a first worker: NATS, or an agent in the namespace."""
        if self.bus.outage_reason:
            yield f"NATS: {self.bus.outage_reason}"
        elif self.bus.connected and not self._replica.readiness.has_met_worker:
            peers = len(self._replica.peers)
            heard = f"only {peers} other replicas are" if peers else "nobody is"
            yield f"{heard} heard in namespace {self._loop.awaited.namespace!r}: {NO_WORKER}"
        yield from self._audit.degrading()

    def _feed_states(self, verbose: bool) -> dict[str, Any]:
        """State and lag of each feed; in a large fleet only of feeds that are behind, unless `verbose`."""
        rows = [
            {"feed": name(source), "state": reader.state.value, "lag": reader.lag}
            for source, reader in self._replica.readers.items()
        ]
        if verbose or len(rows) <= MOST_FEEDS:
            return {"feeds": rows}
        behind = [row for row in rows if row["state"] != "live" or row["lag"]][:MOST_FEEDS]
        return {"feeds": behind, "feeds_omitted": len(rows) - len(behind), "all_feeds": "/ready?verbose=1"}

    async def health(self, request: Request, *, sees: Callable[[Request], bool]) -> Answer:
        """What runs here. `sees`: whether the client may see names of workers and peers."""
        reasons, sees_names = self._degraded(), sees(request)
        return json_answer(
            Health(
                status="degraded" if reasons else "ok",
                reasons=reasons if sees_names else _counted(reasons),
                version=__version__,
                router_id=self._replica.router_id,
                pid=os.getpid(),
                url=self._listeners.url,
                nats_connected=self.bus.connected,
                peers=sorted(self._replica.peers) if sees_names else [],
                workers=sum(len(router.pool.workers) for router in self._replica.routers.values()),
            )
        )

    async def clients_metrics(self, request: Request) -> Answer:
        """Metrics on the clients' port: of all processes on it, as the next scrape may reach another one."""
        return await self._metrics(request, whole=True)

    async def all_metrics(self, names: Sequence[str]) -> bytes:
        """Metrics of all processes on the port, as text, for --metrics-port."""
        own, siblings = partial(exposition, self._registry, names=names), self._listeners.siblings
        return await (siblings.metrics(own, names) if siblings is not None else own())

    async def metrics(self, request: Request) -> Answer:
        """Metrics of this process; with `processes=all` of all processes on its port."""
        return await self._metrics(request, whole=request.query.get("processes") == ["all"])

    async def _metrics(self, request: Request, *, whole: bool) -> Answer:
        names = request.query.get("name[]", ())
        body = await (self.all_metrics(names) if whole else exposition(self._registry, names=names))
        return Answer(200, body, {"content-type": CONTENT_TYPE_LATEST})

    async def workers(self, _request: Request) -> Answer:
        """All targets, feeds and bookings, as of one moment: no await comes between."""
        # Numbers what has happened: `kvrouter verify` compares this replica's seq with its bookings at peers.
        self._loop.publishing.flush()
        return json_answer(
            {
                "router_id": self._replica.router_id,
                "replica_sync": self._replica.settings.synced,
                "core": {"in_use": versions.in_use(), "native_not_built": versions.why_not_built},
                "tokens": self._tokens(),
                "namespace_peers": sorted(self._replica.peers),
                "peers": self._peers(),
                "pools": [
                    _pool(router.pool)
                    | {"prefill": _prefill(router), "cached": _cached(router.reuse)}
                    | {"queue": self._queue(pool_id), "problems": self._problems(router.pool, "")}
                    for pool_id, router in self._replica.routers.items()
                ],
                "targets": [
                    row
                    for router in self._replica.routers.values()
                    for worker in router.pool.workers.values()
                    for row in self._targets(router.pool, worker)
                ],
                "feeds": [_feed(source, reader) for source, reader in self._replica.readers.items()],
                "bookings": [_bookings(pool_id, router) for pool_id, router in self._replica.routers.items()],
                "problems": self._audit.strangers(),
            }
        )

    def _peers(self) -> list[dict[str, Any]]:
        silent = self._loop.members.silent_rounds
        return [
            {"router_id": router_id, "url": peer.address, "silent_rounds": silent(router_id)}
            for router_id, peer in sorted(self._replica.peers.items())
        ]

    async def models(self, request: Request, *, key_of: Callable[[Request], Key | None]) -> Answer:
        """/v1/models, merged over the fleet: those that the client's key may use."""
        return json_answer(ModelList(data=self._model_entries(key_of(request))))

    async def model(self, request: Request, *, key_of: Callable[[Request], Key | None]) -> Answer:
        """/v1/models/NAME. Raises UnknownModelError."""
        entries = {entry.id: entry for entry in self._model_entries(key_of(request))}
        name = request.path_after(MODEL_PATH)
        if name not in entries:
            served = listed(entries.keys())
            raise UnknownModelError(f"The model `{name}` does not exist; served: {served}", param="model")
        return json_answer(entries[name])

    def _model_entries(self, key: Key | None) -> list[ModelEntry]:
        pools, aliases = [router.pool for router in self._replica.routers.values()], self._aliases()
        entries = model_entries(pools, aliases)
        if key is None or not key.models:
            return entries
        return [one for one in entries if key.may_use({one.id, aliases.get(one.id, "")})]

    def _degraded(self) -> list[str]:
        of_workers = self._audit.degrading()
        reasons = [*self._nats_away(), *self._replica.readiness.degraded(), *of_workers, *self._untokenized()]
        more = len(reasons) - MOST_FEEDS
        return reasons if more <= 0 else [*reasons[:MOST_FEEDS], f"{more} more: see /workers"]

    def _nats_away(self) -> list[str]:
        if self.bus.connected:
            return []
        reason = f" ({self.bus.outage_reason})" if self.bus.outage_reason else ""
        return [f"NATS is away{reason}: routing with the last known state"]

    def _targets(self, pool: Pool, worker: Worker) -> Iterator[dict[str, Any]]:
        for target in worker.targets():
            source = KvSource(pool.id, target.worker_id, target.rank)
            reader = self._replica.readers.get(source)
            row = _target(pool, worker, target, reader)
            yield row | {"problems": self._problems(pool, target.worker_id)}

    def _problems(self, pool: Pool, worker_id: str) -> list[str]:
        """Problems that the last look found. An empty id stands for the pool itself."""
        return [problem.text for problem in self._audit.problems(pool.id, worker_id)]


def _counted(reasons: Sequence[str]) -> list[str]:
    """Reasons for clients that may not see the names in them."""
    count = f"{len(reasons)} reason{'s'[: len(reasons) > 1]}"
    return [f"{count}; /ready of the admin listener has the text (--expose)"] if reasons else []


def _pool(pool: Pool) -> dict[str, Any]:
    return {
        "pool": pool.id,
        "model": pool.model,
        "block_size": pool.block_size,
        "names": sorted(pool.names),
        "distinct_blocks": len(pool.index),
    }


def _prefill(router: Router) -> dict[str, Any]:
    """What was learnt of the speed of prefill, and why weight `auto` does not use it."""
    speed = router.tables.speeds.speed
    return {
        "tokens_per_s": round(1 / speed.seconds_per_token),
        "fixed_s": round(speed.fixed_s, 4),
        "samples": speed.samples,
        "error": round(speed.error, 3),
        "doubt": router.doubt,
    }


def _cached(reuse: Reuse) -> dict[str, Any]:
    """The share of the prompt tokens that was cached, and what other caches would have had."""
    total = max(1, reuse.prompt_tokens)
    shares = {name: round(1 - tokens / total, 4) for name, tokens in reuse.uncached().items()}
    return {"prompt_tokens": reuse.prompt_tokens} | (shares if reuse.prompt_tokens else {})


def _target(pool: Pool, worker: Worker, target: Target, reader: FeedReader | None) -> dict[str, Any]:
    count, digest = pool.index.digest(target)
    beat = worker.ranks.get(target.rank)
    return {
        "pool": pool.id,
        "worker_id": target.worker_id,
        "rank": target.rank,
        "url": worker.card.url,
        "engine": f"{worker.card.engine} {worker.card.engine_version}".strip(),
        "role": worker.card.role,
        "kv_connector": worker.card.kv_connector,
        "state": "silent" if worker.silent else worker.state,
        "refused": "",  # always empty; kept for programs that read it
        "block_size": worker.card.block_size,
        "notes": [*_shown(worker.card.notes), *filter(None, [pool.size_note(worker)])],
        "eligible": target in pool.split.serving,
        "blocks": pool.index.blocks(target),
        "device_blocks": count,
        "digest": f"{digest:016x}",  # hex: many JSON parsers round integers above 2**53
        "tiers": list(tier_sets(pool, worker, target)),
        "resume_points": _resume_points(pool, target),
        "truncated": pool.index.is_truncated(target),
        "capacity_blocks": worker.capacity_blocks,
        "charged_prefill_tokens": pool.active.charged_tokens(target),
        "active_blocks": pool.active.blocks(target),
        "requests_in_flight": pool.active.requests(target),
        "running": beat.running if beat else None,
        "waiting": beat.waiting if beat else None,
        "kv_usage": beat.kv_usage if beat else None,
        "metrics": beat.metrics if beat else {},
        "running_loras": beat.running_loras if beat else None,
        "waiting_loras": beat.waiting_loras if beat else (),
        "max_loras": worker.card.max_loras,
        # What the agent has reported. The audit takes a rank as partial until a heartbeat names it.
        "partial": beat.partial if beat else False,
        "events": reader.state.value if reader else "off",
        "incarnation": reader.incarnation if reader else 0,
        "last_seq": reader.seq if reader else 0,
        "lag": reader.lag if reader else 0,
    }


def _shown(notes: Sequence[str]) -> list[str]:
    """The first notes of a card: each target of /workers repeats them."""
    more = len(notes) - MOST_NOTES
    return [note[:MOST_NOTE_CHARACTERS] for note in notes[:MOST_NOTES]] + [f"… {more} more"] * (more > 0)


def tier_sets(pool: Pool, worker: Worker, target: Target) -> Iterator[dict[str, Any]]:
    """The nested tier sets. A wider set without a block of its own tier equals the narrower one."""
    held = (0, 0)
    for tier in TIERS[: worker.tier_sets()]:
        held = max(held, pool.index.digest(target, tier), key=lambda set_: set_[0])
        yield {"tier": tier, "blocks": held[0], "digest": f"{held[1]:016x}"}


def _resume_points(pool: Pool, target: Target) -> dict[str, Any] | None:
    """The blocks behind which an engine with several KV groups can resume; None: behind each block."""
    digest = pool.index.resumable_digest(target)
    return None if digest is None else {"blocks": digest[0], "digest": f"{digest[1]:016x}"}


def _feed(source: Feed, reader: FeedReader) -> dict[str, Any]:
    return {
        "feed": name(source),
        "pool": source.pool,
        "owner": source.router_id if isinstance(source, SyncSource) else str(source.target),
        "kind": "sync" if isinstance(source, SyncSource) else "kv",
        "state": reader.state.value,
        "incarnation": reader.incarnation,
        "last_seq": reader.seq,
        "lag": reader.lag,
        "flag": reader.flag,
        "counters": asdict(reader.counters),
    }


def _bookings(pool_id: str, router: Router) -> dict[str, Any]:
    pool = router.pool
    return {
        "pool": pool_id,
        "own_feed": {"incarnation": router.feed.source.incarnation, "seq": router.feed.source.seq},
        "owners": {
            router_id: {"count": count, "digest": f"{pool.active.digest(router_id)[1]:016x}"}
            for router_id, count in pool.active.owners().items()
        },
    }
