"""The router of one pool. It chooses a target and books the request in one plain call: no task runs between.

    route ──> booking + AddRequest        sent frames:  [AddRequest n …]
    first data byte ──> MarkPrefillCompleted            [MarkPrefillCompleted n]
    end, error, disconnect ──> Free                     [Free n]

Changes to the bookings of this router collect in an outbox; `frames` numbers them for the peers. The outbox,
the wire and the peer keep one order, so a Free never overtakes its AddRequest.
"""

from __future__ import annotations

import heapq
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from msgspec import Struct
from msgspec.structs import replace

from kvrouter.core.feeds.sinks import SyncSink
from kvrouter.core.feeds.source import FeedSource
from kvrouter.core.fleet.pool import Pool
from kvrouter.core.routing.admission import AdmissionQueue
from kvrouter.core.routing.breaker import CircuitBreakers
from kvrouter.core.routing.builtin_policy import BuiltInPolicy, Moment, RoutingTables
from kvrouter.core.routing.candidates import Candidates
from kvrouter.core.routing.decisions import Decided, DecisionRing
from kvrouter.core.routing.filters import Filter
from kvrouter.core.routing.policy import Candidate, RouteRequest
from kvrouter.core.routing.selection import Decision, Modes, Selection
from kvrouter.core.routing.worker import Worker
from kvrouter.core.tables.bookings import Booking, UnseenBookings, add_request, booking_ops
from kvrouter.core.tables.claimed_losses import ClaimedLoss, ClaimedLosses
from kvrouter.core.tables.deadly_prompts import KEPT_S, Deadly, DeadlyPrompts
from kvrouter.core.tables.early_ops import EarlyOps
from kvrouter.core.tables.ghosts import Ghosts, Reuse
from kvrouter.core.tables.predictions import PredictionTable
from kvrouter.core.tables.prefill_speeds import Calibration
from kvrouter.core.tables.text_index import KeptTexts, sent_text
from kvrouter.core.wire.hashes import hashes_of, pack_hashes
from kvrouter.core.wire.heartbeats import Card
from kvrouter.core.wire.ids import BookingKey, PromptHash, RouterId, Target, WorkerId
from kvrouter.core.wire.ops import (
    MAX_BOOKING_HASHES,
    ApproxEntry,
    Bind,
    Check,
    DeadlyPrompt,
    FirstByte,
    Free,
    LostWith,
    MarkPrefillCompleted,
    Op,
    Pardon,
    Progress,
    SentText,
)
from kvrouter.errors import NoWorkersError

# A snapshot contains at most this many sessions, the last used ones: encoding them takes about 15 ms.
SNAPSHOT_SESSIONS_MOST = 5_000

# Readers that join together share a snapshot for this long. What was learnt from peers is in none of this
# router's own frames, so an older one may lack it.
SNAPSHOT_SHARED_S = 1.0

# Seconds between two Checks of a quiet feed, so that a peer with a wrong copy notices it.
QUIET_CHECK_S = 10.0

# A heap with fewer predictions is not tidied: keeping it costs less.
_FEW_PREDICTED = 64

# The status of a request that was freed before its worker answered. nginx logs it when a client disconnects.
GIVEN_UP = 499


class Placement(Struct, frozen=True, gc=False):
    """Where a request is sent, and what was known when that was decided."""

    key: BookingKey
    target: Target
    choice: Candidate
    url: str
    rank_header: str
    wants_report: bool
    """Whether to ask the engine to report the blocks that this request reuses."""
    sends_token_ids: bool
    """Whether to send the token ids of a chat that were computed here."""
    fallbacks: tuple[Target, ...]
    """The targets that the policy tries next if this one fails."""
    block_size: int
    """The pool's block size, in which `choice` counts."""


