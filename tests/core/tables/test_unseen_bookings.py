"""Bookings that a decision cannot know of yet."""

from __future__ import annotations

import pytest

from kvrouter.core.tables.bookings import UNSEEN_WINDOW_S, UnseenBookings


def test_steady_traffic_leaves_nothing_unseen() -> None:
    """Peers' bookings that come between own ones, not with them, do not count."""
    unseen = UnseenBookings()
    for second in range(100):
        unseen.booked_here(second)
        unseen.booked_elsewhere(second + 10 * UNSEEN_WINDOW_S)

    assert 0 == unseen.expected


def test_bursts_are_learnt_and_forgotten() -> None:
    """Seven peers that book at the same moment are expected after a while, and no longer afterwards."""
    unseen = UnseenBookings()
    for second in range(60):
        unseen.booked_here(second)
        for _ in range(7):
            unseen.booked_elsewhere(second + UNSEEN_WINDOW_S / 2)
    assert 7 == pytest.approx(unseen.expected, rel=0.01)

    for second in range(100, 160):
        unseen.booked_here(second)
    assert unseen.expected < 0.05


def test_what_is_kept_is_bounded_by_the_window() -> None:
    """Own bookings are kept no longer than the window, however many there are."""
    unseen = UnseenBookings()
    for number in range(10_000):
        unseen.booked_here(number * UNSEEN_WINDOW_S)

    assert len(unseen._open) <= 2
