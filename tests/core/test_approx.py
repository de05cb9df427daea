"""The approximate index: what was prefilled somewhere is taken to stay there for a while."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.core.approx import DEFAULT_TTL_S, ApproxIndex
from kvrouter.core.ids import Target, WorkerId
from kvrouter.core.index import BlockIndex
from tests.core.forest import Forest

pytestmark = pytest.mark.usefixtures("core")

T1, T2 = Target(WorkerId("w1")), Target(WorkerId("w2"))
CHAIN = [11, 22, 33, 44]


@pytest.fixture
def index() -> BlockIndex:
    """The index that is filled."""
    return BlockIndex()


@pytest.fixture
def approx(index: BlockIndex) -> ApproxIndex:
    """Ten seconds to live."""
    return ApproxIndex(index, ttl_s=10.0)


def test_published_ttl() -> None:
    """120 s, as in Dynamo's ApproxKvIndexer."""
    assert 120.0 == DEFAULT_TTL_S == ApproxIndex(BlockIndex()).ttl_s


def test_entry_lives_for_its_ttl(approx: ApproxIndex, index: BlockIndex) -> None:
    """Just before the ttl all is there; at the ttl nothing."""
    approx.insert(T1, CHAIN, now=5.0)

    approx.expire(14.999)
    assert {T1: 4} == index.overlap(CHAIN)

    approx.expire(15.0)
    assert {} == index.overlap(CHAIN)
    assert 0 == len(index)


def test_use_renews(approx: ApproxIndex, index: BlockIndex) -> None:
    """A prefix used again lives from then on; what was not used again goes first."""
    approx.insert(T1, CHAIN, now=0.0)
    approx.insert(T1, CHAIN[:2], now=6.0)

    approx.expire(10.0)
    assert {T1: 2} == index.overlap(CHAIN)

    approx.expire(16.0)
    assert {} == index.overlap(CHAIN)


def test_shorter_ttl_does_not_shorten(approx: ApproxIndex, index: BlockIndex) -> None:
    """An entry from a joiner's snapshot with little time left takes nothing from what is known here."""
    approx.insert(T1, CHAIN, now=0.0)

    approx.insert(T1, CHAIN, now=1.0, ttl_s=2.0)
    approx.expire(9.9)

    assert {T1: 4} == index.overlap(CHAIN)


def test_targets_are_apart(approx: ApproxIndex, index: BlockIndex) -> None:
    """Renewal on one target is none on another."""
    approx.insert(T1, CHAIN, now=0.0)
    approx.insert(T2, CHAIN, now=5.0)

    approx.expire(10.0)

    assert {T2: 4} == index.overlap(CHAIN)


def test_deepest_goes_first(index: BlockIndex) -> None:
    """Of blocks due together the deepest is removed first: no step leaves a hole."""
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
    """A worker that left and came back starts with nothing, and old deadlines do not touch the new."""
    approx.insert(T1, CHAIN, now=0.0)
    approx.drop(T1)
    assert {} == index.overlap(CHAIN)

    approx.insert(T1, CHAIN, now=5.0)
    approx.expire(10.0)

    assert {T1: 4} == index.overlap(CHAIN)


def test_joiner_is_told_of_own_entries_only(approx: ApproxIndex) -> None:
    """Own live entries travel with the seconds they have left; a peer's are the peer's to tell."""
    approx.insert(T1, CHAIN, now=0.0, own=True)
    approx.insert(T2, CHAIN[:1], now=0.0, own=False)
    approx.insert(T1, CHAIN[:2], now=4.0, own=True)

    assert [(T1, CHAIN, 5.0), (T1, CHAIN[:2], 9.0)] == list(approx.own_entries(5.0))
    assert [(T1, CHAIN[:2], 4.0)] == list(approx.own_entries(10.0))


def test_joiner_is_not_told_of_a_target_that_left(approx: ApproxIndex) -> None:
    """What was assumed of a dropped target is gone for joiners too."""
    approx.insert(T1, CHAIN, now=0.0, own=True)

    approx.drop(T1)

    assert [] == list(approx.own_entries(1.0))


