"""The two versions of the hot tables: which one is in use, and that both give the same answers."""

from __future__ import annotations

import random
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvrouter.core.native import versions
from kvrouter.core.tables.block_index import BlockIndex
from kvrouter.core.tables.table import CountedSet, FlatTable, SlotSet, new_table
from kvrouter.core.wire.hashes import block_hashes, pack_hashes, prompt_hashes, sequence_hashes
from kvrouter.errors import ConfigError
from tests.core.aimed import SECRET, aimed
from tests.core.forest import Forest
from tests.long import examples

SIZE, SLOTS = 40, 70  # more slots than a machine word has bits
BLOCKED = "import sys; sys.modules['kvrouter.core.native.table'] = None; "
needs_native = pytest.mark.skipif(bool(versions.why_not_built), reason=f"not built: {versions.why_not_built}")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Restore the version in use after each test."""
    before = versions.in_use()
    yield
    versions.choose(before)


def run_blocked(code: str) -> subprocess.CompletedProcess[str]:
    """Run this in a Python without the native version."""
    return subprocess.run(
        [sys.executable, "-c", BLOCKED + code], capture_output=True, text=True, timeout=60, check=False
    )


def test_python_version_may_be_chosen() -> None:
    """`--core python` is always possible, and then tables are Python objects."""
    assert versions.PYTHON == versions.choose("python")

    assert FlatTable is type(new_table())
    assert versions.chosen.hashes is None


@needs_native
def test_native_version_is_the_default_where_it_is_built() -> None:
    """`choose(None)` chooses it."""
    versions.choose("python")

    assert versions.NATIVE == versions.choose(None)
    assert FlatTable is not type(new_table())


def test_without_the_extension_python_is_used() -> None:
    """Hashes and index work, and the reason is reported."""
    code = (
        "from kvrouter import BlockIndex, block_hashes; from kvrouter.core.native import versions; "
        "index = BlockIndex(); index.store('t', [1, 2]); "
        "print(versions.in_use(), index.overlap([1, 2, 3]), block_hashes(range(16), 16)); "
        "print(versions.why_not_built)"
    )
    done = run_blocked(code)

    answer, reason = done.stdout.splitlines()
    assert f"python {{'t': 2}} {block_hashes(range(16), 16)}" == answer
    assert "kvrouter.core.native" in reason


@pytest.mark.parametrize("process", ["frontend", "worker"])
def test_native_without_the_extension_is_an_error(process: str) -> None:
    """`--core native` reports the reason and the remedy; the process does not start."""
    flags = ["--engine-url", "http://127.0.0.1:1"] if process == "worker" else []
    code = f"from kvrouter.{process}.__main__ import main; sys.exit(main({['--core', 'native', *flags]}))"
    done = run_blocked(code)

    assert done.returncode in {1, 2}
    assert "--core native: it is not built here" in done.stderr
    assert "C compiler" in done.stderr


def test_reason_for_python_is_logged_once() -> None:
    """One line at the start; none if Python was requested."""
    code = "from kvrouter.config import use_core; use_core(None); use_core('python')"
    done = run_blocked(code)

    assert 1 == (done.stdout + done.stderr).count("core.not_built")


def test_a_choice_cannot_be_changed_in_part() -> None:
    """A version is replaced as a whole: its modules cannot be assigned one by one."""
    with pytest.raises(FrozenInstanceError):
        versions.chosen.hashes = None  # type: ignore[misc]


def test_choosing_a_version_that_is_not_built() -> None:
    """`choose` raises, and the version in use stays."""
    if not versions.why_not_built:
        pytest.skip("the C version is built here")
    with pytest.raises(ConfigError, match="not built"):
        versions.choose("native")
    assert versions.PYTHON == versions.in_use()


@needs_native
@pytest.mark.parametrize("block_size", [1, 4, 16, 17, 32, 64, 128])
@pytest.mark.parametrize("salt", [None, "s"])
def test_same_hashes(block_size: int, salt: str | None) -> None:
    """For any block size, with and without a seed: XXH3 has another code path for each length."""
    tokens = [(number * 2654435761) % 2**32 for number in range(300)]
    found = []
    for core in versions.CORES:
        versions.choose(core)
        blocks = block_hashes(tokens, block_size, salt=salt)
        chain = sequence_hashes(blocks)
        found.append((blocks, chain, sequence_hashes(blocks[1:], chain[0]) if len(chain) > 1 else None))
        for same in (tokens, tuple(tokens), array("I", tokens), range(300)):
            if list(same) == tokens:
                assert chain == prompt_hashes(same, block_size, salt=salt).tolist()
    assert found[0] == found[1]


@pytest.fixture(params=[versions.PYTHON, pytest.param(versions.NATIVE, marks=needs_native)])
def core(request: pytest.FixtureRequest) -> str:
    return versions.choose(str(request.param))


class Number:
    """A number that is not an int, like numpy's."""

    def __index__(self) -> int:
        return 7


