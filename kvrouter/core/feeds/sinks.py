"""The end of a feed: a sink turns ops into changes of the block index or of the bookings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from kvrouter.core.tables.block_index import BlockIndex, Holding
from kvrouter.core.tables.bookings import Booking, BookingTable
from kvrouter.core.tables.prefill_speeds import PrefillSpeeds
from kvrouter.core.tables.sessions import SessionTable
from kvrouter.core.tables.table import SlotSet
from kvrouter.core.wire.hashes import hash_array
from kvrouter.core.wire.ids import BookingKey, RouterId, Target, WorkerId
from kvrouter.core.wire.ops import (
    TIERS,
    AddRequest,
    ApproxEntry,
    Bind,
    Check,
    CheckResumable,
    Cleared,
    DeadlyPrompt,
    FirstByte,
    Free,
    LostWith,
    MarkPrefillCompleted,
    NotResumable,
    Op,
    Pardon,
    PrefillSpeed,
    Progress,
    Removed,
    Resumable,
    SentText,
    Stored,
    TenantUse,
)
from kvrouter.errors import counted

# A target that stores more than 1.1 times what its card has room for contradicts itself: a target without a
# bound could otherwise fill the index.
CAPACITY_SLACK = 1.1
TOO_MANY = "it has more requests in flight than a replica can serve"


class FeedSink(Protocol):
    """The table a feed writes to."""

    def plain(self) -> tuple[SlotSet, int] | None:
        """The slot to which frames with nothing odd may go, and the blocks that it has room for (0: any)."""
        ...

    def apply(self, op: Op, now: float) -> str:
        """Apply a live op. Returns why it contradicts the copy; empty if it does not."""
        ...

    def agrees(self, check: Check | CheckResumable) -> bool:
        """Whether the source's count and digest equal the copy's."""
        ...

    def has_room_again(self) -> bool:
        """Whether there is room now for blocks that the table refused."""
        ...

    def reset(self) -> None:
        """The source has restarted and holds nothing."""
        ...

    def begin_load(self) -> None:
        """A snapshot begins; an unfinished one is dropped."""
        ...

    def load(self, op: Op, now: float) -> str:
        """Load one op of the snapshot. Returns what `apply` returns."""
        ...

    def finish_load(self) -> None:
        """The snapshot is complete: it replaces the copy in one step."""
        ...

    def abandon_load(self) -> None:
        """Drop the unfinished snapshot."""
        ...


class Capacity(Protocol):
    """A worker, as far as its KV feeds ask."""

    @property
    def capacity_blocks(self) -> int:
        """The blocks that one rank can hold over all tiers, by the worker's card; 0: unknown."""
        ...


