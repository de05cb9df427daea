"""The approximate index, for engines without KV events: blocks sent to a target are assumed to stay there.

    insert(target, chain, now)  →  every block of the chain lives until now + ttl
                                   (another use begins the time again)

    [1 2 3 4], then [1 2 5]:    ┌───┐     ┌───┐
                                │1 2│─┬──>│3 4│      runs: blocks in a row that were last used together;
                                └───┘ │   └───┘      renewing one is one step, however long it is
                                      │   ┌───┐
                                      └──>│ 5 │
                                          └───┘

A chain's blocks are renewed together with all their parents, so a parent never expires before its child; of
blocks that expire at the same time the deepest goes first. A tick orders chains of the same instant: the
last one keeps the parents that they share. So the index stays prefix-closed. The default of 120 s is that
of Dynamo's ApproxKvIndexer.

With a time to live of 0 only `capacity` ends an assumption: a target is assumed to hold at most `capacity`
blocks, and the least recently used chains go first.

Amortized cost of an insert: one step for each new block and for each run on the chain's path, one cut and
one join, and O(log runs). When no live chain branches off between two runs any more, their next common use
joins them, so a path has as many runs as live chains branch off it. A cut or join relabels the shorter
part, in C. Renewing a run does not move its heap entry; when that entry comes up, the run is put back, once
for all renewals.

Memory: one entry for each live block, and at most as many runs and heap entries. Nothing grows with the
number of renewals.

Invariants: each block is in one run; no run is empty; the block before a run is the last of another run,
which expires no earlier and counts its branches; the heap names a block at most once, and the last block of
each run at the run's place or an earlier one.
"""

from __future__ import annotations

import heapq
import itertools
import math
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import compress, pairwise
from typing import NamedTuple

from kvrouter.core.tables.block_index import BlockIndex
from kvrouter.core.wire.ids import Target

DEFAULT_TTL_S = 120.0
DEFAULT_CAPACITY_BLOCKS = 1_000_000  # of a target whose card has no capacity
# 8 MiB of a snapshot. Beyond it the entries that expire first are left out.
SNAPSHOT_BLOCKS_MOST = 1 << 20


class _Stamp(NamedTuple):
    """When a run expires; the tick orders runs that expire at the same time by their last use."""

    expires: float
    tick: int


_NEVER = _Stamp(-math.inf, 0)


class _Turn(NamedTuple):
    """A run's place in the order in which runs expire; of one chain's runs the deepest expires first."""

    stamp: _Stamp
    minus_end: int
    last: int  # the last block, which identifies the run: a cut changes a run's beginning, never its end


@dataclass(slots=True)
class _Run:
    """Blocks in a row, parent first, that were last used together."""

    hashes: array[int]
    stamp: _Stamp = _NEVER
    end: int = 0  # depth of the last block, in the chain that used the run last
    before: int | None = None  # the block before the first one, in that chain
    own: bool = False  # from a booking of this replica
    branches: int = 0  # runs whose `before` is the last block of this one

    @property
    def turn(self) -> _Turn:
        return _Turn(self.stamp, -self.end, self.hashes[-1])


