"""The block index, example by example."""

from __future__ import annotations

import pytest

from kvrouter.core.tables.block_index import BlockIndex
from kvrouter.core.wire.hashes import pack_hashes
from kvrouter.core.wire.ids import Target, WorkerId

pytestmark = pytest.mark.usefixtures("core")

T1, T2 = Target(WorkerId("w1")), Target(WorkerId("w2"))
CHAIN = [11, 22, 33, 44]


@pytest.fixture
def index() -> BlockIndex:
    return BlockIndex()


def sweep_all(index: BlockIndex) -> None:
    """Sweep until nothing is left to do."""
    while index.sweep():
        pass


def test_overlap_is_the_gapless_prefix(index: BlockIndex) -> None:
    """Each target's leading blocks count; a target with none is absent."""
    index.store(T1, CHAIN[:3])
    index.store(T2, CHAIN[:1])

    assert {T1: 3, T2: 1} == index.overlap(CHAIN)
    assert {} == index.overlap([99, *CHAIN])
    assert {} == index.overlap([])


def test_packed_hashes_are_equal_to_numbers(index: BlockIndex) -> None:
    """Bytes are accepted wherever a list is."""
    index.store(T1, pack_hashes(CHAIN))
    index.remove(T1, pack_hashes(CHAIN[:2:-1]))

    assert {T1: 3} == index.overlap(pack_hashes(CHAIN))


def test_host_blocks_do_not_count_as_device_blocks(index: BlockIndex) -> None:
    """Blocks in host memory are not in the overlap, and have a depth of their tier."""
    index.store(T1, CHAIN[:1])
    index.store(T1, CHAIN[:3], "host")

    assert {T1: 1} == index.overlap(CHAIN)
    assert {T1: [1, 3]} == index.overlap_by_tier(CHAIN)


def test_target_without_device_blocks_has_no_overlap(index: BlockIndex) -> None:
    """A target with blocks on disk only is absent from the overlap, and present in its tiers."""
    index.store(T1, CHAIN, "disk")

    assert {} == index.overlap(CHAIN)
    assert {T1: [0, 0, 4]} == index.overlap_by_tier(CHAIN)


def test_stored_on_device_is_in_wider_sets(index: BlockIndex) -> None:
    """The sets are nested: every wider set has the device's blocks."""
    index.store(T1, CHAIN[:1], "disk")

    index.store(T1, CHAIN)

    assert {T1: [4, 4, 4]} == index.overlap_by_tier(CHAIN)


def test_offloaded_block_leaves_the_device_only(index: BlockIndex) -> None:
    """Removed from the device, a block stays in host memory; removed from host, it is gone from both."""
    index.store(T1, CHAIN, "host")
    index.store(T1, CHAIN)

    index.remove(T1, [44, 33])
    assert {T1: [2, 4]} == index.overlap_by_tier(CHAIN)

    index.remove(T1, [44, 33, 22], "host")
    assert {T1: [1, 1]} == index.overlap_by_tier(CHAIN)


def test_removed_of_the_widest_tier_is_gone_everywhere(index: BlockIndex) -> None:
    """A target with only a device loses a block that was removed from host memory."""
    index.store(T1, CHAIN)

    index.remove(T1, [44], "host")

    assert {T1: 3} == index.overlap(CHAIN)


def test_tier_that_appears_late_has_the_narrower_blocks(index: BlockIndex) -> None:
    """The first host event makes a wider set with the device's blocks."""
    index.store(T1, CHAIN[:2])

    index.store(T1, CHAIN[:3], "host")

    assert (3, 66) == index.digest(T1, "host")
    assert (2, 33) == index.digest(T1)


def test_removing_the_unknown_changes_nothing(index: BlockIndex) -> None:
    """An unknown target, or an unknown block, is ignored."""
    index.remove(T1, CHAIN)
    index.clear(T1)
    index.drop(T1)
    index.store(T1, CHAIN[:1])

    index.remove(T1, [99])

    assert (1, 11) == index.digest(T1)
    assert [T1] == index.targets()


def test_cleared_target_is_still_known(index: BlockIndex) -> None:
    """Clear empties all sets of the target at once; other targets keep theirs."""
    index.store(T1, CHAIN, "host")
    index.store(T2, CHAIN)

    index.clear(T1)

    assert {T2: 4} == index.overlap(CHAIN)
    assert [(0, 0), (0, 0)] == [index.digest(T1), index.digest(T1, "host")]
    assert {T1, T2} == set(index.targets())


def test_dropped_target_leaves_no_row(index: BlockIndex) -> None:
    """After the sweep a dropped target takes no room."""
    index.store(T1, range(2000))
    index.store(T2, CHAIN)

    index.drop(T1)
    assert {T2: 1} == index.overlap(CHAIN[:1])
    sweep_all(index)

    assert len(CHAIN) == len(index)
    assert [T2] == index.targets()
    assert 0 == index.blocks(T1)


def test_loading_is_invisible_until_finished(index: BlockIndex) -> None:
    """Look-ups see the old blocks while a snapshot is loaded, and the new ones in one step."""
    index.store(T1, CHAIN[:3])
    fresh = index.begin_load()
    index.load(fresh, CHAIN[:1])
    index.load(fresh, CHAIN[1:2])

    assert {T1: 3} == index.overlap(CHAIN)
    assert not index.holds(T2, 11)
    index.finish_load(T1, fresh)

    assert {T1: 2} == index.overlap(CHAIN)
    assert (2, 33) == index.digest(T1)


def test_abandoned_load_leaves_no_row(index: BlockIndex) -> None:
    """An unfinished snapshot takes no room after the sweep."""
    fresh = index.begin_load(2)
    index.load(fresh, range(1000), "host")

    index.abandon_load(fresh)
    sweep_all(index)

    assert 0 == len(index)


def test_holds_looks_at_the_tier_or_the_widest_there_is(index: BlockIndex) -> None:
    """A device-only target's blocks are in every tier."""
    index.store(T1, CHAIN[:1])
    index.store(T2, CHAIN[:1], "host")

    assert index.holds(T1, 11, "disk")
    assert index.holds(T2, 11, "disk")
    assert not index.holds(T2, 11, "device")


def test_digest_is_a_sum_mod_2_64(index: BlockIndex) -> None:
    """Sums wrap around, and return when blocks are removed."""
    index.store(T1, [2**64 - 1, 2**64 - 2])
    assert (2, 2**64 - 3) == index.digest(T1)

    index.remove(T1, [2**64 - 2])

    assert (1, 2**64 - 1) == index.digest(T1)


def test_check_notices_a_lost_slot(index: BlockIndex) -> None:
    """`check` notices a slot without an owner."""
    index.store(T1, CHAIN)
    index._owners.clear()

    with pytest.raises(AssertionError, match="slot"):
        index.check()
