"""The table of one rank, compared with a model that computes everything again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.wire.hashes import block_hashes, hashes_of, pack_hashes, sequence_hashes
from kvrouter.core.wire.ops import DEVICE, DISK, HOST, MAX_FRAME_HASHES, TIERS, Cleared, Op, Removed, Stored
from kvrouter.worker.blocks.engine_blocks import EngineBlocks
from tests.long import examples
from tests.worker.closed_sets import ClosedSets

SIZE = 2
TOKENS = list(range(100, 112))
NAMES = sequence_hashes(block_hashes(TOKENS, SIZE))
A, B, C = NAMES[:3]

# A forest of ten blocks: PARENTS[i] is the parent of block i.
PARENTS = [None, 0, 1, 2, 1, 4, 0, None, 7, 8]


def path(block: int) -> list[int]:
    """The blocks from the root to `block`."""
    above = PARENTS[block]
    return [block] if above is None else [*path(above), block]


def tokens_of(blocks: Sequence[int]) -> list[int]:
    """The tokens of some blocks: SIZE tokens each, different for each block."""
    return [token for block in blocks for token in (2 * block, 2 * block + 1)]


SEQUENCE = [sequence_hashes(block_hashes(tokens_of(path(block)), SIZE))[-1] for block in range(len(PARENTS))]


class Model:
    """The expected contents: blocks whose whole path is referenced, per tier set."""

    def __init__(self) -> None:
        self.refs: Counter[tuple[int, int, int]] = Counter()

    def store(self, engine: int, blocks: Sequence[int], tier: int) -> None:
        self.refs.update((engine, block, tier) for block in blocks)

    def remove(self, engine: int, blocks: Sequence[int], tier: int) -> None:
        for block in blocks:
            if self.refs[engine, block, tier]:
                self.refs[engine, block, tier] -= 1

    def published(self, tier: int) -> set[int]:
        held = {block for (_, block, in_tier), count in self.refs.items() if count and in_tier <= tier}
        return {SEQUENCE[block] for block in held if held.issuperset(path(block))}


class Run:
    """One history, applied to the table, to a reader that misses no frame, and to the model."""

    def __init__(self) -> None:
        self.table = EngineBlocks()
        self.reader = ClosedSets()
        self.model = Model()

    def step(self, kind: str, engine: int, block: int, count: int, tier: int) -> None:
        chain = path(block)[-count:]
        names = [engine * 100 + name for name in chain]
        if kind == "store":
            above = PARENTS[chain[0]]
            parent = None if above is None else engine * 100 + above
            ops = self.table.stored(names, tokens_of(chain), block_size=SIZE, parent=parent, tier=tier)
            self.model.store(engine, chain, tier)
        elif kind == "join":
            ops = []
            self.reader = ClosedSets().apply(self.table.state_ops())
        elif kind == "remove":
            ops = self.table.removed(names[::-1], tier)
            self.model.remove(engine, chain[::-1], tier)
        else:
            ops = self.table.cleared()
            self.model = Model()
        self.reader.apply(ops).apply(self.table.check_ops())
        self.table.check()


def steps(engines: int) -> st.SearchStrategy[list[tuple[str, int, int, int, int]]]:
    """Histories of events: kind, engine, deepest block, blocks, tier."""
    kinds = st.sampled_from(["store"] * 6 + ["remove"] * 6 + ["clear", "join"])
    blocks = st.integers(0, len(PARENTS) - 1)
    step = st.tuples(kinds, st.integers(0, engines - 1), blocks, st.integers(1, 4), st.integers(DEVICE, DISK))
    return st.lists(step, max_size=40)


@examples(300)
@given(steps(engines=1))
def test_publishes_exactly_the_closure(history: list[tuple[str, int, int, int, int]]) -> None:
    """After every event each tier set is the closure of the referenced blocks; no set ever has a hole."""
    run = Run()

    for step in history:
        run.step(*step)

        assert run.reader.tiers == [run.model.published(tier) for tier in range(len(TIERS))]
        assert ClosedSets().apply(run.table.state_ops()).tiers == run.reader.tiers


@examples(200)
@given(steps(engines=3))
def test_never_publishes_more_than_the_closure(history: list[tuple[str, int, int, int, int]]) -> None:
    """If several engine hashes mean one block, the published sets stay closed and held."""
    run = Run()

    for step in history:
        run.step(*step)

        assert all(run.reader.tiers[tier] <= run.model.published(tier) for tier in range(len(TIERS)))
        assert ClosedSets().apply(run.table.state_ops()).tiers == run.reader.tiers


@pytest.fixture
def table() -> EngineBlocks:
    """An empty table."""
    return EngineBlocks()


def store(table: EngineBlocks, first: int, end: int, tier: int = DEVICE) -> list[Op]:
    """Store blocks [first, end) of the sequence NAMES. Their engine hashes are their numbers."""
    parent = first - 1 if first else None
    tokens = TOKENS[first * SIZE : end * SIZE]
    return table.stored(list(range(first, end)), tokens, block_size=SIZE, parent=parent, tier=tier)


def test_store(table: EngineBlocks) -> None:
    """A chain travels as one op, parent first, with the parent of its first block."""
    assert [Stored(DEVICE, None, pack_hashes([A, B]))] == store(table, 0, 2)
    assert [Stored(DEVICE, B, pack_hashes([C]))] == store(table, 2, 3)


def test_references(table: EngineBlocks) -> None:
    """A hash stored twice is published until its second removal."""
    store(table, 0, 1)

    assert [] == store(table, 0, 1)
    assert [] == table.removed([0])
    assert [Removed(DISK, pack_hashes([A]))] == table.removed([0])
    assert [] == table.removed([0])
    assert 1 == table.ignored_removals


def test_parent_leaves_first(table: EngineBlocks) -> None:
    """A block that is removed takes its descendants along, deepest first; they return with it."""
    store(table, 0, 3)

    assert [Removed(DISK, pack_hashes([C, B, A]))] == table.removed([0])
    assert [Stored(DEVICE, None, pack_hashes([A, B, C]))] == store(table, 0, 1)


def test_unknown_parent(table: EngineBlocks) -> None:
    """Blocks below an unknown block are held, and published when it appears."""
    assert [] == store(table, 1, 3)
    assert 2 == table.held_blocks

    assert [Stored(DEVICE, None, pack_hashes([A, B, C]))] == store(table, 0, 1)
    assert 0 == table.held_blocks


def test_held_and_removed(table: EngineBlocks) -> None:
    """A held block that the engine removes is not published later."""
    store(table, 1, 3)
    table.removed([2])

    assert [Stored(DEVICE, None, pack_hashes([A, B]))] == store(table, 0, 1)


def test_held_blocks_are_bounded() -> None:
    """Beyond the bound the oldest held block is dropped."""
    table = EngineBlocks(max_held_blocks=1)
    store(table, 1, 3)
    table.check()

    assert 1 == table.dropped_held_blocks
    assert [Stored(DEVICE, None, pack_hashes([A]))] == store(table, 0, 1)
    assert [Stored(DEVICE, A, pack_hashes([B, C]))] == store(table, 1, 2)


def test_cleared(table: EngineBlocks) -> None:
    """Cleared empties all tiers; an empty table publishes nothing."""
    store(table, 0, 2)
    store(table, 0, 1, HOST)

    assert [Cleared()] == table.cleared()
    assert [] == table.cleared()
    assert [] == table.state_ops()


def test_move_to_host(table: EngineBlocks) -> None:
    """A block copied to the host and then evicted from the device leaves the device set only."""
    store(table, 0, 2)

    assert [Stored(HOST, None, pack_hashes([A]))] == table.stored([0, 1], [], block_size=SIZE, tier=HOST)
    assert [Removed(DEVICE, pack_hashes([B]))] == table.removed([1], DEVICE)
    assert [Stored(HOST, A, pack_hashes([B]))] == table.state_ops()[2:]
    assert [Removed(DISK, pack_hashes([B]))] == table.removed([1], HOST)


def test_device_hole_above(table: EngineBlocks) -> None:
    """A device block below a block that is only in host counts as host: the sets stay closed."""
    store(table, 0, 3)
    store(table, 0, 3, HOST)

    assert [Removed(DEVICE, pack_hashes([C, B]))] == table.removed([1], DEVICE)
    assert [Stored(DEVICE, A, pack_hashes([B, C]))] == store(table, 1, 2)


def test_tokenless_store_of_unknown(table: EngineBlocks) -> None:
    """A store without tokens, from an offload tier, only adds to blocks that are known already."""
    assert [] == table.stored([5], [], block_size=SIZE, tier=HOST)
    assert [] == table.removed([5], HOST)


def test_seed_is_handed_down(table: EngineBlocks) -> None:
    """Salt and LoRA name of the root hold for every block below it, independent of later events."""
    hashes = sequence_hashes(block_hashes(TOKENS[:6], SIZE, lora_name="a", salt="s"))

    table.stored([0], TOKENS[:2], block_size=SIZE, lora_name="a", salt="s")
    ops = table.stored([1, 2], TOKENS[2:6], block_size=SIZE, parent=0, lora_name="a")

    assert [Stored(DEVICE, hashes[0], pack_hashes(hashes[1:]))] == ops


def test_multimodal_ids(table: EngineBlocks) -> None:
    """A block's multimodal ids enter its hash as in the router."""
    hashes = sequence_hashes(block_hashes(TOKENS[:4], SIZE, multimodal=[(2, 4, "f" * 16)]))

    ops = table.stored([0, 1], TOKENS[:4], block_size=SIZE, ids=[(), [(1 << 64) - 1]])

    assert [Stored(DEVICE, None, pack_hashes(hashes))] == ops


