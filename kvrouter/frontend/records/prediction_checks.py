"""Compares the prediction of a request with the usage in its answer and with the engine's later events."""

from __future__ import annotations

from kvrouter.core.audit.findings import Audit
from kvrouter.core.fleet.router import Placement, Router
from kvrouter.core.routing.policy import RouteRequest
from kvrouter.core.tables.predictions import Prediction, Usage
from kvrouter.frontend.records.record import AttemptRecord


def check_answer(running: AttemptRecord, usage: Usage, audit: Audit, now: float) -> None:
    """Compare the prediction made at the booking with the usage in a good answer, and expect its events."""
    work, placement = running.work, running.placement
    router, route, traits, choice = work.router, work.route, work.traits, placement.choice
    if traits is None:
        return
    pool, names_blocks = router.pool, _names_blocks_of_engine(router, route, placement)
    # A prediction that may fail for a known reason is counted, and raises no alarm. Behind other waiting
    # requests the cache changes before this prompt is computed.
    pulled = placement.pull.blocks if placement.pull is not None else 0  # if its peer still has them
    is_firm = names_blocks and traits.reads_cache and not choice.waiting and not pulled
    prediction = Prediction(
        target=choice.target,
        kind=traits.kind,
        isl=route.isl,
        block_size=placement.block_size,
        blocks=choice.widest_blocks + pulled,
        in_flight=choice.widest_blocks > choice.indexed_blocks,
        is_single=traits.is_single,
        is_firm=is_firm and audit.is_firm(pool.id, choice.target),
        is_estimate=bool([prompt for prompt in route.prompts if prompt.is_estimate]),
        is_one_less=pool.reuses_one_less(choice.target.worker_id),
    )
    router.predictions.observe(prediction, usage)
    is_one_less = router.predictions.reuses_one_less(choice.target.worker_id)
    if is_one_less is not None:
        pool.reuse_one_less(choice.target.worker_id, is_one_less)
    # The first block of a served request must appear in the worker's events.
    if names_blocks and traits.kind is not None and pool.settings.use_kv_events:
        worker = pool.workers.get(placement.target.worker_id)
        if worker is not None and worker.card.publishes_events:
            router.predictions.expect(placement.target, traits.kind, route.prompts[0].hashes, now)


def _names_blocks_of_engine(router: Router, route: RouteRequest, placement: Placement) -> bool:
    """Whether the request was hashed as its engine does, and booked in the block size of its engine.

    If not, nothing was predicted, and no event contains its blocks.
    """
    if route.is_text and router.pool.settings.use_kv_events:
        return False
    worker, size = router.pool.workers.get(placement.target.worker_id), placement.block_size
    if worker is None or size != worker.card.block_size:
        return False
    return not [prompt for prompt in route.prompts if prompt.block_size != size]
