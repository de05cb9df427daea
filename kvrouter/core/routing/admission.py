"""Admission: a request waits while every target that it may go to is full.

    arrives ──may pass?──> routed
        │ no
        v
    [ … waiting, in order … ] ──admit──> routed            a target fell below the threshold
        │         │
        │         └─ leave(ticket)                         the client disconnected
        └─ expire(now)                                     waited `max_wait_s`: 503

A target is full if its charged prefill tokens exceed `threshold × max_batched_tokens`. Order is by
`arrival + priority × ageing_s`: as in vLLM the lower priority goes first. One step of priority is worth
`ageing_s` seconds of waiting. A priority counts for at most a quarter of `max_wait_s`, either way, so
no request starves; with `ageing_s` 0 it does not count. Equal priorities keep their order of arrival
(what Ray's FIFOMixin promises, in one replica). While requests wait, new ones wait behind them.

Tenants (keys of clients) have a queue each in a lane. The next request is that of the tenant that was served
least: computed and output tokens, at all replicas, by its weight (virtual token counters, as in VTC). One
that comes back begins where the others are, so nothing can be saved up. While a tenant waits, each request
of others that goes first brings them nearer to its turn, so none starves, whatever they send. Of the queue's
room a tenant has a part, so that none can fill it.

A turn is worth little if all engines are in the midst of a long prompt. So a tenant that was served more than
another one at work gets an idle target only, and only if SPARE of them stay idle for the others, who may go
first meanwhile; at most half of all. One spare target is enough (tests/core/routing/test_admission.py); where
several replicas decide in the same instant, one of two is left (`scripts/bench neighbour`).

Requests that may go to different targets wait in different lanes: else one that waits for a full worker
would hold up those for an idle one. Order holds within a lane; `max_waiting` counts all lanes.
The caller does the waiting and passes the time in.

Invariants: `_waiting` holds exactly the tickets that have not left, in order of arrival; the heap of a lane
and tenant holds all of its waiting tickets, and may hold some that have left; each has a waiting ticket.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field

from kvrouter.core.routing.policy import Candidate
from kvrouter.errors import QueueFullError, counted
from kvrouter.settings.declare import Settings, setting

# One Free wakes the queues of all replicas. Each waits a random time, up to this many seconds per peer, so
# that they do not all send to the same target.
WAKE_SPREAD_S = 0.002
# Where one too many takes the room that is left for others, each has another place in the order. A booking is
# with all peers within this time, also in a burst.
WAKE_PLACE_S = 0.01

# How many targets stay idle for a tenant that was served less; twice as many with several replicas.
SPARE = 1
# Charged at most this part of what is full, a target is idle.
IDLE_PART = 1 / 16

# A heap is rebuilt once it holds more than this many more departed tickets than waiting ones.
_FEW_LEFT = 64


@dataclass(frozen=True, slots=True)
class AdmissionSettings(Settings):
    """`threshold` 0: no request waits."""

    heading = "Waiting for a worker"

    threshold: float = setting(
        0.0,
        "requests wait while every worker has more prefill tokens charged than X times its "
        "max_batched_tokens; 0: never",
        name="router-queue-threshold",
        least=0,
        reloadable=True,
    )
    max_waiting: int = setting(
        1000,
        "most requests that wait per model; one more gets a 503",
        name="router-queue-size",
        least=1,
        reloadable=True,
    )
    max_wait_s: float = setting(
        30.0,
        "seconds that a request waits; then it gets a 503",
        name="router-queue-timeout-s",
        old=("--router-queue-timeout",),
        above=0,
        reloadable=True,
    )
    ageing_s: float = setting(
        1.0,
        "seconds of waiting that count as much as one step of priority",
        name="router-queue-ageing-s",
        above=0,
    )
    """Seconds of waiting that one step of priority is worth; 0: first come, first served."""

    def delay_s(self, priority: int) -> float:
        """Seconds by which a priority moves a request back in the order; below 0 it moves it forward."""
        # At most a quarter of the longest wait, either way: the greatest and the least priority are then half
        # of it apart, so that no flow of urgent requests can keep one out until it times out.
        most = self.max_wait_s / 4
        return min(max(priority * self.ageing_s, -most), most)


@dataclass(frozen=True, slots=True)
class Ticket:
    """One waiting request."""

    number: int
    arrived: float
    priority: int
    lane: str = ""
    tenant: str = ""


@dataclass(slots=True)
class _TenantLine:
    """A tenant's requests that may go to the same targets: a heap of (rank, number), and how many wait."""

    order: list[tuple[float, int]] = field(default_factory=list)
    waiting: int = 0

    def add(self, ticket: Ticket, settings: AdmissionSettings) -> None:
        # without ageing all ranks are equal, and the ticket's number keeps the order of arrival
        rank = ticket.arrived + settings.delay_s(ticket.priority) if settings.ageing_s else 0.0
        heapq.heappush(self.order, (rank, ticket.number))
        self.waiting += 1

    def first(self, waiting: Container[int]) -> tuple[float, int]:
        """Rank and number of the next ticket. There must be a waiting one."""
        while self.order[0][1] not in waiting:
            heapq.heappop(self.order)
        return self.order[0]

    def tidy(self, waiting: Container[int]) -> None:
        self.order = [entry for entry in self.order if entry[1] in waiting]
        heapq.heapify(self.order)


