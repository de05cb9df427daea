"""The figures of a trace, in one pass over its requests.

    requests ──names──> PrefixTree      endless cache, core tree, branches, ages
                   ├──> Ghosts          one pooled cache, of several sizes
                   └──> fleet caches    random and perfect placement

Caches count in the trace's ids: an id of 512 tokens is cached as a whole. Hits count in tokens of the full
blocks of engines, also of a prompt's partial last id.
"""

from __future__ import annotations

import random
import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvrouter.core.tables.ghosts import Ghosts
from kvrouter.core.wire.hashes import sequence_hashes
from kvrouter.core.wire.ids import BlockHash
from kvrouter.errors import KvRouterError
from kvrouter.lab.analyze.fleet_caches import PerfectPlacement, RandomPlacement
from kvrouter.lab.analyze.prefix_tree import Branch, PrefixTree
from kvrouter.lab.simulate.percentiles import percentiles
from kvrouter.lab.simulate.traces import TraceRequest, check_block_size

BLOCK_SIZES = (16, 32, 64, 128)
CACHE_SIZES = (0.25, 0.5, 1.0, 2.0, 4.0)
# Blocks in the sample of a pooled cache, and uses at one rate: about 100 MB for each size.
_GHOST_BLOCKS, _GHOST_USES = 1 << 18, 1 << 19
# Prefixes that are named.
_NAMED = 100
_CLASSES = (0.1, 0.01, 0.001, 0.0)


@dataclass(frozen=True, slots=True)
class FleetSize:
    """The engines that are to serve the trace."""

    workers: int
    blocks_each: int
    block_size: int

    @property
    def tokens(self) -> int:
        return self.workers * self.blocks_each * self.block_size


@dataclass(frozen=True, slots=True)
class Lengths:
    """In tokens, by nearest rank."""

    mean: float
    p50: int
    p90: int
    p99: int
    counts: dict[int, int]

    @classmethod
    def of(cls, counted: Counter[int]) -> Lengths:
        found, total = percentiles(counted.elements()), counted.total()
        mean = sum(length * number for length, number in counted.items()) / total
        return cls(mean, int(found.p50), int(found.p90), int(found.p99), dict(counted))


@dataclass(frozen=True, slots=True)
class HitRates:
    """Shares of the prompt tokens."""

    endless: float
    pooled: float
    perfect: float
    random: float
    perfect_busiest: float
    """With perfect placement, the tokens that the busiest worker computes, divided by the mean."""
    by_block_size: dict[int, float]
    """Of the endless cache."""
    by_cache_size: dict[float, float]
    """Of the pooled cache, by its size as a multiple of the fleet's."""


@dataclass(frozen=True, slots=True)
class Core:
    """The tree of the blocks visited at least twice. Depths are those of requests."""

    nodes: int
    distinct: int
    """All distinct blocks."""
    id_tokens: int
    """Tokens of these blocks."""
    depth_p50: int
    depth_p90: int
    depth_max: int
    ratio_p50: float
    """Depth / ISL."""
    ratio_p90: float
    ratios: Sequence[float]
    """Depth / ISL at 0, 1, ... 100 % of the requests."""
    is_estimate: bool


@dataclass(frozen=True, slots=True)
class Prefix:
    """`tokens`: how many its requests have in common, from the beginning of the prompt."""

    share: float
    requests: int
    tokens: int


@dataclass(frozen=True, slots=True)
class ShareClass:
    """The prefixes with a share of at least `least`, below the next class."""

    least: float
    prefixes: int
    share: float


@dataclass(frozen=True, slots=True)
class Breadth:
    """What prompts begin with. Prefixes are those after the trunk, of at least two requests."""

    trunk: Prefix
    """What at least nine in ten requests begin with."""
    prefixes: int
    effective: float
    """As many prefixes of equal shares would be as diverse: 1 / the sum of the squared shares."""
    top: Sequence[Prefix]
    classes: Sequence[ShareClass]
    alone: float
    """Share of the requests that share nothing after the trunk."""
    separating_blocks: int
    """Leading blocks of the engines that distinguish the prefixes."""


@dataclass(frozen=True, slots=True)
class WorkingSet:
    """In tokens."""

    distinct: int
    reused: int
    """Of blocks visited at least twice."""
    capacity: int
    lifetime_s: float
    """How long a block stays in a pooled cache: its size / new tokens per second."""


@dataclass(frozen=True, slots=True)
class Analysis:
    source: str
    requests: int
    span_s: float
    prompt_tokens: int
    fleet: FleetSize
    input: Lengths
    output: Lengths | None
    """None: not known."""
    rates: HitRates
    core: Core
    breadth: Breadth
    working_set: WorkingSet
    hits_by_age: dict[float, float]
    """Shares of the hits, by the seconds since the block was used last."""


def analyze(requests: Iterable[TraceRequest], fleet: FleetSize, *, source: str) -> Analysis:
    """The figures of a trace. Raises KvRouterError."""
    counting: _Counting | None = None
    for request in requests:
        if counting is None:
            check_block_size(request.id_tokens, fleet.block_size)
            counting = _Counting(fleet, request.id_tokens)
        counting.add(request)
    if counting is None:
        raise KvRouterError(f"{source}: no requests in it")
    return counting.result(source)


