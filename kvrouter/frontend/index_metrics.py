"""What happens to the block index, for /metrics: Heimdall's `enableMetrics` (`--index-metrics`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry

from kvrouter.core.fleet.pool import NewIndex, Pool
from kvrouter.core.fleet.replica import Replica
from kvrouter.core.tables.block_index import BlockIndex, IndexBounds, Wider
from kvrouter.core.wire.hashes import Hashes
from kvrouter.core.wire.ids import Target
from kvrouter.telemetry.metrics import Sample, Spread

LOOKUP_SECONDS = (2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 1e-2, 0.1)
"""Bucket bounds: a look-up takes microseconds, and a millisecond is one too many."""


class MeasuredIndex(BlockIndex):
    """A block index that tells how long each look-up took."""

    def __init__(self, bounds: IndexBounds, placement_secret: int, observe: Callable[[float], None]) -> None:
        super().__init__(bounds, placement_secret)
        self._observe = observe

    def depths(self, hashes: Hashes) -> dict[Target | Wider, int]:
        """See BlockIndex."""
        began = time.perf_counter()
        found = super().depths(hashes)
        self._observe(time.perf_counter() - began)
        return found


def index_maker(registry: CollectorRegistry, *, is_on: bool) -> NewIndex:
    """What makes the pools' indexes: such that measure themselves, or plain ones."""
    if not is_on:
        return BlockIndex
    seconds = Spread(
        "kvrouter_index_lookup_seconds", "Looking up one prompt's blocks", registry, bounds=LOOKUP_SECONDS
    )
    return lambda bounds, secret: MeasuredIndex(bounds, secret, seconds.observe)


def index_samples(replica: Replica) -> Iterator[Sample]:
    """The indexes of all pools as Prometheus samples."""
    for router in replica.routers.values():
        yield from _samples(router.pool)


def _samples(pool: Pool) -> Iterator[Sample]:
    labels, index = {"pool": str(pool.id)}, pool.index
    counted = index.counters
    yield "kvrouter_index_holders", "gauge", "Pairs of a block and its holder", labels, index.holders()
    yield "kvrouter_index_bytes", "gauge", "Memory of the index, about", labels, index.size_bytes()
    yield "kvrouter_index_lookups", "counter", "Prompts looked up", labels, counted.lookups
    yield "kvrouter_index_stored_blocks", "counter", "Blocks that came", labels, counted.stored_blocks
    yield "kvrouter_index_removed_blocks", "counter", "Blocks that went", labels, counted.removed_blocks
    refused = counted.refused_blocks
    yield "kvrouter_index_refused_blocks", "counter", "Blocks beyond the bounds", labels, refused
    for target in index.targets():
        own = {**labels, "worker": str(target.worker_id), "rank": str(target.rank)}
        truncated = index.is_truncated(target)
        yield "kvrouter_target_truncated", "gauge", "1 if blocks of it were refused", own, truncated
