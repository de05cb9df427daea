"""Blocks from a peer instead of computing them: an idle worker reads a prompt's prefix from the warm one.

    holder  ▓▓▓▓▓▓▓▓           the deepest of the group, by the index
    target  ▓▓░░░░░░▒▒▒        transfer(░) < time to compute ░, then

    cost_s = wait_s + own_s(▒) * (1 + gamma) + transfer_s(░) + copy_s
    copy_s = time to compute what ░ evicts there * how often a cached token is read: tokens held / missed

A transfer costs what a hand-over does (core/tables/transfers.py). Without the price of the copy each target
soon held the same prefixes, and where caches serve most of the tokens the fleet had to compute them again. A
pull never costs more than computing its blocks. The engine asks its peer first and computes what it does not
get, so a wrong choice costs seconds and no answer. Nobody reads blocks that are still being computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvrouter.core.routing.builtin_policy import BuiltInPolicy, Moment
from kvrouter.core.routing.candidates import Candidates
from kvrouter.core.routing.policy import AUTO, RouteRequest
from kvrouter.core.tables.transfers import Pull
from kvrouter.core.wire.ids import Target

# Of all prompt tokens: with fewer no target has to make room.
LEAST_MISSED = 0.01


def with_pulls(
    request: RouteRequest,
    candidates: Candidates,
    peers: Mapping[Target, int],
    policy: BuiltInPolicy,
    moment: Moment,
    *,
    block_size: int,
    free_blocks: Callable[[Target], int],
    held_share: float,
) -> Candidates:
    """The candidates, each with what it would read from a peer. `peers`: those of a Split.

    `held_share`: of all prompt tokens, those that some target holds.
    """
    if not (peers and candidates and request.may_split and candidates.deepest_blocks()):
        return candidates
    if policy.weight(request, moment) != AUTO:
        return candidates
    reads = held_share / max(LEAST_MISSED, 1 - held_share)
    transfers, token_s = moment.tables.transfers, moment.speed.seconds_per_token
    if transfers.is_tried:
        return candidates
    holders = _holders(candidates, peers, moment.random())
    found: dict[int, Pull] = {}
    for index, (target, held) in enumerate(
        zip(candidates.targets(), candidates.widest_blocks(), strict=True)
    ):
        source, depth = holders.get(peers.get(target, -1), (target, 0))
        tokens = (depth - held) * block_size
        if tokens <= 0 or transfers.rests(source.worker_id, target.worker_id, moment.now):
            continue
        seconds, computed_s = transfers.seconds(tokens, moment.now), tokens * token_s
        if seconds < computed_s:
            evicted = max(0, depth - held - free_blocks(target)) * block_size
            found[index] = Pull(source, depth - held, seconds, evicted * reads * token_s)
    return candidates.with_pulls(found) if found else candidates


def _holders(
    candidates: Candidates, peers: Mapping[Target, int], chance: float
) -> dict[int, tuple[Target, int]]:
    """Of each group the one that holds most of the prompt, and how many blocks; of equal ones the idlest."""
    best: dict[int, list[tuple[int, int, Target]]] = {}
    rows = zip(candidates.targets(), candidates.indexed_blocks(), candidates.requests(), strict=True)
    for target, blocks, requests in rows:
        group = peers.get(target)
        if group is None or not blocks:
            continue
        kept = best.setdefault(group, [])
        order = (-blocks, requests)
        if not kept or order < kept[0][:2]:
            best[group] = [(*order, target)]
        elif order == kept[0][:2]:
            kept.append((*order, target))
    return {group: (kept[int(chance * len(kept))][2], -kept[0][0]) for group, kept in best.items()}
