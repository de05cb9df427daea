"""The approximate index, for engines without KV events: what was sent there is taken to stay a while.

    insert(target, chain, now)  →  every block of the chain lives until now + ttl
                                   (again from the start whenever it is used again)

    [1 2 3 4], then [1 2 5]:    ┌───┐     ┌───┐
                                │1 2│─┬──>│3 4│      runs: blocks in a row that were last used together;
                                └───┘ │   └───┘      renewing one is one step, however long it is
                                      │   ┌───┐
                                      └──>│ 5 │
                                          └───┘

A chain's blocks are always renewed together with all their parents, so a parent never expires
before its child; of those due at the same time the deepest goes first. Chains of one instant are
told apart by a tick: the last one keeps the parents they share. The index so stays prefix-closed.
The 120 s default is that of Dynamo's ApproxKvIndexer.

With a time to live of 0 only `capacity` ends an assumption: a target is assumed to hold no more
than `capacity` blocks, and the least recently used chains go first.

Amortized cost of an insert: one step for each new block, one for each run on the chain's path, one
cut and one join, and O(log runs). Runs that nothing branches off between any longer are joined when
they are next used together, so a path has as many runs as live chains branch off it. A cut or join
relabels the shorter part, in C. Renewing a run leaves its place in the heap; when that place comes
up, the run is put back, once for all renewals since.

Memory: every live block is listed once; there are at most as many runs as live blocks, and heap
entries as well. Nothing grows with the number of renewals.

Invariants: each block is in one run; no run is empty; what is before a run is the end of another,
which expires no earlier and counts its branches; the heap names a block once at most, and the last
block of each run at the run's place or an earlier one.
"""

from __future__ import annotations

import heapq
import math
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from kvrouter.core.tables.block_index import BlockIndex
from kvrouter.core.wire.ids import Target

DEFAULT_TTL_S = 120.0
DEFAULT_CAPACITY_BLOCKS = 1_000_000
"""Of a target whose card tells no capacity."""


class _Stamp(NamedTuple):
    """When something expires; among what expires at once, which came last."""

    expires: float
    tick: int


_NEVER = _Stamp(-math.inf, 0)


class _Turn(NamedTuple):
    """A run's place in the order in which runs go; of one chain's runs the deepest goes first."""

    stamp: _Stamp
    minus_end: int
    last: int
    """Its last block: cutting a run changes its beginning or makes a new one, but no end."""


@dataclass(slots=True)
class _Run:
    """Blocks in a row, parent first, that were last used together."""

    hashes: array[int]
    stamp: _Stamp = _NEVER
    end: int = 0
    """How many blocks the chain that used it last has up to its last one."""
    before: int | None = None
    """The block before its first, in that chain."""
    own: bool = False
    branches: int = 0
    """Runs that this one is before."""

    @property
    def turn(self) -> _Turn:
        return _Turn(self.stamp, -self.end, self.hashes[-1])


