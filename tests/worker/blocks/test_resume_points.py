"""Where an engine with several KV groups can resume, compared with a model that looks at all its groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.wire.hashes import block_hashes, pack_hashes, sequence_hashes
from kvrouter.core.wire.ops import CheckResumable, Cleared, NotResumable, Op, Resumable
from kvrouter.worker.blocks.engine_blocks import EngineBlocks
from kvrouter.worker.blocks.resume_points import ALL
from tests.long import examples
from tests.worker.closed_sets import ClosedSets

SIZE = 2

# A forest of twelve blocks: PARENTS[i] is the parent of block i.
PARENTS = [None, 0, 1, 2, 3, 2, 5, 6, None, 8, 9, 10]


def path(block: int) -> list[int]:
    """The blocks from the root to `block`."""
    above = PARENTS[block]
    return [block] if above is None else [*path(above), block]


def tokens_of(blocks: Sequence[int]) -> list[int]:
    """The tokens of some blocks: SIZE tokens each, different for each block."""
    return [token for block in blocks for token in (2 * block, 2 * block + 1)]


def sequences(block: int) -> Sequence[int]:
    """The sequence hashes of a path."""
    return sequence_hashes(block_hashes(tokens_of(path(block)), SIZE))


class Model:
    """An engine: references per group and block; group 0 has full attention. It looks up as vLLM does."""

    def __init__(self, needed: Sequence[int]) -> None:
        self.needed = needed
        self.refs: Counter[tuple[int, int]] = Counter()

    def overlap(self, chain: list[int]) -> int:
        """Full attention first; each group lowers the depth; then all look again, until none lowers it."""
        depth = next((n for n, block in enumerate(chain) if not self.refs[0, block]), len(chain))
        while True:
            before = depth
            for group, needed in enumerate(self.needed, start=1):
                depth = self._lowered(group, needed, chain[:depth])
            if depth == before:
                return depth

    def _lowered(self, group: int, needed: int, chain: list[int]) -> int:
        for depth in range(len(chain), 0, -1):
            last = chain[:depth] if needed == ALL else chain[max(0, depth - needed) : depth]
            if all(self.refs[group, block] for block in last):
                return depth
        return 0


class Run:
    """One history, applied to a table, to a reader that misses no op, and to the model."""

    def __init__(self, needed: Sequence[int]) -> None:
        self.needed = needed
        self.table, self.reader, self.model = EngineBlocks(), ClosedSets(), Model(needed)
        self.declare()

    def declare(self) -> None:
        """The first event of each group: it names no block."""
        for group, needed in enumerate(self.needed, start=1):
            self.reader.apply(self.table.group_stored(group, needed, [], is_root=True))

    def step(self, kind: str, group: int, block: int, count: int) -> None:
        """Events of a real engine: blocks are stored in a full chain, or in any part of it elsewhere."""
        chain = path(block) if kind == "store" and not group else path(block)[-count:]
        group %= len(self.needed) + 1
        if kind == "store":
            ops = self.store(group, chain)
        elif kind == "remove":
            chain = [one for one in chain if self.model.refs[group, one]][::-1]
            self.model.refs.subtract((group, one) for one in chain)
            ops = self.table.group_removed(group, chain) if group else self.table.removed(chain)
        elif kind == "clear":
            ops = self.table.cleared()
            self.model = Model(self.needed)
        elif kind == "restart":
            image, self.table = self.table.image(), EngineBlocks()
            self.table.restore(image)
            ops = []
        else:
            ops = []
            self.reader = ClosedSets().apply(self.table.state_ops())
        self.reader.apply(ops)
        if kind == "clear":
            self.declare()
        self.reader.apply(self.table.check_ops())
        self.table.check()

    def store(self, group: int, chain: list[int]) -> list[Op]:
        self.model.refs.update((group, one) for one in chain)
        if group:
            return self.table.group_stored(group, self.needed[group - 1], chain, is_root=False)
        parent = PARENTS[chain[0]]
        return self.table.stored(chain, tokens_of(chain), block_size=SIZE, parent=parent)


kinds = st.sampled_from(["store"] * 8 + ["remove"] * 5 + ["clear", "join", "restart"])
steps = st.lists(
    st.tuples(kinds, st.integers(0, 2), st.integers(0, len(PARENTS) - 1), st.integers(1, 5)), max_size=40
)
groups = st.lists(st.sampled_from([ALL, 1, 2, 3]), min_size=1, max_size=2)


@examples(300)
@given(groups, steps)
def test_overlap_is_what_is_reused(needed: list[int], history: list[tuple[str, int, int, int]]) -> None:
    """After every event each prompt's overlap is what the engine would reuse, also for who joins then."""
    run = Run(needed)

    for step in history:
        run.step(*step)

        joined = ClosedSets().apply(run.table.state_ops())
        for block in range(len(PARENTS)):
            expected = run.model.overlap(path(block))
            assert expected == run.reader.overlap(sequences(block))
            assert expected == joined.overlap(sequences(block))


