"""The router of one pool. It chooses a target and books the request in one plain call: no task runs between.

route ──> candidates ──filters──> eligible ──policy──> choice ──> bookings ──> feed ──> peers
decide: the same, explained; nothing is booked
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from kvrouter.core.fleet.left_out import UNPAIRED, refused_targets, why_none
from kvrouter.core.fleet.own_bookings import OwnBooking, OwnBookings
from kvrouter.core.fleet.pool import Pool
from kvrouter.core.fleet.sync_feed import SyncFeed
from kvrouter.core.routing.admission import AdmissionQueue
from kvrouter.core.routing.breaker import CircuitBreakers
from kvrouter.core.routing.builtin_policy import BuiltInPolicy, Moment, RoutingTables
from kvrouter.core.routing.candidates import Candidates
from kvrouter.core.routing.decisions import Decided, DecisionRing
from kvrouter.core.routing.filters import Filter
from kvrouter.core.routing.pairs import Pair, Sharing, choose_pair
from kvrouter.core.routing.policy import AUTO, Candidate, RouteRequest
from kvrouter.core.routing.pulls import with_pulls
from kvrouter.core.routing.selection import Decision, Modes, Selection
from kvrouter.core.tables.bookings import PULL, Booking
from kvrouter.core.tables.claimed_losses import ClaimedLosses
from kvrouter.core.tables.deadly_prompts import DeadlyPrompts
from kvrouter.core.tables.early_ops import EarlyBudget, EarlyOps
from kvrouter.core.tables.ghosts import Reuse
from kvrouter.core.tables.predictions import PredictionTable
from kvrouter.core.tables.transfers import Pull
from kvrouter.core.wire.heartbeats import BOTH, DECODE, PREFILL, Card
from kvrouter.core.wire.ids import BookingKey, RouterId, Target, WorkerId
from kvrouter.errors import NoWorkersError

# How prefill and decode workers share a request: the decode worker alone ("decode": it is better, "fallback":
# no prefill worker is left). Empty where a worker of both serves it; "pull": with blocks of a peer.
PairPath = Literal["", "pair", "decode", "fallback", "pull"]


class Placement(Struct, frozen=True, gc=False):
    """Where a request is sent, and what was known when that was decided."""

    key: BookingKey
    target: Target
    choice: Candidate
    url: str
    rank_header: str
    """Whether to ask the engine to report the blocks that this request reuses."""
    sends_token_ids: bool
    """Whether to send the token ids of a chat that were computed here."""
    fallbacks: tuple[Target, ...]
    """The targets that the policy tries next if this one fails."""
    block_size: int
    """The pool's block size, in which `choice` counts."""
    connector: str = ""
    """By which its engine hands KV blocks over."""
    prefill: Placement | None = None
    """Where its prompt is computed, if another worker does that."""
    path: PairPath = ""
    pull: Pull | None = None
    """What it reads from a peer instead of computing it."""


@dataclass(frozen=True, slots=True)
class RouterRules:
    """How requests are routed in one pool. `random()` returns a number in [0, 1)."""

    policy: BuiltInPolicy
    random: Callable[[], float]
    tables: RoutingTables = field(default_factory=RoutingTables)
    filters: tuple[Filter, ...] = ()
    circuits: CircuitBreakers | None = None
    decisions: DecisionRing | None = None
    """Where decisions are kept; None: they are not kept."""
    mode: str = ""
    """The name of the router's own mode."""
    new_policy: Callable[[str], BuiltInPolicy] | None = None
    """Makes the policy of another mode that a request names; None: requests cannot name one."""


