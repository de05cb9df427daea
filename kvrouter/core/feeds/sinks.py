"""Where feeds end: ops become changes of the index and of the active table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvrouter.core.tables.block_index import BlockIndex, Holding
from kvrouter.core.tables.bookings import ActiveTable, Booking
from kvrouter.core.tables.sessions import SessionTable
from kvrouter.core.wire.hashes import hashes_of
from kvrouter.core.wire.ids import BookingKey, RouterId, Target, WorkerId
from kvrouter.core.wire.ops import (
    TIERS,
    AddRequest,
    ApproxEntry,
    Bind,
    Check,
    Cleared,
    Free,
    MarkPrefillCompleted,
    Op,
    Progress,
    Removed,
    SentText,
    Stored,
)
from kvrouter.core.wire.values import MOST_ID_CHARACTERS

CAPACITY_SLACK = 1.1
"""A target may announce this much more than its card says before it is disbelieved."""


class FeedSink(Protocol):
    """The table a feed writes to."""

    def apply(self, op: Op, now: float) -> str:
        """Apply a live op. Returns why it cannot be true, given what is held here; empty if it can."""
        ...

    def agrees(self, check: Check) -> bool:
        """Whether the source's count and digest are the table's own."""
        ...

    def has_room_again(self) -> bool:
        """Whether what the table refused for want of room would be taken now."""
        ...

    def reset(self) -> None:
        """The source begins anew with nothing."""
        ...

    def begin_load(self) -> None:
        """A snapshot comes; an unfinished one is given up."""
        ...

    def load(self, op: Op, now: float) -> str:
        """Take one op of the snapshot. Returns what `apply` returns."""
        ...

    def finish_load(self) -> None:
        """The snapshot is complete and counts from now on."""
        ...

    def abandon_load(self) -> None:
        """The snapshot is given up."""
        ...


class KvSink:
    """One rank's KV feed writes to the pool's index.

    `capacity` returns how many blocks the target can hold over all its tiers; 0 means unknown.
    """

    def __init__(
        self, index: BlockIndex, target: Target, tier_sets: int, capacity: Callable[[], int]
    ) -> None:
        self._index = index
        self._target = target
        self._tier_sets = tier_sets
        self._capacity = capacity
        self._fresh: Holding | None = None

    def apply(self, op: Op, now: float) -> str:
        """Apply a live op; a contradiction is a missing parent, or more blocks than the card has room for."""
        match op:
            case Stored():
                return self._store(op)
            case Removed():
                self._index.remove(self._target, op.hashes, TIERS[op.tier])
            case Cleared():
                self._index.clear(self._target)
        return ""

    def _store(self, op: Stored) -> str:
        tier, before = TIERS[op.tier], self._index.blocks(self._target)
        if op.parent is not None and not self._index.holds(self._target, op.parent, tier):
            return self._without_parent(self._index.holding(self._target), op)
        if excess := self._excess(before):
            return excess  # so that a target which ignores its bound cannot fill the index
        self._index.store(self._target, op.hashes, tier)
        return self._excess(self._index.blocks(self._target))

    def agrees(self, check: Check) -> bool:
        """Compare one tier set; the index knows what it has refused itself."""
        return self._index.agrees(self._target, TIERS[check.tier], check.count, check.digest)

    def has_room_again(self) -> bool:
        """For a chain that the bounds of the index cut off."""
        return self._index.has_room_again(self._target)

    def reset(self) -> None:
        """The rank holds nothing; it is known from now on."""
        self._index.finish_load(self._target, self._index.begin_load(self._tier_sets, self._target))

    def begin_load(self) -> None:
        """Load into fresh slots."""
        self.abandon_load()
        self._fresh = self._index.begin_load(self._tier_sets, self._target)

    def load(self, op: Op, now: float) -> str:
        """Take one Stored of the snapshot; contradictions are those of `apply`."""
        if not isinstance(op, Stored) or self._fresh is None:
            return ""
        tier = TIERS[op.tier]
        if op.parent is not None and not self._index.loaded_holds(self._fresh, op.parent, tier):
            return self._without_parent(self._fresh, op)
        self._index.widen_load(self._fresh, op.tier + 1)
        self._index.load(self._fresh, op.hashes, tier)
        return self._excess(self._fresh.sets[-1].count)

    def finish_load(self) -> None:
        """The fresh slots are the target's from now on."""
        if self._fresh is not None:
            self._index.finish_load(self._target, self._fresh)
            self._fresh = None

    def abandon_load(self) -> None:
        """The fresh slots are swept by and by."""
        if self._fresh is not None:
            self._index.abandon_load(self._fresh)
            self._fresh = None

    def _without_parent(self, holding: Holding | None, op: Stored) -> str:
        """No contradiction if the index's bounds may have cut the parent off: then these blocks go, too."""
        if holding is None or not holding.is_truncated:
            return "it stores blocks whose parent it does not hold"
        self._index.refuse(holding, len(op.hashes) // 8)
        return ""

    def _excess(self, blocks: int) -> str:
        capacity = self._capacity()
        if not capacity or blocks <= capacity * CAPACITY_SLACK:
            return ""
        return f"it holds {blocks} blocks, and its card has room for {capacity}"


class SyncSink:
    """A peer's sync feed writes copies of its bookings to the pool's active table.

    A snapshot is loaded booking by booking: each stands for itself, so what is the same stays, and
    what the snapshot did not name is freed at its end.
    """

    def __init__(
        self,
        active: ActiveTable,
        router_id: RouterId,
        booked: Callable[[float], None],
        prefill_completed: Callable[[Booking, float], None],
        assume: Callable[[ApproxEntry, float], None],
        *,
        sessions: SessionTable | None = None,
        learn: Callable[[SentText, float], None] | None = None,
    ) -> None:
        self._active = active
        self._router_id = router_id
        self._booked = booked
        self._prefill_completed = prefill_completed
        self._assume = assume
        self._sessions = sessions
        self._learn = learn
        self._named: set[int] = set()

    def apply(self, op: Op, now: float) -> str:
        """Apply one of the three moments of a booking, or its progress; nothing contradicts."""
        match op:
            case AddRequest():
                self._active.book(_booking(self._router_id, op))
                self._booked(now)
            case MarkPrefillCompleted():
                booking = self._active.mark_prefill_completed(BookingKey(self._router_id, op.number))
                if booking is not None:
                    self._prefill_completed(booking, now)
            case Progress():
                self._active.progress(BookingKey(self._router_id, op.number), op.output_blocks)
            case Free():
                self._active.free(BookingKey(self._router_id, op.number))
            case SentText() if self._learn is not None:
                self._learn(op, now)
            case Bind() if self._sessions is not None:
                target = Target(WorkerId(op.worker_id), op.rank)
                self._sessions.hear(op.session, target, now, op.ttl_ms / 1000, self._router_id)
        return ""

    def agrees(self, check: Check) -> bool:
        """Compare the copies of all its bookings."""
        return (check.count, check.digest) == self._active.digest(self._router_id)

    def has_room_again(self) -> bool:
        """Nothing is ever refused."""
        return False

    def reset(self) -> None:
        """The replica has no bookings any more."""
        self._active.drop_owner(self._router_id)

    def begin_load(self) -> None:
        """Nothing is named yet."""
        self._named = set()

    def load(self, op: Op, now: float) -> str:
        """Take one op of the snapshot; bookings come as AddRequest with their later moments behind."""
        match op:
            case AddRequest():
                self._named.add(op.number)
                self._active.book(_booking(self._router_id, op))
            case MarkPrefillCompleted():
                self._active.mark_prefill_completed(BookingKey(self._router_id, op.number))
            case ApproxEntry():
                self._assume(op, now)
            case Bind() if self._sessions is not None:
                target = Target(WorkerId(op.worker_id), op.rank)
                self._sessions.recall(op.session, target, now, op.ttl_ms / 1000, self._router_id)
            case _:
                return self.apply(op, now)
        return ""

    def finish_load(self) -> None:
        """What the owner did not name has ended."""
        for booking in self._active.bookings(self._router_id):
            if booking.key.number not in self._named:
                self._active.drop(booking.key)

    def abandon_load(self) -> None:
        """What was loaded stays: each booking stands for itself, and the next snapshot tells the rest."""


def add_request(booking: Booking, hashes: bytes) -> AddRequest:
    """The op that makes a copy of a new booking at a peer; `hashes` are the packed ones."""
    worker_id, rank = booking.target
    return AddRequest(
        booking.key.number, booking.request_id[:MOST_ID_CHARACTERS], worker_id, rank, hashes,
        booking.isl, booking.overlap_blocks, booking.prefill_tokens, booking.anonymous_blocks,
    )  # fmt: skip


def booking_ops(booking: Booking, hashes: bytes) -> list[Op]:
    """The ops that make a copy of this booking at a peer as it is now."""
    number = booking.key.number
    ops: list[Op] = [add_request(booking, hashes)]
    if booking.prefill_completed:
        ops.append(MarkPrefillCompleted(number))
    if booking.output_blocks:
        ops.append(Progress(number, booking.output_blocks))
    return ops


def _booking(router_id: RouterId, op: AddRequest) -> Booking:
    return Booking(
        BookingKey(router_id, op.number),
        op.request_id,
        Target(WorkerId(op.worker_id), op.rank),
        hashes_of(op.hashes),
        op.isl,
        op.overlap_blocks,
        op.prefill_tokens,
        op.anonymous_blocks,
    )
