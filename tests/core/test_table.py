"""The flat table: sets of slots by hash, depths by bisection, slots handed out again when swept."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.core.table import SHARDS, FlatTable, Slots, bits

chains = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=40, unique=True)


@pytest.fixture
def table() -> FlatTable:
    """An empty table."""
    return FlatTable()


@pytest.fixture
def slots(table: FlatTable) -> Slots:
    """Slots of that table."""
    return Slots(table)


def sweep_all(slots: Slots) -> int:
    """Sweep until nothing is left; returns the steps it took."""
    steps = 1
    while slots.sweep():
        steps += 1
    return steps


def test_adding_twice_counts_once(table: FlatTable) -> None:
    """A hash a slot holds already adds nothing to count and sum."""
    assert (2, 2**64 - 1 + 3 - 2**64) == table.add(0, [2**64 - 1, 3])
    assert (1, 4) == table.add(0, [3, 4])
    assert 3 == len(table)
    table.check()


def test_slots_do_not_see_each_other(table: FlatTable) -> None:
    """What one slot discards stays with the others; discarding what is not held takes nothing."""
    table.add(0, [1, 2])
    table.add(70, [2, 3])

    assert (1, 2) == table.discard(0, [2, 3, 4])

    assert table.holds(70, 2)
    assert not table.holds(0, 2)
    assert not table.holds(0, 99)
    assert 3 == len(table)
    table.check()


@settings(deadline=None)
@given(chains, st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(0, 2**12 - 1))
def test_depths_are_those_of_a_walk(chain: list[int], wanted: list[int], asked: int) -> None:
    """Bisection finds for each slot asked for how much of the chain it holds, and leaves out none."""
    table = FlatTable()
    held = {slot: min(depth, len(chain)) for slot, depth in enumerate(wanted)}
    for slot, depth in held.items():
        table.add(slot, chain[:depth])

    found = {slot: depth for mask, depth in table.depths(chain, asked) for slot in bits(mask)}

    assert {slot: depth for slot, depth in held.items() if depth and asked >> slot & 1} == found


def test_depths_of_nothing(table: FlatTable) -> None:
    """An empty chain, or a table that knows none of it, finds nobody."""
    assert [] == table.depths([], 0b1)
    assert [] == table.depths([1, 2], 0b1)


def test_copied_slot_is_the_same_and_then_its_own(table: FlatTable) -> None:
    """A copy holds what its source holds and lives its own life afterwards."""
    chain = list(range(1000, 1300))
    table.add(0, chain)

    table.copy_slot(0, 5)
    table.discard(0, [1299])

    assert [(1 << 5, 300)] == table.depths(chain, 1 << 5)
    assert [(1, 299)] == table.depths(chain, 1)


def test_retired_slot_is_not_reused_before_it_is_swept(table: FlatTable, slots: Slots) -> None:
    """A slot that still holds something is not handed out; after the sweep it is, empty."""
    slot = slots.take()
    table.add(slot, range(1000))
    slots.retire(slot)
    slots.sweep()

    assert slot != slots.take()
    assert SHARDS - 1 == sweep_all(slots)
    assert slot == slots.take()
    assert 0 == len(table)


def test_slot_retired_during_a_sweep_waits_for_the_next(table: FlatTable, slots: Slots) -> None:
    """A sweep half done does not claim to have swept a slot that retired meanwhile."""
    first, second = slots.take(), slots.take()
    table.add(first, range(500))
    table.add(second, range(250, 750))
    slots.retire(first)
    for _ in range(SHARDS // 2):
        assert slots.sweep()

    slots.retire(second)
    for _ in range(SHARDS // 2):
        assert slots.sweep(), "the second slot is still to be swept"

    assert SHARDS == sweep_all(slots)
    assert 0 == len(table)
    assert {first, second} == {slots.take(), slots.take()}


def test_live_slots(slots: Slots) -> None:
    """The mask of live slots follows take, retire and give back."""
    first, second = slots.take(), slots.take()
    assert 0b11 == slots.live

    slots.retire(first)
    slots.give_back(second)

    assert 0 == slots.live
    assert second == slots.take(), "a slot given back empty is handed out at once"


def test_nothing_to_sweep(slots: Slots) -> None:
    """Sweeping without dead slots is over at once."""
    assert not slots.sweep()


def test_bits() -> None:
    """The numbers of set bits, lowest first, beyond a machine word too."""
    assert [] == bits(0)
    assert [0, 3, 200] == bits(1 | 1 << 3 | 1 << 200)
