"""The approximate index, for engines without KV events: what was sent there is taken to stay a while.

    insert(target, chain, now)  →  every block of the chain lives until now + ttl
                                   (again from the start whenever it is used again)

A chain's blocks are always renewed together with all their parents, so a parent never expires
before its child; of those due at the same time the deepest goes first. Chains of one instant are
told apart by a tick: whichever came last keeps the parents they share. The index so stays
prefix-closed. The 120 s default is that of Dynamo's ApproxKvIndexer.

A time to live of 0 means for ever: then only `capacity` ends an assumption.

What is kept is bounded: a target is assumed to hold no more than `capacity` blocks, the entries
least recently used going first; and entries that renewal has emptied are dropped when they make up
more than half of what is listed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvrouter.core.ids import Target
from kvrouter.core.index import BlockIndex

DEFAULT_TTL_S = 120.0
DEFAULT_CAPACITY_BLOCKS = 1_000_000
"""Of a target whose card tells no capacity."""
_FEW_HASHES = 4096
"""Below this nothing is worth tidying."""


class _Stamp(NamedTuple):
    """When something expires; among what expires at once, which came last."""

    expires: float
    tick: int


class _Entry(NamedTuple):
    stamp: _Stamp
    hashes: Sequence[int]
    own: bool

    @property
    def expires(self) -> float:
        return self.stamp.expires


_NEVER = _Stamp(0.0, 0)


@dataclass(slots=True)
class _Assumed:
    """What one target is assumed to hold: when each block expires, and the entries in that order."""

    expiry: dict[int, _Stamp] = field(default_factory=dict)
    entries: deque[_Entry] = field(default_factory=deque)
    listed: int = 0
    """Hashes in all entries, those renewed since included."""


class ApproxIndex:
    """Fills a BlockIndex with assumptions and takes them back when their time is over."""

    def __init__(self, index: BlockIndex, ttl_s: float = DEFAULT_TTL_S) -> None:
        self.ttl_s = ttl_s
        self._index = index
        self._targets: dict[Target, _Assumed] = {}
        self._tick = 0

    def insert(
        self,
        target: Target,
        hashes: Sequence[int],
        now: float,
        *,
        ttl_s: float | None = None,
        own: bool = False,
        capacity: int = 0,
    ) -> None:
        """The target is assumed to hold this chain (parent first) for `ttl_s` (else its own) from `now`.

        `own`: it comes from a booking of this replica, which therefore tells joiners of it.
        `capacity`: blocks the target has room for; 0 if that is not known.
        """
        if not hashes:
            return
        self._tick += 1
        stamp = _Stamp(now + (ttl_s or self.ttl_s or math.inf), self._tick)
        assumed = self._targets.setdefault(target, _Assumed())
        expiry = assumed.expiry
        expiry.update({hash_: stamp for hash_ in hashes if expiry.get(hash_, _NEVER) < stamp})
        self._index.store(target, hashes)
        _remember(assumed, _Entry(stamp, hashes, own))
        while len(expiry) > (capacity or DEFAULT_CAPACITY_BLOCKS) and len(assumed.entries) > 1:
            self._take_back_oldest(target, assumed)
        if assumed.listed > _FEW_HASHES + 2 * len(expiry):
            _tidy(assumed)

    def expire(self, now: float) -> None:
        """Take back what is due. A renewed block is due again later and is passed over here."""
        for target, assumed in self._targets.items():
            while assumed.entries and assumed.entries[0].expires <= now:
                self._take_back_oldest(target, assumed)

    def drop(self, target: Target) -> None:
        """The target is gone, and with it every assumption about it."""
        self._targets.pop(target, None)
        self._index.drop(target)

    def own_entries(self, now: float) -> Iterator[tuple[Target, Sequence[int], float]]:
        """`(target, chain, seconds left)` of this replica's own entries, each target's in order of expiry.

        An entry without an end has 0 seconds left: as long as whoever takes it keeps such things.
        """
        for target, assumed in self._targets.items():
            for entry in assumed.entries:
                if entry.own and entry.expires > now:
                    yield target, entry.hashes, entry.expires - now if entry.expires < math.inf else 0.0

    def _take_back_oldest(self, target: Target, assumed: _Assumed) -> None:
        entry = assumed.entries.popleft()
        assumed.listed -= len(entry.hashes)
        over = [hash_ for hash_ in reversed(entry.hashes) if assumed.expiry.get(hash_) == entry.stamp]
        for hash_ in over:
            del assumed.expiry[hash_]
        self._index.remove(target, over)


def _remember(assumed: _Assumed, entry: _Entry) -> None:
    """Keep entries ordered by time: those of a snapshot have less time left than new ones."""
    late: list[_Entry] = []
    while assumed.entries and assumed.entries[-1].stamp > entry.stamp:
        late.append(assumed.entries.pop())
    assumed.entries.append(entry)
    assumed.entries.extend(reversed(late))
    assumed.listed += len(entry.hashes)


def _tidy(assumed: _Assumed) -> None:
    """Drop the entries of which every block has been renewed since: they would take nothing back."""
    expiry = assumed.expiry
    kept = [
        entry for entry in assumed.entries if any(expiry.get(hash_) == entry.stamp for hash_ in entry.hashes)
    ]
    assumed.entries = deque(kept)
    assumed.listed = sum(len(entry.hashes) for entry in kept)
