"""Filters: which candidates may be chosen at all, before a policy picks. Pure; each is a value.

    must      Breaker, Busy, MaxOngoing        may leave nobody: then it is a 503, or a queue
    should    Session, Multiplex, Locality     narrow, but never to nobody

What must hold comes first: a preferred worker that is full has left before the preference is asked.
Who names its target (mode direct) is asked for no preference.
Workers that drain, are down or lack the adapter are no candidates from the start (core/fleet/pool.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from kvrouter.core.routing.breaker import CircuitBreakers
from kvrouter.core.routing.builtin_policy import Moment
from kvrouter.core.routing.candidates import Candidates
from kvrouter.core.routing.policy import RouteRequest
from kvrouter.core.wire.heartbeats import Card
from kvrouter.core.wire.ids import Target


class Filter(ABC):
    """Keeps some of the candidates, in their order."""

    name: str
    """What a removed candidate is reported with."""
    is_preference: bool = False
    """Whether it only narrows: where it would leave no candidate, it keeps all."""
    frees_up: bool = False
    """Whether a candidate that it removed returns as soon as a request ends."""
    needs_tokens: bool = False
    """Whether it looks at charged tokens or blocks, so that earlier prompts have to be tokenized."""
    keeps_sessions: bool = False
    """Whether it looks at where sessions are bound."""

    @abstractmethod
    def keep(self, request: RouteRequest, candidates: Candidates, moment: Moment) -> Candidates:
        """The candidates that stay."""

    def bound_target(self, _request: RouteRequest, _moment: Moment) -> Target | None:
        """The only target that the request may go to, if this filter demands one."""
        return None


@dataclass(frozen=True, slots=True)
class Busy(Filter):
    """Passes over targets above a threshold. Names are Dynamo's; None: that one does not apply.

    `active_decode_blocks` is a fraction of the target's KV blocks, `active_prefill_tokens` a number
    of tokens; exactly at a threshold is not above it. Unknown capacity is never above.
    """

    active_decode_blocks: float | None = None
    active_prefill_tokens: int | None = None

    name = "busy"
    needs_tokens = True

    def keep(self, _request: RouteRequest, candidates: Candidates, _moment: Moment) -> Candidates:
        """Those that are not above either threshold without this request."""
        tokens, share = self.active_prefill_tokens, self.active_decode_blocks
        if tokens is not None:
            candidates = candidates.kept([charged <= tokens for charged in candidates.charged_tokens()])
        if share is not None:
            used = zip(candidates.active_tokens(), candidates.cards(), strict=True)
            candidates = candidates.kept([not _is_above(active, share, card) for active, card in used])
        return candidates


def _is_above(active_tokens: int, share: float, card: Card) -> bool:
    capacity_tokens = card.tiers.get("device", 0) * card.block_size
    return capacity_tokens > 0 and active_tokens > share * capacity_tokens


@dataclass(frozen=True, slots=True)
class MaxOngoing(Filter):
    """`--max-ongoing-requests`: a target with so many in flight, booked by any replica, takes no more."""

    requests: int

    name = "max-ongoing-requests"
    frees_up = True

    def keep(self, _request: RouteRequest, candidates: Candidates, _moment: Moment) -> Candidates:
        """Those with room for one more."""
        return candidates.kept([requests < self.requests for requests in candidates.requests()])


@dataclass(frozen=True, slots=True)
class Breaker(Filter):
    """Passes over targets whose circuit is open (core/routing/breaker.py)."""

    circuits: CircuitBreakers

    name = "circuit-breaker"

    def keep(self, _request: RouteRequest, candidates: Candidates, moment: Moment) -> Candidates:
        """Those that may be tried."""
        if not self.circuits.any_open():
            return candidates
        return candidates.kept(
            [self.circuits.is_closed(target, moment.now) for target in candidates.targets()]
        )


@dataclass(frozen=True, slots=True)
class Session(Filter):
    """Keeps a session where it is bound, as long as that target is a candidate.

    First in the list it is hard: a bound target that is full then takes itself out, and the request
    waits or fails. Last it is soft: the binding counts only while the target takes requests.
    """

    is_hard: bool = False

    name = "session"
    keeps_sessions = True

    @property
    def is_preference(self) -> bool:  # type: ignore[override]
        return not self.is_hard

    def bound_target(self, request: RouteRequest, moment: Moment) -> Target | None:
        if not self.is_hard or not request.session:
            return None
        return moment.tables.sessions.target_of(request.session, moment.now)

    def keep(self, request: RouteRequest, candidates: Candidates, moment: Moment) -> Candidates:
        """The bound target alone, or all."""
        if not request.session or request.wanted is not None:
            return candidates
        bound = moment.tables.sessions.target_of(request.session, moment.now)
        return candidates.kept([target == bound for target in candidates.targets()]) or candidates


@dataclass(frozen=True, slots=True)
class Multiplex(Filter):
    """Ray's MultiplexMixin, for adapters: those that have it loaded, else those with the fewest adapters.

    The third step, all, is reached by a retry, when these have failed and are excluded.
    """

    name = "multiplex"
    is_preference = True

    def keep(self, request: RouteRequest, candidates: Candidates, _moment: Moment) -> Candidates:
        """The best rank that is not empty."""
        if request.lora_name is None or request.wanted is not None or not candidates:
            return candidates
        names = [card.lora_names for card in candidates.cards()]
        loaded = candidates.kept([request.lora_name in loras for loras in names])
        if loaded:
            return loaded
        fewest = min(map(len, names))
        return candidates.kept([len(loras) == fewest for loras in names])


@dataclass(frozen=True, slots=True)
class Locality(Filter):
    """Ray's LocalityMixin: workers on this node, else in this zone, else all. Empty: not known."""

    node: str = ""
    zone: str = ""

    name = "locality"
    is_preference = True

    def keep(self, request: RouteRequest, candidates: Candidates, _moment: Moment) -> Candidates:
        """The nearest that there are."""
        if request.wanted is not None:
            return candidates
        for label, here in (("node", self.node), ("zone", self.zone)):
            if here:
                near = candidates.kept([card.labels.get(label) == here for card in candidates.cards()])
                if near:
                    return near
        return candidates


@dataclass(frozen=True, slots=True)
class FilterSettings:
    """What an operator sets; with the defaults nothing is filtered beyond what the pool itself leaves out."""

    active_decode_blocks_threshold: float | None = None
    active_prefill_tokens_threshold: int | None = None
    max_ongoing_requests: int = 0
    session_affinity: Literal["off", "soft", "hard"] = "off"
    multiplex: bool = False
    node: str = ""
    zone: str = ""


def new_filters(settings: FilterSettings, circuits: CircuitBreakers | None = None) -> tuple[Filter, ...]:
    """The filters these settings ask for, in the order in which they apply."""
    filters: list[Filter] = []
    if settings.session_affinity == "hard":
        filters.append(Session(is_hard=True))
    if circuits is not None:
        filters.append(Breaker(circuits))
    thresholds = (settings.active_decode_blocks_threshold, settings.active_prefill_tokens_threshold)
    if thresholds != (None, None):
        filters.append(Busy(*thresholds))
    if settings.max_ongoing_requests:
        filters.append(MaxOngoing(settings.max_ongoing_requests))
    if settings.session_affinity == "soft":
        filters.append(Session())
    if settings.multiplex:
        filters.append(Multiplex())
    if settings.node or settings.zone:
        filters.append(Locality(settings.node, settings.zone))
    return tuple(filters)
