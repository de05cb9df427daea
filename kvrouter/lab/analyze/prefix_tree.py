"""The prefix tree of a trace: how often each block was visited, and where prompts part.

    root ── 0 ── 1 ── 2            requests [0 1 2] [0 1 3] [0 4]
            │    └─── 3            core tree (visited at least twice): 0, 1
            └─── 4                 core depths of the requests: 2, 2, 1

Blocks are known by names that stand for all blocks before them, too. A request's core depth is known only at
the end: a later request may visit more of its blocks. So a block with one visitor remembers this request.

Bounded: above `most_blocks` only blocks whose names end in a 0 bit stay, then in two, ... (spatial sampling,
as in core/tables/ghosts.py). Numbers of blocks are estimates then, and depths right to within `scale` blocks.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

# About 160 bytes each: 340 MB.
MOST_BLOCKS = 1 << 21
# Ages are counted in steps of a quarter of an octave.
_STEPS = 4
_ROOT = 0
# A child that this share of the requests goes on to is no parting of ways.
_TOGETHER = 0.9


@dataclass(frozen=True, slots=True)
class Branch:
    """Requests whose prompts begin alike. `depth`: the blocks in which nearly all of them are equal."""

    requests: int
    depth: int


@dataclass(frozen=True, slots=True)
class Parting:
    """Where prompts part first: after the `trunk`, which nearly all begin with, into branches."""

    trunk: Branch
    branches: Sequence[Branch]
    """The most visited first; only those of at least two requests."""


class PrefixTree:
    """Invariants: parents have lower numbers than their children, and at least as many visits."""

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self.core_depths = array("I")
        """Of each request, in blocks."""
        self.ages: Counter[float] = Counter()
        """Blocks that were visited again, by the seconds since the last visit, rounded up."""
        self._most = most_blocks
        self._halvings = 0
        self._numbers: dict[int, int] = {}
        # by number; number 0 is the root
        self._visits = array("I", [0])
        self._last_s = array("d", [0.0])
        self._first = array("I", [0])
        self._parents = array("I", [_ROOT])
        self._depths = array("I", [0])

    @property
    def scale(self) -> int:
        """How many blocks each known one stands for."""
        return 1 << self._halvings

    @property
    def blocks(self) -> int:
        """Distinct blocks."""
        return len(self._numbers) * self.scale

    @property
    def core_blocks(self) -> int:
        """Blocks visited at least twice."""
        return sum(visits >= 2 for visits in self._visits[1:]) * self.scale

    @property
    def depth(self) -> int:
        """Of the core tree."""
        return max(self.core_depths, default=0)

    def visit(self, names: Sequence[int], now: float) -> int:
        """Add a prompt; returns how many of its leading blocks were known."""
        request, places = len(self.core_depths), self._places(names)
        self._visits[_ROOT] += 1
        known, parent = 0, _ROOT
        for place in places:
            number = self._numbers.get(names[place])
            if number is None:
                break
            self._visit_again(number, now)
            known, parent = known + 1, number
        found = self._depth(places, known, len(names))
        self.core_depths.append(found)
        for place in places[known:]:
            parent = self._insert(names[place], parent, place + 1, request, now)
        if len(self._numbers) > self._most:
            self._halve()
        return found

    def parting(self) -> Parting:
        """Where the prompts part."""
        heirs = self._heirs()
        trunk = self._together(_ROOT, heirs)
        children = [
            number
            for number, parent in enumerate(self._parents)
            if number and parent == trunk and self._visits[number] >= 2
        ]
        children.sort(key=lambda number: self._visits[number], reverse=True)
        branches = [self._branch(child, self._together(child, heirs)) for child in children]
        return Parting(self._branch(trunk, trunk), branches)

    def check(self) -> None:
        """Raise if an invariant is broken."""
        for number in range(1, len(self._visits)):
            parent = self._parents[number]
            assert parent < number
            assert self._visits[parent] >= self._visits[number]
            assert self._depths[parent] < self._depths[number]

    def _places(self, names: Sequence[int]) -> Sequence[int]:
        mask = self.scale - 1
        return [place for place, name in enumerate(names) if not name & mask] if mask else range(len(names))

    def _depth(self, places: Sequence[int], known: int, length: int) -> int:
        """Of so many sampled blocks: in the middle between the last known one and the next."""
        if known == len(places):
            return length
        first = places[known - 1] + 1 if known else 0
        return (first + places[known]) // 2 if self._halvings else first

    def _visit_again(self, number: int, now: float) -> None:
        if self._visits[number] == 1:
            first = self._first[number]
            self.core_depths[first] = max(self.core_depths[first], self._depths[number])
        self._visits[number] += 1
        self.ages[_rounded(now - self._last_s[number])] += self.scale
        self._last_s[number] = now

    def _insert(self, name: int, parent: int, depth: int, request: int, now: float) -> int:
        number = self._numbers[name] = len(self._visits)
        self._visits.append(1)
        self._last_s.append(now)
        self._first.append(request)
        self._parents.append(parent)
        self._depths.append(depth)
        return number

    def _halve(self) -> None:
        self._halvings += 1
        mask = self.scale - 1
        names, self._numbers = self._numbers, {}
        # of a block that goes, the nearest block before it that stays
        staying, kept = array("I", [_ROOT]), [_ROOT]
        for name, number in names.items():
            if name & mask:
                staying.append(staying[self._parents[number]])
                continue
            self._numbers[name] = len(kept)
            staying.append(len(kept))
            kept.append(number)
        self._parents = array("I", [staying[self._parents[number]] for number in kept])
        self._visits, self._first, self._depths = (
            array("I", [column[number] for number in kept])
            for column in (self._visits, self._first, self._depths)
        )
        self._last_s = array("d", [self._last_s[number] for number in kept])

    def _heirs(self) -> array[int]:
        """By number, the child with the most visits; 0: none."""
        heirs = array("I", bytes(self._visits.itemsize * len(self._visits)))
        for number in range(1, len(self._visits)):
            parent = self._parents[number]
            if not heirs[parent] or self._visits[number] > self._visits[heirs[parent]]:
                heirs[parent] = number
        return heirs

    def _together(self, number: int, heirs: array[int]) -> int:
        """The last block that nearly all requests of this one have."""
        least = max(2, _TOGETHER * self._visits[number])
        while heirs[number] and self._visits[heirs[number]] >= least:
            number = heirs[number]
        return number

    def _branch(self, number: int, end: int) -> Branch:
        return Branch(self._visits[number], self._depths[end])


def _rounded(age_s: float) -> float:
    """Up to the next step; 0: the same moment."""
    return float(2 ** (math.ceil(_STEPS * math.log2(age_s)) / _STEPS)) if age_s > 0 else 0.0
