"""NVIDIA Dynamo's Python names for routing: only the import changes (docs/coming-from-dynamo.md).

Signatures are those of `dynamo.llm` and `dynamo._core`; where versions differ, both forms work.
"""

from kvrouter.compat.dynamo.indexers import (
    ApproxKvIndexer,
    KvIndexer,
    OverlapScores,
    RadixTree,
    compute_block_hash_for_seq,
)
from kvrouter.compat.dynamo.publishers import (
    ForwardPassMetrics,
    KvEventPublisher,
    KvStats,
    WorkerMetricsPublisher,
    WorkerStats,
)
from kvrouter.compat.dynamo.router import KvPushRouter, KvRouter, KvRouterConfig
from kvrouter.compat.dynamo.runtime import (
    Component,
    DistributedRuntime,
    Endpoint,
    EndpointClient,
    Namespace,
    namespace,
)
from kvrouter.compat.dynamo.selection import SelectionService

__all__ = [
    "ApproxKvIndexer",
    "Component",
    "DistributedRuntime",
    "Endpoint",
    "EndpointClient",
    "ForwardPassMetrics",
    "KvEventPublisher",
    "KvIndexer",
    "KvPushRouter",
    "KvRouter",
    "KvRouterConfig",
    "KvStats",
    "Namespace",
    "OverlapScores",
    "RadixTree",
    "SelectionService",
    "WorkerMetricsPublisher",
    "WorkerStats",
    "compute_block_hash_for_seq",
    "namespace",
]
