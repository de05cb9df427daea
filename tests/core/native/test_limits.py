"""Native modules check their arguments: no call reads or writes outside its memory, or ends the process."""

from __future__ import annotations

import importlib
import subprocess
import sys
from array import array
from collections.abc import Iterator
from typing import Any

import pytest

from kvrouter.core.native import versions
from kvrouter.core.tables.table import FlatTable
from tests.core.aimed import native_table

pytestmark = pytest.mark.skipif(bool(versions.why_not_built), reason=f"not built: {versions.why_not_built}")

MOST = 2**63 - 1


def native(name: str) -> Any:
    """A C module, also while the Python version is in use."""
    return importlib.import_module(f"kvrouter.core.native.{name}")


class Liar(array):  # type: ignore[type-arg]  # array() takes no parameters at run time
    """An array whose __len__ is too large."""

    def __len__(self) -> int:
        return 1 << 30


def longs(*numbers: int) -> array[int]:
    return array("q", numbers)


def test_array_that_lies_about_its_length() -> None:
    """Only the numbers that exist are read."""
    table = native_table().FlatTable()

    assert (2, 3) == table.add(0, Liar("Q", [1, 2]))
    table.counted_set(1).add(Liar("Q", [1, 2]))
    assert 2 == len(table)
    hashes = native("hashes")
    assert hashes.block_hashes([1, 2], 2, 0) == hashes.block_hashes(Liar("I", [1, 2]), 2, 0)
    with pytest.raises(ValueError, match="known"):
        hashes.prompt_hashes([1, 2], 2, 0, Liar("Q", []))


@pytest.mark.parametrize("block_size", [0, -1, -(2**63)])
def test_block_size_below_one(block_size: int) -> None:
    """An error is raised; the process does not end."""
    for call in (native("hashes").block_hashes, native("hashes").prompt_hashes):
        with pytest.raises(ValueError, match="block size"):
            call([1, 2, 3], block_size, 0, *([array("Q")] if call.__name__ == "prompt_hashes" else []))


@pytest.mark.parametrize("wrong", [longs(0), array("b", [0, 0]), Liar("q", [0]), None])
@pytest.mark.parametrize("place", range(6))
def test_columns_that_do_not_fit(wrong: Any, place: int) -> None:
    """Columns that are too short, of another type, or not arrays are rejected before anything is written."""
    columns: list[Any] = [longs(1, 1) for _ in range(6)]
    columns[place] = wrong
    with pytest.raises((ValueError, TypeError)):
        native("columns").reckon_overlap(*columns[:2], 9, 16, *columns[2:])
    with pytest.raises((ValueError, TypeError)):
        native("columns").costs(1.0, 16.0, *(columns[:4] if place < 4 else columns[2:]))

    assert [longs(1, 1)] * 5 == [column for column in columns if column is not wrong]


def test_amounts_beyond_64_bits() -> None:
    """They raise OverflowError, as array('q') does; sums equal the sums of Python's numbers."""
    reckon, costs = native("columns").reckon_overlap, native("columns").costs
    for most, size, start in ((2**40, 2**40, 0), (1, 1, MOST)):
        with pytest.raises(OverflowError):
            reckon(longs(most), longs(most), most, size, longs(0), longs(start), longs(0), longs(0))

    assert [1.5 * ((MOST + MOST) / 3.0) + -(2**63) * 2] == costs(
        1.5, 3.0, longs(MOST), longs(MOST), longs(-(2**63)), longs(-(2**63))
    )


@pytest.mark.parametrize("slots", [array("Q", [0]), Liar("q", [0]), [0], None])
def test_slots_of_another_type(slots: Any) -> None:
    """They are rejected before they are read."""
    with pytest.raises((ValueError, TypeError)):
        native_table().FlatTable().depths_of([1], slots)


def test_shards_and_slots() -> None:
    """A shard number too high raises IndexError in both versions; a slot may be named twice."""
    for new in (FlatTable, native_table().FlatTable):
        table = new()
        table.add(0, [1])
        table.add(90, [1])
        with pytest.raises(IndexError):
            table.sweep([0], table.shards)
        for shard in range(table.shards):
            table.sweep((90, 0, 90), shard)
        assert 0 == len(table)
        table.check()


def test_slot_copied_onto_itself() -> None:
    """The slot keeps its hashes."""
    for new in (FlatTable, native_table().FlatTable):
        table = new()
        table.add(3, [1, 2])
        table.add(4, [2])
        table.copy_slot(3, 3)
        table.check()
        table.label(3, "a")
        assert {"a": 2} == table.depths([1, 2])


def test_hashes_that_widen_the_table() -> None:
    """Hashes may come from a generator that widens the table: the mask is made afterwards."""
    table = native_table().FlatTable()
    for slot in range(3):
        table.add(slot, [5])

    def hashes() -> Iterator[int]:
        table.add(800_000, [5])
        yield 5

    assert 0 == table.accepted(7, hashes(), 3, 7, 2)
    with pytest.raises(TypeError, match="int"):
        table.accepted(7, [5], 3, "7", 2)


@pytest.mark.parametrize("kind", ["SlotSet", "CountedSet"])
def test_slot_without_a_table(kind: str) -> None:
    with pytest.raises(TypeError, match="None"):
        getattr(native_table(), kind)(None, 1)


WITHOUT_MEMORY = """
import resource
from kvrouter.core.native.table import FlatTable
table = FlatTable()
table.label(3, "a")
table.add(3, [1, 2])
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**{bits}, -1))
refused = 0
for slot in range(2**26, 2**32, 2**26):
    try:
        table.add(slot, [1])
    except MemoryError:
        refused += 1
table.label(70, "b")
table.add(70, [1])
print(refused > 0, table.depths([1, 2]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
@pytest.mark.parametrize("bits", [24, 26, 28])
def test_no_memory_for_wider_sets(bits: int) -> None:
    """MemoryError is raised, and the table is unchanged."""
    code = WITHOUT_MEMORY.replace("{bits}", str(bits))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )

    assert ("True {'b': 1, 'a': 2}\n", 0) == (done.stdout, done.returncode), done.stderr