def backwards(packed: bytes) -> memoryview:
    """A memoryview that is not contiguous."""
    return memoryview(packed[::-1])[::-1]


@pytest.mark.parametrize("form", [bytes, bytearray, memoryview, backwards])
def test_bytes_are_packed_hashes(core: str, form: Callable[[bytes], bytes]) -> None:
    """Any kind of bytes is packed hashes: byte by byte they would be other hashes."""
    index: Any = BlockIndex()
    index.store("t", form(pack_hashes([5, 6, 7])))

    assert {"t": 3} == index.overlap([5, 6, 7, 8])
    assert {"t": 3} == index.overlap(form(pack_hashes([5, 6, 7, 8])))
    index.check()


def test_numbers_of_other_kinds(core: str) -> None:
    """A value with __index__ is a hash, in a list or any other sequence."""
    index: Any = BlockIndex()
    index.store("t", [Number()])

    assert (1, 7) == index.digest("t")
    assert {"t": 1} == index.overlap([Number()]) == index.overlap((Number(),)) == index.overlap(range(7, 8))
    chained: Any = sequence_hashes
    assert chained([7, 7], 7) == chained([Number(), Number()], Number())


@pytest.mark.parametrize("wrong", [-1, 1 << 64, 1.0, None, "7"])
def test_wrong_hashes_are_rejected(core: str, wrong: Any) -> None:
    """An error is raised before anything has changed."""
    index: Any = BlockIndex()
    index.store("t", [1, 2])
    chained: Any = sequence_hashes
    for change in (index.store, index.remove):
        with pytest.raises((OverflowError, TypeError)):
            change("t", [1, 3, wrong])
    for chain in ([wrong], [1, wrong]):
        with pytest.raises((OverflowError, TypeError)):
            chained(chain)
    if wrong is not None:
        with pytest.raises((OverflowError, TypeError)):
            chained([1], wrong)

    assert (2, 3) == index.digest("t")
    assert {"t": 2} == index.overlap([1, 2, 3])
    index.check()


class Meddler:
    """An owner whose __hash__ changes the index during a look-up."""

    def __init__(self, name: int, index: Any) -> None:
        self.name = name
        self.index: Any = None
        index.store(self, list(range(1, name + 2)))
        self.index = index

    def __hash__(self) -> int:
        index, self.index = self.index, None
        if index is not None:
            for other in range(9):
                index.store(f"other {other}", [1, 2, 90 + other])
            index.overlap([1, 2, 3])
            for other in range(9):
                index.drop(f"other {other}")
            while index.sweep():
                pass
            self.index = index
        return self.name


def test_look_up_amid_a_look_up(core: str) -> None:
    """An owner's __hash__ runs after the look-up: the answer is that of the moment of the call."""
    index: Any = BlockIndex()
    meddlers = [Meddler(name, index) for name in range(4)]

    assert {each: each.name + 1 for each in meddlers} == index.overlap(list(range(1, 20)))
    index.check()


