"""The flat table: sets of slots by hash, depths by bisection, slots that are used again after a sweep."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.native import versions
from kvrouter.core.tables.table import FlatTable, Slots, bits, new_table
from kvrouter.core.wire.hashes import pack_hashes

pytestmark = pytest.mark.usefixtures("core")

chains = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=40, unique=True)


@pytest.fixture
def table() -> FlatTable:
    return new_table()


@pytest.fixture
def slots(table: FlatTable) -> Slots:
    return Slots(table)


def sweep_all(slots: Slots) -> int:
    """Sweep until nothing is left; returns the steps it took."""
    steps = 1
    while slots.sweep():
        steps += 1
    return steps


def test_adding_twice_counts_once(table: FlatTable) -> None:
    """A hash that a slot holds already adds nothing to count and sum."""
    assert (2, 2**64 - 1 + 3 - 2**64) == table.add(0, [2**64 - 1, 3])
    assert (1, 4) == table.add(0, [3, 4])
    assert 3 == len(table)
    table.check()


def test_held_by_shards(table: FlatTable) -> None:
    """Each hash of a slot is in exactly one shard, and none of another slot."""
    own, others = set(range(1, 500)), set(range(300, 900))
    table.add(70, list(own))
    table.add(3, list(others))
    listed = [hash_ for shard in range(table.shards) for hash_ in table.held(70, shard)]

    assert sorted(own) == sorted(listed)
    assert {0} == {len(table.held(9, shard)) for shard in range(table.shards)}
    with pytest.raises(IndexError):
        table.held(70, table.shards)


@pytest.mark.parametrize("owners", [1, 3, 90])
def test_limited_slots_go_up(table: FlatTable, owners: int) -> None:
    """Slots that end alone, together, or deeper than asked for, some limited by any set of hashes."""
    rng = random.Random(owners)
    chain = [rng.getrandbits(64) for _ in range(40)]
    held = {owner: rng.randrange(41) for owner in range(owners)}
    limits = {owner: set(rng.sample(chain, rng.choice([0, 2, 39]))) for owner in range(0, owners, 2)}
    for owner, depth in held.items():
        table.label(2 * owner, owner)
        table.add(2 * owner, chain[:depth])
        if owner in limits:
            table.limit(2 * owner, 2 * owner + 1)
            table.add(2 * owner + 1, list(limits[owner]))

    for count in range(1, 41):
        for most in (count, count - 1, rng.randrange(41)):
            expected = {owner: min(depth, count) for owner, depth in held.items()}
            for owner, points in limits.items():
                places = range(min(expected[owner], most), 0, -1)
                expected[owner] = next((place for place in places if chain[place - 1] in points), 0)
            found = table.depths(chain[:count], most)
            assert {owner: depth for owner, depth in expected.items() if depth} == found
            slots = array("q", [2 * owner for owner in expected])
            assert [*expected.values()] == table.depths_of(chain[:count], slots, most).tolist()


def test_slots_do_not_see_each_other(table: FlatTable) -> None:
    """A hash that one slot discards stays with others; discarding an absent one removes nothing."""
    table.add(0, [1, 2])
    table.add(70, [2, 3])

    assert (1, 2) == table.discard(0, [2, 3, 4])

    assert table.holds(70, 2)
    assert not table.holds(0, 2)
    assert not table.holds(0, 99)
    assert 3 == len(table)
    table.check()


@given(chains, st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(0, 2**12 - 1))
def test_depths_are_those_of_a_walk(chain: list[int], wanted: list[int], asked: int) -> None:
    """Bisection finds how much of the chain each labelled slot holds."""
    table = new_table()
    held = {slot: min(depth, len(chain)) for slot, depth in enumerate(wanted)}
    for slot, depth in held.items():
        table.add(slot, chain[:depth])
        table.label(slot, slot if asked >> slot & 1 else None)

    found = table.depths(chain)

    table.check()
    assert {slot: depth for slot, depth in held.items() if depth and asked >> slot & 1} == found
    slots = array("q", [*range(len(held)), -1, 99, 0])
    assert [found.get(slot, 0) for slot in slots] == table.depths_of(chain, slots).tolist()


def test_depths_of_nothing(table: FlatTable) -> None:
    """An empty chain, or an unknown one, has no holder."""
    table.label(0, "a")

    assert {} == table.depths([])
    assert {} == table.depths([1, 2])
    assert array("q", [0]) == table.depths_of([1, 2], array("q", [0]))


def test_copied_slot_is_independent(table: FlatTable) -> None:
    """A copy holds what its source holds, and changes alone afterwards."""
    chain = list(range(1000, 1300))
    table.add(0, chain)

    table.copy_slot(0, 5)
    table.discard(0, [1299])

    table.check()
    table.label(0, "source")
    table.label(5, "copy")
    assert {"source": 299, "copy": 300} == table.depths(chain)


def test_retired_slot_is_not_reused_before_it_is_swept(table: FlatTable, slots: Slots) -> None:
    """A slot that still has rows is not assigned; after the sweep it is, empty."""
    slot = slots.take()
    table.add(slot, range(1000))
    slots.retire(slot)
    slots.sweep()

    assert slot != slots.take()
    assert table.shards - 1 == sweep_all(slots)
    assert slot == slots.take()
    assert 0 == len(table)


def test_slot_retired_during_a_sweep_waits_for_the_next(table: FlatTable, slots: Slots) -> None:
    """A sweep in progress does not count for a slot that retires meanwhile."""
    first, second = slots.take(), slots.take()
    table.add(first, range(500))
    table.add(second, range(250, 750))
    slots.retire(first)
    for _ in range(table.shards // 2):
        assert slots.sweep()

    slots.retire(second)
    for _ in range(table.shards // 2):
        assert slots.sweep(), "the second slot is still to be swept"

    assert table.shards == sweep_all(slots)
    assert 0 == len(table)
    assert {first, second} == {slots.take(), slots.take()}


def test_slot_that_is_given_back_is_not_seen(table: FlatTable, slots: Slots) -> None:
    """A retired or returned slot has no owner; a returned one is assigned again at once."""
    first, second = slots.take(), slots.take()
    table.label(first, "a")
    table.label(second, "b")
    table.add(first, [1])

    slots.retire(first)
    slots.give_back(second)

    assert {} == table.depths([1])
    assert second == slots.take()


def test_slot_is_counted(table: FlatTable) -> None:
    """Count and sum follow what is added and discarded, each hash once."""
    held = table.slot_set(3)

    assert 3 == held.add([2**64 - 1, 7, 8])
    assert 1 == held.add(pack_hashes([7, 9]))
    assert (4, 23) == (held.count, held.digest)
    assert 2 == held.discard(array("Q", [8, 9, 10]))
    assert (2, 6) == (held.count, held.digest)
    assert (3, True) == (held.slot, table.holds(3, 7))
    table.check()


def test_references_are_counted(table: FlatTable) -> None:
    """A hash is in the table until its last reference ends; to discard an absent one is an error."""
    held = table.counted_set(70)
    held.add([1, 2])
    held.add([2, 3, 3])

    held.discard([2, 3])
    assert {1: 1, 2: 1, 3: 1} == held.counts()
    held.discard([2, 1])

    assert (1, False, True) == (held.count, table.holds(70, 2), table.holds(70, 3))
    with pytest.raises(KeyError):
        held.discard([2])
    table.check()


def test_references_to_many_hashes(table: FlatTable) -> None:
    """Counts stay right while a set grows by thousands at once, also where most are known, and shrinks."""
    held, chain = table.counted_set(3), [hash_ * 0x9E3779B97F4A7C15 % 2**64 for hash_ in range(1, 8001)]
    held.add(chain[:10])
    held.add(array("Q", chain))
    held.add(chain[:6000])

    assert {hash_: 1 + (at < 10) + (at < 6000) for at, hash_ in enumerate(chain)} == held.counts()
    held.discard(chain[:6000])
    held.discard(chain)
    assert dict.fromkeys(chain[:10], 1) == held.counts()
    assert (10, 10) == (held.count, len(table))
    table.check()


def test_hashes_of_every_type(table: FlatTable) -> None:
    """Bytes, arrays, lists and ranges are the same hashes. Anything else is rejected and adds nothing."""
    chain = [5, 6, 7]
    table.label(1, "a")
    table.add(1, range(5, 8))

    for same in (chain, tuple(chain), array("Q", chain), pack_hashes(chain), range(5, 8)):
        assert {"a": 3} == table.depths(same)
    with pytest.raises(ValueError, match="multiple"):
        table.add(1, b"1234567")
    assert 3 == len(table)


def test_memory_does_not_grow_with_the_slots(table: FlatTable) -> None:
    """A thousand slots that share blocks take little more memory than one."""
    if versions.in_use() == versions.PYTHON:
        pytest.skip("a Python number for each of a few thousand masks, shared as far as they were met lately")
    chain = array("Q", (hash_ * 0x9E3779B97F4A7C15 % 2**64 for hash_ in range(1, 50_001)))
    table.add(0, chain)
    before = table.size_bytes()

    for slot in range(1, 1000):
        table.add(slot, chain[: 50 * slot])

    assert table.size_bytes() - before < 500_000
    assert table.size_bytes() < 40 * len(chain)
    table.check()


def test_memory_is_returned(table: FlatTable) -> None:
    """After most rows are removed, most of the memory is free."""
    if versions.in_use() == versions.PYTHON:
        pytest.skip("Python's dicts shrink when they grow again")
    chain = array("Q", (hash_ * 0x9E3779B97F4A7C15 % 2**64 for hash_ in range(1, 200_001)))
    empty = table.size_bytes()
    table.add(0, chain)
    full = table.size_bytes() - empty

    table.discard(0, chain[1000:])

    assert table.size_bytes() - empty < full / 10
    table.check()


def test_nothing_to_sweep(slots: Slots) -> None:
    """Without dead slots a sweep ends at once."""
    assert not slots.sweep()


def test_bits() -> None:
    """The numbers of set bits, lowest first, beyond a machine word too."""
    assert [] == bits(0)
    assert [0, 3, 200] == bits(1 | 1 << 3 | 1 << 200)
