"""The approximate index: blocks that were prefilled on a target are assumed to stay there for a while."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.tables.approx import DEFAULT_TTL_S, ApproxIndex
from kvrouter.core.tables.block_index import BlockIndex
from kvrouter.core.wire.ids import Target, WorkerId
from scripts.kit.bench.meter import instructions
from tests.core.forest import Forest
from tests.long import examples

pytestmark = pytest.mark.usefixtures("core")

T1, T2 = Target(WorkerId("w1")), Target(WorkerId("w2"))
CHAIN = [11, 22, 33, 44]


def own_entries(approx: ApproxIndex, now: float) -> list[tuple[Target, list[int], float]]:
    """The entries of a snapshot for a joining replica."""
    return [(target, list(chain), seconds) for target, chain, seconds in approx.entries(now, learned=False)]


@pytest.fixture
def index() -> BlockIndex:
    """The index that `approx` fills."""
    return BlockIndex()


@pytest.fixture
def approx(index: BlockIndex) -> ApproxIndex:
    """An approximate index with ten seconds to live."""
    return ApproxIndex(index, ttl_s=10.0)


def test_published_ttl() -> None:
    """120 s, as in Dynamo's ApproxKvIndexer."""
    assert 120.0 == DEFAULT_TTL_S == ApproxIndex(BlockIndex()).ttl_s


def test_entry_lives_for_its_ttl(approx: ApproxIndex, index: BlockIndex) -> None:
    """Just before the TTL all blocks are there; at the TTL none is."""
    approx.insert(T1, CHAIN, now=5.0)

    approx.expire(14.999)
    assert {T1: 4} == index.overlap(CHAIN)

    approx.expire(15.0)
    assert {} == index.overlap(CHAIN)
    assert 0 == len(index)


def test_use_renews(approx: ApproxIndex, index: BlockIndex) -> None:
    """A prefix that is used again begins its time again; blocks that were not used expire first."""
    approx.insert(T1, CHAIN, now=0.0)
    approx.insert(T1, CHAIN[:2], now=6.0)

    approx.expire(10.0)
    assert {T1: 2} == index.overlap(CHAIN)

    approx.expire(16.0)
    assert {} == index.overlap(CHAIN)


def test_shorter_ttl_does_not_shorten(approx: ApproxIndex, index: BlockIndex) -> None:
    """An entry of a peer's snapshot with little time left does not shorten the time known here."""
    approx.insert(T1, CHAIN, now=0.0)

    approx.insert(T1, CHAIN, now=1.0, ttl_s=2.0)
    approx.expire(9.9)

    assert {T1: 4} == index.overlap(CHAIN)


def test_targets_are_apart(approx: ApproxIndex, index: BlockIndex) -> None:
    """Renewal on one target does not renew on another."""
    approx.insert(T1, CHAIN, now=0.0)
    approx.insert(T2, CHAIN, now=5.0)

    approx.expire(10.0)

    assert {T2: 4} == index.overlap(CHAIN)


def test_deepest_goes_first(index: BlockIndex) -> None:
    """Of blocks that expire together the deepest is removed first: no step leaves a hole."""
    removed: list[int] = []

    class Watched(BlockIndex):
        def remove(self, target: Target, hashes: object, tier: str = "device") -> None:
            assert isinstance(hashes, list)
            removed.extend(hashes)

    approx = ApproxIndex(Watched(), ttl_s=10.0)
    approx.insert(T1, CHAIN, now=0.0)

    approx.expire(10.0)

    assert CHAIN[::-1] == removed


def test_dropped_target_is_forgotten(approx: ApproxIndex, index: BlockIndex) -> None:
    """A worker that left and came back starts empty, and old expiries do not touch its new blocks."""
    approx.insert(T1, CHAIN, now=0.0)
    approx.drop(T1)
    assert {} == index.overlap(CHAIN)

    approx.insert(T1, CHAIN, now=5.0)
    approx.expire(10.0)

    assert {T1: 4} == index.overlap(CHAIN)


def test_snapshot_of_an_elder(approx: ApproxIndex) -> None:
    """It also has what other replicas have sent."""
    approx.insert(T1, CHAIN, now=0.0, own=True)
    approx.insert(T2, CHAIN[:1], now=1.0, own=False)

    entries = [(target, list(chain)) for target, chain, _ in approx.entries(2.0, learned=True)]

    assert [(T1, CHAIN), (T2, CHAIN[:1])] == entries


