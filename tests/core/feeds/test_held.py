"""Frames held during a recovery."""

from __future__ import annotations

from kvrouter.core.feeds.held import HELD_BYTES, HeldBudget, HeldFrames
from kvrouter.core.wire.ops import Decoded


def held(*frames: tuple[int, int]) -> HeldFrames:
    """Frames of life 5, given as (seq, question)."""
    kept = HeldFrames(HeldBudget())
    for seq, question in frames:
        kept.hold(Decoded(1, 5, seq, []), 100, question)
    return kept


def numbers(kept: HeldFrames) -> list[int]:
    """What is held, in the order in which it comes out."""
    popped = []
    while kept:
        first = kept.first
        popped.append(kept.pop().seq)
        assert first.seq == popped[-1]
    return popped


def test_lowest_number_first() -> None:
    """Whatever came first; one far ahead stands behind all others."""
    assert [3, 4, 4, 9, 2**40] == numbers(held((2**40, 0), (4, 0), (3, 0), (9, 0), (4, 0)))


def test_life_by_life() -> None:
    """A newer life's frames come after those of an older one."""
    kept = held((7, 0))
    kept.hold(Decoded(1, 6, 1, []), 10, 0)
    kept.hold(Decoded(1, 5, 8, []), 10, 0)

    assert [7, 8, 1] == numbers(kept)


def test_what_the_source_has_not_sent() -> None:
    """Only what was there before the question can be told from what is newer than the answer."""
    kept = held((7, 1), (2**40, 1), (9, 2), (8, 2))

    assert 1 == kept.drop_unsent(7, 2)
    assert [7, 8, 9] == numbers(kept)


def test_bound_of_one_feed() -> None:
    """A frame that there is no room for is not kept; each one that goes makes room for as much."""
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
    """What the source has not sent counts no longer, for the feed or for the budget."""
    budget = HeldBudget()
    kept = HeldFrames(budget)
    kept.hold(Decoded(1, 5, 7, []), 100, 1)
    kept.hold(Decoded(1, 5, 2**40, []), HELD_BYTES - 100, 1)

    kept.drop_unsent(7, 2)

    assert 100 == budget.used_bytes
    assert kept.hold(Decoded(1, 5, 8, []), HELD_BYTES - 100, 1)


def test_bound_of_all_feeds() -> None:
    """One feed cannot take the room of the others beyond what all have together, and gives it back."""
    budget = HeldBudget(most_bytes=100)
    first, second = HeldFrames(budget), HeldFrames(budget)
    assert first.hold(Decoded(1, 5, 1, []), 80, 0)
    assert not second.hold(Decoded(1, 5, 1, []), 30, 0)

    first.clear()

    assert 0 == budget.used_bytes
    assert second.hold(Decoded(1, 5, 1, []), 30, 0)
