"""kvrouter: a KV-cache-aware router for fleets of LLM engines.

Import the public names from here. Everything else may change without notice.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvrouter.version import __version__

if TYPE_CHECKING:
    from kvrouter.client.indexers import ApproxKvIndexer, KvIndexer
    from kvrouter.client.kv_router import KvRouter, PlacedRequest
    from kvrouter.client.openai_client import Client
    from kvrouter.core.routing.policy import Candidate, Choice, Policy, RouteRequest
    from kvrouter.core.tables.block_index import BlockIndex
    from kvrouter.core.tables.text_index import TextIndex, TextIndexSettings
    from kvrouter.core.wire.hashes import block_hashes, sequence_hashes
    from kvrouter.core.wire.heartbeats import Card
    from kvrouter.core.wire.ids import Target, WorkerId
    from kvrouter.policies import PolicySettings
    from kvrouter.worker.announce import announce, connect
    from kvrouter.worker.publisher import KvPublisher

__all__ = [
    "ApproxKvIndexer",
    "BlockIndex",
    "Candidate",
    "Card",
    "Choice",
    "Client",
    "KvIndexer",
    "KvPublisher",
    "KvRouter",
    "PlacedRequest",
    "Policy",
    "PolicySettings",
    "RouteRequest",
    "Target",
    "TextIndex",
    "TextIndexSettings",
    "WorkerId",
    "__version__",
    "announce",
    "block_hashes",
    "connect",
    "sequence_hashes",
]

# A name is imported when it is first used: `block_hashes` must not wait for a NATS or HTTP client.
_ON_DEMAND = {
    "ApproxKvIndexer": "kvrouter.client.indexers",
    "BlockIndex": "kvrouter.core.tables.block_index",
    "Candidate": "kvrouter.core.routing.policy",
    "Card": "kvrouter.core.wire.heartbeats",
    "Choice": "kvrouter.core.routing.policy",
    "Client": "kvrouter.client.openai_client",
    "KvIndexer": "kvrouter.client.indexers",
    "KvPublisher": "kvrouter.worker.publisher",
    "KvRouter": "kvrouter.client.kv_router",
    "PlacedRequest": "kvrouter.client.kv_router",
    "Policy": "kvrouter.core.routing.policy",
    "PolicySettings": "kvrouter.policies",
    "RouteRequest": "kvrouter.core.routing.policy",
    "Target": "kvrouter.core.wire.ids",
    "TextIndex": "kvrouter.core.tables.text_index",
    "TextIndexSettings": "kvrouter.core.tables.text_index",
    "WorkerId": "kvrouter.core.wire.ids",
    "announce": "kvrouter.worker.announce",
    "block_hashes": "kvrouter.core.wire.hashes",
    "connect": "kvrouter.worker.announce",
    "sequence_hashes": "kvrouter.core.wire.hashes",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    if name not in _ON_DEMAND:
        raise AttributeError(f"module 'kvrouter' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_ON_DEMAND[name]), name)
    return value
