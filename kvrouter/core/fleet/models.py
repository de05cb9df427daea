"""Which pool serves the model that a client names.

    base model's names  before  LoRA adapters;  among equals the pool whose id comes first

So every replica answers alike, whichever worker it heard of first. A name that two pools serve is a mistake
of the deployment: requests for it all go to one of them, and `/workers` says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from kvrouter.core.fleet.pool import Pool
from kvrouter.errors import BadRequestError, NoWorkersError, UnknownModelError

LISTED_MOST = 50
"""Names in a sentence."""


def pool_serving(model: str | None, pools: Iterable[Pool]) -> Pool:
    """The pool that serves a model or LoRA name; no name is enough where there is one pool only.

    Raises UnknownModelError, BadRequestError where a name is needed, or NoWorkersError while no worker has
    been seen at all.
    """
    serving = [pool for pool in pools if pool.names]
    if not serving:
        raise NoWorkersError("no worker has been seen yet")
    if model is None and len(serving) == 1:
        return serving[0]
    found = [pool for pool in serving if model in pool.names]
    if len(found) == 1:
        return found[0]
    if found:
        return min(found, key=lambda pool: (model in pool.lora_names, pool.id))
    served = listed({name for pool in serving for name in pool.names})
    if model is None:
        raise BadRequestError(f"`model` must be given, as several are served: {served}", param="model")
    raise UnknownModelError(f"The model `{model}` does not exist; served: {served}", param="model")


def listed(names: Set[str]) -> str:
    """The first of them, for a sentence."""
    first = sorted(names)[:LISTED_MOST]
    return ", ".join([*first, *([f"… {len(names)} in all"] if len(names) > len(first) else [])])


def shared_addresses(pool: Pool) -> list[str]:
    """Sentences about engines that several workers of the pool claim as theirs."""
    workers: dict[str, list[str]] = {}
    for worker_id, worker in pool.workers.items():
        workers.setdefault(worker.card.url, []).append(worker_id)
    return [
        f"workers {', '.join(sorted(names))} have one address, {url}: the engine is counted once for each "
        "of them; stop all of their agents but one"
        for url, names in sorted(workers.items())
        if url and len(names) > 1
    ]


def name_conflicts(pools: Iterable[Pool]) -> dict[str, list[str]]:
    """Sentences about names that several pools serve, by the pool whose clients do not reach it."""
    by_id = sorted((pool for pool in pools if pool.names), key=lambda pool: pool.id)
    conflicts: dict[str, list[str]] = {}
    for pool in by_id:
        for name in sorted(pool.names):
            winner = pool_serving(name, by_id)
            if winner is not pool:
                conflicts.setdefault(pool.id, []).append(
                    f"{name!r} is also a name in pool {winner.id}, where all requests for it go: "
                    "give the model or adapter another name in one of them"
                )
    return conflicts
