"""What a fleet is asked in the simulator: the requests of a trace, and what caches could have had of them.

Generated requests are in generated.py. Blocks have 512 tokens, the size of the trace's hash ids.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from kvrouter.core.tables.ghosts import Ghosts
from kvrouter.lab.simulate.engines import Arrival
from kvrouter.lab.simulate.traces import TRACE_ID_TOKENS, TraceRequest, named_blocks

BLOCK = TRACE_ID_TOKENS


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests at their own pace. `draw(seed)` returns them in order of arrival.

    Those that wait for answers to others stand after these, where they would come if answers took no time.
    """

    name: str
    draw: Callable[[int], list[Arrival]]
    warm_up: int = 0
    """The first requests, which are not measured."""

    def arrivals(self, seed: int, pace: float, leaving: float = 0.0) -> list[Arrival]:
        """The requests, `pace` times as fast. A share of them `leaving` is cancelled by its client."""
        chance = random.Random(f"{self.name} leaves {seed}")
        return [
            replace(arrival, at=arrival.at / pace, leaves_after_s=_patience_s(chance, leaving))
            for arrival in self.draw(seed)
        ]


def working_set_blocks(arrivals: Sequence[Arrival]) -> int:
    """The distinct full blocks of all prompts."""
    return len({hash_ for arrival in arrivals for hash_ in arrival.hashes})


def cache_of(workload: Workload, kv_tokens: int, workers: int) -> float:
    """The blocks of all engines, of so many tokens each, as a share of the working set."""
    # half a block more: rounding down gives the blocks of an engine again
    return (kv_tokens // BLOCK + 0.5) * workers / (working_set_blocks(workload.draw(0)) or 1)


def largest_blocks(arrivals: Sequence[Arrival]) -> int:
    """The blocks that the largest request needs."""
    return max(-(-(one.prompt_tokens + one.output_tokens) // BLOCK) for one in arrivals)


@dataclass(frozen=True, slots=True)
class Achievable:
    """Prompt tokens that caches which all engines share would have had."""

    endless: int
    pooled: int
    """In one cache with as many blocks as all engines together have for their own."""


def achievable(
    arrivals: Sequence[Arrival], room_blocks: int, *, warm_up: int = 0, block_size: int = BLOCK
) -> Achievable:
    """What was achievable after the warm-up; `room_blocks`: those of all engines."""
    # as a router counts them live, and exact: no block is left out
    ghosts = Ghosts(sys.maxsize, sys.maxsize, sys.maxsize)
    blocks = [0, 0]
    for number, arrival in enumerate(arrivals):
        misses = ghosts.endless_misses, ghosts.pooled_misses
        most = min(len(arrival.hashes), (arrival.prompt_tokens - 1) // block_size)
        ghosts.use(arrival.hashes, most, room_blocks)
        if number >= warm_up:
            blocks[0] += most - (ghosts.endless_misses - misses[0])
            blocks[1] += most - (ghosts.pooled_misses - misses[1])
    return Achievable(blocks[0] * block_size, blocks[1] * block_size)


def trace(requests: Sequence[TraceRequest]) -> Workload:
    """A Mooncake trace."""
    return Workload("trace", lambda seed: [as_arrival(request) for request in _drawn(requests, seed)])


def zero(requests: Sequence[TraceRequest]) -> Workload:
    """The same lengths, and no block twice."""

    def draw(seed: int) -> list[Arrival]:
        numbers = itertools.count()
        return [
            prompt_of(one.arrival_s, [(next(numbers), one.prompt_tokens)], one.output_tokens)
            for one in _drawn(requests, seed)
        ]

    return Workload("zero", draw)


def _drawn(requests: Sequence[TraceRequest], seed: int) -> Iterator[TraceRequest]:
    """The requests of one timestamp at random moments before the next timestamp, in their order."""
    chance = random.Random(f"trace {seed}")
    bursts = [list(burst) for _, burst in itertools.groupby(requests, key=lambda one: one.arrival_s)]
    starts = [burst[0].arrival_s for burst in bursts]
    gaps = [later - start for start, later in itertools.pairwise(starts)]
    for burst, gap in zip(bursts, [*gaps, gaps[-1] if gaps else 0.0], strict=True):
        moments = sorted(chance.random() * gap for _ in burst)
        for request, moment in zip(burst, moments, strict=True):
            yield replace(request, arrival_s=request.arrival_s + moment)


def as_arrival(request: TraceRequest) -> Arrival:
    hashes = named_blocks(request, BLOCK)
    return Arrival(
        request.arrival_s, hashes, request.prompt_tokens, max(1, request.output_tokens), text_of(hashes)
    )


def prompt_of(at: float, segments: Sequence[tuple[int, int]], output_tokens: int) -> Arrival:
    """A prompt of segments `(number, tokens)`; segments of one number share their tokens."""
    ids: list[int] = []
    chain, tokens = 0, 0
    for number, length in segments:
        first, tokens = tokens // BLOCK, tokens + length
        # a block that two segments share belongs to the later one
        del ids[first:]
        for place in range(first, -(-tokens // BLOCK)):
            chain = hash((chain, number, place)) & (1 << 63) - 1
            ids.append(chain)
    return as_arrival(TraceRequest(at, tokens, output_tokens, tuple(ids)))


def text_of(hashes: Sequence[int]) -> str:
    """Equal blocks become equal texts of four characters each."""
    return "".join(chr(0x4E00 + hash_ % 20_000) * 4 for hash_ in hashes)


def _patience_s(chance: random.Random, leaving: float) -> float:
    """When the client leaves: within 5 s, if it is one that leaves."""
    return chance.uniform(0.0, 5.0) if chance.random() < leaving else math.inf