class Router:
    """Decides in one pool. `bookings`: those made here; `feed`: what peers get and say."""

    def __init__(
        self,
        pool: Pool,
        rules: RouterRules,
        *,
        router_id: RouterId,
        incarnation: int,
        synced: bool,
        seq: int = 0,
        is_elder: Callable[[], bool] = lambda: True,
        claimed: ClaimedLosses | None = None,
        early: EarlyBudget | None = None,
    ) -> None:
        """`seq`: the last number of this pool's feed, if the pool was dropped before and begins again.

        `synced`: whether bookings are published to peers.
        `is_elder()`: whether this router's snapshots also contain what it has learnt from other replicas.
        `claimed`: the replica's, and with it its deadly prompts; None: no prompt is refused.
        `early`: shared with its other pools.
        """
        self.pool = pool
        self.router_id = router_id
        self.tables = rules.tables
        self.modes = Modes(Selection(rules.policy, rules.filters, rules.mode), rules.new_policy)
        self.circuits = rules.circuits
        self.decisions = rules.decisions
        claimed = ClaimedLosses(DeadlyPrompts(0.0)) if claimed is None else claimed
        self.deadly = claimed.prompts
        self.reuse = Reuse()
        """What was cached of the prompts that were routed here."""
        self.feed = SyncFeed(
            pool,
            rules.tables,
            claimed,
            router_id=router_id,
            incarnation=incarnation,
            synced=synced,
            seq=seq,
            is_elder=is_elder,
            reuse=self.reuse,
            early=EarlyOps(early),
        )
        self.bookings = OwnBookings(pool, rules.tables, self.feed, router_id, rules.circuits)
        self.predictions = PredictionTable()
        self.unheard = ""
        """Why the bookings of other replicas are not known here; empty if they are, or if there are none."""
        self._random = rules.random
        self._reported_changes = 0
        self._reported_cards: list[Card] = []

    @property
    def selection(self) -> Selection:
        """The selection of the router's own mode."""
        return self.modes.default

    @property
    def needs_tokens(self) -> bool:
        """Whether every prompt has to be tokenized, in all modes. The halves of a pair are chosen by them."""
        settings, split = self.pool.settings, self.pool.split
        return settings.counts_tokens or self.modes.default.needs_tokens or split.is_pairs_only

    @property
    def doubt(self) -> str:
        """Why predicted seconds of prefill are not used; empty if they may be."""
        return self.unheard or self.tables.speeds.doubt

    @property
    def is_idle(self) -> bool:
        """Whether it has no booking, and nothing to publish."""
        return self.bookings.is_empty and self.feed.is_empty

    def route(
        self,
        request: RouteRequest,
        now: float,
        *,
        streamed: bool = True,
        exclude: frozenset[Target] = frozenset(),
        prefer: tuple[Target, ...] = (),
    ) -> Placement:
        """Pick and book in one step. Raises NoWorkersError if no target is left to choose from.

        `prefer`: for a retry, the fallbacks of the earlier choice: the first eligible one is taken.
        """
        return self.route_among(request, now, streamed=streamed, exclude=exclude, prefer=prefer)[0]

    def route_among(
        self,
        request: RouteRequest,
        now: float,
        *,
        streamed: bool = True,
        exclude: frozenset[Target] = frozenset(),
        prefer: tuple[Target, ...] = (),
        avoid: frozenset[Target] = frozenset(),
        computed: Placement | None = None,
    ) -> tuple[Placement, Candidates]:
        """Like `route`, but also returns the candidates, which are too large for a placement to keep.

        `avoid`: targets that are left out without having failed this request. `computed`: where its prompt
        has been computed: another decode worker is chosen for it.
        """
        pool = self.pool
        # the pool's block size may have changed since the prompt was hashed
        request = pool.in_present_size(request)
        selection = self._selection(request)
        policy = selection.policy
        moment = self._moment(policy, now)
        left_out = exclude | avoid if avoid else exclude
        candidates = pool.candidates(request, left_out, with_prefills=policy.reads_speed)
        if pool.split.peers:
            candidates = _with_pulls(self, request, candidates, policy, moment)
        eligible = selection.eligible(request, candidates, moment)
        sharing, alone = None, eligible
        if request.may_split and pool.split.whole is not None:
            facts = request, selection, candidates, moment
            eligible, sharing = _shared(pool, *facts, alone, left_out, computed)
        pair = None if sharing is None else sharing.pair
        if pair is None and not eligible:
            removed = selection.removed(request, candidates, moment)
            raise NoWorkersError(why_none(pool, request, exclude, avoid, removed=removed, alone=alone))
        if pair is not None:
            selection, eligible, best = pair.decode, pair.decoders, [pair.answers]
        else:
            best = _preferred(eligible, prefer) if prefer else []
            best = best or selection.choose(request, eligible, moment)
        order = (best[0].target,) if len(best) == 1 else tuple([one.target for one in best])
        if self.decisions is not None:
            refused = refused_targets(pool, request, exclude, avoid) if left_out else pool.refusals(request)
            self.decisions.append(
                Decided(request, moment, selection, order, candidates, eligible, refused, sharing)
            )
        choice = best[0]
        if policy.reads_speed and (policy.compares_seconds or request.overlap_weight == AUTO):
            self.tables.shares.count(*candidates.held_of(request))
        prefill = None if pair is None else computed or _book_prefill(self, request, pair, policy, now)
        pull = eligible.pull_of(choice.target) if pair is None and pool.split.peers else None
        booking = self.bookings.book(request, choice, now, DECODE if pair else PULL if pull else "")
        if request.prompts and not (exclude or prefer):  # a retry is the same request
            _count_reuse(self.reuse, pool, request, pair.computes if pair else choice, candidates)
        charged = choice.prefill_tokens if pair is None else 0
        own = OwnBooking(booking, request, policy, charged, now, streamed, pool.block_size, pull=pull)
        if policy.reads_speed and pair is None:
            own.predicted_ttft_s = self.bookings.count_decision(eligible, choice.target, moment)
        self.bookings.remember(own, choice, selection, moment)
        return _placement(pool, booking, choice, order[1:], sharing, prefill, pull), candidates

    def has_eligible(self, request: RouteRequest, now: float, *, exclude: frozenset[Target]) -> bool:
        """Whether `route` would find a target."""
        request, selection = self.pool.in_present_size(request), self._selection(request)
        candidates, moment = self.pool.candidates(request, exclude), self._moment(selection.policy, now)
        eligible = selection.eligible(request, candidates, moment)
        if eligible or not request.may_split:
            return bool(eligible)
        _, sharing = _shared(self.pool, request, selection, candidates, moment, eligible, exclude)
        return sharing.pair is not None

    def must_wait(self, request: RouteRequest, now: float, queue: AdmissionQueue, *, spare: int = 0) -> bool:
        """Whether the request has to wait in the queue. Books nothing and takes no turn."""
        # the overlap does not matter here, and looking it up costs most
        request = replace(request, prompts=())
        moment = self._moment(self.selection.policy, now)
        groups = _groups(self.pool, request)
        return any(self.selection.must_wait(request, one, moment, queue, spare=spare) for one in groups)

    def lane(self, request: RouteRequest, now: float) -> str:
        """The lane of the queue in which the request waits."""
        return self.selection.lane(request, self._moment(self.selection.policy, now))

    def decide(
        self, request: RouteRequest, now: float, *, exclude: frozenset[Target] = frozenset()
    ) -> Decision:
        """What `route` would choose, and why; nothing is booked."""
        request, selection = self.pool.in_present_size(request), self._selection(request)
        moment = self._moment(selection.policy, now)
        policy = selection.policy
        candidates = self.pool.candidates(request, exclude, with_prefills=policy.reads_speed)
        if self.pool.split.peers:
            candidates = _with_pulls(self, request, candidates, policy, moment)
        refused = refused_targets(self.pool, request, exclude)
        eligible, sharing = selection.eligible(request, candidates, moment), None
        if request.may_split and self.pool.split.whole is not None:
            alone = eligible
            eligible, sharing = _shared(self.pool, request, selection, candidates, moment, alone, exclude)
            if alone and not eligible:
                refused = refused | dict.fromkeys(candidates.targets(), UNPAIRED)  # it is the pool's own
                candidates = eligible
        best = selection.choose(request, eligible, moment) if eligible else []
        order = tuple([one.target for one in best])
        return Decided(request, moment, selection, order, candidates, eligible, refused, sharing).explain()

    def forget(self, targets: list[Target]) -> None:
        """Remove targets that are gone from every table."""
        self.tables.forget(targets)
        for target in targets:
            self.feed.forget_texts(target)
            if self.circuits is not None:
                self.circuits.forget(target)
        for worker_id in dict.fromkeys(target.worker_id for target in targets):
            self.feed.early.left(worker_id)
            self.selection.policy.on_worker_removed(worker_id)

    def engine_lost(self, worker_id: WorkerId) -> None:
        """The worker's engine is gone, or another process has taken its place: what it held is gone, too."""
        for target in self.pool.targets_of(worker_id):
            self.feed.forget_texts(target)
            self.tables.rests.forget(target)
        self.tables.transfers.forget([worker_id])
        self.pool.forget_assumed(worker_id)
        self.selection.policy.on_worker_removed(worker_id)
        # it may take requests all the same: then the policy needs its card again
        self._reported_changes, self._reported_cards = -1, []

    def report_workers(self) -> None:
        """Call the policy's `on_workers` if the workers that take requests have changed."""
        if self._reported_changes == self.pool.changes:
            return
        self._reported_changes = self.pool.changes
        cards = list({worker.card.worker_id: worker.card for worker in self.pool.targets.values()}.values())
        # targets may have been chosen again with the same result
        if cards != self._reported_cards:
            self._reported_cards = cards
            self.tables.speeds.assume([card.prefill_tokens_per_s for card in cards])
            self.selection.policy.on_workers(list(cards))

    def _selection(self, request: RouteRequest) -> Selection:
        """The selection of the mode that the request names."""
        if self._reported_changes != self.pool.changes:
            self.report_workers()
        return self.modes.of(request.mode) if request.mode else self.modes.default

    def _moment(self, policy: BuiltInPolicy, now: float) -> Moment:
        tables, unseen, part = self.tables, self.feed.unseen.expected, self.feed.part
        if not policy.reads_speed:
            return Moment(now=now, random=self._random, tables=tables, unseen=unseen, part=part)
        speed, rate = tables.speeds.speed, tables.arrivals.per_s(now)
        return Moment(
            now=now,
            random=self._random,
            tables=tables,
            unseen=unseen,
            part=part,
            speed=speed,
            arrivals_per_s=rate,
            doubt=self.doubt,
        )


