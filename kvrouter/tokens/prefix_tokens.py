"""The prefix-token cache: of a text that begins like an earlier one, only the rest is tokenized.

    text   | 256 characters and a bit | 256 and a bit | …            cut where `Splits` allows it
    key      H(part 0)                  H(parts 0, 1)   …            one running hash, so a text is read once
    value    ids of part 0              ids of part 1

The ids are exactly those of the whole text. Texts are cut only where `Splits` proves that this does not
change the ids, and a trial at start-up compares cut texts with whole ones; if either fails, the cache is off.

Invariants: the number and bytes of stored parts never exceed their limits. A key names all the text before
it, and of two parts of one text the later one is always evicted first, so each stored part can be reached.
"""

from __future__ import annotations

import random
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import NamedTuple

import tokenizers
import xxhash

from kvrouter.core.wire.hashes import MediaSpan
from kvrouter.settings.declare import MIB, Settings, mib, read_mib, setting
from kvrouter.tokens.splits import Splits

# Memory of an entry besides its ids (key, array, dictionary), measured: 280 to 310 bytes.
ENTRY_BYTES = 300
# Random texts tried at start.
TRIALS = 150
_MOST_PIECES = 39
# Learnt tokens that texts are made of: more find no other faults.
_LEARNT = 300
# Runs of spaces, combining marks, letters without case, contractions.
_ODD_PIECES = (
    "\n\n",
    "  ",
    " \n ",
    "\t",
    "é",
    "e\u0301",
    "Ⅳ",
    "中文",
    "\u3000",
    "'ll",
    "123456",
    "🙂",
    "_<",
    ".\n",
)


@dataclass(slots=True)
class StoreCounters:
    """Characters of prompts, a unit that does not depend on where texts are cut."""

    known_characters: int = 0
    tokenized_characters: int = 0
    skipped_characters: int = 0
    evicted_parts: int = 0


