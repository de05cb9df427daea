"""The targets that may serve a request, in columns: what the request would find and cost on each.

index  ──> depth per tier set ─┐
active ──> depth in flight ────┴──> overlap ──> tokens to compute, blocks to hold

Most targets of a large fleet hold nothing of a prompt, so the request costs the same on all of them. The
columns are therefore filled with that amount, and corrected for the targets that hold a part of it. Built-in
policies read columns. A `Candidate` is only made when an item is read: 512 of them take about 290 µs, one
column of 512 takes 2 to 5 µs.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias, TypeVar, overload

from msgspec import Struct
from msgspec.structs import replace

from kvrouter.core.native import versions
from kvrouter.core.routing.cost import InBlocks, InSeconds, in_blocks, in_seconds, next_copies, per_token_s
from kvrouter.core.routing.overlap import find_overlap, uncached_tokens
from kvrouter.core.routing.policy import Candidate, Prompt, RouteRequest
from kvrouter.core.routing.worker import Worker
from kvrouter.core.tables.block_index import BlockIndex
from kvrouter.core.tables.bookings import BookingTable
from kvrouter.core.tables.prefill_speeds import Speed
from kvrouter.core.tables.transfers import Pull
from kvrouter.core.wire.hashes import known_blocks
from kvrouter.core.wire.heartbeats import Card, RankBeat
from kvrouter.core.wire.ids import Target, WorkerId

Cached: TypeAlias = "array[int] | dict[Target, list[int]]"
"""The index's depths of one prompt: a column, or lists by tier set if any target has tiers."""
Found: TypeAlias = tuple[Prompt, Cached, dict[Target, int]]
"""What one prompt finds, per target: the index's depths, and the depth held in flight."""
Column: TypeAlias = "array[int]"
Item = TypeVar("Item")
Number = TypeVar("Number", int, float)

_NOWHERE: tuple[int, ...] = ()
_NO_BEAT = RankBeat(0, 0, 0)
_NEVER = array("d")
_NO_PULLS: Mapping[int, Pull] = {}


class Roster:
    """The targets of a pool that may be chosen, in columns: a target has the same place in every column.

        place      0        1        2
        targets    w1/0     w2/0     w2/1        ordered by name
        workers    w1       w2       w2
        beats      …        …        …           what each rank last reported

    A decision keeps the columns it was made from, so a column that was handed out never changes: a change of
    the targets makes a new roster, and beats are copied before the first change after `beats` was called.
    """

    def __init__(self, pairs: Iterable[tuple[Target, Worker]] = ()) -> None:
        self.targets: list[Target] = []
        self.workers: list[Worker] = []
        for target, worker in pairs:
            self.targets.append(target)
            self.workers.append(worker)
        self.every_place = range(len(self.targets))
        self.places = {target: place for place, target in enumerate(self.targets)}
        self._beats = [
            worker.ranks.get(target.rank, _NO_BEAT)
            for target, worker in zip(self.targets, self.workers, strict=True)
        ]
        self._are_seen = False
        self._slots: tuple[BlockIndex, int, Column] | None = None
        self.nothing = array("q", bytes(8 * len(self.targets)))
        """A column of zeros, shared by decisions: must not be changed."""

    def __len__(self) -> int:
        return len(self.targets)

    def beats(self) -> list[RankBeat]:
        """What each target last reported. The list does not change after this."""
        self._are_seen = True
        return self._beats

    def slots(self, index: BlockIndex) -> Column:
        """Each target's slot in the index."""
        known = self._slots
        if known is None or known[0] is not index or known[1] != index.owned:
            known = self._slots = index, index.owned, index.slots(self.targets)
        return known[2]

    def update_beats(self, worker: Worker) -> None:
        """A heartbeat of a worker whose targets are the same as before."""
        # Copied at most once between two decisions: a thousand workers send a heartbeat each second.
        if self._are_seen:
            self._beats, self._are_seen = self._beats.copy(), False
        for rank in range(worker.card.ranks):
            place = self.places.get(Target(WorkerId(worker.card.worker_id), rank))
            if place is not None:
                self._beats[place] = worker.ranks.get(rank, _NO_BEAT)