class TwinHistory(RuleBasedStateMachine):
    """The same changes and questions for two tables."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[FlatTable] = []
        self.sets: list[dict[int, SlotSet]] = []
        self.counted: list[dict[int, CountedSet]] = []
        for core in versions.CORES:
            versions.choose(core)
            table = new_table(SECRET)
            self.tables.append(table)
            self.sets.append({slot: table.slot_set(slot) for slot in range(SLOTS - 10)})
            self.counted.append({slot: table.counted_set(slot) for slot in range(SLOTS - 10, SLOTS)})

    @initialize(seed=st.integers(0, 2**32), is_crowded=st.booleans())
    def grow(self, seed: int, is_crowded: bool) -> None:
        """Another forest; its hashes are spread, or all placed in one shard."""
        self.forest = Forest(seed, SIZE)
        if is_crowded:
            self.forest.hashes = random.Random(seed).sample(aimed(SECRET), SIZE)

    @rule(slot=st.integers(0, SLOTS - 11), nodes=st.lists(st.integers(0, SIZE - 1), max_size=4))
    def add(self, slot: int, nodes: list[int]) -> None:
        """Chains, some twice."""
        hashes = [hash_ for node in nodes for hash_ in self.forest.chain(node)]
        assert 1 == len({sets[slot].add(pack_hashes(hashes)) for sets in self.sets})

    @rule(slots=st.sets(st.integers(0, SLOTS - 11), max_size=50), node=st.integers(0, SIZE - 1))
    def add_to_many(self, slots: set[int], node: int) -> None:
        """A prompt that many slots share."""
        for slot in slots:
            self.add(slot, [node])

    @rule(slot=st.integers(0, SLOTS - 11), node=st.integers(0, SIZE - 1))
    def discard(self, slot: int, node: int) -> None:
        """A subtree."""
        hashes = self.forest.subtree(node)
        assert 1 == len({sets[slot].discard(hashes) for sets in self.sets})

    @rule(slot=st.integers(SLOTS - 10, SLOTS - 1), node=st.integers(0, SIZE - 1))
    def book(self, slot: int, node: int) -> None:
        """Another request holds a chain."""
        for counted in self.counted:
            counted[slot].add(array("Q", self.forest.chain(node)))

    @rule(slot=st.integers(SLOTS - 10, SLOTS - 1), node=st.integers(0, SIZE - 1))
    def free(self, slot: int, node: int) -> None:
        """One request fewer, if there is one."""
        chain, counts = self.forest.chain(node), self.counted[0][slot].counts()
        if all(hash_ in counts for hash_ in chain):
            for counted in self.counted:
                counted[slot].discard(chain)

    @rule(slot=st.integers(0, SLOTS - 1), owner=st.sampled_from([None, "a", "b", "c"]))
    def label(self, slot: int, owner: str | None) -> None:
        """A slot gets an owner, or loses it."""
        for table in self.tables:
            table.label(slot, owner and (owner, slot))

    @rule(slots=st.lists(st.integers(0, SLOTS - 11), min_size=1, max_size=5))
    def sweep(self, slots: list[int]) -> None:
        """Some slots are emptied."""
        for table, sets in zip(self.tables, self.sets, strict=True):
            for shard in range(table.shards):
                table.sweep(slots, shard)
            for slot in slots:
                sets[slot] = table.slot_set(slot)

    @rule(source=st.integers(0, SLOTS - 11), copy=st.integers(0, SLOTS - 11))
    def copy_slot(self, source: int, copy: int) -> None:
        """An empty slot becomes a copy."""
        if source != copy:
            self.sweep([copy])
            for table, sets in zip(self.tables, self.sets, strict=True):
                table.copy_slot(source, copy)
                sets[copy].count, sets[copy].digest = sets[source].count, sets[source].digest

    @rule(
        slot=st.integers(0, SLOTS - 1),
        node=st.integers(0, SIZE - 1),
        room=st.integers(0, 5),
        others=st.integers(0, 2**SLOTS - 1),
        most=st.integers(0, 4),
    )
    def ask_for_room(self, slot: int, node: int, room: int, others: int, most: int) -> None:
        """How much of a chain would be accepted."""
        chain = self.forest.chain(node)
        assert 1 == len({table.accepted(slot, chain, room, others, most) for table in self.tables})

    @invariant()
    def same_answers(self) -> None:
        """Depths, membership, counts and sums; and each table's own invariants."""
        for table in self.tables:
            table.check()
        assert len(self.tables[0]) == len(self.tables[1])
        for node in range(0, SIZE, 3):
            chain = self.forest.chain(node)
            assert self.tables[0].depths(chain) == self.tables[1].depths(pack_hashes(chain))
            for slot in range(0, SLOTS, 7):
                assert 1 == len({table.holds(slot, chain[-1]) for table in self.tables})
        for slot, one in self.sets[0].items():
            other = self.sets[1][slot]
            assert (one.count, one.digest) == (other.count, other.digest)
        for slot, held in self.counted[0].items():
            assert held.counts() == self.counted[1][slot].counts()
            assert held.count == self.counted[1][slot].count


@needs_native
def test_any_history_gives_the_same_answers() -> None:
    """After any history both versions give the same answers."""
    run_state_machine_as_test(TwinHistory, settings=examples(40, stateful_step_count=25))
