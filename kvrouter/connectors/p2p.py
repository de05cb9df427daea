"""vLLM's p2p tier: an engine of whole requests reads blocks from the host memory of another one.

    puller: kv_transfer_params {"remote_kv_source": {"kv_request_id", "remote_host", "remote_port"}}

The source gets no request. The engine asks it which blocks it has, and computes the others: also if nobody
answers, after at most 30 s. Each data-parallel rank listens at the next port. Source: vLLM 0.33,
v1/kv_offload/tiering/p2p/manager.py. Dynamo's hint kv.fetch@1.0 is no field of its HTTP API.
"""

from __future__ import annotations

from urllib.parse import urlsplit

import msgspec
from msgspec import Raw

from kvrouter.connectors.source import Source


def pulling(source: Source) -> Raw | None:
    """The parameters of the engine that reads; None: where the source listens is not known."""
    at = urlsplit(f"//{source.address}")
    if not (at.hostname and at.port):
        return None
    named = {
        "kv_request_id": source.transfer_id,
        "remote_host": at.hostname,
        "remote_port": at.port + source.rank,
    }
    return Raw(msgspec.json.encode({"remote_kv_source": named}))