def _book_prefill(
    router: Router, request: RouteRequest, pair: Pair, policy: BuiltInPolicy, now: float
) -> Placement:
    """Book the first half of a pair."""
    choice, pool, bookings = pair.computes, router.pool, router.bookings
    booking = bookings.book(request, choice, now, PREFILL)
    # streamed: the end of its answer is that of its prefill
    bookings.track(OwnBooking(booking, request, policy, choice.prefill_tokens, now, True, pool.block_size))
    return _placement(pool, booking, choice)


def _with_pulls(
    router: Router, request: RouteRequest, candidates: Candidates, policy: BuiltInPolicy, moment: Moment
) -> Candidates:
    """The candidates, each with what it would read from a peer."""
    pool, reuse = router.pool, router.reuse

    def free_blocks(target: Target) -> int:
        return max(0, pool.capacity_blocks(target) - pool.index.blocks(target))

    held_share = 1 - reuse.best / max(1, reuse.prompt_tokens)
    return with_pulls(
        request,
        candidates,
        pool.split.peers,
        policy,
        moment,
        block_size=pool.block_size,
        free_blocks=free_blocks,
        held_share=held_share,
    )


def _groups(pool: Pool, request: RouteRequest) -> list[Candidates]:
    """The candidates of which a request needs one; two groups where only pairs serve."""
    candidates, split = pool.candidates(request), pool.split
    if not split.is_pairs_only:
        return [candidates]
    halves = zip(*[(island.prefill, island.decode) for island in split.islands], strict=True)
    return [pool.among(candidates, [*chain(*half)], request) for half in halves]


