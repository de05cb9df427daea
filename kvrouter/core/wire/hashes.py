"""Block hashes and sequence hashes: the identities that travel between processes.

See docs/concepts/design.md#identities.

    tokens   | block 0        | block 1        | block 2        | rest
    block    b[0]             b[1]             b[2]               (a partial block has none)
    sequence s[0] = b[0]      s[1] = H(s0,b1)  s[2] = H(s1,b2)

A sequence hash names a block and everything before it. The values are those of NVIDIA Dynamo's router
1.6.1: XXH3-64 over little-endian u32 tokens with seed 1337.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeAlias, cast

from xxhash import xxh3_64_digest, xxh3_64_intdigest

from kvrouter.core.native import versions
from kvrouter.core.wire.ids import BlockHash, SequenceHash
from kvrouter.errors import BadRequestError

SEED = 1337
_MASK64 = (1 << 64) - 1
_MAX_TOKEN = (1 << 32) - 1
_NONE = array("Q")

# Sequence hashes: array("Q"), which is the fastest; any sequence of numbers; or packed little-endian u64.
Hashes: TypeAlias = Sequence[int] | bytes

# `(start, end, id)`: the tokens [start, end) stand for the item with this id.
Multimodal = tuple[int, int, str]
# The same with the 64-bit id.
MediaSpan = tuple[int, int, int]


def block_seed(lora_name: str | None = None, salt: str | None = None) -> int:
    """The seed of all block hashes of a sequence: 1337 plus the hashes of its LoRA name and cache salt.

    An empty string counts as absent.
    """
    seed = SEED
    if lora_name:
        seed += xxh3_64_intdigest(lora_name.encode(), 0)
    if salt:
        seed += xxh3_64_intdigest(salt.encode(), 1)
    return seed & _MASK64


def block_hashes(
    tokens: Sequence[int],
    block_size: int,
    *,
    lora_name: str | None = None,
    salt: str | None = None,
    multimodal: Iterable[Multimodal] = (),
) -> list[BlockHash]:
    """Hash each full block of `tokens`; `len(tokens) // block_size` unsigned 64-bit values.

    `multimodal` items change the blocks they touch. Raises BadRequestError for a token
    outside 0..2^32-1 and ValueError for a block size below 1.
    """
    spans = [(start, end, multimodal_id(item)) for start, end, item in multimodal]
    return _media_block_hashes(tokens, block_size, block_seed(lora_name, salt), spans)


def prompt_hashes(
    tokens: Sequence[int], block_size: int, *, lora_name: str | None = None, salt: str | None = None
) -> array[int]:
    """The sequence hashes of a prompt's full blocks: `sequence_hashes(block_hashes(…))` in one call."""
    return seeded_prompt_hashes(tokens, block_size, block_seed(lora_name, salt))


def seeded_prompt_hashes(
    tokens: Sequence[int], block_size: int, seed: int, known: array[int] = _NONE
) -> array[int]:
    """The sequence hashes of a prompt; `known`: those of its first blocks, which are not computed again.

    Raises ValueError if more are known than the prompt has blocks.
    """
    _step(block_size)
    native = versions.chosen.hashes
    if native is not None:
        try:
            return cast("array[int]", native.prompt_hashes(tokens, block_size, seed, known))
        except (OverflowError, TypeError) as error:
            raise _bad_tokens(error) from None
    if not known:
        return array("Q", _chain(_plain_block_hashes(tokens, block_size, seed), None))
    if known.typecode != "Q" or len(known) > len(tokens) // block_size:
        raise ValueError("known must be an array('Q'): the hashes of the prompt's first blocks")
    new = _plain_block_hashes(tokens[len(known) * block_size :], block_size, seed)
    return known + array("Q", _chain(new, known[-1]))