def test_extra_keys_not_understood(table: EngineBlocks) -> None:
    """A block that cannot be named is never published, nor is any block below it."""
    ops = table.stored([0, 1, 2], TOKENS[:6], block_size=SIZE, ids=[(), None, ()])

    assert [Stored(DEVICE, None, pack_hashes([A]))] == ops
    assert [] == store(table, 3, 4)
    assert [] == table.removed([3, 2, 1])
    assert [Removed(DISK, pack_hashes([A]))] == table.removed([0])
    table.check()


def test_opaque_engine_hashes(table: EngineBlocks) -> None:
    """Bytes and integers above 2^63 are equally valid engine hashes."""
    ops = table.stored([b"\xff" * 32, 2**64 - 1], TOKENS[:4], block_size=SIZE)

    assert [Stored(DEVICE, None, pack_hashes([A, B]))] == ops
    assert [Stored(DEVICE, B, pack_hashes([C]))] == table.stored(
        [7], TOKENS[4:6], block_size=SIZE, parent=2**64 - 1
    )


def test_two_names_for_one_block(table: EngineBlocks) -> None:
    """A block is published while any of its engine hashes has a reference."""
    table.stored([10], TOKENS[:2], block_size=SIZE)
    table.stored([20], TOKENS[:2], block_size=SIZE)

    assert [] == table.removed([10])
    assert [Removed(DISK, pack_hashes([A]))] == table.removed([20])


