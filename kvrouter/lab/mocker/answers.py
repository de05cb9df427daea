"""The answers of the simulated model: each token is a pure function of all tokens before it.

So every mocker gives the same greedy answer to the same prompt, independent of its block size. An answer that
was cut off continues identically if prompt and partial answer are sent to another mocker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from kvrouter.lab.mocker.hashing import TokenIds, lora_key


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens an answer is made of."""

    # Ids to draw from: a vocabulary of Llama 2's size without its three special tokens.
    words: Sequence[int] = range(3, 32_000)
    # The end-of-sequence token.
    end: int = 2
    # An answer without `max_tokens` ends with a chance of 1 to this number at each token.
    mean_answer_tokens: int = 200


class Answer:
    """The tokens that follow a prompt, one at a time."""

    __slots__ = ("_may_end", "_seen", "_vocabulary")

    def __init__(
        self, prompt: TokenIds, vocabulary: Vocabulary, *, lora_name: str | None, may_end: bool
    ) -> None:
        self._seen = xxhash.xxh3_64(prompt.tobytes(), seed=lora_key(lora_name))
        self._vocabulary = vocabulary
        self._may_end = may_end

    def next_token(self) -> int:
        """The next token, drawn from the hash of all tokens before it."""
        token = self._draw(self._seen.intdigest())
        self._seen.update(token.to_bytes(4, "little"))
        return token

    def _draw(self, chance: int) -> int:
        vocabulary = self._vocabulary
        if self._may_end and (chance >> 32) % vocabulary.mean_answer_tokens == 0:
            return vocabulary.end
        return vocabulary.words[(chance & 0xFFFF_FFFF) % len(vocabulary.words)]