def media_prompt_hashes(
    tokens: Sequence[int], block_size: int, seed: int, spans: Iterable[MediaSpan], lookahead: int = 0
) -> array[int]:
    """The sequence hashes of a prompt with media, in the places of which `tokens` has placeholders.

    `lookahead`: engines name each block by so many tokens behind it, too (vLLM 0.33 with EAGLE or MTP). A
    block with fewer tokens behind it has no name.
    """
    return array("Q", sequence_hashes(_media_block_hashes(tokens, block_size, seed, spans, lookahead)))


def lookahead_id(tokens: Sequence[int]) -> int:
    """The 64-bit id, among those of a block, of the tokens behind it."""
    return xxh3_64_intdigest(_token_bytes(tokens), SEED)


def _media_block_hashes(
    tokens: Sequence[int], block_size: int, seed: int, spans: Iterable[MediaSpan], lookahead: int = 0
) -> list[BlockHash]:
    count = max(0, len(tokens) - lookahead) // (_step(block_size) // 4)
    extras: list[list[int]] = [[] for _ in range(count)]
    for start, end, item in spans:
        first = max(start - lookahead, 0) // block_size
        for index in range(first, min((end - 1) // block_size + 1, count)):
            extras[index].append(item)
    for index in range(count if lookahead else 0):
        end = (index + 1) * block_size
        extras[index].append(lookahead_id(tokens[end : end + lookahead]))
    return seeded_block_hashes(tokens, block_size, seed, extras)


def seeded_block_hashes(
    tokens: Sequence[int], block_size: int, seed: int, extras: Sequence[Sequence[int]]
) -> list[BlockHash]:
    """Block hashes where block i also carries the 64-bit ids `extras[i]` (any order)."""
    if not any(extras):  # nearly always
        return _plain_block_hashes(tokens, block_size, seed)[: len(extras)]
    data, step = _token_bytes(tokens), _step(block_size)
    return [
        BlockHash(xxh3_64_intdigest(data[i : i + step] + pack_hashes(sorted(ids)), seed))
        for i, ids in zip(range(0, len(data) - step + 1, step), extras, strict=False)
    ]


def _plain_block_hashes(tokens: Sequence[int], block_size: int, seed: int) -> list[BlockHash]:
    step = _step(block_size)
    native = versions.chosen.hashes
    if native is not None:
        try:
            return cast("list[BlockHash]", native.block_hashes(tokens, block_size, seed))
        except (OverflowError, TypeError) as error:
            raise _bad_tokens(error) from None
    data = memoryview(_token_bytes(tokens))
    hashes = [xxh3_64_intdigest(data[i : i + step], seed) for i in range(0, len(data) - step + 1, step)]
    return cast("list[BlockHash]", hashes)  # a NewType call for each hash would cost a third more


def sequence_hashes(hashes: Sequence[BlockHash], parent: SequenceHash | None = None) -> list[SequenceHash]:
    """Chain block hashes; `parent`: the sequence hash before the first, if any.

    The chain always uses seed 1337; LoRA and salt are in the block hashes. Raises OverflowError or TypeError
    for a value that is not an unsigned 64-bit number.
    """
    blocks = hashes_of(hashes)
    above = None if parent is None else hashes_of((parent,))[0]
    native = versions.chosen.hashes
    chain = _chain if native is None else native.sequence_hashes
    return cast("list[SequenceHash]", chain(blocks, above))


def chain_of(blocks: array[int]) -> array[int]:
    """`sequence_hashes` of an array('Q'), without a Python object for each."""
    native = versions.chosen.hashes
    return array("Q", _chain(blocks, None)) if native is None else cast("array[int]", native.chain_of(blocks))


def _chain(hashes: Sequence[int], parent: int | None) -> list[int]:
    chain: list[int] = []
    append, digest = chain.append, xxh3_64_intdigest
    previous = parent
    for block in hashes:
        # one little-endian number of 16 bytes: the previous hash is the low half, the block's the high half
        previous = (
            block if previous is None else digest((previous | block << 64).to_bytes(16, "little"), SEED)
        )
        append(previous)
    return chain


def known_blocks(chains: Sequence[Sequence[int]]) -> list[int]:
    """How many blocks of each chain, from the first on, the chains before it have, too.

    A hash names all blocks before its own. So two chains are the same up to any hash that they share, and
    differ behind the first one that they do not: bisection finds it, and few blocks are looked at.
    """
    # The block at which a path begins that no earlier chain took → the last chain that took it.
    takers: dict[int, Sequence[int]] = {}
    found = []
    for chain in chains:
        depth = 0
        while depth < len(chain):
            other = takers.get(chain[depth])
            takers[chain[depth]] = chain
            if other is None:
                break
            depth = _shared_blocks(chain, other, depth + 1)
            if depth < len(other):
                takers[other[depth]] = other
        found.append(depth)
    return found


def union_of(chains: Sequence[Sequence[int]]) -> Sequence[int]:
    """The blocks of all chains, each once, parents before children."""
    if len(chains) == 1:
        return chains[0]
    union = array("Q")
    for chain, known in zip(chains, known_blocks(chains), strict=True):
        union.extend(chain[known:])
    return union


def sampled_hashes(hashes: Sequence[int], mask: int) -> list[int]:
    """The hashes that are 0 in all bits of `mask`."""
    native = versions.chosen.hashes
    if native is not None:
        return cast("list[int]", native.sampled_hashes(hashes, mask))
    return [hash_ for hash_ in hashes if not hash_ & mask]


def _shared_blocks(one: Sequence[int], other: Sequence[int], least: int) -> int:
    """How many blocks two chains share, if they share `least`."""
    most = min(len(one), len(other))
    return bisect_left(range(most), True, least, key=lambda place: one[place] != other[place])


def multimodal_id(identifier: str) -> int:
    """An item's 64-bit id: the first 16 hex digits of a hex digest, else XXH3-64 of its UTF-8."""
    if len(identifier) >= 16 and all(digit in "0123456789abcdefABCDEF" for digit in identifier):
        return int(identifier[:16], 16)
    return xxh3_64_intdigest(identifier.encode(), 0)


def pack_hashes(hashes: Iterable[int]) -> bytes:
    """Hashes as packed little-endian u64: their form on the wire. Always a copy."""
    packed = array("Q", hashes)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def hashes_of(hashes: Hashes) -> Sequence[int]:
    """Hashes as numbers. Packed ones become an array, without a Python object for each; a list stays.

    Raises OverflowError, TypeError or ValueError for anything else than unsigned 64-bit numbers.
    """
    if type(hashes) is array and hashes.typecode == "Q":
        return hashes
    if type(hashes) is list:
        checked = array("Q", hashes)  # raises for a value out of range
        return hashes if hashes and type(hashes[0]) is int else checked
    if not isinstance(hashes, bytes | bytearray | memoryview):
        return array("Q", hashes)
    return hash_array(bytes(hashes))


def _swapped_array(packed: bytes) -> array[int]:
    unpacked = array("Q", packed)
    unpacked.byteswap()
    return unpacked


# Packed hashes as numbers. Every booking of a peer needs it: on a little-endian machine it is one call of C
# (0.12 instead of 0.32 µs for 64 hashes). Raises ValueError if the length is not a multiple of 8.
hash_array: Callable[[bytes], array[int]] = (
    partial(array, "Q") if sys.byteorder == "little" else _swapped_array
)


def pool_token(model: str) -> str:
    """The pool's name in NATS subjects: a readable slug, and 8 hex digits that keep it unique."""
    slug = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in model)[:40]
    return f"{slug}-{xxh3_64_digest(model.encode())[:4].hex()}"


def _token_bytes(tokens: Sequence[int]) -> bytes:
    try:
        packed = array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise _bad_tokens(error) from None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _bad_tokens(error: Exception) -> BadRequestError:
    return BadRequestError(f"token ids must be integers from 0 to {_MAX_TOKEN}: {error}", param="prompt")


def _step(block_size: int) -> int:
    if block_size < 1:
        raise ValueError(f"block size must be at least 1 token, not {block_size}")
    return block_size * 4
