"""The state of a replica as Prometheus samples: bus, members, pools, feeds, predictions, index."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

from prometheus_client import CollectorRegistry

from kvrouter.bus import Bus
from kvrouter.core.audit.findings import Audit
from kvrouter.core.feeds.reader import FeedReader
from kvrouter.core.fleet.pool import NewIndex, Pool
from kvrouter.core.fleet.replica import Replica
from kvrouter.core.fleet.router import Router
from kvrouter.core.tables.block_index import BlockIndex, IndexBounds, Wider
from kvrouter.core.tables.predictions import ERROR_BLOCKS, WorkerRecord
from kvrouter.core.tables.prefill_speeds import CLASSES_S
from kvrouter.core.wire.hashes import Hashes
from kvrouter.core.wire.heartbeats import RankBeat
from kvrouter.core.wire.ids import PoolId, RouterId, Target
from kvrouter.core.wire.senders import Feed, name
from kvrouter.replica.loop import ReplicaLoop
from kvrouter.telemetry.metrics import Sample, Spread, TargetCounts

Labels = dict[str, str]

_COUNTED = {
    "malformed_heartbeats": "Heartbeats that could not be read",
    "stale_heartbeats": "Heartbeats of an agent's earlier incarnation",
    "unknown_messages": "Messages on unknown subjects, and KV frames of workers whose card is missing",
    "workers_lost": "Workers dropped because their lease ended",
    "replicas_lost": "Replicas dropped because their lease ended",
    "pools_refused": "Messages about pools beyond the limit of pools",
    "members_refused": "Heartbeats of workers or replicas beyond the limit of members",
}


def samples(replica: Replica, replica_loop: ReplicaLoop, audit: Audit, bus: Bus) -> Iterator[Sample]:
    yield "kvrouter_nats_connected", "gauge", "1 while connected to NATS", {}, float(bus.connected)
    yield "kvrouter_bus_published", "counter", "Messages sent", {}, bus.counters.published
    yield (
        "kvrouter_bus_unsent",
        "counter",
        "Messages not sent: NATS away, or its buffer full",
        {},
        bus.counters.unsent,
    )
    yield "kvrouter_bus_received", "counter", "Messages received", {}, bus.counters.received
    sent, got = bus.counters.published_bytes, bus.counters.received_bytes
    yield "kvrouter_bus_published_bytes", "counter", "Payload bytes sent", {}, sent
    yield "kvrouter_bus_received_bytes", "counter", "Payload bytes received", {}, got
    drops = bus.counters.slow_consumer_drops + replica_loop.inbox.drops
    yield "kvrouter_bus_dropped", "counter", "Messages dropped because this replica was slow", {}, drops
    text = "Messages received and not applied yet"
    yield "kvrouter_inbox_messages", "gauge", text, {}, replica_loop.inbox.messages
    yield (
        "kvrouter_inbox_age_seconds",
        "gauge",
        "Age of the oldest message in the inbox",
        {},
        replica_loop.inbox.age_s,
    )
    yield (
        "kvrouter_bus_errors",
        "counter",
        "Messages whose processing raised an unexpected error: bugs",
        {},
        replica_loop.log.errors,
    )
    for counter, value in asdict(replica.counters).items():
        yield f"kvrouter_{counter}", "counter", _COUNTED[counter], {}, value
    yield "kvrouter_replicas", "gauge", "Known replicas, this one included", {}, 1 + len(replica.peers)
    # Copies of the tables: a scrape is written in slices, and members come and go in between.
    for router in list(replica.routers.values()):
        yield from _pool_samples(router.pool)
        yield from _booking_samples(router.pool, {replica.router_id, *replica.peers})
        yield from _speed_samples(router)
        yield from _reuse_samples(router)
        yield from _ttft_samples(router)
        yield from _prediction_samples(router, audit)
    for source, reader in list(replica.readers.items()):
        yield from _feed_samples(source, reader)


def _pool_samples(pool: Pool) -> Iterator[Sample]:
    labels = {"pool": str(pool.id)}
    yield "kvrouter_index_blocks", "gauge", "Distinct blocks in the index", labels, len(pool.index)
    yield "kvrouter_workers", "gauge", "Known workers", labels, len(pool.workers)
    for worker in list(pool.workers.values()):
        for target in worker.targets():
            own = {**labels, "worker": str(target.worker_id), "rank": str(target.rank)}
            yield "kvrouter_target_blocks", "gauge", "Blocks held", own, pool.index.blocks(target)
            active = pool.active
            yield "kvrouter_active_blocks", "gauge", "Active blocks", own, active.blocks(target)
            text = "Requests in flight, of all replicas"
            yield "kvrouter_target_requests", "gauge", text, own, active.requests(target)
            charged = active.charged_tokens(target)
            yield "kvrouter_charged_prefill_tokens", "gauge", "Prefill tokens charged", own, charged
            yield (
                "kvrouter_target_eligible",
                "gauge",
                "1 if the target takes requests",
                own,
                target in pool.targets,
            )
            if beat := worker.ranks.get(target.rank):
                yield from _load_samples(beat, own)


def _load_samples(beat: RankBeat, labels: Labels) -> Iterator[Sample]:
    """What the engine reports of its load; no series for what it does not report."""
    if beat.running is not None:
        yield "kvrouter_engine_running", "gauge", "Requests that the engine computes", labels, beat.running
    if beat.waiting is not None:
        text = "Requests that wait in the engine"
        yield "kvrouter_engine_waiting", "gauge", text, labels, beat.waiting
    if beat.kv_usage is not None:
        text = "Share of the engine's KV blocks in use, 0 to 1"
        yield "kvrouter_engine_kv_usage", "gauge", text, labels, beat.kv_usage


def target_samples(counts: dict[Target, TargetCounts], routers: Sequence[Router]) -> Iterator[Sample]:
    """What was counted here of the known targets. The counts of targets that are gone are dropped."""
    known = {
        target: router.pool.id
        for router in routers
        for worker in router.pool.workers.values()
        for target in worker.targets()
    }
    for gone in counts.keys() - known.keys():
        del counts[gone]
    for target, counted in list(counts.items()):
        labels = {"pool": str(known[target]), "worker": str(target.worker_id), "rank": str(target.rank)}
        for outcome, count in list(counted.answers.items()):
            text = "Attempts that ended, by outcome"
            yield "kvrouter_target_answers", "counter", text, {**labels, "outcome": outcome}, count
        text = "Prompt tokens of the requests sent to a target"
        yield "kvrouter_target_prompt_tokens", "counter", text, labels, counted.prompt_tokens
        text = "Of these, the ones predicted to be cached there"
        yield "kvrouter_target_overlap_tokens", "counter", text, labels, counted.overlap_tokens
        name, text = "kvrouter_target_first_byte_seconds", "From the decision to the first byte"
        yield name, "summary_sum", text, labels, counted.first_byte_s
        yield name, "summary_count", text, labels, counted.first_bytes


def _speed_samples(router: Router) -> Iterator[Sample]:
    labels, speed = {"pool": str(router.pool.id)}, router.tables.speeds.speed
    text = "Prompt tokens that a target computes in a second, as learnt from first bytes"
    yield "kvrouter_prefill_tokens_per_second", "gauge", text, labels, 1 / speed.seconds_per_token
    text = "Mean error of predicted prefill times, as a share of the measured ones"
    yield "kvrouter_prefill_error_ratio", "gauge", text, labels, speed.error
    text = "1 if weight auto may compare seconds; 0 while it is 8"
    yield "kvrouter_prefill_known", "gauge", text, labels, not router.doubt


def _reuse_samples(router: Router) -> Iterator[Sample]:
    labels, reuse = {"pool": str(router.pool.id)}, router.reuse
    text = "Prompt tokens of the requests routed here, each once"
    yield "kvrouter_reusable_tokens", "counter", text, labels, reuse.prompt_tokens
    text = "Of these, the ones that each cache did not have: chosen, best, pooled, endless"
    for cache, tokens in reuse.uncached().items():
        yield "kvrouter_uncached_tokens", "counter", text, {**labels, "cache": cache}, tokens


def _ttft_samples(router: Router) -> Iterator[Sample]:
    labels, counted = {"pool": str(router.pool.id)}, router.calibration
    text = "Decisions that compared predicted times to first token (weight auto)"
    yield "kvrouter_ttft_decisions", "counter", text, labels, counted.decisions
    text = "Of these, the ones for a target that was not predicted to be the earliest"
    yield "kvrouter_ttft_later_decisions", "counter", text, labels, counted.later
    text = "Seconds that the chosen targets were predicted to be later than the earliest ones"
    yield "kvrouter_ttft_later_seconds", "counter", text, labels, counted.later_s
    for bound, one in zip(CLASSES_S, counted.classes, strict=True):
        if not one.requests:
            continue
        own = {**labels, "up_to_s": f"{bound:g}" if bound < math.inf else "+Inf"}
        text = "Measured first bytes, by predicted time to first token; not cumulative"
        yield "kvrouter_ttft_predictions", "counter", text, own, one.requests
        text = "Their predicted times to first token"
        yield "kvrouter_ttft_predicted_seconds", "counter", text, own, one.predicted_s
        text = "Their measured times to first token"
        yield "kvrouter_ttft_measured_seconds", "counter", text, own, one.measured_s


def _booking_samples(pool: Pool, known: set[RouterId]) -> Iterator[Sample]:
    """Also 0 for known replicas without bookings: a series that ends would look like a lost replica."""
    for router_id, count in (dict.fromkeys(sorted(known), 0) | pool.active.owners()).items():
        labels = {"pool": str(pool.id), "router": router_id}
        yield "kvrouter_bookings", "gauge", "Requests in flight by replica", labels, count


def _feed_samples(source: Feed, reader: FeedReader) -> Iterator[Sample]:
    labels = {"feed": name(source)}
    yield "kvrouter_feed_lag_frames", "gauge", "Frames sent and not applied", labels, reader.lag
    yield (
        "kvrouter_feed_live",
        "gauge",
        "1 if the copy is in step with its owner",
        labels,
        reader.state.value == "live",
    )
    for counter, value in asdict(reader.counters).items():
        if counter != "recovery_s":
            own = {**labels, "event": counter}
            yield "kvrouter_feed_events", "counter", "Events of a feed", own, value
    if reader.received_at is not None:
        silent = asyncio.get_running_loop().time() - reader.received_at
        yield (
            "kvrouter_feed_staleness_seconds",
            "gauge",
            "Time since the last message from the owner",
            labels,
            silent,
        )
    recovery = reader.counters.recovery_s
    yield "kvrouter_feed_last_recovery_seconds", "gauge", "Duration of the last recovery", labels, recovery


def _prediction_samples(router: Router, audit: Audit) -> Iterator[Sample]:
    """Only of workers that the pool has now: their series end with them."""
    pool = router.pool
    yield from _of_problems(audit, pool.id, "")
    for worker_id in pool.workers:
        labels = {"pool": str(pool.id), "worker": str(worker_id)}
        yield from _of_problems(audit, pool.id, worker_id)
        record = router.predictions.records.get(worker_id)
        if record is not None:
            yield from _of_predictions(record, labels)
            yield from _of_evidence(record, labels)


def _of_problems(audit: Audit, pool_id: PoolId, worker_id: str) -> Iterator[Sample]:
    """An empty worker id stands for the pool itself."""
    for problem in audit.problems(pool_id, worker_id):
        labels = {"pool": str(pool_id), "worker": worker_id, "problem": problem.kind}
        yield "kvrouter_worker_problem", "gauge", "1 while /workers shows this problem", labels, 1.0


def _of_predictions(record: WorkerRecord, labels: Labels) -> Iterator[Sample]:
    for (result, source), count in record.predictions.items():
        own = {**labels, "result": result, "source": source}
        yield (
            "kvrouter_predictions",
            "counter",
            "Predictions compared with an engine's report",
            own,
            count,
        )
    text = "Prompt tokens predicted to be cached, of compared predictions"
    yield "kvrouter_predicted_cached_tokens", "counter", text, labels, record.predicted_tokens
    text = "Prompt tokens that the engine reported as cached"
    yield "kvrouter_reported_cached_tokens", "counter", text, labels, record.reported_tokens
    if record.inexact.total:
        share = 1 - record.inexact.bad / record.inexact.total
        text = "Share of exact predictions among the last 16 that could be compared"
        yield "kvrouter_prediction_exact_ratio", "gauge", text, labels, share
    yield from _of_errors(record, labels)


def _of_errors(record: WorkerRecord, labels: Labels) -> Iterator[Sample]:
    count = 0
    for bound, own_count in zip([*map(str, ERROR_BLOCKS), "+Inf"], record.errors, strict=True):
        count += own_count
        text = "Blocks predicted minus blocks reported; below 0 the engine had more"
        yield "kvrouter_prediction_error_blocks", "histogram", text, {**labels, "le": bound}, count


def _of_evidence(record: WorkerRecord, labels: Labels) -> Iterator[Sample]:
    for result, count in record.lengths.items():
        text = "Answers by whether their prompt_tokens equal the tokens counted here"
        yield "kvrouter_prompt_lengths", "counter", text, {**labels, "result": result}, count
    for result, count in record.announced.items():
        text = "Served requests by whether the worker's events contained their first block within 2 s"
        yield "kvrouter_announced_requests", "counter", text, {**labels, "result": result}, count


# Bucket bounds. A look-up takes microseconds, and blocks the event loop: above 1 ms it is far too slow.
LOOKUP_SECONDS = (2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 1e-2, 0.1)


class MeasuredIndex(BlockIndex):
    """A block index that measures its look-ups (`--index-metrics`)."""

    def __init__(self, bounds: IndexBounds, placement_secret: int, observe: Callable[[float], None]) -> None:
        super().__init__(bounds, placement_secret)
        self._observe = observe

    def depths(self, hashes: Hashes, most: int = sys.maxsize) -> dict[Target | Wider, int]:
        began = time.perf_counter()
        found = super().depths(hashes, most)
        self._observe(time.perf_counter() - began)
        return found


def index_maker(registry: CollectorRegistry, *, is_on: bool) -> NewIndex:
    """The maker of the pools' indexes."""
    if not is_on:
        return BlockIndex
    seconds = Spread(
        "kvrouter_index_lookup_seconds",
        "Time of looking up one prompt's blocks",
        registry,
        bounds=LOOKUP_SECONDS,
    )
    return lambda bounds, secret: MeasuredIndex(bounds, secret, seconds.observe)


