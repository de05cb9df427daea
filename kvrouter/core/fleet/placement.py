"""Where a request is sent, or why nowhere."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from kvrouter.core.fleet.block_size import NAMED_MOST
from kvrouter.core.fleet.pool import Pool
from kvrouter.core.routing.candidates import Candidates
from kvrouter.core.routing.pairs import Sharing
from kvrouter.core.routing.policy import Candidate, RouteRequest
from kvrouter.core.tables.bookings import Booking
from kvrouter.core.tables.transfers import Pull
from kvrouter.core.wire.heartbeats import DECODE, Card
from kvrouter.core.wire.ids import BookingKey, Target
from kvrouter.errors import counted

# Why a target is no candidate for any request for a while.
AVOIDED = "avoided, as a worker was lost a moment ago"
UNPAIRED = "without a partner that has not just failed (--pd-fallback refuse)"

# How prefill and decode workers share a request: the decode worker alone ("decode": it is better, "fallback":
# no prefill worker is left). Empty where a worker of both serves it; "pull": with blocks of a peer.
PairPath = Literal["", "pair", "decode", "fallback", "pull"]


class Placement(Struct, frozen=True, gc=False):
    """Where a request is sent, and what was known when that was decided."""

    key: BookingKey
    target: Target
    choice: Candidate
    url: str
    rank_header: str
    """Whether to ask the engine to report the blocks that this request reuses."""
    sends_token_ids: bool
    """Whether to send the token ids of a chat that were computed here."""
    fallbacks: tuple[Target, ...]
    """The targets that the policy tries next if this one fails."""
    block_size: int
    """The pool's block size, in which `choice` counts."""
    connector: str = ""
    """By which its engine hands KV blocks over."""
    prefill: Placement | None = None
    """Where its prompt is computed, if another worker does that."""
    path: PairPath = ""
    pull: Pull | None = None
    """What it reads from a peer instead of computing it."""


def placement_of(  # noqa: PLR0917  # on the hot path: keywords cost
    pool: Pool,
    booking: Booking,
    choice: Candidate,
    fallbacks: tuple[Target, ...] = (),
    sharing: Sharing | None = None,
    prefill: Placement | None = None,
    pull: Pull | None = None,
) -> Placement:
    target = choice.target
    worker = pool.targets[target]
    card = worker.card
    return Placement(
        key=booking.key,
        target=target,
        choice=choice,
        url=card.url,
        rank_header=card.rank_header,
        sends_token_ids=pool.sends_token_ids and worker.sends_token_ids,
        fallbacks=fallbacks,
        block_size=pool.block_size,
        connector=card.kv_connector,
        prefill=prefill,
        path="pull" if pull else "" if pool.split.whole is None else _path(pool, card, sharing),
        pull=pull,
    )


def _path(pool: Pool, card: Card, sharing: Sharing | None) -> PairPath:
    if sharing is not None and sharing.pair is not None:
        return "pair"
    if card.role != DECODE:
        return ""
    is_chosen = pool.split.islands if sharing is None else sharing.terms
    return "decode" if is_chosen else "fallback"


def refused_targets(
    pool: Pool, request: RouteRequest, exclude: frozenset[Target], avoid: frozenset[Target] = frozenset()
) -> dict[Target, str]:
    """Why each target of the pool that is not a candidate is not one."""
    refused = pool.refusals(request)
    if avoid:
        refused = refused | dict.fromkeys(avoid, AVOIDED)
    return refused | dict.fromkeys(exclude, "failed this request") if exclude else refused


def why_none(
    pool: Pool,
    request: RouteRequest,
    exclude: frozenset[Target],
    avoid: frozenset[Target],
    *,
    removed: dict[Target, str],
    alone: Candidates,
) -> str:
    """Why no target is left. `removed`: by filters. `alone`: those left, but for pairs only."""
    if alone:
        return f"all workers of {pool.model!r} are {UNPAIRED}"
    if removed:
        names = ", ".join(dict.fromkeys(removed.values()))
        whole = counted(len(removed), "worker")
        return f"filters left none of {whole} of {pool.model!r} that could serve this: {names}"
    if exclude or avoid:
        why = "failed this request" if exclude else f"are {AVOIDED}"
        return f"all workers of {pool.model!r} {why}: {', '.join(map(str, exclude or avoid))}"
    if request.may_split and pool.split.is_pairs_only:
        return (
            f"no prefill worker of {pool.model!r} and decode worker can take this together: all of one role "
            "are full, their circuits are open, or their pairs have just failed"
        )
    if pool.split.others:
        refused = {target.worker_id: reason for target, reason in pool.refusals(RouteRequest("")).items()}
        found = ", ".join(" ".join(why) for why in list(refused.items())[:NAMED_MOST])
        return f"no worker of {pool.model!r} answers requests: {found}"
    known = ", ".join(pool.workers) or "none"
    return f"no live worker for model {pool.model!r}; known: {known}"
