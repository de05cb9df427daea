"""What the router asks of a built-in policy, and what it hands over with the question.

    request, Candidates, Moment ──pick──> place      a question: changes nothing, so a dry run may ask it
    request, choice, Moment ──routed──>              the request is booked: turns advance, tables learn

`pick`, `order` and `terms` must not change anything: `/decisions` asks them again, long after the choice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from msgspec import Struct

from kvrouter.core.routing.candidates import Candidates
from kvrouter.core.routing.cost import FALLBACK_WEIGHT, InBlocks, InSeconds
from kvrouter.core.routing.policy import AUTO, Candidate, OverlapWeight, PolicyHooks, RouteRequest
from kvrouter.core.routing.rests import Rests
from kvrouter.core.tables.arrivals import Arrivals, PrefixShares
from kvrouter.core.tables.no_hit_lru import NoHitLru
from kvrouter.core.tables.prefill_speeds import PrefillRates, PrefillSpeeds, Speed
from kvrouter.core.tables.sessions import SessionTable
from kvrouter.core.tables.text_index import TextIndex
from kvrouter.core.tables.transfers import Transfers
from kvrouter.core.wire.ids import Target


@dataclass(slots=True)
class RoutingTables:
    """What one router remembers of earlier requests. All its modes and filters share these tables."""

    rates: PrefillRates = field(default_factory=PrefillRates)
    texts: TextIndex = field(default_factory=TextIndex)
    no_hit: NoHitLru = field(default_factory=NoHitLru)
    sessions: SessionTable = field(default_factory=SessionTable)
    speeds: PrefillSpeeds = field(default_factory=PrefillSpeeds)
    arrivals: Arrivals = field(default_factory=Arrivals)
    shares: PrefixShares = field(default_factory=PrefixShares)
    rests: Rests = field(default_factory=Rests)
    transfers: Transfers = field(default_factory=Transfers)

    def forget(self, targets: Iterable[Target]) -> None:
        """Remove targets that are gone from every table."""
        gone = frozenset(targets)
        for target in gone:
            self.rates.forget(target)
            self.texts.remove(target)
            self.no_hit.forget(target)
            self.rests.forget(target)
        if gone:
            self.sessions.drop(gone)  # one scan: 40 ms for 100,000 sessions
            self.transfers.forget(target.worker_id for target in gone)


class Moment(Struct, frozen=True, gc=False):
    """The time of one decision, its source of chance, and the tables it may read.

    `random()` returns a number in [0, 1). `unseen` estimates the bookings of other replicas that this
    decision cannot know of yet (core/tables/bookings.py).
    `part`: the share of the replicas that come before this one, in an order that all of them know.
    """

    # Frozen, because a kept decision is explained with the moment it was made in. The tables are the live
    # ones: a copy of them for each decision would cost more than the decision.
    now: float
    random: Callable[[], float]
    tables: RoutingTables
    unseen: float = 0.0
    part: float = 0.0
    speed: Speed = Speed()
    """What is known of the speed of prefill, as of this decision. Like the next two, only for policies that
    read it (`BuiltInPolicy.reads_speed`)."""
    arrivals_per_s: float = 0.0
    """Requests per second, over all replicas."""
    doubt: str = ""
    """Why seconds of prefill are not compared; empty if they may be."""


class BuiltInPolicy(PolicyHooks, ABC):
    """Picks one of the candidates; there is always at least one.

    What it counts from request to request (turns) is its own; what replicas share is in the tables.
    """

    remembers_text: bool = False
    """Whether it reads the texts that targets have computed (`RoutingTables.texts`)."""
    sessions: Literal["", "preferred", "read"] = ""
    """preferred: a session's next request is expected where its last one ran (`Expected` in filters.py);
    read: it reads itself which target a session is bound to."""
    reads_tables: bool = False
    """Whether its terms come from tables, too, and so change with time."""
    reads_speed: bool = False
    """Whether it looks at the speed of prefill, the rate of arrivals, and the doubt of a moment."""
    reads_ends: bool = False
    """Whether it has an `on_request_end`: the length of an answer is read for no other policy."""
    overlap_weight: OverlapWeight | None = None
    """What it weighs overlap by where a request does not say; None: it does not."""
    temperature: float | None = None
    """How far chance may choose; None: it has no such setting."""
    decisive: tuple[str, ...] = ()
    """The terms that decide: candidates equal in these are ties. Empty: all terms decide."""

    @property
    def compares_seconds(self) -> bool:
        """Whether it predicts seconds of prefill, unless a moment has doubts."""
        return self.overlap_weight == AUTO

    @abstractmethod
    def pick(self, request: RouteRequest, candidates: Candidates, moment: Moment) -> int:
        """The index of the candidate to use."""

    def weight(self, request: RouteRequest, moment: Moment) -> OverlapWeight:
        """What overlap counts in this decision, 1 without a setting; `auto`: seconds are compared."""
        weight = self.overlap_weight if request.overlap_weight is None else request.overlap_weight
        if weight == AUTO and (moment.doubt or not self.reads_speed):
            return FALLBACK_WEIGHT
        return 1.0 if weight is None else weight

    def costs(self, request: RouteRequest, candidates: Candidates, moment: Moment) -> InBlocks | InSeconds:
        """What each candidate costs (core/routing/cost.py): the halves of a pair are chosen by it."""
        weight = self.weight(request, moment)
        if weight == AUTO:
            return candidates.costs_in_seconds(moment.now, moment.speed, moment.arrivals_per_s)
        return candidates.costs_in_blocks(weight)

    def order(self, request: RouteRequest, candidates: Candidates, moment: Moment) -> Sequence[int]:
        """The pick, then the candidates to try if it fails. With no others, a retry asks again."""
        return (self.pick(request, candidates, moment),)

    def terms(
        self, request: RouteRequest, candidates: Candidates, moment: Moment, chosen: Candidate | None = None
    ) -> list[dict[str, float]]:
        """What each candidate was judged by, to explain the decision for `chosen`."""
        return [{} for _ in candidates]

    def routed(self, request: RouteRequest, choice: Candidate, moment: Moment) -> None:
        """The request is booked on this candidate."""