class _OwnBooking(Struct, gc=False):
    """A booking of this router, with what its later events need. Not the candidates: they are large."""

    booking: Booking
    request: RouteRequest
    policy: BuiltInPolicy
    """The policy that chose the target."""
    charged_tokens: int
    """Prefill tokens charged on the target when it was booked, this request's included."""
    sent_at: float
    streamed: bool
    block_size: int
    """The pool's block size when it was booked: the booking counts in these blocks until it ends."""
    is_answered: bool = False
    """Whether the policy knows the status of the worker's response."""
    ttft_s: float | None = None
    """From the decision to the first byte; None before it, and where it is not known."""
    output_tokens: int | None = None
    """The length of the answer so far; None: not known."""
    predicted_ttft_s: float | None = None
    """What `ttft_s` was predicted to be; None if no seconds were compared."""


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
    """Decides in one pool, and keeps the bookings made here. `synced`: whether it publishes them to peers."""

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
    ) -> None:
        """`seq`: the last number of this pool's feed, if the pool was dropped before and begins again.

        `is_elder()`: whether this router's snapshots also contain what it has learnt from other replicas.
        `claimed`: the replica's, and with it its deadly prompts; None: no prompt is refused.
        """
        self.pool = pool
        self.router_id = router_id
        # Weak: in a reference cycle, a router outlived its pool by up to an hour (full collections are rare).
        state_ops = weakref.WeakMethod(self._state_ops)
        self.source = FeedSource(
            incarnation,
            lambda now: ops(now) if (ops := state_ops()) else (),
            shared_s=SNAPSHOT_SHARED_S,
        )
        self.early = EarlyOps()
        self._claimed = ClaimedLosses(DeadlyPrompts(0.0)) if claimed is None else claimed
        self.deadly = self._claimed.prompts
        self._is_elder = is_elder
        self.predictions = PredictionTable()
        self.tables = rules.tables
        self.modes = Modes(Selection(rules.policy, rules.filters, rules.mode), rules.new_policy)
        self.circuits = rules.circuits
        self.decisions = rules.decisions
        self.unheard = ""
        """Why the bookings of other replicas are not known here; empty if they are, or if there are none."""
        self._random = rules.random
        # the pool's targets when it was filled, and the reasons: `decisions` needs them for every request
        self._refusals: tuple[dict[Target, Worker], dict[Target, str]] = ({}, {})
        self.source.seq = seq
        self.unseen = UnseenBookings()
        self._peers: set[RouterId] = set()
        # by name, the share of the pool's replicas that come before this one
        self._part = 0.0
        self.reuse = Reuse()
        self.calibration = Calibration()
        self._ghosts = Ghosts()
        # the blocks that all targets have room for, as of a number of changes of the pool
        self._room: tuple[int, int] = (-1, 0)
        self._has_learned = False  # whether its state has something that is in no frame of its own
        self._own_texts, self._learned_texts = KeptTexts(), KeptTexts()
        self._synced = synced
        self._own: dict[int, _OwnBooking] = {}
        # a heap of (time, booking number): when unstreamed prefills should have ended
        self._predicted: list[tuple[float, int]] = []
        self._last_number = 0
        self._outbox: list[Op] = []
        self._checked_seq = seq
        self._checked_at = float("-inf")
        self._reported_changes = 0
        self._reported_cards: list[Card] = []

    @property
    def selection(self) -> Selection:
        """The selection of the router's own mode."""
        return self.modes.default

    @property
    def needs_tokens(self) -> bool:
        """Whether every prompt has to be tokenized, in all modes."""
        return self.pool.settings.counts_tokens or self.modes.default.needs_tokens

    @property
    def doubt(self) -> str:
        """Why predicted seconds of prefill are not used; empty if they may be."""
        return self.unheard or self.tables.speeds.doubt

    @property
    def is_idle(self) -> bool:
        """Whether it has no booking, and nothing to publish."""
        return not self._own and not self._outbox

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
    ) -> tuple[Placement, Candidates]:
        """Like `route`, but also returns the candidates, which are too large for a placement to keep."""
        # the pool's block size may have changed since the prompt was hashed
        request = self.pool.in_present_size(request)
        selection = self._selection(request)
        policy = selection.policy
        moment = self._moment(policy, now)
        candidates = self.pool.candidates(request, exclude, with_prefills=policy.reads_speed)
        eligible = selection.eligible(request, candidates, moment)
        if not eligible:
            removed = selection.removed(request, candidates, moment)
            raise NoWorkersError(self._why_none(exclude, removed))
        best = _preferred(eligible, prefer) if prefer else []
        best = best or selection.choose(request, eligible, moment)
        order = tuple([one.target for one in best])
        if self.decisions is not None:
            refused = self._refused(request, exclude)
            self.decisions.append(
                Decided(
                    request=request,
                    moment=moment,
                    selection=selection,
                    order=order,
                    candidates=candidates,
                    eligible=eligible,
                    refusals=refused,
                )
            )
        choice = best[0]
        if policy.compares_seconds:
            self.tables.shares.count(*candidates.held_of(request))
        booking = self._book(request, choice, now)
        if request.prompts and not (exclude or prefer):  # a retry is the same request
            self._count_reuse(request, choice, candidates)
        own = _OwnBooking(
            booking=booking,
            request=request,
            policy=policy,
            charged_tokens=choice.prefill_tokens,
            sent_at=now,
            streamed=streamed,
            block_size=self.pool.block_size,
        )
        if policy.reads_speed:
            own.predicted_ttft_s = self._count_decision(eligible, choice.target, moment)
        self._remember(own, choice, selection, moment)
        return self._placement(booking, choice, order[1:]), candidates

    def _placement(self, booking: Booking, choice: Candidate, fallbacks: tuple[Target, ...]) -> Placement:
        target = choice.target
        worker = self.pool.targets[target]
        card = worker.card
        beat = worker.ranks.get(target.rank)
        # A report names the blocks that a partial rank's agent missed.
        wants_report = card.repairs_by_report and beat is not None and beat.partial
        return Placement(
            key=booking.key,
            target=target,
            choice=choice,
            url=card.url,
            rank_header=card.rank_header,
            wants_report=wants_report,
            sends_token_ids=self.pool.sends_token_ids and worker.sends_token_ids,
            fallbacks=fallbacks,
            block_size=self.pool.block_size,
        )

    def has_eligible(self, request: RouteRequest, now: float, *, exclude: frozenset[Target]) -> bool:
        """Whether `route` would find a target."""
        request, selection = self.pool.in_present_size(request), self._selection(request)
        candidates = self.pool.candidates(request, exclude)
        return bool(selection.eligible(request, candidates, self._moment(selection.policy, now)))

    def must_wait(self, request: RouteRequest, now: float, queue: AdmissionQueue) -> bool:
        """Whether the request has to wait in the queue. Books nothing and takes no turn."""
        # the overlap does not matter here, and looking it up costs most
        request = replace(request, prompts=())
        candidates = self.pool.candidates(request)
        return self.selection.must_wait(request, candidates, self._moment(self.selection.policy, now), queue)

    def lane(self, request: RouteRequest, now: float) -> str:
        """The lane of the queue in which the request waits."""
        return self.selection.lane(request, self._moment(self.selection.policy, now))

    def decide(
        self, request: RouteRequest, now: float, *, exclude: frozenset[Target] = frozenset()
    ) -> Decision:
        """What `route` would choose, and why; nothing is booked."""
        request, selection = self.pool.in_present_size(request), self._selection(request)
        candidates = self.pool.candidates(request, exclude)
        refused = self._refused(request, exclude)
        return selection.explain(request, candidates, self._moment(selection.policy, now), refused)

    def forget(self, targets: list[Target]) -> None:
        """Remove targets that are gone from every table."""
        self.tables.forget(targets)
        for target in targets:
            self._forget_texts(target)
            if self.circuits is not None:
                self.circuits.forget(target)
        for worker_id in dict.fromkeys(target.worker_id for target in targets):
            self.early.left(worker_id)
            self.selection.policy.on_worker_removed(worker_id)

    def engine_lost(self, worker_id: WorkerId) -> None:
        """The worker's engine is gone, or another process has taken its place: what it held is gone, too."""
        for target in self.pool.targets_of(worker_id):
            self._forget_texts(target)
        self.pool.forget_assumed(worker_id)
        self.selection.policy.on_worker_removed(worker_id)
        # it may take requests all the same: then the policy needs its card again
        self._reported_changes, self._reported_cards = -1, []

    def _forget_texts(self, target: Target) -> None:
        for texts in (self._own_texts, self._learned_texts):
            texts.forget(target)
        self.tables.texts.remove(target)

    def card_arrived(self, worker_id: WorkerId, now: float) -> None:
        """What peers have said of the worker before its card counts from now on."""
        for op in self.early.take(worker_id, now):
            if isinstance(op, SentText):
                self._learn_text(op, now)
            else:
                self._take_assumption(op, now)

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
        tables, unseen = self.tables, self.unseen.expected
        if not policy.reads_speed:
            return Moment(now, self._random, tables, unseen, self._part)
        speed, rate = tables.speeds.speed, tables.arrivals.per_s(now)
        return Moment(now, self._random, tables, unseen, self._part, speed, rate, self.doubt)

    def _refused(self, request: RouteRequest, exclude: frozenset[Target]) -> dict[Target, str]:
        """Why each target of the pool that is not a candidate is not one."""
        if request.is_named:
            refused = self.pool.refusals(request)
        else:
            # the pool makes a new dict of targets with every change: the same dict means no change
            if self._refusals[0] is not self.pool.targets:
                self._refusals = (self.pool.targets, self.pool.refusals(request))
            refused = self._refusals[1]
        return refused | dict.fromkeys(exclude, "failed this request") if exclude else refused

    def _why_none(self, exclude: frozenset[Target], removed: dict[Target, str]) -> str:
        if removed:
            names = ", ".join(dict.fromkeys(removed.values()))
            count = len(removed)
            return f"all {count} workers of {self.pool.model!r} that could serve this were filtered: {names}"
        if exclude:
            return f"all workers of {self.pool.model!r} failed this request: {', '.join(map(str, exclude))}"
        known = ", ".join(self.pool.workers) or "none"
        return f"no live worker for model {self.pool.model!r}; known: {known}"

    def _book(self, request: RouteRequest, choice: Candidate, now: float) -> Booking:
        """Book the request here, and publish its AddRequest."""
        self._last_number += 1
        named, anonymous_blocks = self._blocks(request) if request.prompts else ((), 0)
        booking = Booking(
            key=BookingKey(self.router_id, self._last_number),
            request_id=request.request_id,
            target=choice.target,
            hashes=named,
            isl=request.isl,
            overlap_blocks=choice.overlap_blocks,
            prefill_tokens=choice.own_prefill_tokens,
            anonymous_blocks=anonymous_blocks,
            sent_at=now,
            is_text=request.is_text,
        )
        self.pool.active.book(booking)
        # unsynced, no peer follows the feed
        if self._synced:
            self._outbox.append(add_request(booking, pack_hashes(named)))
        return booking

    def _count_reuse(self, request: RouteRequest, choice: Candidate, candidates: Candidates) -> None:
        """Count what was cached of the prompt, and what could have been."""
        reuse, size, isl = self.reuse, self.pool.block_size, request.isl
        reuse.prompt_tokens += isl
        reuse.chosen += choice.own_prefill_tokens
        # the chosen one may hold more with the wider view of several prompts
        reuse.best += isl - max(candidates.deepest_blocks(), choice.overlap_blocks) * size
        ghosts, room, named = self._ghosts, self._room_blocks(), 0
        endless, pooled = ghosts.endless_misses, ghosts.pooled_misses
        for prompt in request.prompts:
            if prompt.hashes:
                most = min(len(prompt.hashes), max(0, prompt.isl - 1) // size)
                ghosts.use(prompt.hashes, most, room)
                named += most
        never = isl - named * size
        reuse.endless += never + (ghosts.endless_misses - endless) * size
        reuse.pooled += never + (ghosts.pooled_misses - pooled) * size

    def _count_decision(self, eligible: Candidates, target: Target, moment: Moment) -> float | None:
        """The predicted TTFT of the chosen target, counted against the least; None without a prediction."""
        if moment.doubt:
            return None
        predicted = eligible.predicted_ttft_s(target)
        if predicted is None:
            return None
        self.calibration.decided(*predicted)
        return predicted[0]

    def _room_blocks(self) -> int:
        """The blocks that the pool's targets have room for, together."""
        if self._room[0] != self.pool.changes:
            blocks = sum(self.pool.capacity_blocks(target) for target in self.pool.targets)
            self._room = (self.pool.changes, blocks)
        return self._room[1]

    def _blocks(self, request: RouteRequest) -> tuple[Sequence[int], int]:
        """The named blocks of a request, at most MAX_BOOKING_HASHES, and the number of its other blocks."""
        hashes = _union(request)
        named = hashes if len(hashes) <= MAX_BOOKING_HASHES else hashes[:MAX_BOOKING_HASHES]
        return named, len(hashes) - len(named) + self.pool.unnamed_blocks(request)

    def _remember(self, own: _OwnBooking, choice: Candidate, selection: Selection, moment: Moment) -> None:
        """Record what later decisions depend on."""
        request, target, now = own.request, choice.target, own.sent_at
        number = own.booking.key.number
        self._own[number] = own
        if self._synced:  # else no bookings of peers arrive to be counted
            self.unseen.booked_here(own.booking, now)
        self.tables.arrivals.count(now)
        selection.policy.routed(request, choice, moment)
        if self.circuits is not None:
            self.circuits.sent(target, now)
        if request.session and selection.keeps_sessions:
            self.bind(request.session, target, now)
        if not own.streamed:
            seconds = self.tables.rates.seconds(target, own.charged_tokens)
            if seconds is not None:
                self._predict(now + seconds, number)

    def bind(self, session: str, target: Target, now: float) -> None:
        """The target has served the session just now: tell the peers, too."""
        sessions = self.tables.sessions
        sessions.bind(session, target, now)
        self._publish(Bind(session, target.worker_id, target.rank, round(sessions.ttl_s * 1000)))

    def _predict(self, at: float, number: int) -> None:
        """Record when the request's prefill should be over."""
        heapq.heappush(self._predicted, (at, number))
        # requests that ended early stay in the heap until tidied: at most as many as are in flight
        if len(self._predicted) > _FEW_PREDICTED + 2 * len(self._own):
            self._predicted = [one for one in self._predicted if one[1] in self._own]
            heapq.heapify(self._predicted)

    def due(self, now: float) -> list[BookingKey]:
        """Bookings of responses that are not streamed, once their predicted prefill time has passed."""
        over = []
        while self._predicted and self._predicted[0][0] <= now:
            number = heapq.heappop(self._predicted)[1]
            if number in self._own:
                over.append(BookingKey(self.router_id, number))
        return over

    def first_byte(self, key: BookingKey, now: float) -> float | None:
        """The first data byte of a response: prefill has ended, and its rate can be measured.

        Returns the seconds since the decision; None if they do not show how long the prefill took.
        """
        self.answered(key, 200)
        own = self._own.get(key.number)
        if own is None or own.booking.prefill_completed:
            return None
        # unstreamed, the time includes decoding; without a length, the share of the charge is unknown
        if own.streamed:
            own.ttft_s = now - own.sent_at
            if own.predicted_ttft_s is not None:
                self.calibration.measured(own.predicted_ttft_s, own.ttft_s)
        if own.streamed and own.booking.isl:
            self.tables.rates.observe(own.booking.target, own.charged_tokens, now - own.sent_at)
            self._learn(key, now, now - own.sent_at)
        self.mark_prefill_completed(key, now)
        return own.ttft_s

    def _learn(self, key: BookingKey, now: float, ttft_s: float) -> None:
        """Learn from a first byte, and pass it on: every replica learns from all of them."""
        self._publish(FirstByte(key.number, max(0, round(ttft_s * 1e6))))
        service = self.pool.active.service(key, now, ttft_s)
        if service is not None:
            self.tables.speeds.learn(service)

    def answered(self, key: BookingKey, status: int) -> None:
        """The worker's response has begun with this status; only the first call counts."""
        own = self._own.get(key.number)
        if own is not None and not own.is_answered:
            own.is_answered = True
            own.policy.on_request_routed(own.request, own.booking.target, status)

    def mark_prefill_completed(self, key: BookingKey, now: float) -> None:
        """Stop charging the booking's prefill tokens; a second call changes nothing."""
        booking = self.pool.active.mark_prefill_completed(key, now)
        if booking is None:
            return
        if self._synced:
            self._outbox.append(MarkPrefillCompleted(key.number))
        own = self._own.get(key.number)
        # hashes of another block size would be found by no prompt
        if own is not None and own.block_size == self.pool.block_size:
            self.assume(booking, now, own=True)
        if own is not None and own.request.text and own.policy.remembers_text:
            self._remember_text(booking.target, own.request.text, now)

    def _remember_text(self, target: Target, text: str, now: float) -> None:
        if self.pool.may_hold(target):
            self.tables.texts.insert(target, text, now)
            sent = sent_text(target, text)
            self._own_texts.add(sent)
            self._publish(sent)

    def progress(self, key: BookingKey, output_tokens: int) -> None:
        """Book the output blocks that the response has filled. `output_tokens`: an estimate of its length."""
        own = self._own.get(key.number)
        if own is None:
            return
        own.output_tokens = output_tokens
        if not own.booking.isl:
            return
        size, isl, booked_blocks = own.block_size, own.booking.isl, own.booking.output_blocks
        # the rest of the prompt's last block fills first
        output_blocks = (isl + output_tokens) // size - isl // size
        if output_blocks > booked_blocks:
            self.pool.active.progress(key, output_blocks)
            self._publish(Progress(key.number, output_blocks))

    def free(self, key: BookingKey, now: float = 0.0, output_tokens: int | None = None) -> None:
        """The request has ended; a second call changes nothing.

        `output_tokens`: the length of the answer; None: as `progress` was last called with.
        """
        own = self._own.pop(key.number, None)
        if own is not None and not own.is_answered:
            own.policy.on_request_routed(own.request, own.booking.target, GIVEN_UP)
        if own is not None and own.policy.reads_ends:
            seconds = max(0.0, now - own.sent_at)
            produced = own.output_tokens if output_tokens is None else output_tokens
            own.policy.on_request_end(own.request, own.booking.target, own.ttft_s, seconds, produced)
        if self.pool.active.free(key, now) is not None and self._synced:
            self._outbox.append(Free(key.number))

    def assume(self, booking: Booking, now: float, *, own: bool) -> None:
        """Of texts, and without KV events of all prompts: assume that the target holds what it prefilled."""
        target, pool = booking.target, self.pool
        if pool.may_assume(target, is_text=booking.is_text):
            room = pool.capacity_blocks(target)
            pool.approx.insert(target, booking.hashes, now, own=own, capacity=room)
            self._has_learned = self._has_learned or not own
        elif not own and target.worker_id not in pool.workers and pool.assumes(is_text=booking.is_text):
            ttl_ms, packed = round(pool.settings.ttl_s * 1000), pack_hashes(booking.hashes)
            entry = ApproxEntry(target.worker_id, target.rank, packed, ttl_ms, is_text=booking.is_text)
            self.early.hold(entry, now)

    # Prompts that workers were lost with (core/tables/deadly_prompts.py, claimed_losses.py)

    def lost_with(
        self, prompt: PromptHash, worker_id: WorkerId, *, sent_at: float, lost_at: float, now: float
    ) -> None:
        """A worker was lost with a request of this router in hand."""
        self._claimed.worker_ended(worker_id, now)
        self.deadly.lost(prompt, self.pool.id, worker_id, sent_at=sent_at, lost_at=lost_at, now=now)
        if self.deadly.ttl_s:
            sent_ms, lost_ms = round((now - sent_at) * 1000), round((now - lost_at) * 1000)
            self._publish(LostWith(prompt, worker_id, max(0, sent_ms), max(0, lost_ms)))

    def judge(self, prompt: PromptHash, worker_id: WorkerId, now: float) -> Deadly | None:
        """Whether the prompt is to blame for the worker's death; all replicas then refuse it."""
        found = self.deadly.judge(prompt, worker_id, now)
        if found is not None:
            self._publish(_deadly_op(found, now))
        return found

    def acquit(self, prompt: PromptHash) -> None:
        """A worker has answered the prompt to its end: nobody suspects it any longer."""
        if prompt in self.deadly.suspected:
            self.deadly.answered(prompt)
            self._publish(Pardon(prompt, 0))

    def pardon(self, prompt: PromptHash, now: float) -> None:
        """Let the prompt pass, here and at all replicas."""
        self.deadly.pardon(prompt, self.pool.id, self.deadly.ttl_s, now)
        self._publish(Pardon(prompt, round(self.deadly.ttl_s * 1000)))

    def _hear_of_prompt(self, op: LostWith | DeadlyPrompt | Pardon, now: float) -> None:
        """What a peer says of a prompt."""
        prompt, pool_id = PromptHash(op.prompt), self.pool.id
        match op:
            # a worker that is not known here cannot be lost; an old loss proves nothing any more
            case LostWith(_, worker_id, sent_ms, lost_ms):
                if worker_id in self.pool.workers and lost_ms < KEPT_S * 1000:
                    loss = ClaimedLoss(prompt, pool_id, now - sent_ms / 1000, now - lost_ms / 1000)
                    self._claimed.lost(WorkerId(worker_id), loss, now)
            case DeadlyPrompt(_, worker_ids, ttl_ms):
                self._claimed.deadly(prompt, pool_id, [*map(WorkerId, worker_ids)], ttl_ms / 1000, now)
            case Pardon(_, 0):
                self._claimed.pardoned(prompt)
                self.deadly.answered(prompt)
            case Pardon(_, ttl_ms):
                self._claimed.pardoned(prompt)
                self.deadly.pardon(prompt, pool_id, ttl_ms / 1000, now)

    # The sync feed, which peers follow

    def frames(self) -> list[bytes]:
        """The frames that the peers have not received yet, in order."""
        if not self._outbox:
            return []
        self.feed_seq()
        ops, self._outbox = self._outbox, []
        return self.source.append(ops)

    def check_frames(self, now: float) -> list[bytes]:
        """Called once a second: the frames to publish, with a Check if one is due.

        A Check is due after any change, and every QUIET_CHECK_S without one: else a peer whose copy is wrong
        would not find out while nothing happens here.
        """
        is_quiet = self.source.seq == self._checked_seq and not self._outbox
        if is_quiet and (not self.source.seq or now - self._checked_at < QUIET_CHECK_S):
            return []
        self._checked_at = now
        if self._synced:
            self._outbox.append(Check(*self.pool.active.digest(self.router_id)))
        frames = self.frames()
        self._checked_seq = self.source.seq
        return frames

    def feed_seq(self) -> int:
        """The last number of the feed; 0 if a reader needs neither frames nor a snapshot."""
        has_learned = self._has_learned or self.tables.sessions.has_received
        if self._synced and (has_learned or self.deadly.condemned or self.deadly.pardoned):
            self.source.skip_first()
        return self.source.seq

    def copy_sink(self, router_id: RouterId) -> SyncSink:
        """The sink that writes a peer's bookings into this pool's tables."""
        self._peers.add(router_id)
        self._count_replicas()
        return SyncSink(
            self.pool.active,
            router_id,
            booked=self._booked_elsewhere,
            prefill_completed=lambda booking, now: self.assume(booking, now, own=False),
            assume=self._take_assumption,
            sessions=self.tables.sessions,
            learn=self._learn_text,
            speeds=self.tables.speeds,
            hear_of_prompt=self._hear_of_prompt,
        )

    def drop_peer(self, router_id: RouterId) -> None:
        """A peer has left, or its bookings are followed no longer."""
        self.pool.active.drop_owner(router_id)
        self._peers.discard(router_id)
        self._count_replicas()

    def _count_replicas(self) -> None:
        self._part = sum(peer < self.router_id for peer in self._peers) / (len(self._peers) + 1)

    def _booked_elsewhere(self, booking: Booking, now: float) -> None:
        # its owner counts the request; the caches that all replicas' requests share hold it
        self._ghosts.insert(booking.hashes, self._room_blocks())
        self.unseen.booked_elsewhere(booking, now)
        self.tables.arrivals.count(now)

    def _take_assumption(self, entry: ApproxEntry, now: float) -> None:
        target = Target(WorkerId(entry.worker_id), entry.rank)
        if target.worker_id not in self.pool.workers:
            if self.pool.assumes(is_text=entry.is_text):
                self.early.hold(entry, now)
        elif self.pool.may_assume(target, is_text=entry.is_text):
            hashes, room = hashes_of(entry.hashes), self.pool.capacity_blocks(target)
            self.pool.approx.insert(target, hashes, now, ttl_s=entry.ttl_ms / 1000, capacity=room)
            self._has_learned = True

    def _learn_text(self, sent: SentText, now: float) -> None:
        target = Target(WorkerId(sent.worker_id), sent.rank)
        # a peer may still publish a target that has left: `forget` would not be called for it again
        if target.worker_id not in self.pool.workers:
            self.early.hold(sent, now)
        elif self.pool.may_hold(target):
            self.tables.texts.insert(target, sent.text, now)
            self._learned_texts.add(sent)
            self._has_learned = True

    def _publish(self, op: Op) -> None:
        if self._synced:
            self._outbox.append(op)

    def _state_ops(self, now: float) -> Iterator[Op]:
        """A snapshot: the bookings, assumptions, texts and sessions of this router.

        An elder adds what it has learnt from other replicas: a replica that starts again, with a new id, gets
        from peers what it sent before.
        """
        is_elder = self._is_elder()
        for booking in self.pool.active.bookings(self.router_id):
            yield from booking_ops(booking, pack_hashes(booking.hashes))
        for target, hashes, seconds in self.pool.approx.entries(now, learned=is_elder):
            yield ApproxEntry(
                target.worker_id,
                target.rank,
                pack_hashes(hashes),
                math.ceil(seconds * 1000),
                # with KV events nothing else is assumed
                is_text=self.pool.settings.use_kv_events,
            )
        if (speed := self.tables.speeds.op()) is not None:
            yield speed
        if is_elder:
            yield from self._learned_texts
        yield from self._own_texts
        # all that is known, not only what was seen here: without it, a replica that joins loses workers
        yield from (_deadly_op(one, now) for one in self.deadly.entries(self.pool.id))
        for prompt, seconds in self.deadly.pardons(self.pool.id, now):
            yield Pardon(prompt, math.ceil(seconds * 1000))
        # sessions come last, because losing them costs least: the next request binds a session again
        for session, target, seconds in self.tables.sessions.newest(now, SNAPSHOT_SESSIONS_MOST):
            yield Bind(session, target.worker_id, target.rank, int(seconds * 1000))


def _deadly_op(one: Deadly, now: float) -> DeadlyPrompt:
    return DeadlyPrompt(one.prompt, [*map(str, one.workers)], math.ceil(max(0.0, one.ends_at - now) * 1000))


def _preferred(eligible: Candidates, prefer: tuple[Target, ...]) -> list[Candidate]:
    """The eligible fallbacks, in the order of `prefer`."""
    return [one for name in prefer for one in eligible if one.target == name]


def _union(request: RouteRequest) -> Sequence[int]:
    """The blocks of all prompts, each once, parents before children."""
    if len(request.prompts) == 1:
        return request.prompts[0].hashes
    return list(dict.fromkeys(hash_ for prompt in request.prompts for hash_ in prompt.hashes))
