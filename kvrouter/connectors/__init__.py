"""How engines hand the KV blocks of a prompt over: what each half of a request gets in its body.

    client's body ──prefill_body──> prefill worker ──answer──> handed_over ──decode_body──> decode worker
    client's body ──bodies_at_once──> prefill worker and decode worker, which find each other

A connector is one file with what differs: the parameters that the prefill worker is asked with, and what of
its answer the decode worker needs. CONTRIBUTING.md has the recipe for another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import msgspec
from msgspec import Raw

from kvrouter.bodies import lax
from kvrouter.bodies.edits import with_field
from kvrouter.connectors.example import Example
from kvrouter.connectors.mooncake import Mooncake
from kvrouter.connectors.nixl import Nixl
from kvrouter.connectors.sglang import SglangPair
from kvrouter.connectors.source import Source

PARAMETERS = "kv_transfer_params"
_ONE, _NO, _YES, _NULL = Raw(b"1"), Raw(b"false"), Raw(b"true"), Raw(b"null")
# They ask for more than the one token that ends a prefill, or for a stream.
_LEFT_OUT = ("n", "best_of", "logprobs", "top_logprobs")


class Connector(Protocol):
    """`has_parameters`: without them the decode worker finds nothing."""

    has_parameters: bool
    is_at_once: bool
    """Whether both workers are asked at the same time, with the same fields."""
    lease_s: float
    """The decode worker gets no older parameters."""
    waits_for_the_lost: bool
    """Whether a decode engine waits for minutes for the blocks of a prefill engine that has died."""

    def asking(self, source: Source) -> Raw | None:
        """The parameters in the prefill worker's body; None: it gets none. At once: the fields of both."""
        ...

    def handed_over(self, answer: bytes, source: Source) -> Raw | None:
        """The parameters for the decode worker; None: nothing was handed over."""
        ...


SERVED: Mapping[str, Connector] = MappingProxyType(
    {"nixl": Nixl(), "mooncake": Mooncake(), "example": Example(), "sglang": SglangPair()}
)
"""By the name on a worker's card (`CONNECTORS` in core/wire/heartbeats.py)."""


def prefill_body(body: bytes, asking: Raw | None) -> bytes:
    """The client's body for the prefill worker: one token, in one piece. Raises BadRequestError.

    What changes tokens or hashes stays: messages, tools, guided decoding, `cache_salt`.
    """
    fields = lax.fields_of(body)
    if fields.get("stream", _NO) == _YES:  # else the engine rejects them: before it computes anything
        fields.pop("stream_options", None)
    for name in _LEFT_OUT:
        fields.pop(name, None)
    fields |= {"stream": _NO, "min_tokens": _ONE}
    for name in ("max_tokens", "max_completion_tokens"):
        if name == "max_tokens" or name in fields:
            fields[name] = _one(fields.get(name, _NULL))
    if asking is not None:
        fields[PARAMETERS] = asking
    return lax.with_nan(msgspec.json.encode(fields), body)


def _one(limit: Raw) -> Raw:
    """One token, where the engine would take the limit (also 9.0 and "9"); else it stays, and is rejected."""
    if limit == _NULL:
        return _ONE
    try:
        return _ONE if float(bytes(limit).strip(b'" ')) >= 1 else limit
    except ValueError:
        return limit


def bodies_at_once(body: bytes, asking: Raw) -> tuple[bytes, bytes]:
    """The client's body for the prefill and for the decode worker. Raises BadRequestError.

    That of the prefill worker is not streamed, so that its status is known, and its usage in one piece.
    """
    decode = with_field(body, bytes(asking)[1:-1])
    fields = lax.fields_of(decode)
    if fields.get("stream", _NO) != _YES:
        return decode, decode
    fields.pop("stream_options", None)
    return lax.with_nan(msgspec.json.encode(fields | {"stream": _NO}), body), decode


def decode_body(body: bytes, handed: Raw | None) -> bytes:
    """The client's body for the decode worker."""
    if handed is None:
        return body
    return with_field(body, b'"%b":%b' % (PARAMETERS.encode(), bytes(handed)))
