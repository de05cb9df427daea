"""Shared storage (vLLM's ExampleConnector, stores of LMCache and Mooncake): no parameters at all.

The prefill engine writes the blocks of a prompt where the decode engine looks for them.
"""

from __future__ import annotations

from msgspec import Raw


class Example:
    asking: Raw | None = None
    lease_s = float("inf")

    def handed_over(self, answer: bytes, prefill_url: str) -> Raw | None:
        return None
