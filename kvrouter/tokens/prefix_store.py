"""Token ids of texts seen before, by the hash of everything up to their end.

    text   | 256 characters and a bit | 256 and a bit | …            cut where `Splits` allows it
    key      H(part 0)                  H(parts 0, 1)   …            one running hash, so a text is read once
    value    ids of part 0              ids of part 1

A key names all the text before it, so a chain of hits from the start is a known prefix. Invariants: the
parts and bytes held never exceed their limits; of a chain the deeper part is always the older one, so that
the oldest to go leaves no child behind that could not be reached.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

ENTRY_BYTES = 300
"""What an entry takes beside its ids: key, array, dictionary (measured: 280 to 310)."""


@dataclass(slots=True)
class StoreCounters:
    """What happened, in characters of prompts: their unit does not depend on where texts are cut."""

    known_characters: int = 0
    tokenized_characters: int = 0
    skipped_characters: int = 0
    evicted_parts: int = 0


class PrefixStore:
    """An LRU of parts, bounded in number and bytes; all threads of all tokenizers may share one."""

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
        """Memory, about."""
        return self._bytes

    def find(self, key: bytes) -> array[int] | None:
        """The ids of the part that ends the text with this hash. One look-up, so safe without the lock."""
        return self._parts.get(key)

    def use(self, known: Sequence[bytes], new: Sequence[tuple[bytes, array[int]]]) -> None:
        """A text was tokenized: the parts of it that were known, then those that are new, in its order.

        The deepest is remembered first, so that it is the first to go.
        """
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
        """Add to the counters."""
        with self._lock:
            self.counters.known_characters += known
            self.counters.tokenized_characters += tokenized
            self.counters.skipped_characters += skipped

    def check(self) -> None:
        """Raise if the invariants are broken. Tests call this."""
        assert self._bytes == sum(map(_size, self._parts.values()))
        assert len(self._parts) <= self._max_parts
        assert self._bytes <= self._max_bytes


def _size(ids: array[int]) -> int:
    return ENTRY_BYTES + ids.itemsize * len(ids)
