"""What an engine reports: `KvPublisher` and a worker's load under Dynamo's names."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvrouter.compat.dynamo.runtime import Component, names_of
from kvrouter.errors import ConfigError
from kvrouter.worker.publisher import KvPublisher


class KvEventPublisher:
    """One rank's blocks. Replicas follow them once `component.announce(…)` was awaited."""

    def __init__(  # noqa: PLR0917  # a published signature
        self,
        component: Component,
        worker_id: int | str = 0,
        kv_block_size: int = 0,
        dp_rank: int = 0,
        enable_local_indexer: bool = False,  # every publisher answers replicas that missed events
        zmq_endpoint: str | None = None,
        zmq_topic: str | None = None,
    ) -> None:
        if zmq_endpoint is not None:
            raise ConfigError(
                "zmq_endpoint: a process relays these events: "
                f"python -m kvrouter.worker --kv-events {zmq_endpoint} --engine-url http://HOST:PORT"
            )
        if worker_id:
            component.worker_id = str(worker_id)
        self._publisher = KvPublisher(component.outlet, component.worker_id, kv_block_size, dp_rank)
        self._component = component
        component.publishers[dp_rank] = self._publisher

    def publish_stored(  # noqa: PLR0917  # a published signature
        self,
        token_ids: Sequence[int],
        num_block_tokens: Sequence[int],
        block_hashes: Sequence[int],
        lora_id: int = 0,
        parent_hash: int | None = None,
        block_mm_infos: Sequence[Mapping[str, Any] | None] | None = None,
        *,
        lora_name: str | None = None,
        event_id: int | None = None,  # frames have numbers of their own
    ) -> None:
        """The engine stored a chain of blocks. Raises ConfigError for what would be named wrongly."""
        if lora_id and not lora_name:
            raise ConfigError(f"lora_id {lora_id}: give lora_name, which names the adapter in requests")
        if set(num_block_tokens) - {self._publisher.block_size}:
            raise ConfigError(f"num_block_tokens: each block has {self._publisher.block_size} tokens")
        items = [_ids_of(info) for info in block_mm_infos] if block_mm_infos else ()
        parent = None if parent_hash is None else names_of([parent_hash])[0]
        self._publisher.stored(names_of(block_hashes), token_ids, parent, lora_name, ids=items)

    def publish_removed(self, block_hashes: Sequence[int], *, event_id: int | None = None) -> None:
        """The engine removed these blocks."""
        self._publisher.removed(names_of(block_hashes))

    def shutdown(self) -> None:
        """The rank's blocks are gone."""
        self._publisher.cleared()


def _ids_of(info: Mapping[str, Any] | None) -> list[int]:
    return [item["mm_hash"] for item in (info or {}).get("mm_objects", ())]


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """Requests of a rank."""

    request_active_slots: int
    request_total_slots: int
    num_requests_waiting: int
    data_parallel_rank: int | None = None


@dataclass(frozen=True, slots=True)
class KvStats:
    """Blocks of a rank; `gpu_cache_usage_perc` is a fraction 0..1."""

    kv_active_blocks: int
    kv_total_blocks: int
    gpu_cache_usage_perc: float
    gpu_prefix_cache_hit_rate: float = 0.0


@dataclass(frozen=True, slots=True)
class ForwardPassMetrics:
    """A rank's load after a forward pass."""

    worker_stats: WorkerStats
    kv_stats: KvStats
    spec_decode_stats: object = None


class WorkerMetricsPublisher:
    """A worker's load. Heartbeats carry the last values, once a second."""

    def __init__(self) -> None:
        self._component: Component | None = None

    async def create_endpoint(self, component: Component, *_: object) -> None:
        """The component whose load this is."""
        await asyncio.sleep(0)
        self._component = component

    def publish(
        self, dp_rank: ForwardPassMetrics | int | None = None, active_decode_blocks: int | None = None
    ) -> None:
        """A rank's active blocks; or, as in earlier versions, its ForwardPassMetrics. Raises ConfigError."""
        if self._component is None:
            raise ConfigError("await create_endpoint(component) first")
        if isinstance(dp_rank, ForwardPassMetrics):
            requests, blocks = dp_rank.worker_stats, dp_rank.kv_stats
            rank = requests.data_parallel_rank or 0
            load: dict[str, Any] = {
                "running": requests.request_active_slots,
                "waiting": requests.num_requests_waiting,
                "kv_usage": blocks.gpu_cache_usage_perc,
            }
        else:
            rank, active, total = dp_rank or 0, active_decode_blocks or 0, self._component.kv_total_blocks
            load = {"kv_usage": min(1.0, active / total) if total else None}
            load["metrics"] = {"active_decode_blocks": float(active)}
        self._component.loads[rank] = load
        self._component.report_load(rank)
