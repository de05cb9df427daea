"""A pool: its candidates, with the overlap and cost of each."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.wire.heartbeats import RankBeat
from kvrouter.core.wire.ids import Target, WorkerId
from tests.core.forest import Forest
from tests.core.worlds import (
    T1,
    T2,
    T3,
    W1,
    W2,
    W3,
    book,
    card,
    chain_from,
    new_pool,
    prompt,
    request,
    worker_beat,
)

pytestmark = pytest.mark.usefixtures("core")
CHAIN = chain_from(1000, 10)


def test_worker_without_a_card_is_unknown() -> None:
    """A heartbeat adds a worker only with its card."""
    pool = new_pool()

    assert not pool.update(W1, worker_beat())
    assert {} == pool.targets
    assert pool.update(W1, worker_beat(card()))
    assert [T1] == list(pool.targets)
    assert "llama" == pool.model


def test_targets_are_ranks_in_order() -> None:
    """Each rank of each worker is a target; they are ordered by name."""
    pool = new_pool(card("w2"), card("w1", ranks=2))

    assert [Target(W1, 0), Target(W1, 1), T2] == list(pool.targets)


def test_draining_and_down_workers_get_nothing_new() -> None:
    """Only workers that are up are candidates, also after a pause."""
    pool = new_pool(card("w1"), card("w2"), card("w3"))

    pool.update(W1, worker_beat(state="draining"))
    pool.update(W2, worker_beat(state="down"))
    assert [T3] == [found.target for found in pool.candidates(request())]

    pool.update(W1, worker_beat())
    assert [T1, T3] == list(pool.targets)


def test_changed_card_replaces_the_former_one() -> None:
    """The card of a restarted agent counts, even if its version number is the same."""
    pool = new_pool(card("w1"))

    pool.update(W1, worker_beat(card("w1", ranks=2, url="http://new"), incarnation=200))

    assert "http://new" == pool.workers[W1].card.url
    assert [Target(W1, 0), Target(W1, 1)] == list(pool.targets)


def test_removed_worker_loses_its_blocks() -> None:
    """A worker that left is not a target and holds nothing; its bookings stay until their owner ends them."""
    pool = new_pool(card("w1"), card("w2"))
    pool.index.store(T1, CHAIN)
    book(pool, T1, CHAIN)

    assert [T1] == pool.remove(W1)
    assert [] == pool.remove(W1)

    assert [T2] == list(pool.targets)
    assert {} == pool.index.overlap(CHAIN)
    assert 10 == pool.active.blocks(T1)


def test_silent_worker_is_removed_if_others_remain() -> None:
    """The end of its lease removes the worker."""
    pool = new_pool(card("w1"), card("w2"))

    assert [W1] == pool.silence({W1})

    assert [T2] == list(pool.targets)
    assert [W2] == list(pool.workers)


def test_last_workers_are_kept_without_blocks() -> None:
    """Without other targets, silent workers stay eligible with overlap 0, until another worker appears."""
    pool = new_pool(card("w1"), card("w2"))
    pool.index.store(T1, CHAIN)

    assert [] == pool.silence({W1, W2})

    assert [T1, T2] == list(pool.targets)
    assert pool.workers[W1].silent
    assert [0, 0] == [found.overlap_blocks for found in pool.candidates(request(prompt(CHAIN)))]

    pool.update(W2, worker_beat())
    assert [W1] == pool.silence({W1})
    assert [T2] == list(pool.targets)


def test_silent_worker_is_kept_where_no_other_can_serve() -> None:
    """It is kept if the others are down or draining."""
    pool = new_pool(card("w1", block_size=32, started_at_us=1))
    pool.update(W2, worker_beat(card("w2", started_at_us=2), state="down"))

    assert [] == pool.silence({W1})
    assert (32, [T1]) == (pool.block_size, list(pool.targets))

    pool.update(W2, worker_beat(card("w2", started_at_us=2)))
    assert (16, [T2]) == (pool.block_size, list(pool.targets))


def test_two_agents_of_one_engine() -> None:
    """One gets requests: the last one announced that is up, with any order of the heartbeats."""
    beats = {
        name: worker_beat(card(name, url=url, started_at_us=started, ranks=2))
        for name, url, started in (("w1", "http://a", 2), ("w2", "http://a", 3), ("w3", "http://b", 1))
    }
    for order in permutations(beats):
        pool = new_pool()
        for name in order:
            pool.update(WorkerId(name), beats[name])
        assert [T2, Target(W2, 1), T3, Target(W3, 1)] == list(pool.targets)
        assert {T1: "is the same engine as w2", Target(W1, 1): "is the same engine as w2"} == pool.refusals(
            request()
        )
        pool.update(W2, worker_beat("w2", state="draining"))
        assert ([W1, W3], {}) == (
            [target.worker_id for target in pool.targets if not target.rank],
            pool.twins,
        )


@pytest.mark.parametrize("started", [1, 9])
@pytest.mark.parametrize(
    "facts",
    [{"served_names": ("other",)}, {"ranks": 8, "rank_header": "X-data-parallel-rank"}],
    ids=["other name", "other ranks"],
)
def test_card_that_does_not_fit_its_engine(facts: dict[str, Any], started: int) -> None:
    """A forged card with the address of an engine draws none of its requests away, whenever it began."""
    forged = card("w2", url="http://a", started_at_us=started, **facts)
    pool = new_pool(card("w1", url="http://a", started_at_us=5), forged)

    assert [T1] == list(pool.targets)
    assert {W2: W1} == pool.twins


def test_live_targets() -> None:
    """A worker that is up and not silent makes the pool live; a silent one that is kept does not."""
    pool = new_pool(card("w1"), card("w2", block_size=32))
    has_live = [pool.has_live_target]

    pool.silence({W1, W2})
    assert [T1, T2] == list(pool.targets)
    has_live.append(pool.has_live_target)
    pool.update(W2, worker_beat("w2"))

    assert [True, False, True] == [*has_live, pool.has_live_target]


def test_more_hashes_than_blocks() -> None:
    """A prompt hashed in smaller blocks makes no negative amount, which peers would reject."""
    pool = new_pool(card("w1", block_size=32))

    assert 0 == request(prompt(CHAIN)).unnamed_blocks(pool.block_size)


def test_silent_worker_that_is_unreachable() -> None:
    """A silent worker is removed when its port refuses connections; a live one stays."""
    pool = new_pool(card("w1"), card("w2"))
    pool.silence({W1, W2})
    pool.update(W2, worker_beat())

    pool.unreachable(W1)
    pool.unreachable(W2)
    pool.unreachable(W3)

    assert [T2] == list(pool.targets)


def test_candidate_carries_what_the_engine_reports() -> None:
    """A candidate has the load of its rank, or None without a report."""
    pool = new_pool(card("w1"), card("w2"))
    pool.update(W1, worker_beat(ranks=[RankBeat(0, 100, 0, False, 3, 4, 0.5)]))

    first, second = pool.candidates(request())

    assert (3, 4, 0.5) == (first.running, first.waiting, first.kv_usage)
    assert (None, None, None) == (second.running, second.waiting, second.kv_usage)


def test_candidate_of_an_idle_pool() -> None:
    """Nothing cached, nothing in flight: the request's own tokens and blocks."""
    (found,) = new_pool(card()).candidates(request(prompt(CHAIN, isl=165)))

    assert (0, 165, 165) == (found.overlap_blocks, found.own_prefill_tokens, found.prefill_tokens)
    assert (165 / 16, 10, 0) == (found.prefill_blocks, found.decode_blocks, found.requests)