class _Columns(Struct, gc=False):
    """Amounts by place of the roster, named as in `Candidate`.

    `charged_tokens`, `active_blocks` and `requests` do not include the request itself. `unfinished`: prompts
    in prefill, or waiting for it; `head_tokens`, `began`: of the first of them; `context_tokens`: of decoding
    sequences.
    """

    own_prefill_tokens: Column
    own_decode_blocks: Column
    overlap_blocks: Column
    widest_blocks: Column
    indexed_blocks: Column
    charged_tokens: Column
    active_blocks: Column
    requests: Column
    unfinished: Column
    head_tokens: Column
    context_tokens: Column
    began: array[float]
    beats: Sequence[RankBeat]
    deepest: int = 0
    """The most of `overlap_blocks`."""


class Candidates(Sequence[Candidate]):
    """The candidates of one decision, as of its moment. Equal to any sequence of equal candidates."""

    __slots__ = ("_all", "_block_size", "_cached", "_columns", "_compared", "_places", "_pulls", "_roster")
    __hash__ = None  # type: ignore[assignment]  # compared by its items, as a list is

    def __init__(self, roster: Roster, columns: _Columns, cached: Cached, block_size: int) -> None:
        self._roster = roster
        self._columns = columns
        self._cached = cached
        self._block_size = block_size
        self._places: Sequence[int] = roster.every_place
        self._all: list[Candidate] | None = None
        self._compared: InSeconds | None = None
        self._pulls: Mapping[int, Pull] = _NO_PULLS

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, at: int) -> Candidate: ...
    @overload
    def __getitem__(self, at: slice) -> list[Candidate]: ...
    def __getitem__(self, at: int | slice) -> Candidate | list[Candidate]:
        if isinstance(at, slice) or self._all is not None:
            return self._made()[at]
        return self._candidate(self._places[at])

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self._made())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._made() == list(other)

    def __repr__(self) -> str:
        return repr(self._made())

    def only(self, places: Sequence[int]) -> Candidates:
        """The candidates at these places of the roster."""
        fewer = Candidates(self._roster, self._columns, self._cached, self._block_size)
        fewer._places, fewer._pulls = places, self._pulls
        return fewer

    def with_pulls(self, pulls: Mapping[int, Pull]) -> Candidates:
        """The same, where those at these indices read blocks from a peer instead of computing them."""
        by_place = {self._places[index]: pull for index, pull in pulls.items()}
        own = self._columns.own_prefill_tokens[:]
        for place, pull in by_place.items():
            own[place] -= pull.blocks * self._block_size
        columns = replace(self._columns, own_prefill_tokens=own)
        changed = Candidates(self._roster, columns, self._cached, self._block_size)
        changed._places, changed._pulls = self._places, by_place
        return changed

    def pull_of(self, target: Target) -> Pull | None:
        """What the target reads from a peer."""
        return self._pulls.get(self._roster.places[target]) if self._pulls else None

    def at(self, indices: Sequence[int]) -> Candidates:
        """The candidates at these indices."""
        places = self._places
        fewer = self.only([places[index] for index in indices])
        if self._all is not None:  # a Candidate that was made is not made twice
            fewer._all = [self._all[index] for index in indices]
        return fewer

    def kept(self, flags: Sequence[bool]) -> Candidates:
        """The candidates whose flag is set; itself where all are."""
        if all(flags):
            return self
        return self.at([index for index, flag in enumerate(flags) if flag])

    def targets(self) -> Sequence[Target]:
        """The target of each."""
        return self._at_places(self._roster.targets)

    def cards(self) -> Sequence[Card]:
        """The card of each one's worker."""
        return [worker.card for worker in self._at_places(self._roster.workers)]

    def requests(self) -> list[int]:
        """The requests in flight on each, booked by any replica."""
        return self._amounts(self._columns.requests)

    def decoding(self) -> list[int]:
        """The sequences that each one generates, or will when their prompts have been handed over."""
        columns = self._columns
        counts = zip(self._amounts(columns.requests), self._amounts(columns.unfinished), strict=True)
        return [requests - unfinished for requests, unfinished in counts]

    def charged_tokens(self) -> list[int]:
        """The prefill tokens charged on each, without this request."""
        return self._amounts(self._columns.charged_tokens)

    def overlap_blocks(self) -> list[int]:
        """The leading blocks of the prompt that each one holds."""
        return self._amounts(self._columns.overlap_blocks)

    def widest_blocks(self) -> list[int]:
        """The same over all tiers."""
        return self._amounts(self._columns.widest_blocks)

    def indexed_blocks(self) -> list[int]:
        """The part of these that the index knows: no request in flight is still computing them."""
        return self._amounts(self._columns.indexed_blocks)

    def beats(self) -> Sequence[RankBeat]:
        """What each one's engine last reported of itself."""
        return self._at_places(self._columns.beats)

    def active_tokens(self) -> list[int]:
        """The tokens of the blocks that requests in flight hold on each."""
        size = self._block_size
        return [blocks * size for blocks in self._amounts(self._columns.active_blocks)]

    def overlap_tokens(self) -> list[int]:
        """The prompt tokens that each one need not compute."""
        size = self._block_size
        return [blocks * size for blocks in self.overlap_blocks()]

    def costs_in_blocks(self, overlap_weight: float) -> InBlocks:
        """The published formula for each (core/routing/cost.py), without making a Candidate of each."""
        columns = self._columns
        charged, own = columns.charged_tokens, columns.own_prefill_tokens
        active, own_blocks = columns.active_blocks, columns.own_decode_blocks
        costs = in_blocks(overlap_weight, self._block_size, charged, own, active, own_blocks)
        if self._has_all_places():
            return costs
        # computed for all places, then picked: that keeps it one call in C
        return replace(costs, each=[costs.each[place] for place in self._places])

    def costs_in_seconds(self, now: float, speed: Speed, arrivals_per_s: float) -> InSeconds:
        """The seconds until each would send the request's first byte (core/routing/cost.py)."""
        columns = self._columns
        charged, own = columns.charged_tokens, columns.own_prefill_tokens
        heads, context, began = columns.head_tokens, columns.context_tokens, columns.began
        prompts = columns.unfinished
        if not self._has_all_places():
            # picked first: the price of congestion is that of the targets that may be chosen
            charged, own, heads = self._picked(charged), self._picked(own), self._picked(heads)
            context, began, prompts = self._picked(context), self._picked(began), self._picked(prompts)
        costs = in_seconds(
            now, speed, arrivals_per_s, self._block_size, charged, prompts, heads, context, began, own
        )
        if self._pulls:
            pulls = [*map(self._pulls.get, self._places)]
            costs = costs.plus("transfer", [pull.seconds / costs.block if pull else 0.0 for pull in pulls])
            costs = costs.plus("copy", [pull.copy_s / costs.block if pull else 0.0 for pull in pulls])
        self._compared = costs
        return costs

    def predicted_ttft_s(self, target: Target) -> tuple[float, float] | None:
        """Seconds until the target would send the first byte, and the least of any candidate.

        As `costs_in_seconds` predicted them last, without the price of congestion; None if it was not asked.
        """
        costs = self._compared
        if costs is None:
            return None
        place = self._roster.places[target]
        index = place if self._has_all_places() else list(self._places).index(place)
        if not self._pulls:
            return costs.wait_s[index] + costs.own_s[index], costs.earliest_s
        pulls = map(self._pulls.get, self._places)
        rows = zip(costs.wait_s, costs.own_s, pulls, strict=True)
        each = [wait_s + own_s + (pull.seconds if pull else 0.0) for wait_s, own_s, pull in rows]
        return each[index], min(each)

    def next_copies(self, costs: InSeconds, most_holders: float) -> list[int]:
        """Where one more copy of the deepest cached block is worth most (core/routing/cost.py)."""
        overlap = self._columns.overlap_blocks
        if not self._has_all_places():
            overlap = self._picked(overlap)
        return next_copies(overlap, costs.wait_and_added_s(), costs.own_s, most_holders)

    def in_time(self, now: float, speed: Speed) -> list[Candidate]:
        """The candidates with the prefill that is left on each, for custom policies."""
        costs, columns = self.costs_in_seconds(now, speed, 0.0), self._columns
        rows = zip(self._made(), self._places, costs.wait_s, costs.own_s, strict=True)
        return [
            replace(
                one,
                wait_s=wait_s,
                own_s=own_s,
                left_tokens=self._left_tokens(wait_s, place, speed),
                head_tokens=columns.head_tokens[place],
                head_s=now - columns.began[place] if columns.head_tokens[place] else 0.0,
                context_tokens=columns.context_tokens[place],
            )
            for one, place, wait_s, own_s in rows
        ]

    def _left_tokens(self, wait_s: float, place: int, speed: Speed) -> float:
        """The charged tokens less the part of their seconds that has passed."""
        columns = self._columns
        charged = columns.charged_tokens[place]
        if not charged:
            return 0.0
        per_token = per_token_s(speed.seconds_per_token, columns.context_tokens[place])
        whole_s = columns.unfinished[place] * speed.fixed_s + charged * per_token
        return charged * wait_s / whole_s

    def _picked(self, column: array[Number]) -> array[Number]:
        return array(column.typecode, [column[place] for place in self._places])

    def held_of(self, request: RouteRequest) -> tuple[Sequence[int], int]:
        """The prompt's blocks, and how many of them, from the first on, any target of the pool holds.

        None if there are several prompts: their overlaps are added up.
        """
        deepest, prompts = self._columns.deepest, request.prompts
        if not deepest or len(prompts) != 1 or deepest > len(prompts[0].hashes):
            return (), 0
        return prompts[0].hashes, deepest

    def deepest_blocks(self) -> int:
        """The most blocks of the prompt that any target of the pool holds."""
        return self._columns.deepest

    def holds_deepest(self, index: int) -> bool:
        """Whether no target of the pool holds more of the prompt than this one."""
        return self._columns.overlap_blocks[self._places[index]] >= self._columns.deepest

    def _has_all_places(self) -> bool:
        # by identity, not by length: `at` may give all places in another order
        return self._places is self._roster.every_place

    def _amounts(self, column: Column) -> list[int]:
        if self._has_all_places():
            return column.tolist()  # faster to walk than an array, which makes an int at each access
        return [column[place] for place in self._places]

    def _at_places(self, column: Sequence[Item]) -> Sequence[Item]:
        """A column of the roster, without the places that were filtered out."""
        if self._has_all_places():
            return column
        return [column[place] for place in self._places]

    def _made(self) -> list[Candidate]:
        # kept: a policy may iterate several times, and a kept decision shows the candidates again
        if self._all is None:
            self._all = [self._candidate(place) for place in self._places]
        return self._all

    def _tier_blocks(self, place: int) -> Sequence[int]:
        if isinstance(self._cached, dict):
            return self._cached.get(self._roster.targets[place], _NOWHERE)
        depth = self._cached[place]
        return (depth,) if depth else _NOWHERE

    def _candidate(self, place: int) -> Candidate:
        columns, target = self._columns, self._roster.targets[place]
        own_tokens, own_blocks = columns.own_prefill_tokens[place], columns.own_decode_blocks[place]
        prefill_tokens = columns.charged_tokens[place] + own_tokens
        beat = columns.beats[place]
        # positional: with keywords a Candidate takes 0.65 instead of 0.16 µs
        return Candidate(
            target,
            columns.overlap_blocks[place],
            columns.widest_blocks[place],
            own_tokens,
            own_blocks,
            prefill_tokens,
            prefill_tokens / self._block_size,
            columns.active_blocks[place] + own_blocks,
            columns.requests[place],
            beat.running,
            beat.waiting,
            beat.kv_usage,
            self._roster.workers[place].card,
            self._tier_blocks(place) if self._cached else _NOWHERE,
            beat.waiting_loras,
            columns.indexed_blocks[place],
            beat.running_loras,
            beat.metrics,
            self._block_size,
        )