def test_snapshot_is_bounded(approx: ApproxIndex) -> None:
    """Entries that expire first are left out; each has its whole chain."""
    for number in range(10):
        approx.insert(T1, [1, 2, 100 + number], now=float(number))

    entries = [list(chain) for _, chain, _ in approx.entries(9.0, learned=True, most=10)]

    assert [[1, 2, 107], [1, 2, 108], [1, 2, 109]] == entries


def test_snapshot_has_own_entries_only(approx: ApproxIndex) -> None:
    """Own live entries travel with their remaining seconds; a peer's entries are the peer's to publish."""
    approx.insert(T1, CHAIN, now=0.0, own=True)
    approx.insert(T2, CHAIN[:1], now=0.0, own=False)
    approx.insert(T1, CHAIN[:2], now=4.0, own=True)

    assert [(T1, CHAIN, 5.0), (T1, CHAIN[:2], 9.0)] == own_entries(approx, 5.0)
    assert [(T1, CHAIN[:2], 4.0)] == own_entries(approx, 10.0)


def test_snapshot_has_no_target_that_left(approx: ApproxIndex) -> None:
    """Entries of a dropped target are not published either."""
    approx.insert(T1, CHAIN, now=0.0, own=True)

    approx.drop(T1)

    assert [] == own_entries(approx, 1.0)


def test_prompt_without_a_full_block(approx: ApproxIndex, index: BlockIndex) -> None:
    """It leaves no trace."""
    approx.insert(T1, [], now=0.0)

    assert [] == index.targets()


inserts = st.tuples(st.sampled_from([T1, T2]), st.integers(0, 23), st.sampled_from([0.5, 1.0, 3.0, 10.0]))
steps = st.lists(
    st.tuples(st.sampled_from([0.0, 0.5, 1.0, 4.0]), st.one_of(inserts, st.none())), min_size=5, max_size=40
)


@examples(150)
@given(st.integers(0, 2**32), steps)
def test_any_history_is_prefix_closed(
    seed: int, history: list[tuple[float, tuple[Target, int, float] | None]]
) -> None:
    """After any inserts with any TTLs exactly the unexpired blocks are held, without a hole."""
    forest, index, now = Forest(seed, 24), BlockIndex(), 0.0
    approx = ApproxIndex(index)
    deadlines: dict[tuple[Target, int], float] = {}
    for seconds, insert in history:
        now += seconds
        approx.expire(now)
        if insert is not None:
            target, node, ttl_s = insert
            approx.insert(target, forest.chain(node), now, ttl_s=ttl_s)
            for hash_ in forest.chain(node):
                until = deadlines.get((target, hash_), -math.inf)
                deadlines[target, hash_] = max(now + ttl_s, until)

        for target in (T1, T2):
            live = {hash_ for (of, hash_), until in deadlines.items() if of == target and until > now}
            assert live == {hash_ for hash_ in forest.hashes if index.holds(target, hash_)}
            assert forest.is_closed(live)
        index.check()


def test_capacity_bounds_the_blocks_of_a_target() -> None:
    """Beyond its capacity the least recently used chains go, deepest block first."""
    index = BlockIndex()
    approx = ApproxIndex(index)
    for start in range(0, 1000, 10):
        approx.insert(T1, range(start, start + 10), now=start, capacity=50)

    assert 50 == index.blocks(T1)
    assert {T1: 10} == index.overlap(list(range(990, 1000)))
    assert {} == index.overlap(list(range(10)))
    index.check()


def test_one_prompt_repeated_takes_no_more_room(approx: ApproxIndex, index: BlockIndex) -> None:
    """A chain that is renewed often is listed once, and expires after its last use."""
    chain = list(range(500))
    for second in range(1000):
        approx.insert(T1, chain, now=float(second))

    assert (500, 1) == approx.listed()
    approx.expire(1008.0)
    assert {T1: 500} == index.overlap(chain)
    approx.expire(1009.0)
    assert {} == index.overlap(chain)


