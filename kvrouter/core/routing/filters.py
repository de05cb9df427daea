"""Filters: which candidates a policy may pick from. Each filter is a value and changes nothing.

    first          Fits                               always leaves one
    requirements   Breaker, Busy, MaxOngoing          may leave no candidate: the request waits, or gets a 503
    preferences    Rest, Session, Multiplex, Locality narrow the candidates, but always leave one

A request waits for a target that it fits rather than getting another one's 400, so Fits is first.
Requirements come before preferences: a preferred worker that is full is out before the preference applies.
Preferences do not apply to a request that names its target (mode direct). Workers that drain, are down or do
not serve the adapter are not candidates in the first place (core/fleet/pool.py).
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
from kvrouter.settings.declare import Settings, setting


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

    only_if_preferred: bool = False
    """Whether it applies only to policies that prefer sessions."""

    @abstractmethod
    def keep(self, request: RouteRequest, candidates: Candidates, moment: Moment) -> Candidates:
        """The candidates that stay."""

    def bound_target(self, _request: RouteRequest, _moment: Moment) -> Target | None:
        """The only target that the request may go to, if this filter demands one."""
        return None


@dataclass(frozen=True, slots=True)
class Fits(Filter):
    """Removes targets whose context is too short for prompt and asked output; one of unknown length stays.

    If it fits none, the longest stay: the engine tells the client why it refuses.
    """

    name = "fits"
    is_preference = True

    def keep(self, request: RouteRequest, candidates: Candidates, moment: Moment) -> Candidates:
        needed = request.context_tokens
        if not needed or request.wanted is not None:  # nearly always
            return candidates
        lengths = [card.max_model_len or needed for card in candidates.cards()]
        enough = min(needed, max(lengths, default=0))
        return candidates.kept([length >= enough for length in lengths])


@dataclass(frozen=True, slots=True)
class Busy(Filter):
    """Removes targets above a threshold. The names are Dynamo's; None: the threshold does not apply.

    `active_decode_blocks` is a fraction of the target's KV blocks, `active_prefill_tokens` a number of
    tokens; the request itself does not count. Exactly at a threshold is not above it. A target whose
    capacity is unknown is never above.
    """

    active_decode_blocks: float | None = None
    active_prefill_tokens: int | None = None

    name = "busy"
    needs_tokens = True

    def keep(self, _request: RouteRequest, candidates: Candidates, _moment: Moment) -> Candidates:
        tokens, share = self.active_prefill_tokens, self.active_decode_blocks
        if tokens is not None:
            candidates = candidates.kept([charged <= tokens for charged in candidates.charged_tokens()])
        if share is not None:
            # in tokens: the card counts capacity in the engine's blocks, bookings count in the pool's
            used = zip(candidates.active_tokens(), candidates.cards(), strict=True)
            candidates = candidates.kept([not _is_above(active, share, card) for active, card in used])
        return candidates


def _is_above(active_tokens: int, share: float, card: Card) -> bool:
    capacity_tokens = card.tiers.get("device", 0) * card.block_size
    return capacity_tokens > 0 and active_tokens > share * capacity_tokens


@dataclass(frozen=True, slots=True)
class MaxOngoing(Filter):
    """Removes targets with `--max-ongoing-requests` requests in flight, booked by any replica."""

    requests: int

    name = "max-ongoing-requests"
    frees_up = True

    def keep(self, _request: RouteRequest, candidates: Candidates, _moment: Moment) -> Candidates:
        return candidates.kept([requests < self.requests for requests in candidates.requests()])


@dataclass(frozen=True, slots=True)
class Breaker(Filter):
    """Removes targets whose circuit is open (core/routing/breaker.py)."""

    circuits: CircuitBreakers

    name = "circuit-breaker"

    def keep(self, _request: RouteRequest, candidates: Candidates, moment: Moment) -> Candidates:
        # nearly always: a look at each of a thousand targets would cost every request
        if not self.circuits.any_open():
            return candidates
        return candidates.kept(
            [self.circuits.is_closed(target, moment.now) for target in candidates.targets()]
        )


@dataclass(frozen=True, slots=True)
class Rest(Filter):
    """Leaves targets alone that asked for it or refuse connections (rests.py), while another one is there."""

    name = "retry-after"
    is_preference = True

    def keep(self, request: RouteRequest, candidates: Candidates, moment: Moment) -> Candidates:
        rests = moment.tables.rests
        if not rests.until or request.wanted is not None:  # nearly always
            return candidates
        awake = [rests.is_awake(target, moment.now) for target in candidates.targets()]
        return candidates.kept(awake) or candidates


@dataclass(frozen=True, slots=True)
class Session(Filter):
    """Keeps a session on the target it is bound to, while that target is a candidate.

    Hard: it comes first, so that a requirement may remove the bound target; the request then waits or fails.
    Soft: it comes after the requirements, so the binding counts only while the target passes them.
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
        if not request.session or request.wanted is not None:
            return candidates
        bound = moment.tables.sessions.target_of(request.session, moment.now)
        # not a candidate: it drains, has left or does not serve the adapter, so the session may move
        return candidates.kept([target == bound for target in candidates.targets()]) or candidates