def form_candidates(
    request: RouteRequest,
    roster: Roster,
    index: BlockIndex,
    active: BookingTable,
    *,
    block_size: int,
    inflight_overlap: bool,
    with_prefills: bool = True,
    one_less: Collection[WorkerId] = (),
) -> Candidates:
    """A candidate for each target of the roster, in its order.

    `with_prefills`: whether it may be asked for seconds of prefill. `one_less`: workers that compute the last
    block again that they could reuse.
    """
    columns, none = _loads_of(roster, active, with_prefills=with_prefills), roster.nothing
    if not request.prompts:  # no block is known, so no target differs
        return Candidates(roster, columns, {}, block_size)
    found = [
        (
            prompt,
            _find(prompt, roster, index, block_size) if request.reads_cache else none[:],
            active.depths(prompt.hashes),
        )
        for prompt in request.prompts
    ]
    reuses_in_flight = inflight_overlap and request.reads_cache
    count = len(roster.targets)
    known = known_blocks([prompt.hashes for prompt in request.prompts]) if len(found) > 1 else [0]
    own_blocks = _all_blocks(request, block_size, known) if count else 0
    columns.own_prefill_tokens = array("q", [request.isl]) * count
    columns.own_decode_blocks = array("q", [own_blocks]) * count
    columns.overlap_blocks, columns.widest_blocks, columns.indexed_blocks = none[:], none[:], none[:]
    for prompt, cached, in_flight in found:
        reused = _reused(in_flight, roster, block_size) if in_flight and reuses_in_flight else {}
        if one_less:
            most = max(0, prompt.isl - 1) // block_size
            _take_one(one_less, roster, cached, reused, most)
            if prompt.isl % block_size == 0 and request.reads_cache:
                _take_the_last(one_less, roster, cached, prompt, index, block_size)
        # most fleets have one tier: the general way costs a call per target
        if isinstance(cached, dict):
            columns.deepest = _reckon_tiers(columns, roster, prompt.isl, block_size, cached, reused)
        else:
            columns.deepest = _reckon_device(columns, roster, prompt.isl, block_size, cached, reused)
    # blocks in flight are active there already: no new load
    for target, held in _held_in_flight(found, known).items():
        place = roster.places.get(target)
        if place is not None:
            columns.own_decode_blocks[place] -= held
    return Candidates(roster, columns, found[0][1], block_size)


