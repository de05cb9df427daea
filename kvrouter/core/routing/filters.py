"""Filters: which candidates may be chosen at all, before a policy picks. Pure; each is a value.

    must      Breaker, Busy, MaxOngoing        may leave nobody: then it is a 503, or a queue
    should    Session, Multiplex, Locality     narrow, but never to nobody

What must hold comes first: a preferred worker that is full has left before the preference is asked.
Who names its target (mode direct) is asked for no preference.
Workers that drain, are down or lack the adapter are no candidates from the start (core/fleet/pool.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from kvrouter.core.routing.breaker import CircuitBreakers
from kvrouter.core.routing.policy import Candidate, PolicyState, RouteRequest


class Filter(Protocol):
    """Keeps some of the candidates, in their order."""

    @property
    def name(self) -> str:
        """What a removed candidate is said to have been removed by."""
        ...

    def keep(
        self, request: RouteRequest, candidates: Sequence[Candidate], state: PolicyState
    ) -> Sequence[Candidate]:
        """Those that stay."""
        ...


@dataclass(frozen=True, slots=True)
class Busy:
    """Passes over targets above a threshold. Names are Dynamo's; None: that one does not apply.

    `active_decode_blocks` is a fraction of the target's KV blocks, `active_prefill_tokens` a number
    of tokens; exactly at a threshold is not above it. Unknown capacity is never above.
    """

    active_decode_blocks: float | None = None
    active_prefill_tokens: int | None = None
    name: str = "busy"

    def keep(
        self, _request: RouteRequest, candidates: Sequence[Candidate], _state: PolicyState
    ) -> Sequence[Candidate]:
        """Those that are not above either threshold without this request."""
        return [candidate for candidate in candidates if not self.is_busy(candidate)]

    def is_busy(self, candidate: Candidate) -> bool:
        """Whether the target is above one of the thresholds."""
        tokens, share = self.active_prefill_tokens, self.active_decode_blocks
        if tokens is not None and candidate.charged_tokens > tokens:
            return True
        size = candidate.card.block_size
        capacity_tokens = candidate.card.tiers.get("device", 0) * size
        active_tokens = candidate.active_blocks * (candidate.block_size or size)
        return share is not None and capacity_tokens > 0 and active_tokens > share * capacity_tokens


@dataclass(frozen=True, slots=True)
class MaxOngoing:
    """`--max-ongoing-requests`: a target with so many in flight, booked by any replica, takes no more."""

    requests: int
    name: str = "max-ongoing-requests"

    def keep(
        self, _request: RouteRequest, candidates: Sequence[Candidate], _state: PolicyState
    ) -> Sequence[Candidate]:
        """Those with room for one more."""
        return [candidate for candidate in candidates if candidate.requests < self.requests]


@dataclass(frozen=True, slots=True)
class Breaker:
    """Passes over targets whose circuit is open (core/routing/breaker.py)."""

    circuits: CircuitBreakers
    name: str = "circuit-breaker"

    def keep(
        self, _request: RouteRequest, candidates: Sequence[Candidate], state: PolicyState
    ) -> Sequence[Candidate]:
        """Those that may be tried."""
        if not self.circuits.any_open():
            return candidates
        return [one for one in candidates if self.circuits.is_closed(one.target, state.now)]


@dataclass(frozen=True, slots=True)
class Session:
    """Keeps a session where it is bound, as long as that target is a candidate.

    First in the list it is hard: a bound target that is full then takes itself out, and the request
    waits or fails. Last it is soft: the binding counts only while the target takes requests.
    """

    name: str = "session"
    is_hard: bool = False

    def keep(
        self, request: RouteRequest, candidates: Sequence[Candidate], state: PolicyState
    ) -> Sequence[Candidate]:
        """The bound target alone, or all."""
        if not request.session or request.wanted is not None:
            return candidates
        bound = state.sessions.target_of(request.session, state.now)
        return [candidate for candidate in candidates if candidate.target == bound] or candidates


@dataclass(frozen=True, slots=True)
class Multiplex:
    """Ray's MultiplexMixin, for adapters: those that have it loaded, else those with the fewest adapters.

    The third step, all, is reached by a retry, when these have failed and are excluded.
    """

    name: str = "multiplex"

    def keep(
        self, request: RouteRequest, candidates: Sequence[Candidate], _state: PolicyState
    ) -> Sequence[Candidate]:
        """The best rank that is not empty."""
        if request.lora_name is None or request.wanted is not None or not candidates:
            return candidates
        loaded = [one for one in candidates if request.lora_name in one.lora_names]
        if loaded:
            return loaded
        fewest = min(len(one.lora_names) for one in candidates)
        return [one for one in candidates if len(one.lora_names) == fewest]


@dataclass(frozen=True, slots=True)
class Locality:
    """Ray's LocalityMixin: workers on this node, else in this zone, else all. Empty: not known."""

    node: str = ""
    zone: str = ""
    name: str = "locality"

    def keep(
        self, request: RouteRequest, candidates: Sequence[Candidate], _state: PolicyState
    ) -> Sequence[Candidate]:
        """The nearest that there are."""
        if request.wanted is not None:
            return candidates
        for label, here in (("node", self.node), ("zone", self.zone)):
            near = [one for one in candidates if here and one.labels.get(label) == here]
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
