"""Predictions against truth as Prometheus samples. A worker's samples go with it."""

from __future__ import annotations

from collections.abc import Iterator

from kvrouter.core.audit.watch import Watch
from kvrouter.core.fleet.router import Router
from kvrouter.core.tables.predictions import ERROR_BLOCKS, WorkerRecord
from kvrouter.core.wire.ids import PoolId
from kvrouter.telemetry.metrics import Sample

Labels = dict[str, str]


def truth_samples(router: Router, watch: Watch) -> Iterator[Sample]:
    """What is known of every worker that the pool has now."""
    pool = router.pool
    yield from _of_problems(watch, pool.id, "")
    for worker_id in pool.workers:
        labels = {"pool": str(pool.id), "worker": str(worker_id)}
        yield from _of_problems(watch, pool.id, worker_id)
        record = router.truth.records.get(worker_id)
        if record is not None:
            yield from _of_predictions(record, labels)
            yield from _of_evidence(record, labels)


def _of_problems(watch: Watch, pool_id: PoolId, worker_id: str) -> Iterator[Sample]:
    """Those of a worker; an empty id stands for the pool itself."""
    for problem in watch.problems(pool_id, worker_id):
        labels = {"pool": str(pool_id), "worker": worker_id, "problem": problem.kind}
        yield "kvrouter_worker_problem", "gauge", "1 while /workers shows this problem", labels, 1.0


def _of_predictions(record: WorkerRecord, labels: Labels) -> Iterator[Sample]:
    for (result, source), count in record.predictions.items():
        own = {**labels, "result": result, "source": source}
        yield (
            "kvrouter_predictions",
            "counter",
            "Predictions that an engine's report was held against",
            own,
            count,
        )
    text = "Prompt tokens foretold to be cached, where the engine reported them too"
    yield "kvrouter_predicted_cached_tokens", "counter", text, labels, record.predicted_tokens
    text = "Prompt tokens that the engine reported as cached"
    yield "kvrouter_reported_cached_tokens", "counter", text, labels, record.reported_tokens
    if record.inexact.total:
        share = 1 - record.inexact.bad / record.inexact.total
        text = "Exact ones of the last 16 predictions that could be judged"
        yield "kvrouter_prediction_exact_ratio", "gauge", text, labels, share
    yield from _of_errors(record, labels)


def _of_errors(record: WorkerRecord, labels: Labels) -> Iterator[Sample]:
    count = 0
    for bound, own_count in zip([*map(str, ERROR_BLOCKS), "+Inf"], record.errors, strict=True):
        count += own_count
        text = "Blocks foretold minus blocks reported; below 0 the engine had more"
        yield "kvrouter_prediction_error_blocks", "histogram", text, {**labels, "le": bound}, count


def _of_evidence(record: WorkerRecord, labels: Labels) -> Iterator[Sample]:
    for result, count in record.lengths.items():
        text = "Answers whose prompt_tokens were those counted here, or not"
        yield "kvrouter_prompt_lengths", "counter", text, {**labels, "result": result}, count
    for result, count in record.announced.items():
        text = "Served requests whose first block the worker's events named within 2 s, or not"
        yield "kvrouter_announced_requests", "counter", text, {**labels, "result": result}, count