def _loads_of(roster: Roster, active: BookingTable, *, with_prefills: bool) -> _Columns:
    """The load of each target, without the request itself."""
    # copies, in the order of the roster: bookings that follow do not change this decision's columns
    charged, blocks, requests = active.lined_up()
    none = roster.nothing
    unfinished, heads, context, began = (
        active.prefills_lined_up() if with_prefills else (none, none, none, _NEVER)
    )
    return _Columns(
        own_prefill_tokens=none,
        own_decode_blocks=none,
        overlap_blocks=none,
        widest_blocks=none,
        indexed_blocks=none,
        charged_tokens=charged,
        active_blocks=blocks,
        requests=requests,
        unfinished=unfinished,
        head_tokens=heads,
        context_tokens=context,
        began=began,
        beats=roster.beats(),
    )


def _find(prompt: Prompt, roster: Roster, index: BlockIndex, block_size: int) -> Cached:
    # an engine always computes the last token, so it looks for a place to resume above it
    most = max(0, prompt.isl - 1) // block_size
    if index.has_wider_tiers:
        return index.overlap_by_tier(prompt.hashes, most)
    return index.depths_of(prompt.hashes, roster.slots(index), most)


def _reused(in_flight: dict[Target, int], roster: Roster, block_size: int) -> dict[Target, int]:
    """The depths in flight that the engine will reuse instead of computing them again.

    None where prefix caching is off, or where the engine's blocks have another size: it reuses whole blocks.
    """
    return {
        target: depth
        for target, depth in in_flight.items()
        if (place := roster.places.get(target)) is not None
        and roster.workers[place].card.block_size == block_size
        and roster.workers[place].card.prefix_caching is not False
    }


