"""What was decided, kept raw for a while, and explained when somebody asks.

    route ──append──> [ …, request + candidates + choice ]       no terms: they are computed on reading
                          │
                          └──explain──> Decision, as a dry run would have told it

A decision keeps the candidates that were formed for it anyway, so keeping it costs a record.
Bounds: `capacity` decisions, and an estimate of their bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Self

from msgspec import Struct

from kvrouter.core.routing.policy import Candidate, RouteRequest
from kvrouter.core.routing.selection import Decision, Selection, Verdict
from kvrouter.core.wire.ids import Target

MAX_BYTES = 64 * 1024 * 1024
_CANDIDATE_BYTES = 400
_HASH_BYTES = 40
"""Measured roughly: a record of 16 fields with its numbers; an int in a list."""


class Decided(Struct, frozen=True):
    """One choice as it was made."""

    request: RouteRequest
    now: float
    selection: Selection
    overlap_weight: float | None
    temperature: float
    unseen: float
    group_turn: int
    """The one that was taken, or would have been (two-stage)."""
    order: tuple[Target, ...]
    """The choice, then where it would have been tried next."""
    candidates: Sequence[Candidate]
    eligible: Sequence[Candidate]
    refusals: dict[Target, str]
    """Targets that were no candidates, and why."""
    about_bytes: int
    """What keeping it takes."""

    @classmethod
    def of(  # noqa: PLR0917  # on the hot path: keywords cost
        cls,
        request: RouteRequest,
        selection: Selection,
        order: tuple[Target, ...],
        candidates: Sequence[Candidate],
        eligible: Sequence[Candidate],
        refusals: dict[Target, str],
    ) -> Self:
        """With what the state says now."""
        state = selection.state
        weight, temperature, unseen = state.overlap_weight, state.temperature, state.unseen
        turn = state.group_turn - 1  # the choice has been made
        about_bytes = len(candidates) * _CANDIDATE_BYTES + len(request.text)
        for prompt in request.prompts:
            about_bytes += len(prompt.hashes) * _HASH_BYTES
        return cls(
            request, state.now, selection, weight, temperature, unseen, turn,
            order, candidates, eligible, refusals, about_bytes,
        )  # fmt: skip

    def explain(self) -> Decision:
        """Each candidate's terms, and what removed the others.

        Tables that a policy reads beside the candidates (`Policy.reads_tables`) are those of this moment.
        """
        state = replace(
            self.selection.state,
            now=self.now,
            overlap_weight=self.overlap_weight,
            temperature=self.temperature,
            unseen=self.unseen,
            group_turn=self.group_turn,
        )
        selection = replace(self.selection, state=state)
        told = selection.terms(self.request, self.eligible)
        verdicts = [Verdict(one.target, one, terms) for one, terms in zip(self.eligible, told, strict=True)]
        verdicts += self._removed(selection)
        verdicts += [Verdict(target, None, {}, why) for target, why in self.refusals.items()]
        return Decision(
            self.request.request_id,
            self.now,
            self.order,
            tuple(verdicts),
            selection.ties(verdicts, self.order),
        )

    def _removed(self, selection: Selection) -> list[Verdict]:
        if len(self.eligible) == len(self.candidates):
            return []
        kept = {candidate.target for candidate in self.eligible}
        why = selection.removed(self.request, self.candidates)
        gone = [one for one in self.candidates if one.target not in kept]
        return [Verdict(one.target, one, {}, why.get(one.target, "a filter, then")) for one in gone]


class DecisionRing:
    """The last decisions of all pools, oldest first."""

    def __init__(self, capacity: int, max_bytes: int = MAX_BYTES) -> None:
        self.capacity = capacity
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: deque[Decided] = deque()

    def __len__(self) -> int:
        return len(self._kept)

    def append(self, decided: Decided) -> None:
        """Keep this one; the oldest go when there is no room."""
        kept = self._kept
        kept.append(decided)
        self._bytes += decided.about_bytes
        while len(kept) > self.capacity or (self._bytes > self._max_bytes and len(kept) > 1):
            self._bytes -= kept.popleft().about_bytes

    def of(self, request_id: str) -> list[Decided]:
        """What was decided for a request, oldest first: several if it was tried again. Walks the ring."""
        return [decided for decided in self._kept if decided.request.request_id == request_id]

    def last(self, most: int) -> list[Decided]:
        """The newest, newest first."""
        return list(islice(reversed(self._kept), most))