def test_ops() -> None:
    """A window of two blocks: the engine can resume where the window has both, or the whole beginning."""
    table, (a, b, c, d) = EngineBlocks(), sequences(4)[:4]
    table.stored([0, 1, 2, 3], tokens_of([0, 1, 2, 3]), block_size=SIZE)

    stored = table.group_stored(1, 2, [0, 1, 2, 3], is_root=True)
    removed = table.group_removed(1, [1])

    (resumable,), (lost,) = stored, removed
    assert isinstance(resumable, Resumable)
    assert {a, b, c, d} == points([resumable])
    assert isinstance(lost, NotResumable)
    assert {b, c} == points([lost])
    assert CheckResumable(2, (a + d) % 2**64) == table.check_ops()[-1]
    assert [Cleared()] == table.cleared()


def test_group_before_its_names() -> None:
    """Engines announce groups in their own order: blocks count once the published group has named them."""
    table = EngineBlocks()

    before = table.group_stored(1, 2, [0, 1], is_root=True)
    named = table.stored([0, 1], tokens_of([0, 1]), block_size=SIZE)

    assert [Resumable(b"")] == before
    assert {*sequences(1)} == points(named)


def test_reports_name_blocks_that_are_gone() -> None:
    """A report names all blocks from the root on; a window has only the last ones for certain."""
    table = EngineBlocks()
    table.expects_reports = True
    table.stored([0, 1, 2, 3], tokens_of([0, 1, 2, 3]), block_size=SIZE)

    ops = table.group_stored(1, 2, [0, 1, 2, 3], is_root=True)
    again = table.group_stored(1, 2, [0, 1, 2, 3], is_root=True)
    gone = table.group_removed(1, [3])

    assert {sequences(3)[3]} == points(ops)
    assert [] == again
    assert [NotResumable(pack_hashes([sequences(3)[3]]))] == gone


def test_a_plain_engine_has_no_resume_points() -> None:
    """Without a second group no op and no digest mentions resume points."""
    table = EngineBlocks()

    ops = table.stored([0, 1], tokens_of([0, 1]), block_size=SIZE)

    assert ["Stored", "Stored"] == [type(op).__name__ for op in [*ops, *table.state_ops()]]
    assert ["Check"] == [type(op).__name__ for op in table.check_ops()]


def test_a_full_table_takes_no_more_groups() -> None:
    """The bound on known blocks holds for other groups as well."""
    table = EngineBlocks(max_known_blocks=2)
    table.group_stored(1, 2, [0, 1], is_root=True)

    assert [] == table.group_stored(1, 2, [2, 3], is_root=False)

    assert 1 == table.rejected_stores


def points(ops: Sequence[Op]) -> set[int]:
    """The resume points that ops state, in any op."""
    reader = ClosedSets()
    reader.points = set()
    found: set[int] = set()
    for op in ops:
        if isinstance(op, Resumable | NotResumable):
            found |= ClosedSets().apply([Resumable(op.hashes)]).points or set()
    return found
