"""How engines hand the KV blocks of a prompt over: what each half of a request gets in its body.

    client's body ──prefill_body──> prefill worker ──answer──> handed_over ──decode_body──> decode worker

A connector is one file with what differs: the parameters that the prefill worker is asked with, and what of
its answer the decode worker needs. CONTRIBUTING.md has the recipe for another one.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
from msgspec import Raw

from kvrouter.bodies import lax
from kvrouter.bodies.edits import with_field

PARAMETERS = "kv_transfer_params"
_ONE, _NO = Raw(b"1"), Raw(b"false")
# They ask for more than the one token that ends a prefill, or for a stream.
_LEFT_OUT = ("stream_options", "n", "best_of", "logprobs", "top_logprobs")


class Connector(Protocol):
    """`asking`: the parameters in the prefill worker's body; None: it needs none."""

    asking: Raw | None

    def handed_over(self, answer: bytes, prefill_url: str) -> Raw | None:
        """The parameters for the decode worker; None: nothing was handed over."""
        ...


def prefill_body(body: bytes, asking: Raw | None) -> bytes:
    """The client's body for the prefill worker: one token, in one piece. Raises BadRequestError.

    What changes tokens or hashes stays: messages, tools, guided decoding, `cache_salt`.
    """
    fields = lax.fields_of(body)
    for name in _LEFT_OUT:
        fields.pop(name, None)
    fields |= {"stream": _NO, "max_tokens": _ONE, "min_tokens": _ONE}
    if "max_completion_tokens" in fields:
        fields["max_completion_tokens"] = _ONE
    if asking is not None:
        fields[PARAMETERS] = asking
    return lax.with_nan(msgspec.json.encode(fields), body)


def decode_body(body: bytes, handed: Raw | None) -> bytes:
    """The client's body for the decode worker."""
    if handed is None:
        return body
    return with_field(body, b'"%b":%b' % (PARAMETERS.encode(), bytes(handed)))
