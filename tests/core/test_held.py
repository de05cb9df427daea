"""Frames held during a recovery."""

from __future__ import annotations

from kvrouter.core.events import Decoded
from kvrouter.core.held import HELD_BYTES, HeldFrames


def held(*frames: tuple[int, int]) -> HeldFrames:
    """Frames of life 5, given as (seq, question)."""
    kept = HeldFrames()
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


def test_bound() -> None:
    """More than there is room for is said; empty again, there is room again."""
    kept = HeldFrames()
    assert kept.hold(Decoded(1, 5, 1, []), HELD_BYTES, 0)
    assert not kept.hold(Decoded(1, 5, 2, []), 1, 0)

    kept.clear()

    assert kept.hold(Decoded(1, 5, 1, []), HELD_BYTES, 0)
    assert 1 == kept.pop().seq
    assert kept.hold(Decoded(1, 5, 1, []), HELD_BYTES, 0)