def test_excluded_targets() -> None:
    """A target that failed this request is not a candidate."""
    pool = new_pool(card("w1"), card("w2"))

    assert [T2] == [found.target for found in pool.candidates(request(), frozenset({T1}))]


def test_request_for_an_adapter() -> None:
    """It goes only where the adapter is loaded; a request for the base model may go anywhere."""
    pool = new_pool(card("w1", lora_names=("adapterA",)), card("w2"))

    assert [T1] == [found.target for found in pool.candidates(request(lora_name="adapterA"))]
    assert [] == pool.candidates(request(lora_name="adapterB"))
    assert 2 == len(pool.candidates(request()))


def test_request_by_a_name_that_some_workers_lack() -> None:
    """While engines are renamed one by one, a name goes only to the workers that serve it."""
    pool = new_pool(card("w1", served_names=("new", "llama")), card("w2"))
    assert {"new"} == pool.uneven_names
    assert [T1] == [found.target for found in pool.candidates(request(served_name="new"))]
    assert {T2: "does not serve the name 'new'"} == pool.refusals(request(served_name="new"))
    assert 2 == len(pool.candidates(request()))

    pool.update(W2, worker_beat(card("w2", served_names=("llama", "new"))))

    assert not pool.uneven_names


def test_in_flight_blocks_count_as_overlap() -> None:
    """A prefix being computed for another request is overlap, and its blocks are not new ones."""
    pool = new_pool(card())
    book(pool, T1, CHAIN[:6], prefill_tokens=96)

    (found,) = pool.candidates(request(prompt(CHAIN)))

    assert (6, 64, 96 + 64) == (found.overlap_blocks, found.own_prefill_tokens, found.prefill_tokens)
    assert (10, 1) == (found.decode_blocks, found.requests)


