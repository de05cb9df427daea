"""Every target that may serve a request, as policies see it: what the request would find and cost there.

index  ──> depth per tier set ─┐
active ──> depth in flight ────┴──> overlap ──> tokens to compute, blocks to hold

Of a large fleet most targets hold nothing of a prompt and serve nobody: one look-up tells them apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvrouter.core.active import ActiveTable
from kvrouter.core.beats import RankBeat
from kvrouter.core.cost import Prompt, find_overlap, uncached_tokens
from kvrouter.core.ids import Target
from kvrouter.core.index import BlockIndex
from kvrouter.core.policy import Candidate, RouteRequest

if TYPE_CHECKING:
    from kvrouter.core.pool import Worker

Found = tuple[Prompt, dict[Target, list[int]], dict[Target, int]]
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
    if not request.prompts:
        return [_form_plain(target, worker, active, block_size) for target, worker in targets]
    if not block_size:
        return []  # no worker has been seen, so there is no target
    found = [
        (prompt, index.overlap_by_tier(prompt.hashes), active.depths(prompt.hashes))
        for prompt in request.prompts
    ]
    known = set(active.targets()).union(*(cached for _, cached, _ in found))
    isl, blocks = request.isl, _new_blocks(request, None, found, block_size)
    idle_prefill_blocks = isl / block_size
    formed: list[Candidate] = []
    form = formed.append
    for target, worker in targets:
        if target in known:
            form(_candidate(request, target, worker, found, active, block_size, inflight_overlap))
            continue
        beat = worker.ranks.get(target.rank, _NO_LOAD)
        form(
            Candidate(
                target, 0, 0, isl, blocks, isl, idle_prefill_blocks, blocks, 0,
                beat.running, beat.waiting, beat.kv_usage, worker.card, _NOWHERE,
                beat.waiting_loras, 0, beat.running_loras, beat.metrics,
            )
        )  # fmt: skip
    return formed


def _form_plain(target: Target, worker: Worker, active: ActiveTable, block_size: int) -> Candidate:
    """For a request without known prompts: it adds nothing to what the target has to do."""
    charged_tokens, active_blocks, requests = active.load(target)
    beat = worker.ranks.get(target.rank, _NO_LOAD)
    return Candidate(
        target,
        0,
        0,
        0,
        0,
        charged_tokens,
        charged_tokens / block_size,
        active_blocks,
        requests,
        beat.running,
        beat.waiting,
        beat.kv_usage,
        worker.card,
        _NOWHERE,
        beat.waiting_loras,
        0,
        beat.running_loras,
        beat.metrics,
    )


def _candidate(  # noqa: PLR0917  # on the hot path: keywords cost
    request: RouteRequest,
    target: Target,
    worker: Worker,
    found: list[Found],
    active: ActiveTable,
    block_size: int,
    inflight_overlap: bool,
) -> Candidate:
    """A target that holds something of the prompts, or has requests in flight."""
    own_tokens = overlap_blocks = widest_blocks = indexed_blocks = 0
    reuses = inflight_overlap and worker.card.prefix_caching is not False
    for prompt, cached, in_flight in found:
        depths: Sequence[int] = cached.get(target, _NOWHERE)
        reused = in_flight.get(target, 0) if reuses else 0
        if not (depths or reused):
            own_tokens += prompt.isl
            continue
        overlap = find_overlap(prompt.isl, block_size, depths, reused)
        own_tokens += uncached_tokens(prompt.isl, block_size, overlap)
        overlap_blocks += overlap.overlap_blocks
        widest_blocks += overlap.widest_blocks
        if depths:
            indexed_blocks += min(depths[-1], overlap.widest_blocks)
    new_blocks = _new_blocks(request, target, found, block_size)
    charged_tokens, active_blocks, requests = active.load(target)
    beat = worker.ranks.get(target.rank, _NO_LOAD)
    prefill_tokens = charged_tokens + own_tokens
    return Candidate(
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
        found[0][1].get(target, _NOWHERE),
        beat.waiting_loras,
        indexed_blocks,
        beat.running_loras,
        beat.metrics,
    )


def _new_blocks(request: RouteRequest, target: Target | None, found: list[Found], block_size: int) -> int:
    """Blocks that would be active there only through this request; None: where nothing is in flight."""
    if len(found) == 1:
        prompt, _, in_flight = found[0]
        return prompt.isl // block_size - (in_flight.get(target, 0) if target else 0)
    blocks: set[int] = set()
    held: set[int] = set()
    for prompt, _, in_flight in found:
        blocks.update(prompt.hashes)
        held.update(prompt.hashes[: in_flight.get(target, 0) if target else 0])
    return len(blocks) - len(held) + unnamed_blocks(request, block_size)


def unnamed_blocks(request: RouteRequest, block_size: int) -> int:
    """Blocks of prompts whose end was not tokenized: charged, and without a hash.

    Never fewer than none: the pool's block size may have grown since the prompt was hashed.
    """
    return sum(max(0, prompt.isl // block_size - len(prompt.hashes)) for prompt in request.prompts)
