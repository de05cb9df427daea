"""Engine hashes: opaque 64-bit names of full blocks, chained from the parent as in vLLM.

They differ from the router's own hashes on purpose, so that tests fail if the agent relies on more than their
equality. The salt enters block 0 only and reaches the others through the chain; the LoRA name enters every
block.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import xxhash

from kvrouter.core.wire.hashes import MediaSpan

# Token ids as unsigned 32-bit integers, in machine order.
TokenIds: TypeAlias = "array[int]"


class EnginePrompt(NamedTuple):
    """One prompt, and the images in it."""

    tokens: TokenIds
    media: Sequence[MediaSpan] = ()


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


def images_by_block(media: Sequence[MediaSpan], block_size: int) -> list[list[tuple[int, int]]]:
    """For each block up to the last image: the id of each image in it, and where it begins in the block."""
    blocks: list[list[tuple[int, int]]] = []
    for start, end, item in media:
        last = (end - 1) // block_size
        blocks.extend([] for _ in range(last + 1 - len(blocks)))
        for block in range(start // block_size, last + 1):
            blocks[block].append((item, start - block * block_size))
    return blocks


def images_key(images: Sequence[tuple[int, int]]) -> int:
    """The part of a block's hash that its images add; 0 without one."""
    return xxhash.xxh3_64_intdigest(repr(images).encode()) if images else 0


def lookahead_key(tokens: TokenIds) -> int:
    """The part of a block's hash that the tokens behind it add."""
    return xxhash.xxh3_64_intdigest(tokens.tobytes())


def chain_hashes(
    tokens: TokenIds, block_size: int, *, parent: int, key: int, keys: Sequence[int] = ()
) -> Iterator[int]:
    """The hashes of the full blocks in `tokens`, the first chained from `parent`.

    `key`: of every block; `keys`: of each of the first blocks.
    """
    packed = tokens.tobytes()
    width = block_size * tokens.itemsize
    for index, end in enumerate(range(width, len(packed) + 1, width)):
        seed = parent ^ key ^ (keys[index] if index < len(keys) else 0)
        parent = xxhash.xxh3_64_intdigest(packed[end - width : end], seed=seed)
        yield parent
