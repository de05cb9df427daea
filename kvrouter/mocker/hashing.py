"""Engine hashes: opaque 64-bit names of full blocks, chained from the parent as in vLLM.

They differ from the router's own hashes on purpose, so that tests fail if the agent relies on more than their
equality. The salt enters block 0 only and reaches the others through the chain; the LoRA name enters every
block.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import xxhash

# Token ids as unsigned 32-bit integers, in machine order.
TokenIds: TypeAlias = "array[int]"

# The parent hash of block 0. A constant, like vLLM's `NONE_HASH`: equal prompts have equal hashes on every
# engine.
NO_PARENT = xxhash.xxh3_64_intdigest(b"kvrouter-mocker-none-hash")


def token_ids(ids: Iterable[int]) -> TokenIds:
    """Pack token ids. Raises OverflowError or TypeError for values other than unsigned 32-bit integers."""
    return array("I", ids)


def root_hash(salt: str | None) -> int:
    """The parent hash of block 0 for a cache salt (an empty one counts as absent)."""
    if not salt:
        return NO_PARENT
    return xxhash.xxh3_64_intdigest(salt.encode(), seed=NO_PARENT)


def lora_key(lora_name: str | None) -> int:
    """The part of every block's hash that a LoRA name adds; 0 without one."""
    return xxhash.xxh3_64_intdigest(lora_name.encode()) if lora_name else 0


def chain_hashes(tokens: TokenIds, block_size: int, *, parent: int, key: int) -> Iterator[int]:
    """The hashes of the full blocks in `tokens`, the first chained from `parent`."""
    packed = tokens.tobytes()
    width = block_size * tokens.itemsize
    for end in range(width, len(packed) + 1, width):
        parent = xxhash.xxh3_64_intdigest(packed[end - width : end], seed=parent ^ key)
        yield parent
