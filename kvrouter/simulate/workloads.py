"""What a fleet is asked in the simulator: a trace, or generated requests. A seed gives the same arrivals.

| name | requests |
|---|---|
| trace | those of a Mooncake trace; the seed draws the moments within one of its timestamps |
| docs | questions about long shared documents |
| hot, hot-3, hot-10, hot-40 | a few shared prefixes, each request with its own end |
| zero | the lengths of the conversation trace, nothing shared |
| groups | Heimdall's benchmark: 230 prefixes of 8,192 tokens with five prompts each |
| siblings | bursts of eight requests with one new prefix, within 20 ms |

Blocks have 512 tokens, the size of the trace's hash ids.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from kvrouter.core.tables.ghosts import Ghosts
from kvrouter.simulate.engines import Arrival
from kvrouter.simulate.traces import TRACE_ID_TOKENS, TraceRequest, named_blocks

BLOCK = TRACE_ID_TOKENS

# Long documents, as in tools that answer questions about papers and books: 10k to 60k tokens, log-uniform.
_DOCUMENT_TOKENS = (10_000, 60_000)
_QUESTION_TOKENS = (50, 500)
_DOCUMENT_ANSWER_TOKENS = (16, 160)
_ZIPF = 0.8

_HOT_PREFIX_TOKENS, _HOT_OWN_TOKENS, _HOT_ANSWER_TOKENS, _HOT_RATE = 4096, 600, 128, 60.0
_GROUPS, _GROUP_PROMPTS, _WARM_UP_RATE = 230, 5, 46
_GROUP_RATES, _STAGE = (3, 10, 15, 20, 25, 30, 35, 40, 46, 60, 80, 100), 150
_GROUP_PREFIX_TOKENS, _GROUP_OWN_TOKENS, _GROUP_ANSWER_TOKENS = 8192, 808, 100
_SIBLINGS, _BURST_S = 8, 0.020
_SIBLING_PREFIX_TOKENS, _SIBLING_OWN_TOKENS, _SIBLING_ANSWER_TOKENS = 16 * BLOCK, 500, 200


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests at their own pace. `draw(seed)` returns them in order of arrival."""

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
    ghosts = Ghosts(sys.maxsize, sys.maxsize)
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
    return Workload("trace", lambda seed: [_arrival(request) for request in _drawn(requests, seed)])


def zero(requests: Sequence[TraceRequest]) -> Workload:
    """The same lengths, and no block twice."""

    def draw(seed: int) -> list[Arrival]:
        numbers = itertools.count()
        return [
            _request(one.arrival_s, [(next(numbers), one.prompt_tokens)], one.output_tokens)
            for one in _drawn(requests, seed)
        ]

    return Workload("zero", draw)


def docs(count: int = 3000, documents: int = 2000) -> Workload:
    """Questions about documents, whose popularity is Zipf's with exponent 0.8; ten a second at first."""

    def draw(seed: int) -> list[Arrival]:
        # the documents are the same for all seeds; the seed draws the questions' order and times
        made, chance = random.Random("documents"), random.Random(f"docs {seed}")
        low, high = map(math.log, _DOCUMENT_TOKENS)
        lengths = [int(math.exp(made.uniform(low, high))) for _ in range(documents)]
        weights = list(itertools.accumulate((rank + 1) ** -_ZIPF for rank in range(documents)))
        asked = made.choices(range(documents), cum_weights=weights, k=count)
        questions = [
            (one, made.randint(*_QUESTION_TOKENS), made.randint(*_DOCUMENT_ANSWER_TOKENS)) for one in asked
        ]
        at = 0.0
        arrivals = []
        for number, (document, question, answer) in enumerate(questions):
            at += chance.expovariate(10.0)
            shared, own = (document, lengths[document]), (documents + number, question)
            arrivals.append(_request(at, [shared, own], answer))
        return arrivals

    return Workload("docs", draw)


