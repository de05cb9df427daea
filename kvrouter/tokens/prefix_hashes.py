"""Sequence hashes of prompts that begin like an earlier one: only the new blocks are hashed.

    text     | part 0 | part 1 | …  | part n | rest        cut by `PrefixTokens`, which names each beginning
    tokens   | block 0   | block 1   | … | block m | rest  cut by the pool's block size
    stored   under the name of parts 0 to n: the hashes of the blocks that end within them

Two positions of each prompt are stored: the end of the beginning that it shares with earlier prompts, for
prompts that branch off there (one system prompt, other questions), and the end of its own last part, for
prompts that continue it (the next turn of a chat). Not thread-safe: only the event loop uses it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvrouter.core.native import versions
from kvrouter.core.wire.hashes import seeded_prompt_hashes
from kvrouter.tokens.prefix_tokens import Beginnings

# Bytes of an entry besides its hashes (key, tuples, array, dictionary); measured: 260 to 360.
ENTRY_BYTES = 360
# A beginning is stored only if it is at least this much longer than a stored one: hashing fewer tokens costs
# less than another entry.
NEAR_TOKENS = 256
# Look-ups per prompt, the longest known beginning first: each step back is one part, about 60 tokens.
MOST_STEPS = 8
# Below this, hashing is faster than the look-up. Measured for each version of the hashes.
LEAST_TOKENS = {versions.PYTHON: 512, versions.NATIVE: 8192}

_NONE = array("Q")
# Block size, seed and number of leading special tokens: with the text itself, they determine the hashes.
_Naming: TypeAlias = tuple[int, int, int]


@dataclass(slots=True)
class HashCounters:
    """Blocks of prompts that were looked up or hashed; `evicted` counts stored beginnings."""

    known_blocks: int = 0
    hashed_blocks: int = 0
    evicted: int = 0


class PrefixHashes:
    """An LRU of chains of hashes, bounded in number and bytes. Invariant: neither limit is exceeded."""

    def __init__(
        self,
        *,
        most: int = 60_000,
        max_bytes: int = 1 << 26,
        least_tokens: int | None = None,
        near_tokens: int = NEAR_TOKENS,
    ) -> None:
        """`least_tokens`: shorter beginnings are neither looked up nor stored."""
        self.counters = HashCounters()
        self._most = most
        self._max_bytes = max_bytes
        self._least_tokens = LEAST_TOKENS[versions.in_use()] if least_tokens is None else least_tokens
        self._near_tokens = near_tokens
        self._chains: OrderedDict[tuple[bytes, _Naming], array[int]] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._chains)

    @property
    def held_bytes(self) -> int:
        """Approximate memory."""
        return self._bytes

    def of(self, ids: Sequence[int], beginnings: Beginnings, block_size: int, seed: int) -> array[int]:
        """The sequence hashes of a prompt's full blocks, as `seeded_prompt_hashes` computes them."""
        if beginnings.deepest_tokens < self._least_tokens:
            chain = seeded_prompt_hashes(ids, block_size, seed)
            self.counters.hashed_blocks += len(chain)
            return chain
        naming = (block_size, seed, beginnings.before)
        held = self._held(beginnings, naming)
        chain = seeded_prompt_hashes(ids, block_size, seed, held)
        self.counters.known_blocks += len(held)
        self.counters.hashed_blocks += len(chain) - len(held)
        self._remember(beginnings, naming, chain, len(held))
        return chain

    def _held(self, beginnings: Beginnings, naming: _Naming) -> array[int]:
        """The hashes of the longest stored beginning."""
        if beginnings.known_tokens < self._least_tokens:
            return _NONE
        for name in beginnings.known[: -1 - MOST_STEPS : -1]:
            held = self._chains.get((name, naming))
            if held is not None:
                self._chains.move_to_end((name, naming))
                return held
        return _NONE

    def _remember(self, beginnings: Beginnings, naming: _Naming, chain: array[int], held: int) -> None:
        """Store the end of the known part and that of the last part, if far enough from a stored one."""
        _, known, known_tokens, deepest, deepest_tokens = beginnings
        block_size, _, _ = naming
        enough = self._near_tokens // block_size + 1
        known_blocks, deepest_blocks = known_tokens // block_size, deepest_tokens // block_size
        if known and known_tokens >= self._least_tokens and known_blocks >= held + enough:
            self._add((known[-1], naming), chain[:known_blocks])
            held = known_blocks
        if deepest_blocks >= held + enough:
            self._add((deepest, naming), chain[:deepest_blocks])

    def _add(self, key: tuple[bytes, _Naming], chain: array[int]) -> None:
        chains = self._chains
        if key in chains:  # the store of token ids has evicted this part, but its hashes are still here
            chains.move_to_end(key)
            return
        chains[key] = chain
        self._bytes += _size(chain)
        while self._bytes > self._max_bytes or len(chains) > self._most:
            self._bytes -= _size(chains.popitem(last=False)[1])
            self.counters.evicted += 1

    def check(self) -> None:
        """Raise if the invariant is broken. Tests call this."""
        assert self._bytes == sum(map(_size, self._chains.values()))
        assert len(self._chains) <= self._most
        assert self._bytes <= self._max_bytes


def _size(chain: array[int]) -> int:
    return ENTRY_BYTES + 8 * len(chain)
