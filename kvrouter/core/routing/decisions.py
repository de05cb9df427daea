"""Past decisions, kept for a while as they were made, and explained on request (`/decisions`).

    route ──append──> [ …, request + candidates + choice ]       without terms: computed when it is read
                          │
                          └──explain──> Decision, as a dry run would have explained it

The candidates of a decision were formed anyway, so keeping them costs one record. Bounds: `capacity`
decisions, and MAX_BYTES of them by estimate.
"""

from __future__ import annotations

from collections import deque
from itertools import islice

from msgspec import Struct
from msgspec.structs import replace

from kvrouter.core.routing.builtin_policy import Moment
from kvrouter.core.routing.candidates import Candidates
from kvrouter.core.routing.pairs import Sharing
from kvrouter.core.routing.policy import RouteRequest
from kvrouter.core.routing.selection import Decision, Selection
from kvrouter.core.wire.ids import Target

MAX_BYTES = 64 * 1024 * 1024

# Measured roughly: a Candidate with its numbers; an int in a list.
_CANDIDATE_BYTES = 400
_HASH_BYTES = 40


class Decided(Struct, frozen=True, gc=False):
    """One choice as it was made."""

    request: RouteRequest
    moment: Moment
    selection: Selection
    order: tuple[Target, ...]
    """The choice, then the targets to try if it fails."""
    candidates: Candidates
    eligible: Candidates
    refusals: dict[Target, str]
    """Targets that were not candidates, and why."""
    sharing: Sharing | None = None
    """None: two workers were no choice. Of a pair, `order`, `eligible`, `selection` are the second one's."""

    def about_bytes(self) -> int:
        """An estimate of what keeping it takes."""
        request = self.request
        hashes = sum([len(prompt.hashes) for prompt in request.prompts]) if request.prompts else 0
        return len(self.candidates) * _CANDIDATE_BYTES + hashes * _HASH_BYTES + len(request.text)

    def explain(self) -> Decision:
        """Each candidate's terms, and what removed the others.

        Tables that a policy reads (`BuiltInPolicy.reads_tables`) are read as they are now, not as they were.
        """
        sharing = self.sharing
        if sharing is not None and sharing.pair is not None:
            decision = sharing.pair.explain(self.request, self.candidates, self.moment, self.refusals)
        else:
            decision = self.selection.decision(
                self.request,
                self.candidates,
                eligible=self.eligible,
                order=self.order,
                moment=self.moment,
                refusals=self.refusals,
            )
        return decision if sharing is None else replace(decision, remote=sharing.terms)


class DecisionRing:
    """The last decisions of all pools, oldest first."""

    def __init__(self, capacity: int, max_bytes: int = MAX_BYTES) -> None:
        self.capacity = capacity
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: deque[Decided] = deque()
        self._sizes: deque[int] = deque()  # of each kept one

    def __len__(self) -> int:
        return len(self._kept)

    def append(self, decided: Decided) -> None:
        """Keep a decision, and drop the oldest ones above the bounds."""
        kept, size = self._kept, decided.about_bytes()
        kept.append(decided)
        self._sizes.append(size)
        self._bytes += size
        # the newest stays even if it alone exceeds the bytes: --log-decisions reads it at once
        while len(kept) > self.capacity or (self._bytes > self._max_bytes and len(kept) > 1):
            kept.popleft()
            self._bytes -= self._sizes.popleft()

    def of(self, request_id: str) -> list[Decided]:
        """The decisions for a request, oldest first: one for each attempt. Walks the whole ring."""
        return [decided for decided in self._kept if decided.request.request_id == request_id]

    def last(self, most: int) -> list[Decided]:
        """The newest decisions, newest first."""
        return list(islice(reversed(self._kept), most))