def hot(prefixes: int = 1, count: int = 2000) -> Workload:
    """Prefixes of 4,096 tokens, each request with 600 tokens of its own; 60 requests a second."""

    def draw(seed: int) -> list[Arrival]:
        chance = random.Random(f"hot {seed}")
        at = 0.0
        arrivals = []
        for number in range(count):
            at += chance.expovariate(_HOT_RATE)
            shared = (chance.randrange(prefixes), _HOT_PREFIX_TOKENS)
            own = (prefixes + number, _HOT_OWN_TOKENS)
            arrivals.append(_request(at, [shared, own], _HOT_ANSWER_TOKENS))
        return arrivals

    return Workload("hot" if prefixes == 1 else f"hot-{prefixes}", draw)


def groups() -> Workload:
    """Heimdall's benchmark: every prompt once at 46 requests/s; then, measured, 150 at each of its rates."""
    prompts = [(group, prompt) for group in range(_GROUPS) for prompt in range(_GROUP_PROMPTS)]

    def draw(seed: int) -> list[Arrival]:
        chance = random.Random(f"groups {seed}")
        rates = [(_WARM_UP_RATE, len(prompts)), *((rate, _STAGE) for rate in _GROUP_RATES)]
        asked = chance.sample(prompts, len(prompts))
        at = 0.0
        arrivals: list[Arrival] = []
        for rate, count in rates:
            for _ in range(count):
                at += chance.expovariate(rate)
                group, prompt = asked[len(arrivals)] if len(arrivals) < len(asked) else chance.choice(prompts)
                shared = (group, _GROUP_PREFIX_TOKENS)
                own = (_GROUPS + group * _GROUP_PROMPTS + prompt, _GROUP_OWN_TOKENS)
                arrivals.append(_request(at, [shared, own], _GROUP_ANSWER_TOKENS))
        return arrivals

    return Workload("groups", draw, warm_up=len(prompts))


def siblings(bursts: int = 300) -> Workload:
    """Bursts of eight requests that share a new prefix of 8,192 tokens; two bursts a second at first."""

    def draw(seed: int) -> list[Arrival]:
        chance = random.Random(f"siblings {seed}")
        at = 0.0
        arrivals = []
        for burst in range(bursts):
            at += chance.expovariate(2.0)
            for place in range(_SIBLINGS):
                own = bursts + burst * _SIBLINGS + place
                segments = [(burst, _SIBLING_PREFIX_TOKENS), (own, _SIBLING_OWN_TOKENS)]
                arrivals.append(_request(at + chance.uniform(0, _BURST_S), segments, _SIBLING_ANSWER_TOKENS))
        return sorted(arrivals, key=lambda one: one.at)

    return Workload("siblings", draw)


def named(name: str, requests: Sequence[TraceRequest]) -> Workload:
    """The workload of a name; `requests` are the trace."""
    kind, _, prefixes = name.partition("-")
    if kind == "hot":
        return hot(int(prefixes or 1))
    made: dict[str, Callable[[], Workload]] = {
        "trace": lambda: trace(requests),
        "zero": lambda: zero(requests),
        "docs": docs,
        "groups": groups,
        "siblings": siblings,
    }
    return made[kind]()


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


def _arrival(request: TraceRequest) -> Arrival:
    hashes = named_blocks(request, tokens_per_id=TRACE_ID_TOKENS, block_size=BLOCK)
    return Arrival(
        request.arrival_s, hashes, request.prompt_tokens, max(1, request.output_tokens), text_of(hashes)
    )


def _request(at: float, segments: Sequence[tuple[int, int]], output_tokens: int) -> Arrival:
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
    return _arrival(TraceRequest(at, tokens, output_tokens, tuple(ids)))


def text_of(hashes: Sequence[int]) -> str:
    """Equal blocks become equal texts of four characters each."""
    return "".join(chr(0x4E00 + hash_ % 20_000) * 4 for hash_ in hashes)


def _patience_s(chance: random.Random, leaving: float) -> float:
    """When the client leaves: within 5 s, if it is one that leaves."""
    return chance.uniform(0.0, 5.0) if chance.random() < leaving else math.inf