def test_held_below_two_parents(table: EngineBlocks) -> None:
    """A hash announced below an unknown parent and then below a known one counts below the known one."""
    table.stored([9], TOKENS[:2], block_size=SIZE, parent=77)
    table.stored([9], TOKENS[:2], block_size=SIZE)
    table.check()

    assert 0 == table.held_blocks
    assert [Removed(DISK, pack_hashes([A]))] == table.removed([9])


def test_reports(table: EngineBlocks) -> None:
    """While reports may come, a store at the root adds no reference; a store below a parent does."""
    table.expects_reports = True
    store(table, 0, 2)
    store(table, 0, 3)
    store(table, 2, 3)
    table.check()

    assert [(1, 0, 0), (1, 0, 0), (2, 0, 0)] == [known.refs for known in table.image().known.values()]


def test_report_names_held_blocks(table: EngineBlocks) -> None:
    """Held blocks keep their references when a report names the blocks above them."""
    table.expects_reports = True
    store(table, 1, 3)
    store(table, 1, 3)
    store(table, 0, 3)

    assert {0: (1, 0, 0), 1: (2, 0, 0), 2: (2, 0, 0)} == {
        name: known.refs for name, known in table.image().known.items()
    }


def test_wrong_token_count(table: EngineBlocks) -> None:
    """Tokens that do not fill the blocks are rejected."""
    with pytest.raises(ValueError, match="2 blocks of 2 with 3 tokens"):
        table.stored([0, 1], TOKENS[:3], block_size=SIZE)