@dataclass(slots=True)
class _Assumed:
    """The blocks that one target is assumed to hold."""

    runs: dict[int, _Run] = field(default_factory=dict)  # by block
    turns: list[_Turn] = field(default_factory=list)  # a heap
    listed: set[int] = field(default_factory=set)  # the blocks in `turns`: last blocks of runs, now or once
    newest: _Stamp = _NEVER

    def use(self, chain: array[int], stamp: _Stamp, *, own: bool) -> int:
        """Renew or add the chain's blocks until the stamp; returns how many precede the first new block."""
        self.newest = max(self.newest, stamp)
        place, end, known = 0, 0, len(chain)
        before: _Run | None = None
        while place < len(chain):
            run = self.runs.get(chain[place])
            if run is None:
                known = min(known, place)
                run = self._begin(chain, place)
            elif run.stamp == stamp:
                place += 1  # a faulty peer has named the block twice
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
        """The run that expires first."""
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
        """Remove `oldest`, which must have been called just before; returns its blocks."""
        last = heapq.heappop(self.turns).last
        self.listed.remove(last)
        run = self.runs[last]
        self._put_behind(run, None)
        for hash_ in run.hashes:
            del self.runs[hash_]
        return run.hashes

    def all_runs(self) -> list[_Run]:
        """All runs, in no particular order."""
        ends = [(self.runs.get(turn.last), turn.last) for turn in self.turns]
        return [run for run, last in ends if run is not None and run.hashes[-1] == last]

    def path(self, run: _Run) -> Iterator[_Run]:
        """The run and its parents, up to the first."""
        while True:
            yield run
            if run.before is None:
                return
            run = self.runs[run.before]

    def _begin(self, chain: array[int], place: int) -> _Run:
        """A new run of the unknown blocks from `place` on."""
        run, end, new = _Run(chain), place, chain[place:]
        unknown = next(compress(itertools.count(), map(self.runs.__contains__, new)), len(new))
        if len(runs := dict.fromkeys(new[:unknown], run)) == unknown:  # in C, as there may be thousands
            self.runs.update(runs)
            run.hashes = new[:unknown]
            return run
        while end < len(chain) and chain[end] not in self.runs:  # a faulty peer has named a block twice
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
        """The part of the run that the chain from `place` on shares, cut out of the run if needed."""
        start = run.hashes.index(chain[place])  # 0, unless several prompts were booked as one
        if start:
            _, run = self._cut(run, start)
        shared = _shared_blocks(run.hashes, chain, place)
        return run if shared == len(run.hashes) else self._cut(run, shared)[0]

    def _cut(self, run: _Run, length: int) -> tuple[_Run, _Run]:
        """Cut the run after `length` blocks. The longer part stays the same object, so few blocks change."""
        upper, lower = (run, copy(run)) if length * 2 > len(run.hashes) else (copy(run), run)
        upper.hashes, lower.hashes = run.hashes[:length], run.hashes[length:]
        upper.end -= len(lower.hashes)
        upper.branches, lower.before = 1, upper.hashes[-1]
        shorter = lower if upper is run else upper
        self.runs.update(dict.fromkeys(shorter.hashes, shorter))
        self._list(upper)
        return upper, lower

    def _join(self, upper: _Run, lower: _Run) -> _Run:
        """Join two runs. The longer one stays the same object, so few blocks change."""
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
    """Stores assumed blocks in a BlockIndex and removes them when they expire."""

    def __init__(self, index: BlockIndex, ttl_s: float = DEFAULT_TTL_S) -> None:
        self.ttl_s = ttl_s
        self._index = index
        self._targets: dict[Target, _Assumed] = {}
        self._tick = 0

    def listed(self) -> tuple[int, int]:
        """The number of blocks and of heap entries, over all targets. Entries never exceed blocks."""
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
        """Assume that the target holds this chain (parent first) for `ttl_s` (else the index's) from `now`.

        `own`: from a booking of this replica, whose snapshots therefore contain it.
        `capacity`: blocks that the target has room for; 0: unknown.
        """
        if not hashes:
            return
        self._tick += 1
        stamp = _Stamp(now + (ttl_s or self.ttl_s or math.inf), self._tick)
        chain = hashes if isinstance(hashes, array) else array("Q", hashes)
        assumed = self._targets.setdefault(target, _Assumed())
        known = assumed.use(chain, stamp, own=own)
        if self._index.is_truncated(target):
            self._index.store(target, chain)  # all of it: blocks refused before may have room now
        elif known < len(chain):
            self._index.store(target, chain[known:], parent=chain[known - 1] if known else None)
        self._make_room(target, assumed, capacity or DEFAULT_CAPACITY_BLOCKS)

    def expire(self, now: float) -> None:
        """Remove expired blocks from the index."""
        for target, assumed in self._targets.items():
            while (run := assumed.oldest()) is not None and run.stamp.expires <= now:
                self._take_back_oldest(target, assumed)

    def drop(self, target: Target) -> None:
        """Forget the target."""
        self._targets.pop(target, None)
        self._index.drop(target)

    def entries(
        self, now: float, *, learned: bool, most: int = SNAPSHOT_BLOCKS_MOST
    ) -> Iterator[tuple[Target, Sequence[int], float]]:
        """`(target, chain, seconds left)` in order of expiry, the last ones, with at most `most` blocks.

        `learned` False: only of this replica's own bookings. 0 seconds: the entry does not expire here, and a
        peer keeps it for its own time to live.
        """
        found: list[tuple[_Stamp, Target, list[_Run]]] = []
        for target, assumed in self._targets.items():
            covered: set[int] = set()
            live = [run for run in assumed.all_runs() if (run.own or learned) and run.stamp.expires > now]
            for run in sorted(live, key=_turn):
                if run.hashes[-1] in covered:
                    continue  # a deeper run's chain contains it, with the same time
                path = list(assumed.path(run))
                covered.update(one.hashes[-1] for one in path if one.stamp == run.stamp)
                found.append((run.stamp, target, path))
        found.sort(key=_stamp)
        first = len(found)
        while first and (most := most - sum(len(run.hashes) for run in found[first - 1][2])) >= 0:
            first -= 1
        for stamp, target, path in found[first:]:
            chain = array("Q")
            for run in reversed(path):
                chain.extend(run.hashes)
            yield target, chain, stamp.expires - now if stamp.expires < math.inf else 0.0

    def check(self) -> None:
        """Raise if an invariant is broken. Tests call this after every step."""
        for assumed in self._targets.values():
            assumed.check()

    def _make_room(self, target: Target, assumed: _Assumed, capacity: int) -> None:
        """Remove least recently used chains, but not the parts that later ones share, and not the newest."""
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


def _stamp(found: tuple[_Stamp, Target, list[_Run]]) -> _Stamp:
    return found[0]


def _are_one(before: _Run, run: _Run) -> bool:
    """Whether both were last used by the same chain, and no other run branches off between them."""
    return before.branches == 1 and run.before == before.hashes[-1] and run.stamp == before.stamp


def _shared_blocks(run: array[int], chain: array[int], start: int) -> int:
    """How many blocks the run shares with the chain from `start` on; the first is known to be shared."""
    most = min(len(run), len(chain) - start)
    if run[:most] == chain[start : start + most]:
        return most
    return bisect_left(range(1, most), True, key=lambda length: run[:length] != chain[start : start + length])