@dataclass(slots=True)
class _Assumed:
    """What one target is assumed to hold."""

    runs: dict[int, _Run] = field(default_factory=dict)
    """By block."""
    turns: list[_Turn] = field(default_factory=list)
    """A heap."""
    listed: set[int] = field(default_factory=set)
    """The blocks that the heap names: ends of runs, or of what are parts of runs now."""
    newest: _Stamp = _NEVER

    def use(self, chain: array[int], stamp: _Stamp, *, own: bool) -> int:
        """The chain's blocks live as long as the stamp says, or longer; returns how many were known.

        Those are the blocks before the first new one.
        """
        self.newest = max(self.newest, stamp)
        place, end, known = 0, 0, len(chain)
        before: _Run | None = None
        while place < len(chain):
            run = self.runs.get(chain[place])
            if run is None:
                known = min(known, place)
                run = self._begin(chain, place)
            elif run.stamp == stamp:
                place += 1  # named twice, by a peer that is not sound
                continue
            else:
                run = self._part(run, chain, place)
            place += len(run.hashes)
            end += len(run.hashes)
            if run.stamp < stamp:
                run.stamp, run.end, run.own = stamp, end, own
                self._put_behind(run, before)
            if before is not None and _are_one(before, run):
                run = self._join(before, run)
            self._list(run)
            before = run
        return known

    def oldest(self) -> _Run | None:
        """The run that goes first."""
        while self.turns:
            turn = self.turns[0]
            run = self.runs.get(turn.last)
            if run is None or run.hashes[-1] != turn.last:
                self.listed.remove(heapq.heappop(self.turns).last)  # joined since it was listed
            elif turn.stamp == run.stamp:
                return run
            else:
                heapq.heapreplace(self.turns, run.turn)  # renewed since it was listed
        return None

    def pop(self) -> array[int]:
        """Take out `oldest`, which was just looked at; returns its blocks."""
        last = heapq.heappop(self.turns).last
        self.listed.remove(last)
        run = self.runs[last]
        self._put_behind(run, None)
        for hash_ in run.hashes:
            del self.runs[hash_]
        return run.hashes

    def all_runs(self) -> list[_Run]:
        """In no order."""
        ends = [(self.runs.get(turn.last), turn.last) for turn in self.turns]
        return [run for run, last in ends if run is not None and run.hashes[-1] == last]

    def path(self, run: _Run) -> Iterator[_Run]:
        """The run, and what is before it, up to the first."""
        while True:
            yield run
            if run.before is None:
                return
            run = self.runs[run.before]

    def _begin(self, chain: array[int], place: int) -> _Run:
        """A run of the unknown blocks that the chain has here."""
        run, end = _Run(chain), place
        while end < len(chain) and chain[end] not in self.runs:
            self.runs[chain[end]] = run
            end += 1
        run.hashes = chain[place:end]
        return run

    def _put_behind(self, run: _Run, before: _Run | None) -> None:
        last = before.hashes[-1] if before is not None else None
        if run.before == last:
            return
        if run.before is not None:
            self.runs[run.before].branches -= 1
        if before is not None:
            before.branches += 1
        run.before = last

    def _part(self, run: _Run, chain: array[int], place: int) -> _Run:
        """What this run and the chain from here on have in common, cut out of the run if need be."""
        start = run.hashes.index(chain[place])  # 0, unless several prompts were booked as one
        if start:
            _, run = self._cut(run, start)
        shared = _shared_blocks(run.hashes, chain, place)
        return run if shared == len(run.hashes) else self._cut(run, shared)[0]

    def _cut(self, run: _Run, length: int) -> tuple[_Run, _Run]:
        """Two runs, the upper with so many blocks. The longer one is the same object as before."""
        upper, lower = (run, copy(run)) if length * 2 > len(run.hashes) else (copy(run), run)
        upper.hashes, lower.hashes = run.hashes[:length], run.hashes[length:]
        upper.end -= len(lower.hashes)
        upper.branches, lower.before = 1, upper.hashes[-1]
        shorter = lower if upper is run else upper
        self.runs.update(dict.fromkeys(shorter.hashes, shorter))
        self._list(upper)
        return upper, lower

    def _join(self, upper: _Run, lower: _Run) -> _Run:
        """One run of two. It is the longer one of them."""
        hashes = upper.hashes + lower.hashes
        end, before, branches = lower.end, upper.before, lower.branches
        run, shorter = (upper, lower) if len(upper.hashes) > len(lower.hashes) else (lower, upper)
        self.runs.update(dict.fromkeys(shorter.hashes, run))
        run.hashes, run.end, run.before, run.branches = hashes, end, before, branches
        return run

    def _list(self, run: _Run) -> None:
        if run.hashes[-1] not in self.listed:
            self.listed.add(run.hashes[-1])
            heapq.heappush(self.turns, run.turn)

    def check(self) -> None:
        """Raise if an invariant is broken. Tests call this after every step."""
        runs = {id(run): run for run in self.runs.values()}.values()
        if self.runs != {hash_: run for run in runs for hash_ in run.hashes}:
            raise AssertionError(f"a block is in no run, or in two: {self.runs}")
        if sum(len(run.hashes) for run in runs) != len(self.runs):
            raise AssertionError(f"a run has a block twice: {self.runs}")
        if sorted(turn.last for turn in self.turns) != sorted(self.listed):
            raise AssertionError(f"the heap names a block twice: {self.turns}")
        if len(self.all_runs()) != len(runs) or not self.listed <= self.runs.keys():
            raise AssertionError(f"the heap lacks a run, or names a block that is gone: {self.turns}")
        turns = {turn.last: turn for turn in self.turns}
        if any(turns[run.hashes[-1]] > run.turn for run in runs):
            raise AssertionError(f"a run stands too late in the heap: {self.turns}")
        branches = Counter(run.before for run in runs)
        for run in runs:
            path = list(self.path(run))
            if any(upper.hashes[-1] != lower.before for lower, upper in pairwise(path)):
                raise AssertionError(f"what is before {run} is not the end of a run")
            stamps = [one.stamp for one in path]
            if stamps != sorted(stamps) or stamps[-1] > self.newest:
                raise AssertionError(f"something before {run} goes earlier: {stamps}")
            if run.branches != branches[run.hashes[-1]]:
                raise AssertionError(f"{branches[run.hashes[-1]]} runs are behind {run}")


