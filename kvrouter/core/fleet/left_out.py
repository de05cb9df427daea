"""Why a request does not go to some targets, or to none."""

from __future__ import annotations

from kvrouter.core.fleet.block_size import NAMED_MOST
from kvrouter.core.fleet.pool import Pool
from kvrouter.core.routing.candidates import Candidates
from kvrouter.core.routing.policy import RouteRequest
from kvrouter.core.wire.ids import Target
from kvrouter.errors import counted

# Why a target is no candidate for any request for a while.
AVOIDED = "avoided, as a worker was lost a moment ago"
UNPAIRED = "without a partner that has not just failed (--pd-fallback refuse)"


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
