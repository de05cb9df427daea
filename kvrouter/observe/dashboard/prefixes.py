"""GET /prefixes: which prefixes the last requests of this replica shared. A sample: the decisions it keeps.

kept decision ──> the last block that its target had ──counted──> rows, the most frequent first
"""

from __future__ import annotations

import asyncio

import msgspec
from msgspec import Struct

from kvrouter.core.routing.decisions import Decided, DecisionRing
from kvrouter.relay.answer import Answer
from kvrouter.relay.request import Request

MOST_READ = 10_000
MOST_ROWS = 50
# So many decisions are read in one piece of the event loop's time.
SLICE = 50


class PrefixRow(Struct, frozen=True, gc=False):
    """Requests that continued one prefix. `holders`: the targets that had it at the last of them."""

    model: str
    hash: str
    blocks: int
    requests: int
    holders: list[str]


class PrefixSample(Struct, frozen=True):
    """`read`: decisions looked at; `cached`: those whose target had a part of the prompt."""

    read: int
    cached: int
    prefixes: list[PrefixRow]


class Prefixes:
    """`kept` None: no decisions are kept."""

    def __init__(self, kept: DecisionRing | None) -> None:
        self._kept = kept

    async def view(self, _request: Request) -> Answer:
        return Answer(200, msgspec.json.encode(await self.sample()) + b"\n", {"cache-control": "no-store"})

    async def sample(self) -> PrefixSample:
        """The most frequent prefixes. Reads the kept decisions in slices, with other work in between."""
        kept = self._kept.last(MOST_READ) if self._kept is not None else []
        counts: dict[tuple[int, int], int] = {}
        newest: dict[tuple[int, int], Decided] = {}
        for number, decided in enumerate(kept, 1):
            found = _deepest(decided)
            if found is not None:
                counts[found] = counts.get(found, 0) + 1
                newest.setdefault(found, decided)
            if not number % SLICE:
                await asyncio.sleep(0)
        most = sorted(counts, key=lambda key: -counts[key])[:MOST_ROWS]
        rows = [_row(key, counts[key], newest[key]) for key in most]
        return PrefixSample(len(kept), sum(counts.values()), rows)


def _deepest(decided: Decided) -> tuple[int, int] | None:
    """Hash and number of the last block that the chosen target had; None: none, or tokens are unknown."""
    prompts, candidates = decided.request.prompts, decided.candidates
    if len(prompts) != 1 or prompts[0].is_text:
        return None
    hashes = prompts[0].hashes
    blocks = min(candidates[candidates.targets().index(decided.order[0])].overlap_blocks, len(hashes))
    return (int(hashes[blocks - 1]), blocks) if blocks else None


def _row(key: tuple[int, int], requests: int, decided: Decided) -> PrefixRow:
    hash_, blocks = key
    holders = [str(one.target) for one in decided.candidates if one.overlap_blocks >= blocks]
    return PrefixRow(decided.candidates[0].card.model, f"{hash_:016x}", blocks, requests, holders)
