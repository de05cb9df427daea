"""SGLang: both halves are sent at once, and meet in a room of the prefill engine's bootstrap server.

    P and D: {…, "bootstrap_host", "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank": that of P}

D takes the first token from P, so both get what the client wants of tokens: limits, sampling, log
probabilities. A room serves one attempt: of two requests in one, 0.5.23 left one hanging and gave the other
the first one's token. Only the same request comes into it again, if an idle connection was closed as it was
sent. Where one half is missing the other waits for 300 s (SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT and
…_WAITING_TIMEOUT).
Source: SGLang 0.5.23, srt/entrypoints/openai/protocol.py and srt/disaggregation/{common/conn,decode}.py.
"""

from __future__ import annotations

from urllib.parse import urlsplit

import msgspec
from msgspec import Raw

from kvrouter.connectors.source import Source


class SglangPair:
    has_parameters = True
    is_at_once = True
    lease_s = float("inf")
    # Its prefill engine's connection breaks, which ends the other half, too.
    waits_for_the_lost = False

    def asking(self, source: Source) -> Raw | None:
        """The fields of both bodies."""
        at = urlsplit(f"//{source.address}")
        fields = {
            "bootstrap_host": at.hostname,
            "bootstrap_port": at.port or None,
            "bootstrap_room": source.room,
            "disagg_prefill_dp_rank": source.rank,
        }
        return Raw(msgspec.json.encode(fields))

    def handed_over(self, answer: bytes, source: Source) -> Raw | None:
        """Nothing: the engines have done that."""
        return None
