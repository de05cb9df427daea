"""The hash by which a prompt is known that ended workers: of all that an engine computes with.

    route, JSON fields by name, without those in _NOT_COMPUTED ──BLAKE2b──> 16 bytes

The body is hashed, not token ids: so it needs no tokenizer, and two prompts are the same only if they are
equal to their ends. The options count too, since they can end an engine as well as the text can (a grammar,
a bias, a seed): a harmless request with a common text must not be refused because another one added such an
option. What no engine computes with does not count, since clients change it when they ask again.

Bodies that are no JSON object (forms) count byte for byte; a client that makes a new boundary for each try
is not recognized.
"""

from __future__ import annotations

import asyncio
from hashlib import blake2b

import msgspec
from msgspec import Raw

from kvrouter.core.wire.ids import PoolId, PromptHash
from kvrouter.core.wire.values import PROMPT_HASH_BYTES
from kvrouter.frontend.bodies.large import LARGE_BYTES

# How the answer is sent, who asks, and where the request should go. A salt changes only what is cached.
_NOT_COMPUTED = frozenset({
    "stream", "stream_options", "include_usage", "user", "metadata", "safety_identifier", "request_id", "rid",
    "store", "background", "service_tier", "priority", "cache_salt", "prompt_cache_key",
    "prompt_cache_retention", "kvrouter", "nvext", "session_id",
})  # fmt: skip

_fields = msgspec.json.Decoder(dict[str, Raw]).decode


async def prompt_hash(pool_id: PoolId, route: str, body: bytes) -> PromptHash | None:
    """The hash of a request's prompt; None if the request has no body. A large one is hashed in a thread."""
    if not body:
        return None
    if len(body) > LARGE_BYTES:
        return await asyncio.to_thread(hash_of, pool_id, route, body)
    return hash_of(pool_id, route, body)


def hash_of(pool_id: PoolId, route: str, body: bytes) -> PromptHash:
    """Like `prompt_hash`, in this thread."""
    hashed = blake2b(digest_size=PROMPT_HASH_BYTES)
    for part in (pool_id.encode(), route.encode("utf-8", "surrogateescape"), *_parts(body)):
        hashed.update(len(part).to_bytes(8, "little"))  # else the end of one part could begin the next
        hashed.update(part)
    return PromptHash(hashed.digest())


def _parts(body: bytes) -> list[bytes]:
    try:
        fields = _fields(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return [body]
    parts: list[bytes] = []
    for name in sorted(fields.keys() - _NOT_COMPUTED):
        parts += (name.encode("utf-8", "surrogatepass"), bytes(fields[name]))
    return parts