class KvSink:
    """Writes one rank's KV feed to the pool's index.

    `workers` are the pool's own: a new card may change the capacity, so it is looked up for each Stored.
    """

    def __init__(
        self, index: BlockIndex, target: Target, tier_sets: int, workers: Mapping[WorkerId, Capacity]
    ) -> None:
        self._index = index
        self._target = target
        self._tier_sets = tier_sets
        self._workers = workers
        self._fresh: Holding | None = None

    def plain(self) -> tuple[SlotSet, int] | None:
        held, worker = self._index.plain(self._target), self._workers.get(self._target.worker_id)
        if held is None or worker is None:
            return None
        return held, int(worker.capacity_blocks * CAPACITY_SLACK)

    def apply(self, op: Op, now: float) -> str:
        """A contradiction is a parent that is not held, or more blocks than the card has room for."""
        match op:
            case Stored():
                return self._store(op)
            case Removed():
                self._index.remove(self._target, op.hashes, TIERS[op.tier])
            case Resumable():
                return self._resume(op)
            case NotResumable():
                self._index.stop_resuming(self._target, op.hashes)
            case Cleared():
                self._index.clear(self._target)
        return ""

    def _store(self, op: Stored) -> str:
        tier, before = TIERS[op.tier], self._index.blocks(self._target)
        if op.parent is not None and not self._index.holds(self._target, op.parent, tier):
            return self._without_parent(self._index.holding(self._target), op)
        if excess := self._excess(before):
            return excess  # before storing: else each further op of such a target would fill the index
        self._index.store(self._target, op.hashes, tier, op.parent)
        return self._excess(self._index.blocks(self._target))

    def _resume(self, op: Resumable) -> str:
        if excess := self._excess(self._resume_points):
            return excess  # before they are added, as in `_store`
        self._index.resume(self._target, op.hashes)
        return self._excess(self._resume_points)

    @property
    def _resume_points(self) -> int:
        count, _ = self._index.resumable_digest(self._target) or (0, 0)
        return count

    def agrees(self, check: Check | CheckResumable) -> bool:
        # the index, not the sink: only it knows which blocks it has refused
        if isinstance(check, CheckResumable):
            return self._index.agrees_on_resumable(self._target, check.count, check.digest)
        return self._index.agrees(self._target, TIERS[check.tier], check.count, check.digest)

    def has_room_again(self) -> bool:
        return self._index.has_room_again(self._target)

    def reset(self) -> None:
        # an empty holding, so that the index knows the target from now on
        self._index.finish_load(self._target, self._index.begin_load(self._tier_sets, self._target))

    def begin_load(self) -> None:
        self.abandon_load()
        self._fresh = self._index.begin_load(self._tier_sets, self._target)

    def load(self, op: Op, now: float) -> str:
        if self._fresh is None:
            return ""
        if isinstance(op, Resumable):
            self._index.load_resumable(self._fresh, op.hashes)
            return self._excess(self._fresh.resumable.count if self._fresh.resumable else 0)
        if not isinstance(op, Stored):
            return ""
        tier = TIERS[op.tier]
        if op.parent is not None and not self._index.loaded_holds(self._fresh, op.parent, tier):
            return self._without_parent(self._fresh, op)
        self._index.widen_load(self._fresh, op.tier + 1)
        self._index.load(self._fresh, op.hashes, tier, op.parent)
        return self._excess(self._fresh.sets[-1].count)

    def finish_load(self) -> None:
        if self._fresh is not None:
            self._index.finish_load(self._target, self._fresh)
            self._fresh = None

    def abandon_load(self) -> None:
        if self._fresh is not None:
            self._index.abandon_load(self._fresh)
            self._fresh = None

    def _without_parent(self, holding: Holding | None, op: Stored) -> str:
        """Not a contradiction if the index may have refused the parent: then it refuses these blocks, too."""
        if holding is None or not holding.is_truncated:
            return "it stores blocks whose parent it does not hold"
        self._index.refuse(holding, len(op.hashes) // 8)
        return ""

    def _excess(self, blocks: int) -> str:
        capacity = self._workers[self._target.worker_id].capacity_blocks
        if not capacity or blocks <= capacity * CAPACITY_SLACK:
            return ""
        return f"it holds {counted(blocks, 'block')}, and its card has room for {capacity}"


class SyncSink:
    """Writes a peer's sync feed to the pool's bookings, as copies.

    A snapshot is loaded in place, because bookings do not depend on each other: equal ones stay, and at the
    end bookings that the snapshot did not name are dropped. `booked`, `prefill_completed`, `assume`,
    `learn` and `hear_of_prompt` pass on the ops that change other tables. `is_early`: whether a session's
    worker is not known, and the op was put aside.
    """

    def __init__(
        self,
        active: BookingTable,
        router_id: RouterId,
        *,
        booked: Callable[[Booking, float], None],
        prefill_completed: Callable[[Booking, float], None],
        assume: Callable[[ApproxEntry, float], None],
        sessions: SessionTable | None = None,
        is_early: Callable[[Bind, float], bool] = lambda *_: False,
        learn: Callable[[SentText, float], None] | None = None,
        speeds: PrefillSpeeds | None = None,
        hear_of_prompt: Callable[[LostWith | DeadlyPrompt | Pardon, float], None] = lambda *_: None,
    ) -> None:
        self._active = active
        self._router_id = router_id
        self._booked = booked
        self._prefill_completed = prefill_completed
        self._assume = assume
        self._sessions, self._is_early = sessions, is_early
        self._learn = learn
        self._speeds = speeds
        self._hear_of_prompt = hear_of_prompt
        self._named: set[int] = set()
        self._counted: list[tuple[TenantUse, float]] = []

    def plain(self) -> None:
        return None

    def apply(self, op: Op, now: float) -> str:
        """Apply a moment of a booking, a session or a text. Only too many bookings contradict."""
        match op:
            case AddRequest():
                return self._book(op, now)
            case FirstByte() if self._speeds is not None:
                key = BookingKey(self._router_id, op.number)
                service = self._active.service(key, now, op.ttft_us / 1e6)
                if service is not None:
                    self._speeds.learn(service)
            case MarkPrefillCompleted():
                completed = self._active.mark_prefill_completed(BookingKey(self._router_id, op.number), now)
                if completed is not None:
                    self._prefill_completed(completed, now)
            case Progress():
                self._active.progress(BookingKey(self._router_id, op.number), op.output_blocks)
            case Free():
                self._free(op, now)
            case SentText() if self._learn is not None:
                self._learn(op, now)
            case Bind() if self._sessions is not None:
                if not self._is_early(op, now):
                    target = Target(WorkerId(op.worker_id), op.rank)
                    self._sessions.receive(op.session, target, now, op.ttl_ms / 1000, self._router_id)
            case LostWith() | DeadlyPrompt() | Pardon():
                self._hear_of_prompt(op, now)
        return ""

    def _book(self, op: AddRequest, now: float) -> str:
        booking = self._active.book_of_peer(_booking(self._router_id, op, now))
        if booking is None:
            return TOO_MANY
        if op.tenant:
            facts = op.tenant, op.tenant_tokens, now, op.prefill_tokens
            self._active.tenants.begun_elsewhere(self._router_id, *facts)
        self._booked(booking, now)
        return ""

    def _free(self, op: Free, now: float) -> None:
        freed = self._active.free(BookingKey(self._router_id, op.number), now)
        if freed is not None and freed.tenant:
            self._active.tenants.ended_elsewhere(
                self._router_id,
                freed.tenant,
                now,
                settled=op.settled,
                tokens=freed.tenant_tokens,
                begun_at=freed.sent_at,
                isl=freed.isl,
            )

    def agrees(self, check: Check | CheckResumable) -> bool:
        return isinstance(check, Check) and (check.count, check.digest) == self._active.digest(
            self._router_id
        )

    def has_room_again(self) -> bool:
        return False  # no table is ever too full for a booking

    def reset(self) -> None:
        self._active.drop_owner(self._router_id)

    def begin_load(self) -> None:
        self._named, self._counted = set(), []

    def load(self, op: Op, now: float) -> str:
        """Load one op. A booking comes as AddRequest, followed by its later moments."""
        match op:
            case AddRequest():
                self._named.add(op.number)
                if self._active.book_of_peer(_booking(self._router_id, op, now)) is None:
                    return TOO_MANY
            case MarkPrefillCompleted():
                self._active.mark_prefill_completed(BookingKey(self._router_id, op.number), now)
            case PrefillSpeed() if self._speeds is not None:
                self._speeds.adopt(op)
            case ApproxEntry():
                self._assume(op, now)
            case TenantUse():
                if op.tenant in self._active.tenants.limited:
                    self._counted.append((op, now))
            case Bind() if self._sessions is not None:
                if not self._is_early(op, now):
                    target = Target(WorkerId(op.worker_id), op.rank)
                    self._sessions.restore(op.session, target, now, op.ttl_ms / 1000, self._router_id)
            case _:
                return self.apply(op, now)
        return ""

    def finish_load(self) -> None:
        if self._counted:  # older replicas count nothing
            self._active.tenants.load(self._router_id, [op for op, _ in self._counted], self._counted[0][1])
        # a booking that the owner did not name has ended
        for booking in self._active.bookings(self._router_id):
            if booking.key.number not in self._named:
                self._active.drop(booking.key)  # not `free`: there may be thousands of them

    def abandon_load(self) -> None:
        """Keep what was loaded: bookings do not depend on each other, and the next snapshot has the rest."""


def _booking(router_id: RouterId, op: AddRequest, now: float) -> Booking:
    return Booking(
        BookingKey(router_id, op.number),
        op.request_id,
        Target(WorkerId(op.worker_id), op.rank),
        hash_array(op.hashes),
        isl=op.isl,
        overlap_blocks=op.overlap_blocks,
        prefill_tokens=op.prefill_tokens,
        anonymous_blocks=op.anonymous_blocks,
        sent_at=now,
        is_text=op.is_text,
        role=op.role,
        tenant=op.tenant,
        tenant_tokens=op.tenant_tokens,
    )