@pytest.mark.parametrize("is_timed", [True, False], ids=["by time", "by capacity"])
def test_cost_of_an_insert_does_not_grow(is_timed: bool) -> None:
    """Prompts that share 75 %, at steady load: with 150 of them live an insert costs as much as with 10.

    Counted in instructions. Each live block is listed once.
    """
    costs = []
    for live in (10, 150):
        index = BlockIndex()
        approx = ApproxIndex(index, ttl_s=float(live) if is_timed else 0.0)

        def book(number: int, approx: ApproxIndex = approx, capacity: int = 300 + 100 * live) -> None:
            approx.expire(float(number))
            own = range(1000 + 100 * number, 1100 + 100 * number)
            approx.insert(T1, [*range(300), *own], now=float(number), capacity=capacity)

        for number in range(2 * live):
            book(number)
        sample = range(2 * live, 2 * live + 20)
        costs.append(statistics.fmean(instructions(book, number) for number in sample))

        assert (300 + 100 * live, 1 + live) == approx.listed()
        assert 300 + 100 * live == index.blocks(T1)
    assert costs[1] <= 1.3 * costs[0]


def test_cost_of_a_renewal_does_not_grow_with_its_blocks(approx: ApproxIndex) -> None:
    """A chain that is known as a whole costs one step, at any length."""
    short, long = range(10), range(1000, 3000)
    for chain in (short, long):
        approx.insert(T1, chain, now=0.0)

    first, second = (instructions(approx.insert, T1, chain, 1.0) for chain in (short, long))

    assert first == second


def test_branches_that_went_leave_no_trace(approx: ApproxIndex) -> None:
    """Prompts that ended or branched off at every block of a shared prefix do not cut it for good."""
    chain = list(range(500))
    approx.insert(T1, chain, now=0.0)
    whole = instructions(approx.insert, T1, chain, 0.0)
    for place in range(1, 500):
        approx.insert(T1, chain[:place], now=1.0)
        approx.insert(T1, [*chain[:place], 1000 + place], now=1.0)

    approx.insert(T1, chain, now=2.0)
    approx.expire(11.0)
    approx.insert(T1, chain, now=11.0)

    assert whole == instructions(approx.insert, T1, chain, 11.0)
    approx.check()


def test_old_entry_costs_no_walk() -> None:
    """An entry of a snapshot has less time left than new ones; the number of new ones does not matter."""
    costs = []
    for known in (10, 1000):
        approx = ApproxIndex(BlockIndex())
        for number in range(known):
            approx.insert(T1, [number], now=float(number))
        costs.append(instructions(approx.insert, T1, [9999], 0.0, ttl_s=1.0))

    assert costs[1] <= 1.3 * costs[0]


def test_chains_of_one_instant_share_their_parents(approx: ApproxIndex, index: BlockIndex) -> None:
    """Of two chains inserted at the same time, one is removed: the parents that the other needs stay.

    Without its parents the rest of the other chain would count as overlap that the target does not hold, as
    soon as its root is stored again.
    """
    approx.insert(T1, [1, 2, 3], now=5.0, capacity=5)
    approx.insert(T1, [1, 2, 4], now=5.0, capacity=5)
    approx.insert(T1, [8, 9], now=5.0, capacity=5)

    assert {T1: 3} == index.overlap([1, 2, 4])
    assert {T1: 2} == index.overlap([1, 2, 3])
    approx.insert(T1, [7], now=5.0, capacity=5)
    approx.insert(T1, [1, 6], now=5.0, capacity=5)
    assert {T1: 1} == index.overlap([1, 2, 4]), "the chain is removed as a whole"


def test_by_capacity_alone(index: BlockIndex) -> None:
    """TTL 0: blocks do not expire; without room the least recently used go, deepest first."""
    approx = ApproxIndex(index, ttl_s=0.0)
    other = [91, 92]
    approx.insert(T1, CHAIN, now=0.0, capacity=len(CHAIN) + 1, own=True)
    approx.expire(1e12)
    assert len(CHAIN) == index.overlap(CHAIN)[T1]

    approx.insert(T1, CHAIN[:1], now=1e12, capacity=len(CHAIN) + 1, own=True)
    approx.insert(T1, other, now=1e12, capacity=len(CHAIN) + 1, own=True)

    assert {T1: 1} == index.overlap(CHAIN), "the chain that was used again stays"
    assert {T1: 2} == index.overlap(other)
    assert [0.0, 0.0] == [seconds for _, _, seconds in approx.entries(2e12, learned=False)]


