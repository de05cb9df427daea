"""Sinks: ops change the block index and the bookings."""

from __future__ import annotations

import pytest

from kvrouter.core.feeds.sinks import KvSink, SyncSink
from kvrouter.core.tables.block_index import BlockIndex
from kvrouter.core.tables.bookings import Booking, BookingTable, booking_ops
from kvrouter.core.wire.hashes import pack_hashes
from kvrouter.core.wire.ids import BookingKey, Target, WorkerId
from kvrouter.core.wire.ops import (
    AddRequest,
    ApproxEntry,
    Check,
    CheckResumable,
    Cleared,
    Free,
    MarkPrefillCompleted,
    NotResumable,
    Progress,
    Removed,
    Resumable,
    Stored,
)
from tests.core.links import Room
from tests.core.worlds import OTHER, T1

pytestmark = pytest.mark.usefixtures("core")

CHAIN = [11, 22, 33]
ADD = AddRequest(7, "req", "w1", 0, pack_hashes(CHAIN), 50, 1, 34, 2)


@pytest.fixture
def index() -> BlockIndex:
    return BlockIndex()


@pytest.fixture
def kv(index: BlockIndex) -> KvSink:
    """The sink of a rank with room for ten blocks."""
    return KvSink(index, T1, 1, {T1.worker_id: Room(10)})


@pytest.fixture
def active() -> BookingTable:
    return BookingTable()


@pytest.fixture
def prefilled() -> list[Booking]:
    """Bookings whose MarkPrefillCompleted was applied."""
    return []


@pytest.fixture
def sync(active: BookingTable, prefilled: list[Booking]) -> SyncSink:
    """The sink of a peer's bookings."""
    return SyncSink(
        active,
        OTHER,
        booked=lambda *_: None,
        prefill_completed=lambda booking, now: prefilled.append(booking),
        assume=lambda entry, now: None,
    )


def test_kv_ops_change_the_index(kv: KvSink, index: BlockIndex) -> None:
    """Stored adds blocks, Removed removes them, Cleared empties the rank."""
    assert not kv.apply(Stored(0, None, pack_hashes(CHAIN[:1])), 0.0)
    assert not kv.apply(Stored(0, 11, pack_hashes(CHAIN[1:])), 0.0)
    assert {T1: 3} == index.overlap(CHAIN)

    assert not kv.apply(Removed(0, pack_hashes([33])), 0.0)
    assert {T1: 2} == index.overlap(CHAIN)

    assert not kv.apply(Cleared(), 0.0)
    assert {} == index.overlap(CHAIN)


def test_parent_must_be_held_in_the_same_tier_set(index: BlockIndex) -> None:
    """A device block below a parent that is only in host memory is a contradiction; a host block is not."""
    kv = KvSink(index, T1, 2, {T1.worker_id: Room(0)})
    kv.apply(Stored(1, None, pack_hashes(CHAIN[:1])), 0.0)

    assert "parent" in kv.apply(Stored(0, 11, pack_hashes(CHAIN[1:])), 0.0)
    assert not kv.apply(Stored(1, 11, pack_hashes(CHAIN[1:])), 0.0)


def test_capacity_has_some_slack(kv: KvSink) -> None:
    """Up to 1.1 × the card's capacity is accepted."""
    assert not kv.apply(Stored(0, None, pack_hashes(range(11))), 0.0)
    assert "12 blocks" in kv.apply(Stored(0, None, pack_hashes([11])), 0.0)


def test_target_that_ignores_its_capacity_does_not_fill_the_index(kv: KvSink, index: BlockIndex) -> None:
    """Blocks beyond the capacity are not stored, however often they are announced."""
    for start in range(0, 1000, 10):
        kv.apply(Stored(0, None, pack_hashes(range(start, start + 10))), 0.0)

    assert 20 == index.blocks(T1)


def test_kv_check_compares_a_tier_set(kv: KvSink) -> None:
    """A Check compares the tier set that it names; a tier that the target has not is empty."""
    kv.apply(Stored(0, None, pack_hashes(CHAIN)), 0.0)

    assert kv.agrees(Check(3, 66))
    assert not kv.agrees(Check(3, 67))
    assert not kv.agrees(Check(2, 66))
    assert kv.agrees(Check(0, 0, 2))


def test_resume_points_limit_the_overlap(kv: KvSink, index: BlockIndex) -> None:
    """From the first such op on, a block counts only up to the last resume point; Cleared ends it."""
    kv.apply(Stored(0, None, pack_hashes(CHAIN)), 0.0)
    assert {T1: 3} == index.overlap(CHAIN)

    assert not kv.apply(Resumable(b""), 0.0)
    assert {} == index.overlap(CHAIN)
    assert not kv.apply(Resumable(pack_hashes([33, 22])), 0.0)
    assert not kv.apply(NotResumable(pack_hashes([33])), 0.0)
    assert {T1: 2} == index.overlap(CHAIN)

    kv.apply(Cleared(), 0.0)
    kv.apply(Stored(0, None, pack_hashes(CHAIN)), 0.0)
    assert {T1: 3} == index.overlap(CHAIN)