class ApproxIndex:
    """Fills a BlockIndex with assumptions and takes them back when their time is over."""

    def __init__(self, index: BlockIndex, ttl_s: float = DEFAULT_TTL_S) -> None:
        self.ttl_s = ttl_s
        self._index = index
        self._targets: dict[Target, _Assumed] = {}
        self._tick = 0

    def listed(self) -> tuple[int, int]:
        """Blocks that are listed, and heap entries, over all targets. The latter are no more than blocks."""
        assumed = self._targets.values()
        return sum(len(one.runs) for one in assumed), sum(len(one.turns) for one in assumed)

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
        chain = hashes if isinstance(hashes, array) else array("Q", hashes)
        assumed = self._targets.setdefault(target, _Assumed())
        known = assumed.use(chain, stamp, own=own)
        if self._index.is_truncated(target):
            self._index.store(target, chain)  # what was refused before may have room now
        elif known < len(chain):
            self._index.store(target, chain[known:])
        self._make_room(target, assumed, capacity or DEFAULT_CAPACITY_BLOCKS)

    def expire(self, now: float) -> None:
        """Take back what is due."""
        for target, assumed in self._targets.items():
            while (run := assumed.oldest()) is not None and run.stamp.expires <= now:
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
            covered: set[int] = set()
            live = [run for run in assumed.all_runs() if run.own and run.stamp.expires > now]
            for run in sorted(live, key=_turn):
                if run.hashes[-1] in covered:
                    continue
                path = list(assumed.path(run))
                covered.update(one.hashes[-1] for one in path if one.stamp == run.stamp)
                chain = array("Q")
                for one in reversed(path):
                    chain.extend(one.hashes)
                yield target, chain, run.stamp.expires - now if run.stamp.expires < math.inf else 0.0

    def check(self) -> None:
        """Raise if an invariant is broken. Tests call this after every step."""
        for assumed in self._targets.values():
            assumed.check()

    def _make_room(self, target: Target, assumed: _Assumed, capacity: int) -> None:
        """The chains used least recently go, each with all that no later one shares; the newest stays."""
        going: _Stamp | None = None
        while (run := assumed.oldest()) is not None and run.stamp != assumed.newest:
            if len(assumed.runs) <= capacity and run.stamp != going:
                return
            going = run.stamp
            self._take_back_oldest(target, assumed)

    def _take_back_oldest(self, target: Target, assumed: _Assumed) -> None:
        self._index.remove(target, list(reversed(assumed.pop())))


def _turn(run: _Run) -> _Turn:
    return run.turn


def _are_one(before: _Run, run: _Run) -> bool:
    """Whether they were last used together, and nothing else branches off between them."""
    return before.branches == 1 and run.before == before.hashes[-1] and run.stamp == before.stamp


def _shared_blocks(run: array[int], chain: array[int], start: int) -> int:
    """How many blocks the run shares with the chain from `start` on: at least the first."""
    most = min(len(run), len(chain) - start)
    if run[:most] == chain[start : start + most]:
        return most
    return bisect_left(range(1, most), True, key=lambda length: run[:length] != chain[start : start + length])
