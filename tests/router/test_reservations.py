"""The table of reservations: leases, bounds, and selections that are kept."""

from __future__ import annotations

from array import array
from typing import cast

import pytest

from kvrouter.core.fleet.router import Router
from kvrouter.core.routing.policy import Prompt, RouteRequest
from kvrouter.core.wire.ids import BookingKey, RouterId, Target, WorkerId
from kvrouter.errors import ReservationsFullError, TakenIdError, UnknownReservationError
from kvrouter.router.reservations import (
    KEPT_S,
    MOST,
    MOST_KEPT,
    MOST_KEPT_BYTES,
    Reservation,
    Reservations,
    size_of,
)

ROUTER = cast("Router", None)  # the table only carries it
W = Target(WorkerId("w"))


def asked(name: str, blocks: int = 0) -> RouteRequest:
    return RouteRequest(name, (Prompt(array("Q", range(blocks)), 16 * blocks),))


def reserve(
    table: Reservations, name: str, *, caller: str = "a", lease_s: float = 10, blocks: int = 0
) -> None:
    """At time 0."""
    size = table.check_room(name, caller, asked(name, blocks))
    key = BookingKey(RouterId("r"), 1)
    table.add(Reservation(name, caller, ROUTER, key, W, 16, lease_s, lease_s, size))


def expired(table: Reservations, now: float) -> list[str]:
    """Those that have expired, which are removed."""
    over = table.expired(now)
    for one in over:
        table.remove(one)
    return [one.id for one in over]


def test_a_lease_ends_unless_it_is_renewed() -> None:
    """Each has a lease of its own, which any call for it begins again."""
    table = Reservations()
    for name, lease_s in (("short", 1), ("long", 10), ("renewed", 1)):
        reserve(table, name, lease_s=lease_s)

    table.renew("renewed", 0.9)
    assert ["short"] == expired(table, 1.0)
    assert [] == expired(table, 1.8)
    assert ["renewed"] == expired(table, 1.9)
    assert ["long"] == expired(table, 99)
    assert 0 == len(table)


def test_a_lease_that_has_ended_is_not_renewed() -> None:
    """Also if it was not removed yet: its caller was considered gone at that time."""
    table = Reservations()
    reserve(table, "r", lease_s=1)
    with pytest.raises(UnknownReservationError, match="its lease has ended"):
        table.renew("r", 1.0)


def test_an_id_is_free_again_after_its_end() -> None:
    """The first one's entry in the heap does not end the second."""
    table = Reservations()
    reserve(table, "r", lease_s=1)
    with pytest.raises(TakenIdError, match="give another id"):
        reserve(table, "r")
    table.remove(table.renew("r", 0.5))
    reserve(table, "r", lease_s=5)
    assert [] == expired(table, 4)
    assert ["r"] == expired(table, 5)


def test_bounds_of_callers_and_of_all() -> None:
    """Each says what to do; what a caller frees it may reserve again."""
    table = Reservations(per_caller=2)
    reserve(table, "a1")
    reserve(table, "a2")
    with pytest.raises(ReservationsFullError, match="--reservations-per-caller"):
        reserve(table, "a3")
    for number in range(MOST - 2):
        reserve(table, f"b{number}", caller=f"b{number}")
    with pytest.raises(ReservationsFullError, match=rf"{MOST:,} reservations are held here.*another router"):
        reserve(table, "c1", caller="c")
    table.remove(table.renew("a1", 0))
    reserve(table, "a3")


def test_bounds_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One caller has half of the memory, all have all of it."""
    monkeypatch.setattr("kvrouter.router.reservations.MOST_BYTES", 5 * size_of(asked("", 1000)))
    table = Reservations()
    reserve(table, "a1", blocks=1000)
    reserve(table, "a2", blocks=1000)
    with pytest.raises(ReservationsFullError, match="'a' holds takes too much"):
        reserve(table, "a3", blocks=1000)
    for name in ("b1", "b2"):
        reserve(table, name, caller="b", blocks=1000)
    reserve(table, "c1", caller="c", blocks=1000)
    with pytest.raises(ReservationsFullError, match="as many as there is room for"):
        reserve(table, "d1", caller="d", blocks=1000)
    expired(table, 99)
    reserve(table, "d1", caller="d", blocks=1000)


def test_nothing_is_left() -> None:
    """Callers, bytes and entries in the heap go with the reservations, however long their leases are."""
    table = Reservations()
    for number in range(1000):
        reserve(table, f"r{number}", caller=f"c{number}", lease_s=80_000)
        table.remove(table.renew(f"r{number}", 0))
    assert len(table._heap) <= 66
    assert (0, {}, {}) == (table._bytes, table._of_caller, table._bytes_of)


def test_a_selection_is_kept_for_one_use() -> None:
    """And for a while only."""
    table = Reservations()
    table.keep("s", ROUTER, asked("s"), W, 0.0)
    table.keep("late", ROUTER, asked("late"), W, 0.0)
    assert W == table.kept("s", 1.0).target
    for name in ("s", "late", "never"):
        with pytest.raises(UnknownReservationError, match="once, within 120 s"):
            table.kept(name, KEPT_S)


@pytest.mark.parametrize(
    ("blocks", "most"), [(0, MOST_KEPT), (60_000, MOST_KEPT_BYTES // size_of(asked("", 60_000)))]
)
def test_kept_selections_are_bounded(blocks: int, most: int) -> None:
    """In number and in bytes: the oldest give way."""
    table, request = Reservations(), asked("", blocks)
    for number in range(most + 2):
        table.keep(f"s{number}", ROUTER, request, W, 0.0)
    with pytest.raises(UnknownReservationError):
        table.kept("s1", 0.0)
    assert W == table.kept("s2", 0.0).target
    table.expired(KEPT_S)
    for number in range(most):
        table.keep(f"t{number}", ROUTER, request, W, KEPT_S)
    assert W == table.kept("t0", KEPT_S).target
