"""What a recovering reader keeps: bounded frames, and snapshots cut into parts that load quickly."""

from __future__ import annotations

from kvrouter.core.feeds.buffers import (
    BOOKED_HASH_COST,
    HELD_BYTES,
    OP_HASHES,
    HeldBudget,
    HeldFrames,
    Loading,
    cost,
)
from kvrouter.core.wire.hashes import hashes_of, pack_hashes
from kvrouter.core.wire.ops import AddRequest, Cleared, Decoded, Op, Resumable, SnapshotChunk, Stored


def held(*frames: tuple[int, int]) -> HeldFrames:
    """Frames of incarnation 5, given as (seq, question)."""
    kept = HeldFrames(HeldBudget())
    for seq, question in frames:
        kept.hold(Decoded(1, 5, seq, []), 100, question)
    return kept


def popped_seqs(kept: HeldFrames) -> list[int]:
    popped = []
    while kept:
        first = kept.first
        popped.append(kept.pop().seq)
        assert first.seq == popped[-1]
    return popped


def loaded(op: Op) -> list[Op]:
    """The parts in which the op is loaded."""
    loading = Loading(1, 9, 5, 1)
    loading.take(SnapshotChunk(1, 9, 0, 1, [op], 5))
    return list(loading.ops)


def test_lowest_number_comes_out_first() -> None:
    """The order of arrival does not matter; a number far ahead comes last."""
    assert [3, 4, 4, 9, 2**40] == popped_seqs(held((2**40, 0), (4, 0), (3, 0), (9, 0), (4, 0)))


def test_older_incarnation_comes_out_first() -> None:
    """A newer incarnation's frames come after an older incarnation's."""
    kept = held((7, 0))
    kept.hold(Decoded(1, 6, 1, []), 10, 0)
    kept.hold(Decoded(1, 5, 8, []), 10, 0)

    assert [7, 8, 1] == popped_seqs(kept)


def test_frames_that_the_source_has_not_sent_are_dropped() -> None:
    """A frame that arrived after the question may be newer than the answer, so it stays."""
    kept = held((7, 1), (2**40, 1), (9, 2), (8, 2))

    assert 1 == kept.drop_unsent(7, 2)
    assert [7, 8, 9] == popped_seqs(kept)


def test_bound_of_one_feed() -> None:
    """A frame without room is not kept; a frame that is popped makes room for its size."""
    kept = HeldFrames(HeldBudget())
    assert kept.hold(Decoded(1, 5, 1, []), HELD_BYTES - 10, 0)
    assert kept.hold(Decoded(1, 5, 2, []), 10, 0)
    assert not kept.hold(Decoded(1, 5, 3, []), 1, 0)

    assert 1 == kept.pop().seq

    assert kept.hold(Decoded(1, 5, 3, []), HELD_BYTES - 10, 0)
    assert not kept.hold(Decoded(1, 5, 4, []), 1, 0)


def test_frames_that_pass_through_leave_no_bytes() -> None:
    """A heap that is never empty counts what it holds, not what it has held."""
    kept = HeldFrames(HeldBudget())
    kept.hold(Decoded(1, 5, 0, []), HELD_BYTES // 2, 0)
    for seq in range(1, 100):
        assert kept.hold(Decoded(1, 5, seq, []), HELD_BYTES // 2, 0)
        kept.pop()


def test_dropped_frames_make_room() -> None:
    """Dropped frames no longer count, for the feed or for the budget."""
    budget = HeldBudget()
    kept = HeldFrames(budget)
    kept.hold(Decoded(1, 5, 7, []), 100, 1)
    kept.hold(Decoded(1, 5, 2**40, []), HELD_BYTES - 100, 1)

    kept.drop_unsent(7, 2)

    assert 100 == budget.used_bytes
    assert kept.hold(Decoded(1, 5, 8, []), HELD_BYTES - 100, 1)


def test_bound_of_all_feeds() -> None:
    """All feeds share one budget; a feed that is cleared gives its part back."""
    budget = HeldBudget(most_bytes=100)
    first, second = HeldFrames(budget), HeldFrames(budget)
    assert first.hold(Decoded(1, 5, 1, []), 80, 0)
    assert not second.hold(Decoded(1, 5, 1, []), 30, 0)

    first.clear()

    assert 0 == budget.used_bytes
    assert second.hold(Decoded(1, 5, 1, []), 30, 0)


def test_long_op_is_loaded_in_parts() -> None:
    """The parts hold the same hashes in the same order; only the first names its parent."""
    hashes = list(range(2 * OP_HASHES + 3))

    parts = loaded(Stored(1, 77, pack_hashes(hashes)))

    stored = [part for part in parts if isinstance(part, Stored)]
    assert [OP_HASHES, OP_HASHES, 3] == [len(part.hashes) // 8 for part in stored]
    assert hashes == [int(hash_) for part in stored for hash_ in hashes_of(part.hashes)]
    assert [(1, 77), (1, None), (1, None)] == [(part.tier, part.parent) for part in stored]


def test_long_list_of_resume_points_is_loaded_in_parts() -> None:
    """As long as a Stored may be."""
    hashes = pack_hashes(range(OP_HASHES + 3))

    parts = loaded(Resumable(hashes))

    assert [Resumable(hashes[: OP_HASHES * 8]), Resumable(hashes[OP_HASHES * 8 :])] == parts


def test_other_ops_are_loaded_whole() -> None:
    """A short Stored, and a booking of any length."""
    for op in (Stored(0, None, pack_hashes([1])), AddRequest(1, "r", "w", 0, bytes(80_000), 1, 0, 1)):
        assert [op] == loaded(op)


def test_bookings_cost_more() -> None:
    """A booked hash costs more than a stored one, and an op without hashes costs something."""
    assert (11, 11 * BOOKED_HASH_COST) == (
        cost(Stored(0, None, bytes(80))),
        cost(AddRequest(1, "r", "w", 0, bytes(80), 1, 0, 1)),
    )
    assert cost(Cleared())