class PrefixStore:
    """An LRU of parts, bounded in number and bytes. Thread-safe; several tokenizers may share one."""

    def __init__(self, *, max_parts: int = 500_000, max_bytes: int = 1 << 29) -> None:
        self.counters = StoreCounters()
        self._max_parts = max_parts
        self._max_bytes = max_bytes
        self._parts: OrderedDict[bytes, array[int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def held_bytes(self) -> int:
        """Approximate memory."""
        return self._bytes

    def find(self, key: bytes) -> array[int] | None:
        """The ids of the last part of the text with this hash."""
        # without the lock: one look-up in a dictionary is atomic under the GIL
        return self._parts.get(key)

    def use(self, known: Sequence[bytes], new: Sequence[tuple[bytes, array[int]]]) -> None:
        """Record the parts of one text, in its order: the known ones, then the new ones with their ids."""
        # Reversed: the last part becomes the least recently used, so the LRU evicts it before the parts
        # on which its key depends.
        parts = self._parts
        with self._lock:
            for key, ids in reversed(new):
                self._bytes += _size(ids) if key not in parts else 0
                parts[key] = ids
                parts.move_to_end(key)
            for key in reversed(known):
                if key in parts:
                    parts.move_to_end(key)
            while len(parts) > self._max_parts or self._bytes > self._max_bytes:
                self._bytes -= _size(parts.popitem(last=False)[1])
                self.counters.evicted_parts += 1

    def count(self, *, known: int = 0, tokenized: int = 0, skipped: int = 0) -> None:
        """Add characters to the counters."""
        with self._lock:
            self.counters.known_characters += known
            self.counters.tokenized_characters += tokenized
            self.counters.skipped_characters += skipped

    def check(self) -> None:
        """Raise if the invariants are broken. Tests call this."""
        assert self._bytes == sum(map(_size, self._parts.values()))
        assert len(self._parts) <= self._max_parts
        assert self._bytes <= self._max_bytes


class Beginnings(NamedTuple):
    """Names of a prompt's beginnings: prompts with an equal name and `before` begin with the same ids."""

    # Number of leading special tokens: a name is made from text, which does not contain them.
    before: int
    # One name for each known part, from the start of the text.
    known: Sequence[bytes]
    known_tokens: int
    # The name of all parts, new ones included. The rest after the last part has no name.
    deepest: bytes
    deepest_tokens: int


class Encoded(NamedTuple):
    """The ids of one prompt and its length in tokens, which is larger if its end was not tokenized."""

    ids: Sequence[int]
    isl: int
    # None: the text has no parts, or the ids are not those of a whole text (token ids, truncated prompts).
    beginnings: Beginnings | None = None
    # The images in `ids`, and how much is known of a prompt with media (media.py); empty without media.
    media: Sequence[MediaSpan] = ()
    media_outcome: str = ""


@dataclass(frozen=True, slots=True)
class CacheSettings(Settings):
    """The operator's settings of the cache."""

    heading = "Tokens"

    max_parts: int = setting(
        500_000,
        "prefix cache of the tokenizer: most pieces of text whose tokens are kept; 0 switches it off",
        name="prefix-store-blocks",
        least=0,
    )
    part_characters: int = 256
    max_bytes: int = setting(
        512 * MIB,
        "memory of the prefix cache, in MiB",
        name="prefix-store-mib",
        old=("--prefix-store-mb",),
        metavar="MIB",
        read=read_mib,
        text=mib,
    )
    enough: float | None = setting(
        None,
        "if this share of a prompt's text is in the prefix cache, do not tokenize the rest (Heimdall: 0.8)",
        name="min-prefix-overlap-ratio",
        metavar="SHARE",
        above=0,
        most=1,
    )


class PrefixTokens:
    """Tokenizes texts with the help of a store.

    `model` separates the entries of tokenizers that share a store.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        splits: Splits,
        store: PrefixStore,
        *,
        model: str,
        part_characters: int = 256,
    ) -> None:
        if splits.pattern is None:
            raise ValueError(f"texts of {model} cannot be cut: {splits.reason}")
        self._tokenizer = tokenizer
        self._splits = splits
        self._store = store
        self._search = splits.pattern.search
        self._part_characters = part_characters
        self._root = xxhash.xxh3_128(f"{model}\0{part_characters}\0".encode())

    def encode(self, text: str, *, add_special_tokens: bool, enough: float | None = None) -> Encoded:
        """The ids of `text`. Raises UnicodeEncodeError if it has no UTF-8 form."""
        ids = array("I", self._splits.before if add_special_tokens else ())
        before = len(ids)
        known, at, new = self._known(text, ids)
        known_tokens = len(ids)
        if enough is not None and 0 < at < len(text) and at >= enough * len(text):
            self._store.use(known, [])
            self._store.count(known=at, skipped=len(text) - at)
            beginnings = Beginnings(before, known, known_tokens, known[-1], known_tokens)
            return Encoded(ids, round(known_tokens * len(text) / at), beginnings)
        parts = self._tokenized(text, at, [end for _, end in new])
        self._store.use(known, [(key, part) for (key, _), part in zip(new, parts, strict=False)])
        self._store.count(known=at, tokenized=len(text) - at)
        for part in parts:
            ids += part
        deepest_tokens = len(ids) - len(parts[-1]) if len(parts) > len(new) else len(ids)
        ids.extend(self._splits.after if add_special_tokens else ())
        if not known and not new:
            return Encoded(ids, len(ids))
        deepest = new[-1][0] if new else known[-1]
        return Encoded(ids, len(ids), Beginnings(before, known, known_tokens, deepest, deepest_tokens))

    def _known(self, text: str, ids: array[int]) -> tuple[list[bytes], int, list[tuple[bytes, int]]]:
        """Extend `ids` by those of the known parts.

        Returns the keys of these, the position where they end, and key and end of each new part.
        """
        known: list[bytes] = []
        new: list[tuple[bytes, int]] = []
        running, find, known_end, start = self._root.copy(), self._store.find, 0, 0
        for end in self._cuts(text):
            running.update(text[start:end].encode())
            start, key = end, running.digest()
            part = None if new else find(key)
            if part is None:
                new.append((key, end))
                continue
            ids += part
            known.append(key)
            known_end = end
        return known, known_end, new

    def _cuts(self, text: str) -> Iterator[int]:
        """The ends of the parts; the rest after the last end belongs to no part.

        Each part ends at the first possible place after `part_characters`. That depends only on the text
        before it, so texts that begin alike are cut alike.
        """
        search, size, at = self._search, self._part_characters, 0
        while (match := search(text, at + size)) is not None:
            at = match.end()
            yield at

    def _tokenized(self, text: str, start: int, ends: list[int]) -> list[array[int]]:
        """The ids of each part after `start`, and those of the rest."""
        bounds = [start, *ends, len(text)]
        parts = [text[a:b] for a, b in pairwise(bounds) if a < b]
        encodings = self._tokenizer.encode_batch_fast(parts, add_special_tokens=False)
        return [array("I", encoding.ids) for encoding in encodings]


def _size(ids: array[int]) -> int:
    return ENTRY_BYTES + ids.itemsize * len(ids)


def trial_fault(tokenizer: tokenizers.Tokenizer, splits: Splits, *, trials: int = TRIALS) -> str:
    """A random text whose parts have other ids than the whole; empty if none was found."""
    rng = random.Random(0)  # the same texts at every start, so that a fault can be reproduced
    cutter = PrefixTokens(tokenizer, splits, PrefixStore(), model="trial", part_characters=1)
    for text in islice(trial_texts(tokenizer, rng), trials):
        for add in (False, True):
            whole = tokenizer.encode_batch_fast([text], add_special_tokens=add)[0].ids
            if list(cutter.encode(text, add_special_tokens=add).ids) != whole:
                return text
    return ""


def trial_texts(tokenizer: tokenizers.Tokenizer, rng: random.Random) -> Iterator[str]:
    """Without end; the same texts for the same state of `rng`."""
    kinds = _pieces(tokenizer, rng)
    while True:
        yield "".join(rng.choice(rng.choice(kinds)) for _ in range(rng.randint(1, _MOST_PIECES)))


def _pieces(tokenizer: tokenizers.Tokenizer, rng: random.Random) -> list[Sequence[str]]:
    """Kinds of pieces: added tokens, the vocabulary (twice: it counts double), spaces, words, odd ones."""
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    size = tokenizer.get_vocab_size()
    learnt = [tokenizer.decode([rng.randrange(size)], skip_special_tokens=False) for _ in range(_LEARNT)]
    return [added or [""], learnt, learnt, (" ", " ", "\n"), ("word", "End"), _ODD_PIECES]
