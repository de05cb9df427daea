"""Every target that may serve a request, as policies see it: what the request would find and cost there.

index  ──> depth per tier set ─┐
active ──> depth in flight ────┴──> overlap ──> tokens to compute, blocks to hold
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvrouter.core.active import ActiveTable
from kvrouter.core.beats import RankBeat
from kvrouter.core.cost import find_overlap, uncached_tokens
from kvrouter.core.ids import Target
from kvrouter.core.index import BlockIndex
from kvrouter.core.policy import Candidate, RouteRequest

if TYPE_CHECKING:
    from kvrouter.core.pool import Worker

Found = tuple[dict[Target, list[int]], dict[Target, int]]
"""What one prompt finds, per target: the index's depth per tier set, and the depth held in flight."""

_NO_LOAD = RankBeat(0, 0, 0)
_NOWHERE: tuple[int, ...] = ()


def form_candidates(
    request: RouteRequest,
    targets: Iterable[tuple[Target, Worker]],
    index: BlockIndex,
    active: ActiveTable,
    *,
    block_size: int,
    inflight_overlap: bool,
) -> list[Candidate]:
    """One for each target, in their order."""
    prompts = [
        (prompt.isl, (index.overlap_by_tier(prompt.hashes), active.depths(prompt.hashes)))
        for prompt in request.prompts
    ]
    found = [what for _, what in prompts]
    formed = []
    for target, worker in targets:
        own_tokens = overlap_blocks = widest_blocks = indexed_blocks = new_blocks = 0
        depths: Sequence[int] = _NOWHERE
        for isl, (cached, in_flight) in prompts:
            active_depth = in_flight.get(target, 0)
            depths = cached.get(target, _NOWHERE)
            reused = active_depth if inflight_overlap and worker.card.prefix_caching is not False else 0
            overlap = find_overlap(isl, block_size, depths, reused)
            own_tokens += uncached_tokens(isl, block_size, overlap)
            overlap_blocks += overlap.overlap_blocks
            widest_blocks += overlap.widest_blocks
            if depths:
                indexed_blocks += min(depths[-1], overlap.widest_blocks)
            new_blocks += isl // block_size - active_depth
        if len(prompts) > 1:
            new_blocks = _distinct_new_blocks(request, target, found) + unnamed_blocks(request, block_size)
            depths = found[0][0].get(target, _NOWHERE)
        charged_tokens, active_blocks, requests = active.load(target)
        beat = worker.ranks.get(target.rank, _NO_LOAD)
        prefill_tokens = charged_tokens + own_tokens
        formed.append(
            Candidate(
                target,
                overlap_blocks,
                widest_blocks,
                own_tokens,
                new_blocks,
                prefill_tokens,
                prefill_tokens / block_size,
                active_blocks + new_blocks,
                requests,
                beat.running,
                beat.waiting,
                beat.kv_usage,
                worker.card,
                depths,
                beat.waiting_loras,
                indexed_blocks,
                beat.running_loras,
                beat.metrics,
            )
        )
    return formed


def unnamed_blocks(request: RouteRequest, block_size: int) -> int:
    """Blocks of prompts whose end was not tokenized: charged, and without a hash.

    Never fewer than none: the pool's block size may have grown since the prompt was hashed.
    """
    return sum(max(0, prompt.isl // block_size - len(prompt.hashes)) for prompt in request.prompts)


def _distinct_new_blocks(request: RouteRequest, target: Target, found: list[Found]) -> int:
    """Blocks of the union of the prompts that no request in flight on the target holds."""
    blocks: set[int] = set()
    held: set[int] = set()
    for prompt, (_, in_flight) in zip(request.prompts, found, strict=True):
        blocks.update(prompt.hashes)
        held.update(prompt.hashes[: in_flight.get(target, 0)])
    return len(blocks) - len(held)
