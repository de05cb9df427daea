"""The sync feed of one pool: what this replica tells its peers, and what it takes from theirs.

    publish ──> outbox ──frames, numbered──> peers            peers' feeds ──copy_sink──> tables
                  └── a peer that joins gets a snapshot: _state_ops

The outbox, the wire and the peer keep one order, so a Free never overtakes its AddRequest.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator

from kvrouter.core.feeds.sinks import SyncSink
from kvrouter.core.feeds.source import FeedSource
from kvrouter.core.fleet.pool import Pool
from kvrouter.core.routing.builtin_policy import RoutingTables
from kvrouter.core.tables.bookings import Booking, UnseenBookings, booking_ops
from kvrouter.core.tables.claimed_losses import ClaimedLosses
from kvrouter.core.tables.deadly_prompts import Deadly
from kvrouter.core.tables.early_ops import EarlyOps
from kvrouter.core.tables.ghosts import Reuse
from kvrouter.core.tables.text_index import KeptTexts
from kvrouter.core.wire.hashes import hashes_of, pack_hashes
from kvrouter.core.wire.heartbeats import PREFILL
from kvrouter.core.wire.ids import PromptHash, RouterId, Target, WorkerId
from kvrouter.core.wire.ops import (
    ApproxEntry,
    Bind,
    Check,
    DeadlyPrompt,
    LostWith,
    Op,
    Pardon,
    SentText,
)

# A snapshot contains at most this many sessions, the last used ones: encoding them takes about 15 ms.
SNAPSHOT_SESSIONS_MOST = 5_000

# Readers that join together share a snapshot for this long. What was learnt from peers is in none of this
# router's own frames, so an older one may lack it.
SNAPSHOT_SHARED_S = 1.0

# Seconds between two Checks of a quiet feed, so that a peer with a wrong copy notices it.
QUIET_CHECK_S = 10.0


class SyncFeed:
    """Of one router."""

    def __init__(
        self,
        pool: Pool,
        tables: RoutingTables,
        claimed: ClaimedLosses,
        *,
        router_id: RouterId,
        incarnation: int,
        synced: bool,
        seq: int,
        is_elder: Callable[[], bool],
        reuse: Reuse,
        early: EarlyOps,
    ) -> None:
        """`synced`, `seq`, `is_elder` and `claimed` as Router has them."""
        # Weak: in a reference cycle, a router outlived its pool by up to an hour (full collections are rare).
        state_ops = weakref.WeakMethod(self._state_ops)
        self.source = FeedSource(
            incarnation,
            lambda now: ops(now) if (ops := state_ops()) else (),
            shared_s=SNAPSHOT_SHARED_S,
        )
        self.source.seq = seq
        self.is_followed = synced
        """Whether peers may follow it; else nothing is published."""
        self.early, self.unseen = early, UnseenBookings()
        self.deadly = claimed.prompts
        self.part = 0.0
        """By name, the share of the pool's replicas that come before this one."""
        self._pool, self._tables, self._claimed = pool, tables, claimed
        self._router_id, self._is_elder, self._reuse = router_id, is_elder, reuse
        self._peers: set[RouterId] = set()
        self._smaller_peers = 0
        self._has_learned = False  # whether its state has something that is in no frame of its own
        self._own_texts, self._learned_texts = KeptTexts(), KeptTexts()
        self._outbox: list[Op] = []
        self._checked_seq, self._checked_at = seq, float("-inf")

    # What peers get

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to publish."""
        return not self._outbox

    def publish(self, op: Op) -> None:
        """Tell the peers, with the next frame."""
        if self.is_followed:
            self._outbox.append(op)

    def sent(self, text: SentText) -> None:
        """A text that this router has sent to a target."""
        self._own_texts.add(text)
        self.publish(text)

    def frames(self) -> list[bytes]:
        """The frames that the peers have not received yet, in order."""
        if not self._outbox:
            return []
        self.last_seq()
        ops, self._outbox = self._outbox, []
        frames, tenants = self.source.append(ops), self._pool.active.tenants
        if tenants.limited:
            tenants.published(self._pool.id, self.source.seq)
        return frames

    def check_frames(self, now: float) -> list[bytes]:
        """Called once a second: the frames to publish, with a Check if one is due.

        A Check is due after any change, and every QUIET_CHECK_S without one, for peers whose copy is wrong.
        """
        is_quiet = self.source.seq == self._checked_seq and not self._outbox
        if is_quiet and (not self.source.seq or now - self._checked_at < QUIET_CHECK_S):
            return []
        self._checked_at = now
        if self.is_followed:
            self._outbox.append(Check(*self._pool.active.digest(self._router_id)))
        frames = self.frames()
        self._checked_seq = self.source.seq
        return frames

    def last_seq(self) -> int:
        """The last number of the feed; 0 if a reader needs neither frames nor a snapshot."""
        has_learned = self._has_learned or self._tables.sessions.has_received
        if self.is_followed and (has_learned or self.deadly.condemned or self.deadly.pardoned):
            self.source.skip_first()
        return self.source.seq

    def _state_ops(self, now: float) -> Iterator[Op]:
        """A snapshot: the bookings, assumptions, texts and sessions of this router.

        An elder adds what it has learnt from other replicas: a replica that starts again, with a new id, gets
        from peers what it sent before.
        """
        is_elder = self._is_elder()
        for booking in self._pool.active.bookings(self._router_id):
            yield from booking_ops(booking, pack_hashes(booking.hashes))
        for target, hashes, seconds in self._pool.approx.entries(now, learned=is_elder):
            yield ApproxEntry(
                target.worker_id,
                target.rank,
                pack_hashes(hashes),
                math.ceil(seconds * 1000),
                # with KV events nothing else is assumed
                is_text=self._pool.settings.use_kv_events,
            )
        yield from self._pool.active.tenants.ops(now, self._peers, is_elder=is_elder)
        if (speed := self._tables.speeds.op()) is not None:
            yield speed
        if is_elder:
            yield from self._learned_texts
        yield from self._own_texts
        # all that is known, not only what was seen here: without it, a replica that joins loses workers
        yield from (_deadly_op(one, now) for one in self.deadly.entries(self._pool.id))
        for prompt, seconds in self.deadly.pardons(self._pool.id, now):
            yield Pardon(prompt, math.ceil(seconds * 1000))
        # sessions come last, because losing them costs least: the next request binds a session again
        for session, target, seconds in self._tables.sessions.newest(now, SNAPSHOT_SESSIONS_MOST):
            yield Bind(session, target.worker_id, target.rank, int(seconds * 1000))

    # What peers say

    def copy_sink(self, router_id: RouterId) -> SyncSink:
        """The sink that writes a peer's bookings into this pool's tables."""
        if router_id not in self._peers:
            self._peers.add(router_id)
            self._count_replicas(router_id, 1)
        return SyncSink(
            self._pool.active,
            router_id,
            booked=self._booked_elsewhere,
            prefill_completed=lambda booking, now: self.assume(booking, now, own=False),
            assume=self._take_assumption,
            sessions=self._tables.sessions,
            is_early=self._is_early,
            learn=self._learn_text,
            speeds=self._tables.speeds,
            hear_of_prompt=self._hear_of_prompt,
        )

    def drop_peer(self, router_id: RouterId) -> None:
        """A peer has left, or its bookings are followed no longer."""
        self._pool.active.drop_owner(router_id)
        if router_id in self._peers:
            self._peers.remove(router_id)
            self._count_replicas(router_id, -1)

    def _count_replicas(self, router_id: RouterId, more: int) -> None:
        self._smaller_peers += more * (router_id < self._router_id)
        self.part = self._smaller_peers / (len(self._peers) + 1)

    def _booked_elsewhere(self, booking: Booking, now: float) -> None:
        if booking.role == PREFILL:  # one of two bookings of a request: the other one counts
            return
        self._reuse.booked_elsewhere(booking.hashes, self._pool.room_blocks)
        self.unseen.booked_elsewhere(booking, now)
        self._tables.arrivals.count(now)

    def assume(self, booking: Booking, now: float, *, own: bool) -> None:
        """Of texts, and without KV events of all prompts: assume that the target holds what it prefilled."""
        target, pool = booking.target, self._pool
        if pool.may_assume(target, is_text=booking.is_text):
            room = pool.capacity_blocks(target)
            pool.approx.insert(target, booking.hashes, now, own=own, capacity=room)
            self._has_learned = self._has_learned or not own
        elif not own and target.worker_id not in pool.workers and pool.assumes(is_text=booking.is_text):
            ttl_ms, packed = round(pool.settings.ttl_s * 1000), pack_hashes(booking.hashes)
            entry = ApproxEntry(target.worker_id, target.rank, packed, ttl_ms, is_text=booking.is_text)
            self.early.hold(entry, now)

    def _take_assumption(self, entry: ApproxEntry, now: float) -> None:
        target = Target(WorkerId(entry.worker_id), entry.rank)
        if target.worker_id not in self._pool.workers:
            if self._pool.assumes(is_text=entry.is_text):
                self.early.hold(entry, now)
        elif self._pool.may_assume(target, is_text=entry.is_text):
            hashes, room = hashes_of(entry.hashes), self._pool.capacity_blocks(target)
            self._pool.approx.insert(target, hashes, now, ttl_s=entry.ttl_ms / 1000, capacity=room)
            self._has_learned = True

    def _is_early(self, bind: Bind, now: float) -> bool:
        """Whether the session's worker is not known here: then the op waits for its card."""
        if bind.worker_id in self._pool.workers:
            return False
        self.early.hold(bind, now)
        return True

    def _learn_text(self, sent: SentText, now: float) -> None:
        target = Target(WorkerId(sent.worker_id), sent.rank)
        # a peer may still publish a target that has left: `forget` would not be called for it again
        if target.worker_id not in self._pool.workers:
            self.early.hold(sent, now)
        elif self._pool.may_hold(target):
            self._tables.texts.insert(target, sent.text, now)
            self._learned_texts.add(sent)
            self._has_learned = True

    def card_arrived(self, worker_id: WorkerId, now: float) -> None:
        """What peers have said of the worker before its card counts from now on."""
        for op in self.early.take(worker_id, now):
            match op:
                case SentText():
                    self._learn_text(op, now)
                case ApproxEntry():
                    self._take_assumption(op, now)
                case Bind(session, _, rank, ttl_ms):
                    target = Target(worker_id, rank)
                    self._tables.sessions.restore(session, target, now, ttl_ms / 1000, RouterId(""))

    def forget_texts(self, target: Target) -> None:
        """The target is gone, or another engine has taken its place."""
        for texts in (self._own_texts, self._learned_texts):
            texts.forget(target)
        self._tables.texts.remove(target)

    # Prompts that workers were lost with (core/tables/deadly_prompts.py, claimed_losses.py)

    def lost_with(
        self, prompt: PromptHash, worker_id: WorkerId, *, sent_at: float, lost_at: float, now: float
    ) -> None:
        """A worker was lost with a request of this router in hand."""
        self._claimed.worker_ended(worker_id, now)
        self.deadly.lost(prompt, self._pool.id, worker_id, sent_at=sent_at, lost_at=lost_at, now=now)
        if self.deadly.ttl_s:
            sent_ms, lost_ms = round((now - sent_at) * 1000), round((now - lost_at) * 1000)
            self.publish(LostWith(prompt, worker_id, max(0, sent_ms), max(0, lost_ms)))

    def judge(self, prompt: PromptHash, worker_id: WorkerId, now: float) -> Deadly | None:
        """Whether the prompt is to blame for the worker's death; all replicas then refuse it."""
        found = self.deadly.judge(prompt, worker_id, now)
        if found is not None:
            self.publish(_deadly_op(found, now))
        return found

    def acquit(self, prompt: PromptHash) -> None:
        """A worker has answered the prompt to its end: nobody suspects it any longer."""
        if prompt in self.deadly.suspected:
            self.deadly.answered(prompt)
            self.publish(Pardon(prompt, 0))

    def pardon(self, prompt: PromptHash, now: float) -> None:
        """Let the prompt pass, here and at all replicas."""
        self.deadly.pardon(prompt, self._pool.id, self.deadly.ttl_s, now)
        self.publish(Pardon(prompt, round(self.deadly.ttl_s * 1000)))

    def _hear_of_prompt(self, op: LostWith | DeadlyPrompt | Pardon, now: float) -> None:
        self._claimed.hear(op, self._pool.id, self._pool.workers.keys(), now)


def _deadly_op(one: Deadly, now: float) -> DeadlyPrompt:
    return DeadlyPrompt(one.prompt, [*map(str, one.workers)], math.ceil(max(0.0, one.ends_at - now) * 1000))