def test_without_inflight_overlap_blocks_still_count_once() -> None:
    """`--no-router-inflight-overlap`: no overlap from requests in flight, but no block twice either."""
    pool = new_pool(card(), inflight_overlap=False)
    book(pool, T1, CHAIN[:6])

    (found,) = pool.candidates(request(prompt(CHAIN)))

    assert (0, 160, 10) == (found.overlap_blocks, found.own_prefill_tokens, found.decode_blocks)


def test_tiers_give_credit() -> None:
    """Host blocks save three quarters of their tokens, disk blocks one quarter; neither is overlap."""
    pool = new_pool(card(tiers={"device": 100, "host": 100, "disk": 100}))
    pool.index.store(T1, CHAIN[:2])
    pool.index.store(T1, CHAIN[:6], "host")
    pool.index.store(T1, CHAIN[:8], "disk")

    (found,) = pool.candidates(request(prompt(CHAIN)))

    assert (2, 8) == (found.overlap_blocks, found.widest_blocks)
    assert 160 - (2 + 0.75 * 4 + 0.25 * 2) * 16 == found.own_prefill_tokens


def test_last_token_is_computed_even_if_all_is_cached() -> None:
    """A prompt that is cached whole still computes its last block."""
    pool = new_pool(card())
    pool.index.store(T1, CHAIN)

    (found,) = pool.candidates(request(prompt(CHAIN)))

    assert (9, 16) == (found.overlap_blocks, found.own_prefill_tokens)


def test_several_prompts() -> None:
    """Uncached tokens add up over the prompts; blocks that two prompts share are new only once."""
    pool = new_pool(card())
    first, second = CHAIN, CHAIN[:4] + chain_from(5000, 3)
    pool.index.store(T1, CHAIN[:4])

    (found,) = pool.candidates(request(prompt(first), prompt(second, isl=115)))

    assert 4 + 4 == found.overlap_blocks
    assert (160 - 64) + (115 - 64) == found.own_prefill_tokens
    assert 10 + 3 == found.decode_blocks


def test_several_prompts_and_requests_in_flight() -> None:
    """A block that one prompt shares with a request in flight is not new for the other prompt either."""
    pool = new_pool(card())
    book(pool, T1, CHAIN[:5])

    (found,) = pool.candidates(request(prompt(CHAIN), prompt(CHAIN[:7])))

    assert 5 + 5 == found.overlap_blocks
    assert 10 == found.decode_blocks


@given(st.integers(0, 2**32), st.lists(st.integers(0, 29), min_size=1, max_size=6), st.integers(0, 29))
def test_new_blocks_of_several_prompts(seed: int, nodes: list[int], booked: int) -> None:
    """Each block counts once, on each target without those that requests in flight hold there."""
    forest, pool = Forest(seed, 30), new_pool(card("w1"), card("w2"))
    held = forest.chain(booked)
    book(pool, T1, held)
    chains = [forest.chain(node) for node in nodes]
    blocks = {block for chain in chains for block in chain}

    first, second = pool.candidates(request(*map(prompt, chains)))

    assert [len(blocks - {*held}), len(blocks)] == [first.own_decode_blocks, second.own_decode_blocks]
    assert len(blocks | {*held}) == first.decode_blocks


def test_tier_sets_and_capacity_of_a_card() -> None:
    """The widest tier on the card gives the number of sets; one unknown capacity makes the sum unknown."""
    pool = new_pool(
        card("w1", tiers={"device": 100, "host": 50}),
        card("w2"),
        card("w3", tiers={"device": 100, "disk": 1000}),
    )

    assert [2, 1, 3] == [pool.workers[w].tier_sets() for w in (W1, W2, W3)]
    assert [150, 0, 1100] == [pool.workers[w].capacity_blocks for w in (W1, W2, W3)]


def test_names_stay_known_without_workers() -> None:
    """A model stays known when all its workers are gone."""
    pool = new_pool(card("w1", served_names=("chat", "chat-v2"), lora_names=("adapterA",)))
    assert {"chat", "chat-v2", "adapterA"} == pool.names

    pool.remove(W1)

    assert {"chat", "chat-v2", "adapterA"} == pool.names
    assert {"adapterA"} == pool.lora_names