@dataclass(frozen=True, slots=True)
class Expected(Filter):
    """Where no overlap is known: the target of the session's last request, else of its parent's.

    What the index knows decides better, so a request with any overlap keeps all candidates. Only while the
    target is no busier than the least busy one, in requests and in charged tokens; if the prompt itself is
    not known, one request more is accepted, since the last turn is then all there is to know.
    """

    name = "agent-session"
    is_preference = True
    keeps_sessions = True
    only_if_preferred = True

    def keep(self, request: RouteRequest, candidates: Candidates, moment: Moment) -> Candidates:
        if not (request.session or request.parent_session) or request.wanted is not None:
            return candidates
        sessions, targets = moment.tables.sessions, candidates.targets()
        for session in filter(None, (request.session, request.parent_session)):
            target = sessions.target_of(session, moment.now)
            if target in targets:
                is_free = not candidates.deepest_blocks() and _is_free(
                    request, candidates, targets.index(target)
                )
                return candidates.kept([one == target for one in targets]) if is_free else candidates
        return candidates


def _is_free(request: RouteRequest, candidates: Candidates, place: int) -> bool:
    """Whether this candidate is as free as the freest."""
    requests = candidates.requests()
    if not request.prompts:
        return requests[place] <= min(requests) + 1
    charged = candidates.charged_tokens()
    return requests[place] == min(requests) and charged[place] == min(charged)


@dataclass(frozen=True, slots=True)
class Multiplex(Filter):
    """Ray's MultiplexMixin for adapters: targets that have it loaded, else targets with the fewest adapters.

    A retry reaches Ray's third step, any target: the targets that failed are excluded.
    """

    name = "multiplex"
    is_preference = True

    def keep(self, request: RouteRequest, candidates: Candidates, _moment: Moment) -> Candidates:
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
    """Ray's LocalityMixin: workers on this node, else in this zone, else all. Empty: unknown."""

    node: str = ""
    zone: str = ""

    name = "locality"
    is_preference = True

    def keep(self, request: RouteRequest, candidates: Candidates, _moment: Moment) -> Candidates:
        if request.wanted is not None:
            return candidates
        for label, here in (("node", self.node), ("zone", self.zone)):
            if here:
                near = candidates.kept([card.labels.get(label) == here for card in candidates.cards()])
                if near:
                    return near
        return candidates


@dataclass(frozen=True, slots=True)
class FilterSettings(Settings):
    """What an operator sets."""

    heading = "Which workers may be chosen"

    active_decode_blocks_threshold: float | None = setting(
        None,
        "skip workers with more than this share of their KV blocks active; see POST /busy_threshold",
        metavar="SHARE",
        least=0,
        most=1,
        reloadable=True,
    )
    active_prefill_tokens_threshold: int | None = setting(
        None, "skip workers with more prefill tokens charged", metavar="TOKENS", least=1, reloadable=True
    )
    max_ongoing_requests: int = setting(
        0, "skip targets with N requests in flight; 0: no limit", least=0, reloadable=True
    )
    session_affinity: Literal["off", "soft", "hard"] = setting(
        "off", "keep a session on one worker; soft: while the worker takes requests; hard: even if it is full"
    )
    multiplex: bool = setting(
        False,
        "engines load adapters on demand: prefer workers that have it, else those with the fewest",
        name="lora-multiplex",
    )
    node: str = setting("", "node of this frontend: prefer its workers", name="locality-node", metavar="NODE")
    zone: str = setting("", "zone of this frontend: prefer its workers", name="locality-zone", metavar="ZONE")
    agent_sessions: bool = setting(
        True,
        "read sessions from the headers of Claude Code, Codex, OpenCode and others",
    )


def new_filters(settings: FilterSettings, circuits: CircuitBreakers | None = None) -> tuple[Filter, ...]:
    """The filters these settings ask for, in the order in which they apply."""
    filters: list[Filter] = []
    # A hard session is first: filters after it may then remove its target, and the request waits or fails.
    if settings.session_affinity == "hard":
        filters.append(Session(is_hard=True))
    filters.append(Fits())
    if circuits is not None:
        filters.append(Breaker(circuits))
    thresholds = (settings.active_decode_blocks_threshold, settings.active_prefill_tokens_threshold)
    if thresholds != (None, None):
        filters.append(Busy(*thresholds))
    if settings.max_ongoing_requests:
        filters.append(MaxOngoing(settings.max_ongoing_requests))
    # From here on preferences: they must not see targets that a requirement removes.
    filters.append(Rest())
    if settings.session_affinity == "soft":
        filters.append(Session())
    if settings.agent_sessions:
        filters.append(Expected())
    if settings.multiplex:
        filters.append(Multiplex())
    if settings.node or settings.zone:
        filters.append(Locality(settings.node, settings.zone))
    return tuple(filters)