class AdmissionQueue:
    """The waiting requests of one pool. `served(tenant)`: what it was served so far, by its weight."""

    def __init__(
        self,
        settings: AdmissionSettings,
        served: Callable[[str], float] = lambda _: 0.0,
        halvings: Callable[[], int] = lambda: 0,
    ) -> None:
        """`halvings`: how often what was served has been halved so far."""
        self.settings = settings
        self._served = served
        self._halvings = halvings
        self._halved = halvings()
        self._lifts: dict[str, float] = {}
        """What is added for a tenant that was away; fades as what was served does."""
        self._turn = 0.0
        """That of the last request that was admitted."""
        self._of_tenants: Counter[str] = Counter()
        self._waiting: dict[int, Ticket] = {}
        self._lanes: dict[str, dict[str, _TenantLine]] = {}
        self._last_number = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_on(self) -> bool:
        """Whether requests can wait at all."""
        return self.settings.threshold > 0

    def is_saturated(self, eligible: Iterable[Candidate], *, spare: int = 0) -> bool:
        """Whether all of these targets are full; False if there are none.

        `spare`: how many must stay idle for others; 0: these may be full, too.
        """
        if not self.is_on:
            return False
        full = [self._is_full(candidate, IDLE_PART if spare else 1.0) for candidate in eligible]
        return bool(full) and full.count(False) <= min(spare, len(full) // 2)

    def is_waited_in(self, lane: str = "") -> bool:
        """Whether requests wait in the lane: a new one must wait behind them."""
        return lane in self._lanes

    def join(self, now: float, priority: int = 0, lane: str = "", tenant: str = "") -> Ticket:
        """Queue a request. Raises QueueFullError if `max_waiting`, or a tenant's part of it, wait already."""
        self._fade()
        count = self._of_tenants[tenant] if tenant else len(self._waiting)
        if count >= self._room(tenant):
            waiting = counted(count, "request")
            raise QueueFullError(f"all workers are busy, with {waiting} in the queue; try again later")
        if tenant and not self._of_tenants[tenant]:
            least = min([self._turn_of(one) for one in self._of_tenants if one], default=self._turn)
            self._lifts[tenant] = max(self._lifts.get(tenant, 0.0), least - self._served(tenant))
        self._last_number += 1
        ticket = Ticket(self._last_number, now, priority, lane, tenant)
        self._waiting[ticket.number] = ticket
        self._of_tenants[tenant] += 1
        self._lanes.setdefault(lane, {}).setdefault(tenant, _TenantLine()).add(ticket, self.settings)
        return ticket

    def _room(self, tenant: str) -> int:
        """The most requests that wait; of tenants at most half, or an equal part if more of them wait."""
        most = self.settings.max_waiting
        if not tenant:
            return most
        others = len(self._of_tenants.keys() - {tenant, ""})
        return max(1, most // max(2, others + 1))

    def _fade(self) -> None:
        passed = self._halvings() - self._halved
        if passed:
            self._halved += passed
            self._turn *= 0.5**passed
            self._lifts = {tenant: lift * 0.5**passed for tenant, lift in self._lifts.items()}

    def _turn_of(self, tenant: str) -> float:
        return self._served(tenant) + self._lifts.get(tenant, 0.0)

    def firsts(self) -> list[Ticket]:
        """The next ticket of each lane."""
        return [first for lane in self._lanes if (first := self.first(lane)) is not None]

    def lanes(self) -> list[str]:
        """Those in which requests wait."""
        return list(self._lanes)

    def first(self, lane: str = "") -> Ticket | None:
        """The next ticket of a lane; None if none waits there."""
        return next(self.in_turn(lane), None)

    def in_turn(self, lane: str = "") -> Iterator[Ticket]:
        """The next ticket of each tenant of a lane, in the order of their turns."""
        lines = self._lanes.get(lane, {})
        heads = [(tenant, line, line.first(self._waiting)) for tenant, line in lines.items()]
        if len(heads) > 1:
            self._fade()
            # of equal turns that of the tenant with fewer requests: it has just come back
            heads.sort(key=lambda one: (self._turn_of(one[0]), one[1].waiting, one[2]))
        for _, _, (_, number) in heads:
            yield self._waiting[number]

    def admit(self, ticket: Ticket, *, has_room: bool, overtakes: bool = False) -> bool:
        """Whether this request may be routed now; if so it leaves the queue.

        `overtakes`: those before it have to leave this room.
        """
        if not has_room or not (overtakes or self.first(ticket.lane) == ticket):
            return False
        self._turn = max(self._turn, self._turn_of(ticket.tenant))
        self.leave(ticket)
        return True

    def leave(self, ticket: Ticket) -> None:
        """Remove a request that was admitted or whose client disconnected; a second call changes nothing."""
        if self._waiting.pop(ticket.number, None) is None:
            return
        self._of_tenants[ticket.tenant] -= 1
        if not self._of_tenants[ticket.tenant]:
            del self._of_tenants[ticket.tenant]
        lines = self._lanes[ticket.lane]
        line = lines[ticket.tenant]
        line.waiting -= 1
        if not line.waiting:
            del lines[ticket.tenant]
            if not lines:
                del self._lanes[ticket.lane]
        elif len(line.order) > _FEW_LEFT + 2 * line.waiting:
            line.tidy(self._waiting)

    def expire(self, now: float) -> list[Ticket]:
        """Remove and return the tickets that have waited `max_wait_s`; their clients get a 503."""
        over = [one for one in self._waiting.values() if now - one.arrived >= self.settings.max_wait_s]
        for ticket in over:
            self.leave(ticket)
        return over

    def longest_wait_s(self, now: float) -> float:
        """How long the oldest waiting request has waited; 0 if none waits."""
        oldest = next(iter(self._waiting.values()), None)  # `_waiting` is in order of arrival
        return now - oldest.arrived if oldest else 0.0

    def wake_after_s(self, peers: int, chance: float, *, place: int | None = None) -> float:
        """How long to wait after a target has capacity again. Peers see that at the same moment.

        `chance` is in [0, 1). `place`: behind requests of tenants that were served less, which may wait at a
        peer, and behind as many replicas.
        """
        if place is None:
            return chance * WAKE_SPREAD_S * peers
        return WAKE_SPREAD_S * peers + place * WAKE_PLACE_S

    def _is_full(self, candidate: Candidate, part: float) -> bool:
        capacity = candidate.card.max_batched_tokens
        return capacity > 0 and candidate.charged_tokens > self.settings.threshold * capacity * part