def test_resume_points_in_a_snapshot(kv: KvSink, index: BlockIndex) -> None:
    """A snapshot replaces them, and a digest compares them."""
    kv.apply(Resumable(pack_hashes([1, 2])), 0.0)

    kv.begin_load()
    for op in (Stored(0, None, pack_hashes(CHAIN)), Resumable(pack_hashes([22]))):
        assert not kv.load(op, 0.0)
    kv.finish_load()

    assert {T1: 2} == index.overlap(CHAIN)
    assert kv.agrees(CheckResumable(1, 22))
    assert not kv.agrees(CheckResumable(1, 23))


def test_digest_of_resume_points_that_nobody_stated(kv: KvSink) -> None:
    """A source that states a digest of them has stated that there are some: the copy differs."""
    assert not kv.agrees(CheckResumable(0, 0))


def test_resume_points_have_the_capacity_as_bound(kv: KvSink, index: BlockIndex) -> None:
    """No more are kept than the card has room for blocks, however often they are announced."""
    for start in range(0, 1000, 10):
        excess = kv.apply(Resumable(pack_hashes(range(start, start + 10))), 0.0)

    assert "20 blocks" in excess
    assert 20 == len(index)


def test_repeated_resume_points_count_once(kv: KvSink, index: BlockIndex) -> None:
    """Points that are stated again are no more than there were."""
    for _ in range(2):
        assert not kv.apply(Resumable(pack_hashes(range(10))), 0.0)

    assert 10 == len(index)


def test_snapshot_with_a_wider_tier_than_the_card(index: BlockIndex) -> None:
    """A tier that the card does not list is indexed, live and by snapshot."""
    other, room = Target(WorkerId("w2")), Room(0)
    live = KvSink(index, T1, 1, {T1.worker_id: room})
    loaded = KvSink(index, other, 1, {other.worker_id: room})
    op = Stored(1, None, pack_hashes(CHAIN))

    assert not live.apply(op, 0.0)
    loaded.begin_load()
    assert not loaded.load(op, 0.0)
    loaded.finish_load()

    assert live.agrees(Check(3, 66, 1))
    assert loaded.agrees(Check(3, 66, 1))


def test_ops_of_the_other_kind_are_ignored(
    kv: KvSink, sync: SyncSink, index: BlockIndex, active: BookingTable
) -> None:
    """A booking in a KV feed, or a block in a sync feed, changes nothing and is not a contradiction."""
    assert not kv.apply(ADD, 0.0)
    assert not sync.apply(Stored(0, 99, b""), 0.0)

    assert 0 == len(index)
    assert {} == active.owners()


def test_three_moments_of_a_booking(sync: SyncSink, active: BookingTable, prefilled: list[Booking]) -> None:
    """AddRequest books, MarkPrefillCompleted ends the charge, Progress adds blocks, Free ends."""
    sync.apply(ADD, 0.0)
    assert (5, 34) == (active.blocks(T1), active.charged_tokens(T1))

    sync.apply(MarkPrefillCompleted(7), 0.0)
    sync.apply(MarkPrefillCompleted(7), 0.0)
    sync.apply(Progress(7, 4), 0.0)
    assert (9, 0) == (active.blocks(T1), active.charged_tokens(T1))
    assert [7] == [booking.key.number for booking in prefilled]

    sync.apply(Free(7), 0.0)
    sync.apply(Free(7), 0.0)
    assert (0, 0) == (active.blocks(T1), active.requests(T1))
    active.check()


def test_moments_of_unknown_bookings_are_ignored(sync: SyncSink, active: BookingTable) -> None:
    """A booking that was freed, or never made here, does not appear."""
    for op in (MarkPrefillCompleted(1), Progress(1, 2), Free(1)):
        assert not sync.apply(op, 0.0)

    assert {} == active.owners()


def test_sync_snapshot_replaces_all_bookings(sync: SyncSink, active: BookingTable) -> None:
    """Bookings are as the snapshot names them; those it does not name are freed."""
    sync.apply(ADD, 0.0)
    sync.apply(AddRequest(8, "old", "w2", 0, b"", 5, 0, 5), 0.0)
    booking = active.booking(BookingKey(OTHER, 7))
    assert booking is not None
    booking_at_owner = Booking(booking.key, "req", T1, CHAIN, 50, 1, 34, 2, 3, True)

    sync.begin_load()
    for op in booking_ops(booking_at_owner, pack_hashes(CHAIN)):
        sync.load(op, 0.0)
    sync.finish_load()

    assert [7] == [one.key.number for one in active.bookings(OTHER)]
    assert (1, booking_at_owner.digest()) == active.digest(OTHER)
    active.check()


def test_snapshot_passes_assumptions_on(active: BookingTable) -> None:
    """ApproxEntry counts only in a snapshot, and its prefill moments are not assumed a second time."""
    entries: list[ApproxEntry] = []
    prefilled: list[Booking] = []
    sync = SyncSink(
        active,
        OTHER,
        booked=lambda *_: None,
        prefill_completed=lambda one, now: prefilled.append(one),
        assume=lambda one, now: entries.append(one),
    )
    entry = ApproxEntry("w1", 0, pack_hashes(CHAIN), 5000)
    sync.apply(entry, 0.0)

    sync.begin_load()
    for op in (ADD, MarkPrefillCompleted(7), entry):
        sync.load(op, 0.0)
    sync.finish_load()

    assert ([entry], []) == (entries, prefilled)


def test_reset_frees_all(sync: SyncSink, active: BookingTable) -> None:
    """A replica that has restarted has no bookings."""
    sync.apply(ADD, 0.0)

    sync.reset()

    assert {} == active.owners()
    assert sync.agrees(Check(0, 0))