def _count_reuse(
    reuse: Reuse, pool: Pool, request: RouteRequest, choice: Candidate, candidates: Candidates
) -> None:
    """Count what was cached of the prompts, and what could have been."""
    size = pool.block_size
    reuse.chosen += choice.own_prefill_tokens
    # the chosen one may hold more with the wider view of several prompts
    reuse.best += request.isl - max(candidates.deepest_blocks(), choice.overlap_blocks) * size
    if len(request.prompts) > 1:
        reuse.expect(sum([len(prompt.hashes) for prompt in request.prompts]), pool.room_blocks)
    for prompt in request.prompts:
        reuse.count(prompt.hashes, prompt.isl, size, pool.room_blocks)


def _shared(  # noqa: PLR0917  # all that a decision is made from
    pool: Pool,
    request: RouteRequest,
    selection: Selection,
    candidates: Candidates,
    moment: Moment,
    alone: Candidates,
    left_out: frozenset[Target],
    computed: Placement | None = None,
) -> tuple[Candidates, Sharing]:
    """Whether two workers serve the request together; first, those of `alone` that may serve it so."""
    islands = [
        (
            pool.among(candidates, island.prefill, request, left_out),
            pool.among(candidates, island.decode, request, left_out),
        )
        for island in pool.split.islands
    ]
    sharing = choose_pair(
        request,
        selection,
        islands,
        alone,
        moment,
        least_tokens=pool.settings.pd_min_uncached_tokens,
        computed_at=None if computed is None else computed.target,
    )
    if not sharing.terms and pool.settings.refuses_whole:
        alone = alone.kept([card.role == BOTH for card in alone.cards()])
    return alone, sharing


def _placement(  # noqa: PLR0917  # on the hot path: keywords cost
    pool: Pool,
    booking: Booking,
    choice: Candidate,
    fallbacks: tuple[Target, ...] = (),
    sharing: Sharing | None = None,
    prefill: Placement | None = None,
    pull: Pull | None = None,
) -> Placement:
    target = choice.target
    worker = pool.targets[target]
    card = worker.card
    return Placement(
        key=booking.key,
        target=target,
        choice=choice,
        url=card.url,
        rank_header=card.rank_header,
        sends_token_ids=pool.sends_token_ids and worker.sends_token_ids,
        fallbacks=fallbacks,
        block_size=pool.block_size,
        connector=card.kv_connector,
        prefill=prefill,
        path="pull" if pull else "" if pool.split.whole is None else _path(pool, card, sharing),
        pull=pull,
    )


def _path(pool: Pool, card: Card, sharing: Sharing | None) -> PairPath:
    if sharing is not None and sharing.pair is not None:
        return "pair"
    if card.role != DECODE:
        return ""
    is_chosen = pool.split.islands if sharing is None else sharing.terms
    return "decode" if is_chosen else "fallback"


def _preferred(eligible: Candidates, prefer: tuple[Target, ...]) -> list[Candidate]:
    """The eligible fallbacks, in the order of `prefer`."""
    return [one for name in prefer for one in eligible if one.target == name]