def test_entry_without_an_end_takes_the_readers_ttl(approx: ApproxIndex, index: BlockIndex) -> None:
    """A joining replica with a TTL applies its own."""
    approx.insert(T1, CHAIN, now=0.0, ttl_s=0.0)

    approx.expire(9.9)
    assert index.overlap(CHAIN)
    approx.expire(10.0)
    assert not index.overlap(CHAIN)


class NaiveApprox:
    """The specification: when each block expires, and all blocks looked at every time."""

    def __init__(self, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self.stamps: dict[int, tuple[float, int]] = {}
        self.tick = 0

    def insert(self, hashes: Sequence[int], now: float, ttl_s: float | None, capacity: int) -> None:
        """Each block gets the latest stamp; beyond the capacity all blocks of the oldest stamps go."""
        self.tick += 1
        stamp = now + (ttl_s or self.ttl_s or math.inf), self.tick
        for hash_ in hashes:
            self.stamps[hash_] = max(stamp, self.stamps.get(hash_, stamp))
        while len(self.stamps) > capacity and len(set(self.stamps.values())) > 1:
            oldest = min(self.stamps.values())
            self.stamps = {hash_: one for hash_, one in self.stamps.items() if one != oldest}

    def expire(self, now: float) -> None:
        """Remove expired blocks."""
        self.stamps = {hash_: one for hash_, one in self.stamps.items() if one[0] > now}


prompts = st.lists(st.integers(0, 23), min_size=1, max_size=3)
uses = st.tuples(prompts, st.sampled_from([None, None, None, 0.5, 3.0]), st.booleans())


@pytest.mark.parametrize("ttl_s", [10.0, 0.0], ids=["by time", "by capacity"])
@examples(150)
@given(
    seed=st.integers(0, 2**32),
    history=st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0, 4.0]), uses), min_size=5, max_size=40),
    capacity=st.sampled_from([5, 10, 1000]),
)
def test_any_history_is_as_specified(
    ttl_s: float, seed: int, history: list[tuple[float, tuple[list[int], float | None, bool]]], capacity: int
) -> None:
    """Chains, and several prompts in one booking: each block expires when the specification has it expire.

    An own entry names only blocks that are held, and only the time that they have.
    """
    forest, index, now = Forest(seed, 24), BlockIndex(), 0.0
    approx, naive = ApproxIndex(index, ttl_s), NaiveApprox(ttl_s)
    for seconds, (nodes, left_s, own) in history:
        now += seconds
        approx.expire(now)
        naive.expire(now)
        chain = list(dict.fromkeys(hash_ for node in nodes for hash_ in forest.chain(node)))
        approx.insert(T1, chain, now, ttl_s=left_s, own=own, capacity=capacity)
        naive.insert(chain, now, left_s, capacity)

        held = {hash_ for hash_ in forest.hashes if index.holds(T1, hash_)}
        assert held == set(naive.stamps)
        assert forest.is_closed(held)
        blocks, runs = approx.listed()
        assert len(held) == blocks >= runs
        approx.check()
        for _, entry, seconds_left in approx.entries(now, learned=False):
            assert set(entry) <= held
            assert all(naive.stamps[hash_][0] >= now + (seconds_left or math.inf) - 1e-9 for hash_ in entry)


odd_chains = st.lists(st.integers(0, 9), min_size=1, max_size=9)


@examples(100)
@given(
    st.lists(
        st.tuples(odd_chains, st.sampled_from([0.0, 0.5, 2.0]), st.sampled_from([None, 0.5])), min_size=5
    )
)
def test_odd_chains_do_no_harm(history: list[tuple[list[int], float, float | None]]) -> None:
    """A peer names blocks twice, or in any order: each still expires as the specification has it."""
    index, now = BlockIndex(), 0.0
    approx, naive = ApproxIndex(index, 5.0), NaiveApprox(5.0)
    for chain, seconds, left_s in history:
        now += seconds
        approx.expire(now)
        naive.expire(now)
        approx.insert(T1, chain, now, ttl_s=left_s, own=True, capacity=6)
        naive.insert(chain, now, left_s, 6)

        assert set(naive.stamps) == {hash_ for hash_ in range(10) if index.holds(T1, hash_)}
        assert all(entry for _, entry, _ in approx.entries(now, learned=False))
        approx.check()
