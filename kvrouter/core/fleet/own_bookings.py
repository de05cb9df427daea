"""The bookings of one router's requests, from their choice to their end, and what is learnt from them.

    book ──> first_byte ──> mark_prefill_completed ──> progress … ──> free
     │AddRequest  │FirstByte        │MarkPrefillCompleted  │Progress     │Free      to the sync feed
     │            └── speeds, rates └── assumptions, texts               └── the policy
     └── arrivals, sessions, circuits, unseen bookings

A call for a booking that has ended changes nothing, so no caller has to know whether it has.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from msgspec import Struct

from kvrouter.core.fleet.pool import Pool
from kvrouter.core.fleet.sync_feed import SyncFeed
from kvrouter.core.routing.breaker import CircuitBreakers
from kvrouter.core.routing.builtin_policy import BuiltInPolicy, Moment, RoutingTables
from kvrouter.core.routing.candidates import Candidates
from kvrouter.core.routing.policy import Candidate, RouteRequest
from kvrouter.core.routing.selection import Selection
from kvrouter.core.tables.bookings import Booking, add_request
from kvrouter.core.tables.prefill_speeds import Calibration
from kvrouter.core.tables.tenants import Charge
from kvrouter.core.tables.text_index import sent_text
from kvrouter.core.tables.transfers import Pull
from kvrouter.core.wire.hashes import pack_hashes, union_of
from kvrouter.core.wire.heartbeats import DECODE, PREFILL
from kvrouter.core.wire.ids import BookingKey, RouterId, Target
from kvrouter.core.wire.ops import (
    MAX_BOOKING_HASHES,
    Bind,
    FirstByte,
    Free,
    MarkPrefillCompleted,
    Progress,
)

# A heap with fewer predictions is not tidied: keeping it costs less.
_FEW_PREDICTED = 64

# The status of a request that was freed before its worker answered. nginx logs it when a client disconnects.
GIVEN_UP = 499


class OwnBooking(Struct, gc=False):
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
    pull: Pull | None = None
    """What its target reads from a peer."""

    @property
    def is_next(self) -> bool:
        """Whether its target had no other prompt to compute when it was booked."""
        return self.charged_tokens == self.booking.prefill_tokens


class OwnBookings:
    """Of one router. Their numbers count from 1; peers know them by the router's id and the number."""

    def __init__(
        self,
        pool: Pool,
        tables: RoutingTables,
        feed: SyncFeed,
        router_id: RouterId,
        circuits: CircuitBreakers | None,
    ) -> None:
        self.calibration = Calibration()
        self._pool = pool
        self._tables = tables
        self._feed = feed
        self._router_id = router_id
        self._circuits = circuits
        self._own: dict[int, OwnBooking] = {}
        # a heap of (time, booking number): when unstreamed prefills should have ended
        self._predicted: list[tuple[float, int]] = []
        self._last_number = 0

    @property
    def is_empty(self) -> bool:
        """Whether none of its requests is in flight."""
        return not self._own

    def book(self, request: RouteRequest, choice: Candidate, now: float, role: str = "") -> Booking:
        """Book the request here, and publish its AddRequest. `role`: that of AddRequest."""
        self._last_number += 1
        named, anonymous_blocks = self._blocks(request) if request.prompts else ((), 0)
        booking = Booking(
            key=BookingKey(self._router_id, self._last_number),
            request_id=request.request_id,
            target=choice.target,
            hashes=named,
            isl=request.isl,
            overlap_blocks=choice.overlap_blocks,
            prefill_tokens=choice.own_prefill_tokens if role != DECODE else 0,
            anonymous_blocks=anonymous_blocks,
            sent_at=now,
            is_text=request.is_text,
            role=role,
        )
        if request.charge is not None and role != PREFILL:  # of a pair the other one counts
            self._charge(booking, request.charge, now)
        self._pool.active.book(booking)
        if self._feed.is_followed:
            self._feed.publish(add_request(booking, pack_hashes(named)))
        return booking

    def _charge(self, booking: Booking, charge: Charge, now: float) -> None:
        self._pool.active.tenants.booked(charge, booking.prefill_tokens, now)
        booking.tenant, booking.tenant_tokens = charge.tenant, charge.tokens

    def _blocks(self, request: RouteRequest) -> tuple[Sequence[int], int]:
        """The named blocks of a request, at most MAX_BOOKING_HASHES, and the number of its other blocks."""
        hashes = union_of([prompt.hashes for prompt in request.prompts])
        named = hashes if len(hashes) <= MAX_BOOKING_HASHES else hashes[:MAX_BOOKING_HASHES]
        return named, len(hashes) - len(named) + request.unnamed_blocks(self._pool.block_size)

    def remember(self, own: OwnBooking, choice: Candidate, selection: Selection, moment: Moment) -> None:
        """Record what later decisions depend on."""
        request, target, now = own.request, choice.target, own.sent_at
        number = own.booking.key.number
        self.track(own)
        if self._feed.is_followed:  # else no bookings of peers arrive to be counted
            self._feed.unseen.booked_here(own.booking, now)
        self._tables.arrivals.count(now)
        selection.policy.routed(request, choice, moment)
        if request.session and selection.keeps_sessions:
            self.bind(request.session, target, now)
        # a decode half computes no prompt
        if own.charged_tokens and not own.streamed and own.booking.role != DECODE:
            seconds = self._tables.rates.seconds(target, own.charged_tokens)
            if seconds is not None:
                self.predict(now + seconds, number)

    def count_decision(self, eligible: Candidates, target: Target, moment: Moment) -> float | None:
        """The predicted TTFT of the chosen target, counted against the least; None without a prediction."""
        predicted = None if moment.doubt else eligible.predicted_ttft_s(target)
        if predicted is None:
            return None
        self.calibration.decided(*predicted)
        return predicted[0]

    def track(self, own: OwnBooking) -> None:
        """Record the booking, of a whole request or of half of one, for its later events."""
        self._own[own.booking.key.number] = own
        if own.pull is not None:
            tokens = own.pull.blocks * own.block_size
            self._tables.transfers.begin(own.booking.key, tokens, _pulls_from(own, own.pull))
        if self._circuits is not None:
            self._circuits.sent(own.booking.target, own.sent_at)

    def bind(self, session: str, target: Target, now: float) -> None:
        """The target has served the session just now: tell the peers, too."""
        sessions = self._tables.sessions
        sessions.bind(session, target, now)
        self._feed.publish(Bind(session, target.worker_id, target.rank, round(sessions.ttl_s * 1000)))

    def predict(self, at: float, number: int) -> None:
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
                over.append(BookingKey(self._router_id, number))
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
        if own.streamed and own.booking.isl and own.booking.role != DECODE:  # it did not compute the prompt
            if own.pull is None:
                self._tables.rates.observe(own.booking.target, own.charged_tokens, now - own.sent_at)
            elif own.is_next:
                self._learn_transfer(own, own.pull, now)
            self._learn(key, now, now - own.sent_at)
        if own.pull is not None:
            self._tables.transfers.end(key)
        self.mark_prefill_completed(key, now)
        return own.ttft_s

    def _learn(self, key: BookingKey, now: float, ttft_s: float) -> None:
        """Learn from a first byte, and pass it on: every replica learns from all of them."""
        self._feed.publish(FirstByte(key.number, max(0, round(ttft_s * 1e6))))
        service = self._pool.active.service(key, now, ttft_s)
        if service is not None:
            self._tables.speeds.learn(service)

    def _learn_transfer(self, own: OwnBooking, pull: Pull, now: float) -> None:
        """What a first byte took beyond waiting and prefill, as these were predicted."""
        seconds = max(0.0, now - _pulls_from(own, pull))
        self._tables.transfers.observe(seconds, pull.blocks * own.block_size, now)

    def answered(self, key: BookingKey, status: int) -> None:
        """The worker's response has begun with this status; only the first call counts."""
        own = self._own.get(key.number)
        if own is not None and not own.is_answered:
            own.is_answered = True
            own.policy.on_request_routed(own.request, own.booking.target, status)

    def mark_prefill_completed(self, key: BookingKey, now: float) -> None:
        """Stop charging the booking's prefill tokens; a second call changes nothing."""
        booking = self._pool.active.mark_prefill_completed(key, now)
        if booking is None:
            return
        if self._feed.is_followed:
            self._feed.publish(MarkPrefillCompleted(key.number))
        own = self._own.get(key.number)
        # hashes of another block size would be found by no prompt
        if own is not None and booking.hashes and own.block_size == self._pool.block_size:
            self._feed.assume(booking, now, own=True)
        if own is not None and own.request.text and own.policy.remembers_text:
            self._remember_text(booking.target, own.request.text, now)

    def _remember_text(self, target: Target, text: str, now: float) -> None:
        if self._pool.may_hold(target):
            self._tables.texts.insert(target, text, now)
            self._feed.sent(sent_text(target, text))

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
            self._pool.active.progress(key, output_blocks)
            self._feed.publish(Progress(key.number, output_blocks))

    def free(self, key: BookingKey, now: float = 0.0, output_tokens: int | None = None) -> None:
        """The request has ended; a second call changes nothing.

        `output_tokens`: the length of the answer; None: as `progress` was last called with.
        """
        own = self._own.pop(key.number, None)
        if own is not None and own.pull is not None:
            self._tables.transfers.end(key)
        if own is not None and not own.is_answered:
            own.policy.on_request_routed(own.request, own.booking.target, GIVEN_UP)
        if own is not None and own.policy.reads_ends:
            seconds = max(0.0, now - own.sent_at)
            produced = own.output_tokens if output_tokens is None else output_tokens
            own.policy.on_request_end(own.request, own.booking.target, own.ttft_s, seconds, produced)
        booking, settled = self._pool.active.free(key, now), 0
        if own is not None and own.request.charge is not None and own.booking.tenant:
            settled = self._pool.active.tenants.settle(own.request.charge, now)
        if booking is not None and self._feed.is_followed:
            self._feed.publish(Free(key.number, settled))


def _pulls_from(own: OwnBooking, pull: Pull) -> float:
    """When its target would have had a first byte, had it had the blocks: it takes longer by the transfer."""
    return own.sent_at + (own.predicted_ttft_s or pull.seconds) - pull.seconds
