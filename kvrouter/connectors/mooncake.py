"""vLLM's MooncakeConnector: the decode engine asks the prefill engine for the blocks of a transfer.

    P: kv_transfer_params {"do_remote_decode": true, "transfer_id": …}   its answer has nothing for D
    D: {"do_remote_prefill": true, "transfer_id": the same, "remote_engine_id", "remote_bootstrap_addr"}

P keeps the blocks only if its answer ended at the length asked for: one that ended by a stop word drops them,
and D would wait for ever. It keeps them for 480 s (VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT).
Source: vLLM 0.33, distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from kvrouter.connectors.source import Source


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _PrefillUsage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _PrefillChoice(msgspec.Struct):
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    choices: list[_PrefillChoice] = []
    usage: _PrefillUsage | None = None

    @property
    def is_kept(self) -> bool:
        return [choice.finish_reason for choice in self.choices] == ["length"]

    @property
    def cached_tokens(self) -> int | None:
        details = self.usage.prompt_tokens_details if self.usage is not None else None
        return details.cached_tokens if details is not None else None


class Mooncake:
    has_parameters = True
    is_at_once = False
    # Of 480 s, without a minute for the way there and the transfer.
    lease_s = 420.0
    # 540 s if the engine ends while it is asked (vLLM 0.33).
    waits_for_the_lost = True

    def asking(self, source: Source) -> Raw | None:
        """None: its engine is not known, so no decode engine could read the blocks."""
        if not source.engine_id:
            return None
        return _raw(do_remote_decode=True, do_remote_prefill=False, transfer_id=source.transfer_id)

    def handed_over(self, answer: bytes, source: Source) -> Raw | None:
        """None: nothing is kept, so D computes the prompt."""
        try:
            found = msgspec.json.decode(answer, type=_Answer)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        if not found.is_kept or not source.engine_id:
            return None
        # vLLM answers with it in place of its own, which would be the whole prompt
        cached = found.cached_tokens
        return _raw(
            do_remote_prefill=True,
            do_remote_decode=False,
            transfer_id=source.transfer_id,
            remote_engine_id=source.engine_id,
            remote_bootstrap_addr=f"http://{source.address}",
            **({} if cached is None else {"remote_prefill_cached_tokens": cached}),
        )


def _raw(**parameters: Any) -> Raw:
    return Raw(msgspec.json.encode(parameters))
