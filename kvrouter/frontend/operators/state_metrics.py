"""The state of a replica as Prometheus samples: bus, members, pools, feeds, predictions, index."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import ParamSpec, TypeVar

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
_P = ParamSpec("_P")
_R = TypeVar("_R")


def samples(replica: Replica, replica_loop: ReplicaLoop, audit: Audit, bus: Bus) -> Iterator[Sample]:
    yield "kvrouter_nats_connected", {}, float(bus.connected)
    yield from _bus_samples(bus, replica_loop)
    yield "kvrouter_inbox_age_seconds", {}, replica_loop.inbox.age_s
    for event, count in asdict(replica.counters).items():
        yield "kvrouter_replica_events_total", {"event": event}, count
    yield "kvrouter_replicas", {}, 1 + len(replica.peers)
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


def _bus_samples(bus: Bus, replica_loop: ReplicaLoop) -> Iterator[Sample]:
    counted = bus.counters
    for event, messages in (
        ("published", counted.published),
        ("received", counted.received),
        ("unsent", counted.unsent),
        ("dropped", counted.slow_consumer_drops + replica_loop.inbox.drops),
        ("failed", replica_loop.log.errors),
    ):
        yield "kvrouter_bus_messages_total", {"event": event}, messages
    yield "kvrouter_bus_bytes_total", {"event": "published"}, counted.published_bytes
    yield "kvrouter_bus_bytes_total", {"event": "received"}, counted.received_bytes


def _pool_samples(pool: Pool) -> Iterator[Sample]:
    labels = {"pool": str(pool.id)}
    yield "kvrouter_index_blocks", labels, len(pool.index)
    yield "kvrouter_workers", labels, len(pool.workers)
    for worker in list(pool.workers.values()):
        for target in worker.targets():
            own = {**labels, "worker": str(target.worker_id), "rank": str(target.rank)}
            yield "kvrouter_target_blocks", own, pool.index.blocks(target)
            if worker.capacity_blocks:
                yield "kvrouter_target_capacity_blocks", own, worker.capacity_blocks
            active = pool.active
            yield "kvrouter_active_blocks", own, active.blocks(target)
            yield "kvrouter_target_requests", own, active.requests(target)
            charged = active.charged_tokens(target)
            yield "kvrouter_charged_prefill_tokens", own, charged
            yield "kvrouter_target_eligible", own | worker.card.part(), target in pool.split.serving
            if beat := worker.ranks.get(target.rank):
                yield from _load_samples(beat, own)


def _load_samples(beat: RankBeat, labels: Labels) -> Iterator[Sample]:
    """What the engine reports of its load; no series for what it does not report."""
    for state, requests in (("running", beat.running), ("waiting", beat.waiting)):
        if requests is not None:
            yield "kvrouter_engine_requests", {**labels, "state": state}, requests
    if beat.kv_usage is not None:
        yield "kvrouter_engine_kv_usage", labels, beat.kv_usage


def target_samples(counts: dict[Target, TargetCounts], routers: Sequence[Router]) -> Iterator[Sample]:
    """What was counted here of the known targets. The counts of targets that are gone are dropped."""
    known = {
        target: router.pool.id
        for router in routers
        for worker in router.pool.workers.values()
        for target in worker.targets()
    }
    for gone in counts.keys() - known.keys():
        del counts[gone]  # else each worker that ever came would keep its series
    for target, counted in list(counts.items()):
        labels = {"pool": str(known[target]), "worker": str(target.worker_id), "rank": str(target.rank)}
        for outcome, count in list(counted.answers.items()):
            yield "kvrouter_target_answers_total", {**labels, "outcome": outcome}, count
        yield "kvrouter_target_first_byte_seconds_sum", labels, counted.first_byte_s
        yield "kvrouter_target_first_byte_seconds_count", labels, counted.first_bytes


def _speed_samples(router: Router) -> Iterator[Sample]:
    if not router.doubt:  # else it is a first guess, or off by too much
        speed = router.tables.speeds.speed
        yield "kvrouter_prefill_tokens_per_second", {"pool": str(router.pool.id)}, 1 / speed.seconds_per_token


def _reuse_samples(router: Router) -> Iterator[Sample]:
    labels, reuse = {"pool": str(router.pool.id)}, router.reuse
    for cache, tokens in {"none": reuse.prompt_tokens, **reuse.uncached()}.items():
        yield "kvrouter_uncached_tokens_total", {**labels, "cache": cache}, tokens


def _ttft_samples(router: Router) -> Iterator[Sample]:
    labels, counted = {"pool": str(router.pool.id)}, router.bookings.calibration
    yield "kvrouter_ttft_later_seconds_sum", labels, counted.later_s
    yield "kvrouter_ttft_later_seconds_count", labels, counted.decisions
    for bound, one in zip(CLASSES_S, counted.classes, strict=True):
        if not one.requests:
            continue
        own = {**labels, "up_to_s": f"{bound:g}" if bound < math.inf else "+Inf"}
        for kind, seconds in (("predicted", one.predicted_s), ("measured", one.measured_s)):
            yield "kvrouter_ttft_seconds_sum", {**own, "time": kind}, seconds
            yield "kvrouter_ttft_seconds_count", {**own, "time": kind}, one.requests


def _booking_samples(pool: Pool, known: set[RouterId]) -> Iterator[Sample]:
    """Also 0 for known replicas without bookings: a series that ends would look like a lost replica."""
    for router_id, count in (dict.fromkeys(sorted(known), 0) | pool.active.owners()).items():
        labels = {"pool": str(pool.id), "router": router_id}
        yield "kvrouter_bookings", labels, count


def _feed_samples(source: Feed, reader: FeedReader) -> Iterator[Sample]:
    labels = {"feed": name(source)}
    yield "kvrouter_feed_live", labels, reader.state.value == "live"
    for counter, value in asdict(reader.counters).items():
        if counter != "recovery_s":  # a duration, not a count
            own = {**labels, "event": counter}
            yield "kvrouter_feed_events_total", own, value
    if reader.received_at is not None:
        silent = asyncio.get_running_loop().time() - reader.received_at
        yield "kvrouter_feed_staleness_seconds", labels, silent


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
        yield "kvrouter_worker_problem", labels, 1.0


def _of_predictions(record: WorkerRecord, labels: Labels) -> Iterator[Sample]:
    for (result, source), count in record.predictions.items():
        own = {**labels, "result": result, "source": source}
        yield "kvrouter_predictions_total", own, count
    yield "kvrouter_cached_tokens_total", {**labels, "by": "predicted"}, record.predicted_tokens
    yield "kvrouter_cached_tokens_total", {**labels, "by": "reported"}, record.reported_tokens
    if record.inexact.total:
        share = 1 - record.inexact.bad / record.inexact.total
        yield "kvrouter_prediction_exact_ratio", labels, share
    yield from _of_errors(record, labels)


def _of_errors(record: WorkerRecord, labels: Labels) -> Iterator[Sample]:
    count = 0
    for bound, own_count in zip([*map(str, ERROR_BLOCKS), "+Inf"], record.errors, strict=True):
        count += own_count  # Prometheus's buckets are cumulative
        yield "kvrouter_prediction_error_blocks_bucket", {**labels, "le": bound}, count


def _of_evidence(record: WorkerRecord, labels: Labels) -> Iterator[Sample]:
    for check, counts in (("prompt_length", record.lengths), ("announced", record.announced)):
        for result, count in counts.items():
            yield "kvrouter_evidence_total", {**labels, "check": check, "result": result}, count


# One look-up of this many is measured: to measure each would cost 0.6 % of a short request.
LOOKUPS_TIMED_EVERY = 16


class MeasuredIndex(BlockIndex):
    """A block index that measures some of its look-ups (`--index-metrics`)."""

    def __init__(self, bounds: IndexBounds, placement_secret: int, observe: Callable[[float], None]) -> None:
        super().__init__(bounds, placement_secret)
        self._observe = observe
        self._until_timed = 1

    def depths(self, hashes: Hashes, most: int = sys.maxsize) -> dict[Target | Wider, int]:
        return self._timed(super().depths, hashes, most)

    def depths_of(self, hashes: Hashes, slots: array[int], most: int = sys.maxsize) -> array[int]:
        return self._timed(super().depths_of, hashes, slots, most)

    def _timed(self, look_up: Callable[_P, _R], *arguments: _P.args, **named: _P.kwargs) -> _R:
        self._until_timed -= 1
        if self._until_timed:
            return look_up(*arguments, **named)
        self._until_timed, began = LOOKUPS_TIMED_EVERY, time.perf_counter()
        found = look_up(*arguments, **named)
        self._observe(time.perf_counter() - began)
        return found


def index_maker(steps: Spread, *, is_on: bool) -> NewIndex:
    """The maker of the pools' indexes."""
    if not is_on:
        return BlockIndex
    return lambda bounds, secret: MeasuredIndex(bounds, secret, partial(steps.observe, value="lookup"))


def index_samples(replica: Replica) -> Iterator[Sample]:
    for router in replica.routers.values():
        yield from _index_samples_of(router.pool)


def _index_samples_of(pool: Pool) -> Iterator[Sample]:
    labels, index = {"pool": str(pool.id)}, pool.index
    counted = index.counters
    yield "kvrouter_index_bytes", labels, index.size_bytes()
    for change in ("stored", "removed", "refused"):
        count = getattr(counted, f"{change}_blocks")
        yield "kvrouter_index_changes_total", {**labels, "change": change}, count
