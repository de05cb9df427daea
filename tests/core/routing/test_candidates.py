"""Candidates in columns: the same as made one by one, of their moment, and cheap to look at."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvrouter.core.fleet.pool import Pool
from kvrouter.core.routing.candidates import Candidates
from kvrouter.core.routing.overlap import find_overlap, uncached_tokens
from kvrouter.core.wire.heartbeats import RankBeat
from tests.core.worlds import T1, T2, T3, W1, book, card, chain_from, new_pool, prompt, request, worker_beat

pytestmark = pytest.mark.usefixtures("core")
CHAIN = chain_from(1000, 10)
depths = st.integers(0, 10)


def filled_pool(cached: Sequence[int], booked: Sequence[int], host: int) -> Pool:
    """Three workers that hold, and compute, so much of CHAIN; `host`: so much in host memory."""
    pool = new_pool(card("w1"), card("w2", prefix_caching=False), card("w3"))
    for target, count in zip((T1, T2, T3), cached, strict=True):
        if count:
            pool.index.store(target, CHAIN[:count])
    if host:
        pool.index.store(T1, CHAIN[:host], "host")
    for target, count in zip((T1, T2, T3), booked, strict=True):
        if count:
            book(pool, target, CHAIN[:count], prefill_tokens=16 * count)
    return pool


@given(st.tuples(depths, depths, depths), st.tuples(depths, depths, depths), depths, st.integers(0, 9))
def test_amounts_are_those_of_the_design(
    cached: tuple[int, ...], booked: tuple[int, ...], host: int, weight: int
) -> None:
    """Overlap, tokens, blocks and cost of each candidate follow the formulas."""
    pool = filled_pool(cached, booked, host)

    found = pool.candidates(request(prompt(CHAIN, isl=165)))

    for place, one in enumerate(found):
        tiers = pool.index.overlap_by_tier(CHAIN).get(one.target, [])
        reused = 0 if one.card.prefix_caching is False else booked[place]
        overlap = find_overlap(165, 16, tiers, reused)
        own_tokens = uncached_tokens(165, 16, overlap)
        assert (overlap.overlap_blocks, overlap.widest_blocks) == (one.overlap_blocks, one.widest_blocks)
        assert (own_tokens, 16 * booked[place] + own_tokens) == (one.own_prefill_tokens, one.prefill_tokens)
        assert (10 - booked[place], 10) == (one.own_decode_blocks, one.decode_blocks)
        assert list(tiers) == list(one.tier_blocks)
        assert min(max(tiers, default=0), overlap.widest_blocks) == one.indexed_blocks
    costs = [weight * one.prefill_blocks + one.decode_blocks for one in found]
    assert costs == found.costs_in_blocks(weight).each
    assert [one.requests for one in found] == found.requests()


@given(st.tuples(depths, depths, depths), st.tuples(depths, depths, depths), depths)
def test_one_block_less(cached: tuple[int, ...], booked: tuple[int, ...], host: int) -> None:
    """Of what it could reuse, at most the blocks before the last token, w1 computes the last one again."""
    pool = filled_pool(cached, booked, host)
    before = [*pool.candidates(request(prompt(CHAIN, isl=160)))]
    pool.reuse_one_less(W1, True)

    w1, *others = pool.candidates(request(prompt(CHAIN, isl=160)))

    assert max(0, before[0].overlap_blocks - 1) == w1.overlap_blocks
    assert max(0, before[0].widest_blocks - 1) == w1.widest_blocks
    assert w1.own_prefill_tokens >= 160 - 16 * w1.widest_blocks
    assert [(one.overlap_blocks, one.prefill_tokens) for one in before[1:]] == [
        (one.overlap_blocks, one.prefill_tokens) for one in others
    ]


def test_slots_that_go_to_another_target() -> None:
    """A target that left, and one that took its slot, each have what they hold; also of texts."""
    pool = filled_pool((4, 0, 3), (0, 0, 0), 0)
    assert [4, 0, 3] == pool.candidates(request(prompt(CHAIN))).overlap_blocks()

    pool.index.drop(T1)
    assert [0, 0, 3] == pool.candidates(request(prompt(CHAIN))).overlap_blocks()
    while pool.index.sweep():
        pass
    pool.index.store(T2, CHAIN[:2])
    assert [0, 2, 3] == pool.candidates(request(prompt(CHAIN))).overlap_blocks()
    pool.index.clear(T3)

    assert [0, 2, 0] == pool.candidates(request(prompt(CHAIN))).overlap_blocks()
    pool.assumed.store(T3, CHAIN)
    text = replace(prompt(CHAIN, isl=165), is_text=True)
    assert [0, 0, 10] == pool.candidates(request(text)).overlap_blocks()


def eagle_depth(chain: set[int], window: set[int], needed: int, isl: int) -> int:
    """What vLLM reuses of blocks 0, 1, …: a window is looked up one block further on, then one is dropped.

    As its coordinator does it: HybridKVCacheCoordinator.find_longest_cache_hit, with EAGLE in all groups.
    """
    whole = 0
    while whole < isl // 16 and whole in chain:
        whole += 1
    found, run = max(0, min(whole, isl // 16) - 1), 0
    for place in reversed(range(min(found + 1, isl // 16))):
        run = run + 1 if place in window else 0
        if run == needed + 1:
            return place + run - 1
    return max(0, run - 1)  # the beginning of the prompt


@given(st.integers(0, 9), st.sets(st.integers(0, 8)), st.integers(1, 3), st.integers(1, 160))
def test_one_block_less_beside_a_window(held: int, window: set[int], needed: int, isl: int) -> None:
    """As vLLM finds it, also for prompts that end with a block; the agent asks windows for one block more."""
    pool = new_pool(card("w1", speculates=True), card("w2", speculates=True))
    points = [d for d in range(1, held + 1) if set(range(max(0, d - needed - 1), d)) <= window]
    pool.index.store(T1, CHAIN[:held])
    pool.index.store(T2, CHAIN[:held])
    pool.index.resume(T1, [CHAIN[d - 1] for d in points])

    hybrid, plain = pool.candidates(request(prompt(CHAIN[: isl // 16], isl=isl)))

    assert eagle_depth(set(range(held)), window, needed, isl) == hybrid.overlap_blocks
    assert max(0, min(held, (isl - 1) // 16) - 1) == plain.overlap_blocks


def test_one_block_less_by_card() -> None:
    """A card that says that its engine speculates decides, until the answers or another card do."""
    pool = new_pool(card("w1", speculates=True))
    pool.index.store(T1, CHAIN[:4])
    overlaps = []

    for is_so in (None, False):
        if is_so is not None:
            pool.reuse_one_less(W1, is_so)
        overlaps.append(pool.candidates(request(prompt(CHAIN)))[0].overlap_blocks)
    for speculates in (True, False, True):  # the first is the same card as before, but for its adapters
        pool.update(W1, worker_beat(card("w1", speculates=speculates, lora_names=("a",))))
        overlaps.append(pool.candidates(request(prompt(CHAIN)))[0].overlap_blocks)

    assert [3, 4, 4, 4, 3] == overlaps


@given(st.tuples(depths, depths, depths), st.tuples(depths, depths, depths), depths)
def test_requests_that_read_no_cache(cached: tuple[int, ...], booked: tuple[int, ...], host: int) -> None:
    """They compute every token everywhere; blocks in flight are still shared."""
    pool = filled_pool(cached, booked, host)

    found = pool.candidates(replace(request(prompt(CHAIN, isl=165)), reads_cache=False))

    for place, one in enumerate(found):
        assert (0, 0, 0) == (one.overlap_blocks, one.widest_blocks, one.indexed_blocks)
        assert 165 == one.own_prefill_tokens
        assert 10 - booked[place] == one.own_decode_blocks


def test_looked_at_one_by_one_or_all_at_once() -> None:
    """An index, a slice, a loop: the same candidates, and equal to a list of them."""
    found = filled_pool((3, 0, 5), (0, 2, 0), 0).candidates(request(prompt(CHAIN)))

    last = found[-1]
    assert isinstance(found, Candidates)
    assert [found[0], found[1], last] == list(found) == found[:]
    assert found == [found[0], found[1], last]
    assert found != [last]
    assert T3 == last.target
    with pytest.raises(IndexError):
        found[3]


def test_candidates_are_of_their_moment() -> None:
    """What happens after a decision does not change what it was made from."""
    pool = filled_pool((3, 0, 5), (0, 0, 0), 0)
    pool.update(W1, worker_beat(ranks=[RankBeat(0, 1, 0, running=7)]))
    found = pool.candidates(request(prompt(CHAIN)))

    book(pool, T1, CHAIN)
    pool.index.store(T2, CHAIN)
    pool.update(W1, worker_beat(ranks=[RankBeat(0, 1, 0, running=8)]))
    pool.remove(W1)

    assert [T1, T2, T3] == [one.target for one in found]
    assert (7, 0, 3) == (found[0].running, found[0].requests, found[0].overlap_blocks)
    assert 0 == found[1].overlap_blocks


def test_costs_of_some_only() -> None:
    """Every column leaves out the candidates that were filtered out, and keeps the order."""
    pool = filled_pool((3, 0, 5), (0, 4, 0), 0)

    asked = request(prompt(CHAIN))
    every, fewer = pool.candidates(asked), pool.candidates(asked, frozenset({T1}))

    assert every.costs_in_blocks(1.0).each[1:] == fewer.costs_in_blocks(1.0).each
    assert every.requests()[1:] == fewer.requests()
    assert list(every)[1:] == fewer
    for some in (every, fewer, every.at([2, 1, 0]), every.kept([True, False, True])):
        assert [one.target for one in some] == list(some.targets())
        assert [one.card for one in some] == list(some.cards())
        assert [one.requests for one in some] == list(some.requests())
        assert [one.charged_tokens for one in some] == list(some.charged_tokens())
        assert [one.active_blocks * 16 for one in some] == list(some.active_tokens())
        assert [one.overlap_blocks for one in some] == list(some.overlap_blocks())
        assert [one.overlap_tokens for one in some] == list(some.overlap_tokens())
        assert [one.waiting for one in some] == [beat.waiting for beat in some.beats()]


def test_loads_stay_lined_up() -> None:
    """Workers come and go between bookings: each candidate shows its own load."""
    pool = new_pool(card("w2"), card("w3"))
    book(pool, T3, CHAIN[:4], prefill_tokens=64)
    pool.update(W1, worker_beat(card("w1")))
    book(pool, T1, CHAIN[:2], prefill_tokens=32)
    pool.active.check()

    found = pool.candidates(request())
    assert [(32, 1), (0, 0), (64, 1)] == [(one.charged_tokens, one.requests) for one in found]
    pool.remove(W1)

    found = pool.candidates(request())
    assert [(0, 0), (64, 1)] == [(one.charged_tokens, one.requests) for one in found]
    pool.active.check()


def test_a_rank_that_falls_silent_reports_nothing() -> None:
    """A heartbeat that leaves a rank out: what that rank said before no longer stands."""
    pool = new_pool(card("w1", ranks=2))
    both = [RankBeat(0, 1, 0, running=1), RankBeat(1, 1, 0, running=2)]
    pool.update(W1, worker_beat(ranks=both))
    assert [1, 2] == [one.running for one in pool.candidates(request())]

    pool.update(W1, worker_beat(ranks=both[:1]))

    assert [1, None] == [one.running for one in pool.candidates(request())]
