"""Snapshots on their way in: cut into parts that load quickly, and priced."""

from __future__ import annotations

from kvrouter.core.feeds.loading import BOOKED_HASH_COST, OP_HASHES, Loading, cost
from kvrouter.core.wire.hashes import pack_hashes, unpack_hashes
from kvrouter.core.wire.ops import AddRequest, Cleared, Op, SnapshotChunk, Stored


def taken(op: Op) -> list[Op]:
    """The op as it is loaded."""
    loading = Loading(1, 9, 5, 1)
    loading.take(SnapshotChunk(1, 9, 0, 1, [op], 5))
    return list(loading.ops)


def test_long_op_is_loaded_in_parts() -> None:
    """The parts hold the same hashes in the same order; only the first names its parent."""
    hashes = list(range(2 * OP_HASHES + 3))

    parts = taken(Stored(1, 77, pack_hashes(hashes)))

    stored = [part for part in parts if isinstance(part, Stored)]
    assert [OP_HASHES, OP_HASHES, 3] == [len(part.hashes) // 8 for part in stored]
    assert hashes == [int(hash_) for part in stored for hash_ in unpack_hashes(part.hashes)]
    assert [(1, 77), (1, None), (1, None)] == [(part.tier, part.parent) for part in stored]


def test_other_ops_are_loaded_whole() -> None:
    """A short Stored, and a booking however long."""
    for op in (Stored(0, None, pack_hashes([1])), AddRequest(1, "r", "w", 0, bytes(80_000), 1, 0, 1)):
        assert [op] == taken(op)


def test_bookings_cost_more() -> None:
    """Per hash; nothing is free."""
    assert (11, 11 * BOOKED_HASH_COST) == (
        cost(Stored(0, None, bytes(80))),
        cost(AddRequest(1, "r", "w", 0, bytes(80), 1, 0, 1)),
    )
    assert cost(Cleared())
