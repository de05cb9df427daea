"""Sequence hashes of prompts whose beginning was seen before: only what is new is hashed.

    text     | part 0 | part 1 | …  | part n | rest        cut by `PrefixTokens`, which names all before a cut
    tokens   | block 0   | block 1   | … | block m | rest  cut by the pool's block size
    held     under the name of parts 0 to n: the hashes of the blocks that end there or before

Two places of a prompt are remembered: where what it shares with earlier ones ends, for the next that
branches off there (one system prompt, other questions), and where its own last part ends, for the next
that goes on from there (a conversation). Not safe in several threads: it is the event loop's.
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

# What an entry takes beside its hashes: key, tuples, array, dictionary (measured: 260 to 360).
ENTRY_BYTES = 360
# A beginning that is less than this longer than one held is not held, too: to hash the rest costs less.
NEAR_TOKENS = 256
# How many known parts are asked for, the deepest first: one part has some 60 tokens.
MOST_STEPS = 8
# Fewer are hashed faster than looked up (`scripts/bench hashes`).
LEAST_TOKENS = {versions.PYTHON: 512, versions.NATIVE: 8192}

_NONE = array("Q")
# Block size, seed and number of leading special tokens: what the hashes of a text depend on beside it.
_Naming: TypeAlias = tuple[int, int, int]


@dataclass(slots=True)
class HashCounters:
    """What happened, in blocks of prompts whose beginnings have names, and in beginnings (`evicted`)."""

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
        """`least_tokens`: of shorter beginnings nothing is looked up or kept."""
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
        """Memory, about."""
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
        """The hashes of the deepest beginning that has some here."""
        if beginnings.known_tokens < self._least_tokens:
            return _NONE
        for name in beginnings.known[: -1 - MOST_STEPS : -1]:
            held = self._chains.get((name, naming))
            if held is not None:
                self._chains.move_to_end((name, naming))
                return held
        return _NONE

    def _remember(self, beginnings: Beginnings, naming: _Naming, chain: array[int], held: int) -> None:
        """Where the known part ends and where the last one does, if that is far enough from what is held."""
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
        if key in chains:  # though the part's ids had gone from the store
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
