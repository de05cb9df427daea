"""vLLM's NixlConnector, pull: the decode engine reads the blocks from the prefill engine.

    P: kv_transfer_params {"do_remote_decode": true, …}      its answer has those for D, with a lease of 30 s
    D: these, verbatim, unknown ones too

All or none: with half of them vLLM 0.33 parks the request and fetches nothing. In time or not at all: after
the lease the prefill engine frees the blocks for other prompts. Source: vLLM 0.33,
distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py.
"""

from __future__ import annotations

from urllib.parse import urlsplit

import msgspec
from msgspec import Raw

from kvrouter.connectors.source import Source

ASKING = Raw(
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)
# Without one of them the decode engine waits for ever, or its scheduler ends.
NEEDED = (
    "remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size",
)  # fmt: skip
_TRUE, _NULL = Raw(b"true"), Raw(b"null")
_HERE = ("localhost", "127.", "::1")


class _PrefillResponse(msgspec.Struct):
    kv_transfer_params: dict[str, Raw] | None = None


class Nixl:
    has_parameters = True
    is_at_once = False
    # Of 30 s (kv_lease_duration), without 5 s until the decode engine renews it, and 5 s for the way there.
    lease_s = 20.0
    waits_for_the_lost = False

    def asking(self, source: Source) -> Raw | None:
        return ASKING

    def handed_over(self, answer: bytes, source: Source) -> Raw | None:
        """None: a parameter is missing, so D computes the prompt."""
        try:
            found = msgspec.json.decode(answer, type=_PrefillResponse).kv_transfer_params or {}
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        if found.get("do_remote_prefill") != _TRUE or any(found.get(name, _NULL) == _NULL for name in NEEDED):
            return None
        host = urlsplit(source.url).hostname or ""
        if _is_here(found["remote_host"]) and not host.startswith(_HERE):
            # VLLM_NIXL_SIDE_CHANNEL_HOST was not set: its default is localhost
            found["remote_host"] = Raw(msgspec.json.encode(host))
        return Raw(msgspec.json.encode(found))


def _is_here(host: Raw) -> bool:
    return bytes(host).strip(b'"').decode("utf-8", "replace").startswith(_HERE)
