"""The state of a replica as Prometheus samples: the bus, who is there, pools, targets, feeds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import asdict

from kvrouter.bus import Bus
from kvrouter.core.audit.watch import Watch
from kvrouter.core.feeds.reader import FeedReader
from kvrouter.core.fleet.pool import Pool
from kvrouter.core.fleet.replica import Replica
from kvrouter.core.wire.ids import RouterId
from kvrouter.core.wire.senders import Feed, name
from kvrouter.frontend.truth_metrics import truth_samples
from kvrouter.replica.loop import ReplicaLoop
from kvrouter.telemetry.metrics import Sample

_COUNTED = {
    "malformed_heartbeats": "Heartbeats that could not be read",
    "stale_heartbeats": "Heartbeats of a worker whose agent was started again since",
    "unknown_messages": "Messages of no known subject, and KV frames of workers whose card is missing",
    "workers_lost": "Workers dropped because they were silent past their lease",
    "replicas_lost": "Replicas dropped because they were silent past their lease",
    "pools_refused": "Messages about a pool that is one too many",
    "members_refused": "Heartbeats of a worker or replica that is one too many",
}


def samples(replica: Replica, replica_loop: ReplicaLoop, watch: Watch, bus: Bus) -> Iterator[Sample]:
    """The state of a replica as Prometheus samples."""
    yield "kvrouter_nats_connected", "gauge", "1 while NATS answers", {}, float(bus.connected)
    yield "kvrouter_bus_published", "counter", "Messages sent", {}, bus.counters.published
    yield "kvrouter_bus_unsent", "counter", "Messages not sent (NATS away, or full)", {}, bus.counters.unsent
    yield "kvrouter_bus_received", "counter", "Messages received", {}, bus.counters.received
    sent, got = bus.counters.published_bytes, bus.counters.received_bytes
    yield "kvrouter_bus_published_bytes", "counter", "Payload bytes sent", {}, sent
    yield "kvrouter_bus_received_bytes", "counter", "Payload bytes received", {}, got
    drops = bus.counters.slow_consumer_drops + replica_loop.inbox.drops
    yield "kvrouter_bus_dropped", "counter", "Messages dropped because this replica was slow", {}, drops
    text = "Messages that have come and are not applied yet"
    yield "kvrouter_inbox_messages", "gauge", text, {}, replica_loop.inbox.messages
    yield (
        "kvrouter_inbox_age_seconds",
        "gauge",
        "How long the oldest of them has waited",
        {},
        replica_loop.inbox.age_s,
    )
    yield (
        "kvrouter_bus_errors",
        "counter",
        "Messages that raised an error here: bugs",
        {},
        replica_loop.log.errors,
    )
    for counter, value in asdict(replica.counters).items():
        yield f"kvrouter_{counter}", "counter", _COUNTED[counter], {}, value
    yield "kvrouter_replicas", "gauge", "Replicas known, this one included", {}, 1 + len(replica.peers)
    for router in list(replica.routers.values()):
        yield from _pool_samples(router.pool)
        yield from _booking_samples(router.pool, {replica.router_id, *replica.peers})
        yield from truth_samples(router, watch)
    for source, reader in list(replica.readers.items()):
        yield from _feed_samples(source, reader)


def _pool_samples(pool: Pool) -> Iterator[Sample]:
    labels = {"pool": str(pool.id)}
    yield "kvrouter_index_blocks", "gauge", "Distinct blocks in the index", labels, len(pool.index)
    yield "kvrouter_workers", "gauge", "Workers known", labels, len(pool.workers)
    for worker in list(pool.workers.values()):
        for target in worker.targets():
            own = {**labels, "worker": str(target.worker_id), "rank": str(target.rank)}
            yield "kvrouter_target_blocks", "gauge", "Blocks held", own, pool.index.blocks(target)
            active = pool.active
            yield "kvrouter_active_blocks", "gauge", "Active blocks", own, active.blocks(target)
            charged = active.charged_tokens(target)
            yield "kvrouter_charged_prefill_tokens", "gauge", "Prefill tokens charged", own, charged
            yield "kvrouter_target_eligible", "gauge", "1 if it takes requests", own, target in pool.targets


def _booking_samples(pool: Pool, known: set[RouterId]) -> Iterator[Sample]:
    """A replica that is known has a series, also while it has none: a series that ends looks like a loss."""
    for router_id, count in (dict.fromkeys(sorted(known), 0) | pool.active.owners()).items():
        labels = {"pool": str(pool.id), "router": router_id}
        yield "kvrouter_bookings", "gauge", "Requests in flight by replica", labels, count


def _feed_samples(source: Feed, reader: FeedReader) -> Iterator[Sample]:
    labels = {"feed": name(source)}
    yield "kvrouter_feed_lag_frames", "gauge", "Frames sent and not applied", labels, reader.lag
    yield "kvrouter_feed_live", "gauge", "1 if the copy is in step", labels, reader.state.value == "live"
    for counter, value in asdict(reader.counters).items():
        if counter != "recovery_s":
            own = {**labels, "event": counter}
            yield "kvrouter_feed_events", "counter", "What happened on a feed", own, value
    if reader.heard_at is not None:
        silent = asyncio.get_running_loop().time() - reader.heard_at
        yield "kvrouter_feed_staleness_seconds", "gauge", "Since the source was last heard", labels, silent
    recovery = reader.counters.recovery_s
    yield "kvrouter_feed_last_recovery_seconds", "gauge", "How long the last repair took", labels, recovery
