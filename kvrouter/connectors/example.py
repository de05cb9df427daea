"""Shared storage (vLLM's ExampleConnector, stores of LMCache and Mooncake): no parameters at all.

The prefill engine writes the blocks of a prompt where the decode engine looks for them.
"""

from __future__ import annotations

from msgspec import Raw

from kvrouter.connectors.source import Source


class Example:
    has_parameters = False
    is_at_once = False
    lease_s = float("inf")
    waits_for_the_lost = False

    def asking(self, source: Source) -> Raw | None:
        return None

    def handed_over(self, answer: bytes, source: Source) -> Raw | None:
        return None