def _take_one(
    one_less: Collection[WorkerId], roster: Roster, cached: Cached, reused: dict[Target, int], most: int
) -> None:
    """Lower the depths of these workers by one: by what they could reuse, not by what they hold."""
    if isinstance(cached, dict):
        for target in [target for target in cached if target.worker_id in one_less]:
            cached[target] = [max(0, min(one, most) - 1) for one in cached[target]]
    else:
        for place, depth in enumerate(cached):
            if depth and roster.targets[place].worker_id in one_less:
                cached[place] = max(0, min(depth, most) - 1)
    for target in [target for target in reused if target.worker_id in one_less]:
        reused[target] = max(0, min(reused[target], most) - 1)


def _take_the_last(  # noqa: PLR0917
    one_less: Collection[WorkerId],
    roster: Roster,
    cached: Cached,
    prompt: Prompt,
    index: BlockIndex,
    block_size: int,
) -> None:
    """Correct the depths of engines with several KV groups for a prompt that ends with a block.

    With EAGLE they look for one block more than they may reuse, before they drop one. So of such a prompt
    they may find the last block, too, and drop that. Source: `find_longest_cache_hit` of vLLM 0.32's
    HybridKVCacheCoordinator (`eagle_proof_margin`). Engines with one group look before the last token only.
    """
    limited = [target for target in index.limited if target.worker_id in one_less and target in roster.places]
    found = index.overlap(prompt.hashes, prompt.isl // block_size) if limited else {}
    for target in limited:
        depth = max(0, found.get(target, 0) - 1)
        if not isinstance(cached, dict):
            cached[roster.places[target]] = depth
        elif len(cached.get(target, _NOWHERE)) < 2:
            cached[target] = [depth]


def _reckon_device(  # noqa: PLR0917  # on the hot path: keywords cost
    columns: _Columns,
    roster: Roster,
    isl: int,
    block_size: int,
    cached: Column,
    reused: dict[Target, int],
) -> int:
    """Correct the columns for each target that holds the start of the prompt, or reuses one in flight.

    Returns the most blocks that any of them reuses.
    `find_overlap` and `uncached_tokens` for a single tier, written out: a call for each target costs more.
    """
    most, held = max(0, isl - 1) // block_size, cached
    own_tokens, overlap = columns.own_prefill_tokens, columns.overlap_blocks
    widest, indexed = columns.widest_blocks, columns.indexed_blocks
    if reused:
        held = cached[:]
        for target, depth in reused.items():
            place = roster.places[target]
            held[place] = max(held[place], depth)
    native = versions.chosen.columns
    if native is not None:
        return native.reckon_overlap(  # type: ignore[no-any-return]
            held, cached, most, block_size, own_tokens, overlap, widest, indexed
        )
    deepest = 0
    for place, depth in enumerate(held):
        if depth:
            own = min(depth, most)
            own_tokens[place] -= own * block_size
            overlap[place] += own
            widest[place] += own
            indexed[place] += min(cached[place], own)
            deepest = max(deepest, overlap[place])
    return deepest


def _reckon_tiers(  # noqa: PLR0917
    columns: _Columns,
    roster: Roster,
    isl: int,
    block_size: int,
    cached: dict[Target, list[int]],
    reused: dict[Target, int],
) -> int:
    """The same where targets also hold blocks in host memory or on disk."""
    deepest = 0
    for target in {**cached, **reused}:
        place = roster.places.get(target)
        if place is None:
            continue
        depths: Sequence[int] = cached.get(target, _NOWHERE)
        overlap = find_overlap(isl, block_size, depths, reused.get(target, 0))
        columns.own_prefill_tokens[place] -= isl - uncached_tokens(isl, block_size, overlap)
        columns.overlap_blocks[place] += overlap.overlap_blocks
        columns.widest_blocks[place] += overlap.widest_blocks
        columns.indexed_blocks[place] += min(depths[-1] if depths else 0, overlap.widest_blocks)
        deepest = max(deepest, columns.overlap_blocks[place])
    return deepest


def _all_blocks(request: RouteRequest, block_size: int, known: list[int]) -> int:
    """Blocks that the request makes active on a target where none of them is in flight."""
    if len(request.prompts) == 1:
        return request.prompts[0].isl // block_size
    named = sum([len(prompt.hashes) for prompt in request.prompts]) - sum(known)
    return named + request.unnamed_blocks(block_size)


def _held_in_flight(found: list[Found], known: list[int]) -> Mapping[Target, int]:
    """Per target, how many of the request's blocks are held by requests in flight."""
    if len(found) == 1:
        return found[0][2]
    held: Counter[Target] = Counter()
    for (_, _, in_flight), shared in zip(found, known, strict=True):
        for target, depth in in_flight.items():
            held[target] += max(0, depth - shared)
    return held
