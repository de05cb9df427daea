"""The approximate index, for engines without KV events: what was sent there is taken to stay a while.

    insert(target, chain, now)  →  every block of the chain lives until now + ttl
                                   (again from the start whenever it is used again)

A chain's blocks are always renewed together with all their parents, so a parent never expires
before its child; of those due at the same time the deepest goes first. The index so stays
prefix-closed. The 120 s default is that of Dynamo's ApproxKvIndexer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvrouter.core.ids import Target
from kvrouter.core.index import BlockIndex

DEFAULT_TTL_S = 120.0


class _Entry(NamedTuple):
    expires: float
    target: Target
    hashes: Sequence[int]
    own: bool


class ApproxIndex:
    """Fills a BlockIndex with assumptions and takes them back when their time is over."""

    def __init__(self, index: BlockIndex, ttl_s: float = DEFAULT_TTL_S) -> None:
        self.ttl_s = ttl_s
        self._index = index
        self._expiry: dict[Target, dict[int, float]] = {}
        self._due: deque[_Entry] = deque()

    def insert(
        self,
        target: Target,
        hashes: Sequence[int],
        now: float,
        *,
        ttl_s: float | None = None,
        own: bool = False,
    ) -> None:
        """The target is assumed to hold this chain (parent first) for `ttl_s` from `now`.

        `own`: it comes from a booking of this replica, which therefore tells joiners of it.
        """
        if not hashes:
            return
        expires = now + (self.ttl_s if ttl_s is None else ttl_s)
        expiry = self._expiry.setdefault(target, {})
        expiry.update({hash_: expires for hash_ in hashes if expiry.get(hash_, 0.0) < expires})
        self._index.store(target, hashes)
        self._remember(_Entry(expires, target, hashes, own))

    def _remember(self, entry: _Entry) -> None:
        """Keep `_due` ordered by time: entries of a snapshot have less time left than new ones."""
        late: list[_Entry] = []
        while self._due and self._due[-1].expires > entry.expires:
            late.append(self._due.pop())
        self._due.append(entry)
        self._due.extend(reversed(late))

    def expire(self, now: float) -> None:
        """Take back what is due. A renewed block is due again later and is passed over here."""
        while self._due and self._due[0].expires <= now:
            entry = self._due.popleft()
            expiry = self._expiry.get(entry.target, {})
            over = [hash_ for hash_ in reversed(entry.hashes) if expiry.get(hash_) == entry.expires]
            for hash_ in over:
                del expiry[hash_]
            self._index.remove(entry.target, over)

    def drop(self, target: Target) -> None:
        """The target is gone, and with it every assumption about it."""
        if self._expiry.pop(target, None) is not None:
            self._due = deque(entry for entry in self._due if entry.target != target)
        self._index.drop(target)

    def own_entries(self, now: float) -> Iterator[tuple[Target, Sequence[int], float]]:
        """`(target, chain, seconds left)` of this replica's own entries, in order of expiry."""
        for entry in self._due:
            if entry.own and entry.expires > now:
                yield entry.target, entry.hashes, entry.expires - now