def test_long_chain() -> None:
    """An op names at most 4,096 hashes; the next op continues below the last one."""
    table = EngineBlocks()
    count = MAX_FRAME_HASHES + 10

    ops = table.stored(range(count), range(count), block_size=1)

    first, second = ops
    assert isinstance(first, Stored)
    assert isinstance(second, Stored)
    assert MAX_FRAME_HASHES == len(hashes_of(first.hashes))
    assert hashes_of(first.hashes)[-1] == second.parent
    assert ClosedSets().apply(table.state_ops() + table.check_ops()).tiers == ClosedSets().apply(ops).tiers


class Chunks:
    """A table with six plain blocks on the device, to which chunks of two blocks are added."""

    def __init__(self, salt: str | None = None) -> None:
        self.table = EngineBlocks()
        self.reader = ClosedSets()
        self.apply(self.table.stored(range(6), TOKENS, block_size=SIZE, salt=salt))

    def apply(self, ops: list[Op]) -> list[set[int]]:
        self.reader.apply(ops).apply(self.table.check_ops())
        self.table.check()
        return self.reader.tiers

    def store(
        self, *chunks: bytes | int, start: int = 0, parent: bytes | int | None = None
    ) -> list[set[int]]:
        """Store chunks of the tokens from block `start` on."""
        tokens = TOKENS[start * SIZE : (start + 2 * len(chunks)) * SIZE]
        return self.apply(self.table.stored_chunks(chunks, tokens, block_size=SIZE, parent=parent, tier=HOST))

    def evict(self) -> list[set[int]]:
        return self.apply(self.table.removed([5, 4, 3, 2, 1, 0]))


@pytest.mark.parametrize("chunks", [(b"x" * 32, b"y" * 32, b"z" * 32), (-(2**63), 7, 8)])
def test_chunks(chunks: tuple[bytes | int, ...]) -> None:
    """Chunks stay in their tier after the device has evicted their blocks; a removal takes a whole chunk."""
    case = Chunks()
    case.store(*chunks[:2])
    case.store(chunks[2], start=4, parent=chunks[1])

    assert [set(), set(NAMES[:6])] == case.evict()[:2]
    assert set(NAMES[:4]) == case.apply(case.table.removed([chunks[2]], HOST))[1]
    assert set() == case.apply(case.table.removed([chunks[0]], HOST))[1]


def test_chunk_stored_twice() -> None:
    """The same chunk counts once: it is removed once."""
    case = Chunks()
    case.store(7)
    case.store(7)
    case.evict()

    assert set() == case.apply(case.table.removed([7], HOST))[1]


def test_chunks_without_a_proof() -> None:
    """A chunk counts only if the plain prompt is on the device: its event lacks salt and adapter."""
    salted, evicted, orphan, odd = Chunks("s"), Chunks(), Chunks(), Chunks()
    evicted.evict()
    odd.apply(odd.table.stored_chunks([7], TOKENS[:3], block_size=SIZE, parent=None, tier=HOST))
    salted.store(7)
    evicted.store(7)
    orphan.store(8, start=2, parent=7)

    assert [set()] * 4 == [case.evict()[1] for case in (salted, evicted, orphan, odd)]


def test_chunks_by_the_hashes_of_the_engine() -> None:
    """VLLM's own offload tier uses the engine's hashes: a copy of a block, with or without tokens."""
    case = Chunks()
    case.store(0, 1)

    assert [set(), set(NAMES[:2])] == case.evict()[:2]
