"""kvrouter: a KV-cache-aware router for fleets of LLM engines.

What others build on is imported from here; everything else may change without notice.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvrouter.core.blocks import block_hashes, sequence_hashes
from kvrouter.core.ids import Target, WorkerId
from kvrouter.core.index import BlockIndex
from kvrouter.core.policy import Candidate, Policy
from kvrouter.core.text_index import TextIndex, TextIndexSettings
from kvrouter.version import __version__

if TYPE_CHECKING:
    from kvrouter.worker.announce import announce, connect
    from kvrouter.worker.publisher import KvPublisher

__all__ = [
    "BlockIndex",
    "Candidate",
    "KvPublisher",
    "Policy",
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

_ON_DEMAND = {
    "KvPublisher": "kvrouter.worker.publisher",
    "announce": "kvrouter.worker.announce",
    "connect": "kvrouter.worker.announce",
}
"""They need a NATS client: whoever wants the pure core alone does not wait for that."""


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    if name not in _ON_DEMAND:
        raise AttributeError(f"module 'kvrouter' has no attribute {name!r}")
    return getattr(import_module(_ON_DEMAND[name]), name)