def test_nothing_to_assume(approx: ApproxIndex, index: BlockIndex) -> None:
    """A prompt without a full block leaves no trace."""
    approx.insert(T1, [], now=0.0)

    assert [] == index.targets()


inserts = st.tuples(st.sampled_from([T1, T2]), st.integers(0, 23), st.sampled_from([0.5, 1.0, 3.0, 10.0]))
steps = st.lists(
    st.tuples(st.sampled_from([0.0, 0.5, 1.0, 4.0]), st.one_of(inserts, st.none())), min_size=5, max_size=40
)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), steps)
def test_any_history_is_prefix_closed(
    seed: int, history: list[tuple[float, tuple[Target, int, float] | None]]
) -> None:
    """Whatever is inserted with whatever ttl, exactly what is not over is held, and it has no hole."""
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


def test_a_target_is_assumed_to_hold_no_more_than_it_can() -> None:
    """Beyond its capacity the least recently used chains go, deepest block first."""
    index = BlockIndex()
    approx = ApproxIndex(index)
    for start in range(0, 1000, 10):
        approx.insert(T1, range(start, start + 10), now=start, capacity=50)

    assert 50 == index.blocks(T1)
    assert {T1: 10} == index.overlap(list(range(990, 1000)))
    assert {} == index.overlap(list(range(10)))
    index.check()


def test_one_prompt_repeated_takes_no_more_room() -> None:
    """Entries that renewal has emptied are dropped by and by; what is due is due at its last use."""
    index = BlockIndex()
    approx = ApproxIndex(index, ttl_s=10.0)
    chain = list(range(500))
    for second in range(1000):
        approx.insert(T1, chain, now=float(second))

    assert approx._targets[T1].listed <= 4096 + 3 * len(chain)
    approx.expire(1008.0)
    assert {T1: 500} == index.overlap(chain)
    approx.expire(1009.0)
    assert {} == index.overlap(chain)


def test_chains_of_one_instant_share_their_parents(approx: ApproxIndex, index: BlockIndex) -> None:
    """Two chains inserted at the same time: when one has to go, what the other needs stays.

    Otherwise the other's end would hang in the air, and be found again, deeper than it is held, as
    soon as somebody stores its root anew.
    """
    approx.insert(T1, [1, 2, 3], now=5.0, capacity=5)
    approx.insert(T1, [1, 2, 4], now=5.0, capacity=5)
    approx.insert(T1, [8, 9], now=5.0, capacity=5)

    assert {T1: 3} == index.overlap([1, 2, 4])
    assert {T1: 2} == index.overlap([1, 2, 3])
    approx.insert(T1, [7], now=5.0, capacity=5)
    approx.insert(T1, [1, 6], now=5.0, capacity=5)
    assert {T1: 1} == index.overlap([1, 2, 4]), "it went as a whole"


def test_by_capacity_alone(index: BlockIndex) -> None:
    """Ttl 0: nothing ends by itself; the least recently used goes when there is no room, leaf first."""
    approx = ApproxIndex(index, ttl_s=0.0)
    other = [91, 92]
    approx.insert(T1, CHAIN, now=0.0, capacity=len(CHAIN) + 1, own=True)
    approx.expire(1e12)
    assert len(CHAIN) == index.overlap(CHAIN)[T1]

    approx.insert(T1, CHAIN[:1], now=1e12, capacity=len(CHAIN) + 1, own=True)
    approx.insert(T1, other, now=1e12, capacity=len(CHAIN) + 1, own=True)

    assert {T1: 1} == index.overlap(CHAIN), "what was used again stays"
    assert {T1: 2} == index.overlap(other)
    assert [0.0, 0.0] == [seconds for _, _, seconds in approx.own_entries(2e12)]


def test_entry_without_an_end_takes_the_readers_ttl(approx: ApproxIndex, index: BlockIndex) -> None:
    """A joiner with a time to live keeps to it."""
    approx.insert(T1, CHAIN, now=0.0, ttl_s=0.0)

    approx.expire(9.9)
    assert index.overlap(CHAIN)
    approx.expire(10.0)
    assert not index.overlap(CHAIN)
