"""Bookings that a decision cannot know of yet."""

from __future__ import annotations

import pytest

from kvrouter.core.tables.bookings import UNSEEN_WINDOW_S, Booking, UnseenBookings
from kvrouter.core.wire.ids import BookingKey, RouterId
from tests.core.worlds import T1, chain_from


def booking(number: int, overlap: int = 0) -> Booking:
    """Of a prompt of four blocks of its own; `overlap` of them are held by the target."""
    key = BookingKey(RouterId("r"), number)
    return Booking(key, "x", T1, chain_from(1000 * number, 4), 64, overlap, 64 - 16 * overlap)


def test_steady_traffic_leaves_nothing_unseen() -> None:
    """Peers' bookings that come between own ones, not with them, do not count."""
    unseen = UnseenBookings()
    for second in range(100):
        unseen.booked_here(booking(second), second)
        unseen.booked_elsewhere(booking(1000 + second), second + 10 * UNSEEN_WINDOW_S)

    assert 0 == unseen.expected


def test_bursts_are_learnt_and_forgotten() -> None:
    """Seven peers that book at the same moment are expected after a while, and no longer afterwards."""
    unseen = UnseenBookings()
    for second in range(60):
        unseen.booked_here(booking(0), second)
        for peer in range(1, 8):
            unseen.booked_elsewhere(booking(peer), second + UNSEEN_WINDOW_S / 2)
    assert 7 == pytest.approx(unseen.expected, rel=0.01)

    for second in range(100, 160):
        unseen.booked_here(booking(0), second)
    assert unseen.expected < 0.05


def bursts(own: Booking, peers: list[Booking]) -> float:
    """What is expected after sixty bursts of these bookings."""
    unseen = UnseenBookings()
    for second in range(60):
        unseen.booked_here(own, second)
        for peer in peers:
            unseen.booked_elsewhere(peer, second + UNSEEN_WINDOW_S / 2)
    return unseen.expected


def test_siblings_should_choose_alike() -> None:
    """A peer's booking that computes the same new block counts against one that does not."""
    sibling, other = booking(0), booking(1)

    assert 0 == bursts(booking(0), [sibling, sibling, other])
    assert 1 == pytest.approx(bursts(booking(0), [sibling, other, other]), rel=0.01)


def test_a_prefix_that_is_held_makes_no_siblings() -> None:
    """Nor does one whose blocks are all held: there is nothing to compute twice."""
    cached = booking(0, overlap=4)

    assert 1 == pytest.approx(bursts(cached, [cached]), rel=0.01)
    assert 1 == pytest.approx(bursts(booking(0), [booking(0, overlap=1)]), rel=0.01)


def test_what_is_kept_is_bounded_by_the_window() -> None:
    """Own bookings are kept no longer than the window, however many there are."""
    unseen = UnseenBookings()
    for number in range(10_000):
        unseen.booked_here(booking(number), number * UNSEEN_WINDOW_S)

    assert len(unseen._open) <= 2
    assert len(unseen._new_blocks) <= 2