class _Counting:
    def __init__(self, fleet: FleetSize, id_tokens: int) -> None:
        self._fleet = fleet
        self._id_tokens = id_tokens
        self._sizes = sorted(size for size in {fleet.block_size, *BLOCK_SIZES} if _fits(size, id_tokens))
        self._inputs: Counter[int] = Counter()
        self._outputs: Counter[int] = Counter()
        self._lengths = array("I")
        self._span_s = 0.0
        self._tree = PrefixTree()
        self._by_block_size = dict.fromkeys(self._sizes, 0)
        self._ghosts = {size: Ghosts(_GHOST_BLOCKS, _GHOST_USES, sys.maxsize) for size in CACHE_SIZES}
        self._by_cache_size = dict.fromkeys(CACHE_SIZES, 0)
        each = fleet.blocks_each * fleet.block_size // id_tokens
        self._random = RandomPlacement(fleet.workers, each, random.Random(0).randrange)
        self._perfect = PerfectPlacement(fleet.workers, each)
        self._random_hits = self._perfect_hits = 0

    def add(self, request: TraceRequest) -> None:
        names = sequence_hashes([BlockHash(id_) for id_ in request.hash_ids])
        length, count = request.prompt_tokens, len(names)
        self._inputs[length] += 1
        self._outputs[request.output_tokens] += 1
        self._lengths.append(length)
        self._span_s = request.arrival_s
        known = self._tree.visit(names, request.arrival_s)
        for size in self._sizes:
            self._by_block_size[size] += self._hit_tokens(known, length, size)
        size = self._fleet.block_size
        for multiple, ghosts in self._ghosts.items():
            before = ghosts.pooled_misses
            ghosts.use(names, count, int(self._fleet.tokens * multiple) // self._id_tokens)
            depth = count - (ghosts.pooled_misses - before)
            self._by_cache_size[multiple] += self._hit_tokens(depth, length, size)
        self._random_hits += self._hit_tokens(count - self._random.place(names), length, size)
        self._perfect_hits += self._hit_tokens(count - self._perfect.place(names), length, size)

    def _hit_tokens(self, depth: int, length: int, block_size: int) -> int:
        """Of a prompt with so many ids cached. An engine always computes the last token.

        Where blocks are sampled, a depth below 0 makes up for others that are too large.
        """
        return min(depth * self._id_tokens, length - 1) // block_size * block_size

    def result(self, source: str) -> Analysis:
        tokens = sum(length * number for length, number in self._inputs.items())
        return Analysis(
            source=source,
            requests=self._inputs.total(),
            span_s=self._span_s,
            prompt_tokens=tokens,
            fleet=self._fleet,
            input=Lengths.of(self._inputs),
            output=Lengths.of(self._outputs) if any(self._outputs) else None,
            rates=self._rates(tokens),
            core=self._core(),
            breadth=self._breadth(),
            working_set=self._working_set(),
            hits_by_age=self._hits_by_age(),
        )

    def _rates(self, tokens: int) -> HitRates:
        by_block_size = {size: hits / tokens for size, hits in self._by_block_size.items()}
        by_cache_size = {multiple: hits / tokens for multiple, hits in self._by_cache_size.items()}
        return HitRates(
            endless=by_block_size[self._fleet.block_size],
            pooled=by_cache_size[1.0],
            perfect=self._perfect_hits / tokens,
            random=self._random_hits / tokens,
            perfect_busiest=self._perfect.busiest,
            by_block_size=by_block_size,
            by_cache_size=by_cache_size,
        )

    def _core(self) -> Core:
        tree, size = self._tree, self._id_tokens
        depths = [
            min(depth * size, length) for depth, length in zip(tree.core_depths, self._lengths, strict=True)
        ]
        of_depth = percentiles(depths)
        ratios = sorted(depth / length for depth, length in zip(depths, self._lengths, strict=True))
        of_ratio = percentiles(ratios)
        return Core(
            nodes=tree.core_blocks,
            distinct=tree.blocks,
            id_tokens=size,
            depth_p50=int(of_depth.p50),
            depth_p90=int(of_depth.p90),
            depth_max=max(depths),
            ratio_p50=of_ratio.p50,
            ratio_p90=of_ratio.p90,
            ratios=[round(ratios[(len(ratios) - 1) * percent // 100], 4) for percent in range(101)],
            is_estimate=tree.scale > 1,
        )

    def _breadth(self) -> Breadth:
        parting, total = self._tree.parting(), self._inputs.total()
        shares = [branch.requests / total for branch in parting.branches]
        squares = sum(share * share for share in shares)
        return Breadth(
            trunk=self._prefix(parting.trunk, total),
            prefixes=len(shares),
            effective=sum(shares) ** 2 / squares if squares else 0.0,
            top=[self._prefix(branch, total) for branch in parting.branches[:_NAMED]],
            classes=_classes(shares),
            alone=1.0 - sum(shares),
            separating_blocks=-(-(parting.trunk.depth + 1) * self._id_tokens // self._fleet.block_size),
        )

    def _prefix(self, branch: Branch, total: int) -> Prefix:
        return Prefix(branch.requests / total, branch.requests, branch.depth * self._id_tokens)

    def _working_set(self) -> WorkingSet:
        distinct = self._tree.blocks * self._id_tokens
        reused = self._tree.core_blocks * self._id_tokens
        lifetime_s = self._fleet.tokens * self._span_s / distinct
        return WorkingSet(distinct, reused, self._fleet.tokens, lifetime_s)

    def _hits_by_age(self) -> dict[float, float]:
        total = self._tree.ages.total()
        return {age_s: hits / total for age_s, hits in sorted(self._tree.ages.items())}


def _classes(shares: Sequence[float]) -> list[ShareClass]:
    classes, above = [], float("inf")
    for least in _CLASSES:
        found = [share for share in shares if least <= share < above]
        classes.append(ShareClass(least, len(found), sum(found)))
        above = least
    return classes


def _fits(block_size: int, id_tokens: int) -> bool:
    return not block_size % id_tokens or not id_tokens % block_size
