"""Admission: requests wait here while every target they may go to has more prefill than it can do soon.

    arrives ──may pass?──> routed
        │ no
        v
    [ … waiting, in order … ] ──next(now)──> routed        a target fell below the threshold
        │         │
        │         └─ leave(ticket)                         the client went away
        └─ expire(now)                                     waited too long: 503

Full is a target whose charged prefill tokens exceed `threshold × max_batched_tokens`. Order is by
`arrival − priority × ageing_s`: a step of priority is worth so many seconds of waiting, so nobody
starves, and equal priorities keep their order of arrival (Ray's FIFOMixin promise, in one replica).
While anyone waits, whoever arrives waits too. The caller does the waiting and passes the time in.

Invariant: `_waiting` holds exactly the tickets that have not left; the heap may hold more.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from kvrouter.core.policy import Candidate
from kvrouter.errors import QueueFullError

WAKE_SPREAD_S = 0.002
"""Per peer: N queues wake at once on one Free, and must not all send there."""


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """`threshold` 0: nobody ever waits."""

    threshold: float = 0.0
    max_waiting: int = 1000
    max_wait_s: float = 30.0
    ageing_s: float = 1.0
    """What a step of priority is worth, in seconds of waiting; 0: first come, first served."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """One waiting request."""

    number: int
    arrived: float
    priority: int


class AdmissionQueue:
    """The requests of one pool that wait for room."""

    def __init__(self, settings: AdmissionSettings) -> None:
        self.settings = settings
        self._waiting: dict[int, Ticket] = {}
        self._order: list[tuple[float, int]] = []
        self._last_number = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def is_saturated(self, eligible: Iterable[Candidate]) -> bool:
        """Whether all of these are full, so that a request for them has to wait."""
        if not self.settings.threshold:
            return False
        full = [self._is_full(candidate) for candidate in eligible]
        return bool(full) and all(full)

    def must_wait(self, eligible: Iterable[Candidate]) -> bool:
        """Whether a request that arrives now has to queue: nobody is overtaken."""
        return bool(self._waiting) or self.is_saturated(eligible)

    def join(self, now: float, priority: int = 0) -> Ticket:
        """Queue. Raises QueueFullError when too many wait already."""
        if len(self._waiting) >= self.settings.max_waiting:
            raise QueueFullError(
                f"all workers are busy and {len(self._waiting)} requests wait already; try again later"
            )
        self._last_number += 1
        ticket = Ticket(self._last_number, now, priority)
        self._waiting[ticket.number] = ticket
        rank = now - priority * self.settings.ageing_s if self.settings.ageing_s else 0.0
        heapq.heappush(self._order, (rank, ticket.number))
        return ticket

    def first(self) -> Ticket | None:
        """Who is next."""
        while self._order and self._order[0][1] not in self._waiting:
            heapq.heappop(self._order)
        return self._waiting[self._order[0][1]] if self._order else None

    def admit(self, ticket: Ticket, eligible: Iterable[Candidate]) -> bool:
        """Whether this request may be routed now; if so it has left the queue."""
        if self.first() != ticket or self.is_saturated(eligible):
            return False
        self.leave(ticket)
        return True

    def leave(self, ticket: Ticket) -> None:
        """Its client went away, or it was admitted; a second time changes nothing."""
        self._waiting.pop(ticket.number, None)
        if len(self._order) > 64 + 2 * len(self._waiting):  # many left from the middle
            self._order = [entry for entry in self._order if entry[1] in self._waiting]
            heapq.heapify(self._order)

    def expire(self, now: float) -> list[Ticket]:
        """Those that have waited too long: they have left, and their clients get a 503."""
        over = [one for one in self._waiting.values() if now - one.arrived >= self.settings.max_wait_s]
        for ticket in over:
            self.leave(ticket)
        return over

    def longest_wait_s(self, now: float) -> float:
        """How long the one who has waited longest has waited."""
        oldest = next(iter(self._waiting.values()), None)  # in order of arrival
        return now - oldest.arrived if oldest else 0.0

    def wake_after_s(self, peers: int, chance: float) -> float:
        """How long to hesitate when room appears, that peers see too; `chance` in [0, 1)."""
        return chance * WAKE_SPREAD_S * peers

    def _is_full(self, candidate: Candidate) -> bool:
        capacity = candidate.card.max_batched_tokens
        return capacity > 0 and candidate.charged_tokens > self.settings.threshold * capacity