def index_samples(replica: Replica) -> Iterator[Sample]:
    for router in replica.routers.values():
        yield from _index_samples_of(router.pool)


def _index_samples_of(pool: Pool) -> Iterator[Sample]:
    labels, index = {"pool": str(pool.id)}, pool.index
    counted = index.counters
    yield (
        "kvrouter_index_holders",
        "gauge",
        "Pairs of a block and a target that holds it",
        labels,
        index.holders(),
    )
    yield "kvrouter_index_bytes", "gauge", "Approximate memory of the index", labels, index.size_bytes()
    yield "kvrouter_index_lookups", "counter", "Prompts looked up", labels, counted.lookups
    yield "kvrouter_index_stored_blocks", "counter", "Blocks stored", labels, counted.stored_blocks
    yield "kvrouter_index_removed_blocks", "counter", "Blocks removed", labels, counted.removed_blocks
    refused = counted.refused_blocks
    yield (
        "kvrouter_index_refused_blocks",
        "counter",
        "Blocks rejected beyond the index's bounds",
        labels,
        refused,
    )
    evicted = "Blocks evicted at --index-max-blocks (--index-full lru)"
    yield "kvrouter_index_evicted_blocks", "counter", evicted, labels, counted.evicted_blocks
    for target in index.targets():
        own = {**labels, "worker": str(target.worker_id), "rank": str(target.rank)}
        truncated = index.is_truncated(target)
        yield (
            "kvrouter_target_truncated",
            "gauge",
            "1 if the index rejected blocks of the target",
            own,
            truncated,
        )
