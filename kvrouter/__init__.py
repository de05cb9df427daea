"""kvrouter: a KV-cache-aware router for fleets of LLM engines.

What others build on is imported from here; everything else may change without notice.
"""

from kvrouter.core.blocks import block_hashes, sequence_hashes
from kvrouter.core.index import BlockIndex
from kvrouter.core.policy import Candidate, Policy
from kvrouter.version import __version__

__all__ = ["BlockIndex", "Candidate", "Policy", "__version__", "block_hashes", "sequence_hashes"]
