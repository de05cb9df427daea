"""Eviction orders."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.lab.mocker.eviction import ORDERS, EvictionOrder, LfuOrder, LruOrder


@pytest.fixture(params=sorted(ORDERS))
def order(request: pytest.FixtureRequest) -> EvictionOrder:
    """Each order in turn."""
    return ORDERS[request.param]()


def test_first_in_first_out_among_equals(order: EvictionOrder) -> None:
    """Blocks with equal use leave in the order in which they came."""
    for block in (3, 1, 2):
        order.push(block, engine_hash=100 + block)

    assert [3, 1, 2] == [order.pop() for _ in range(3)]


def test_discarded_block_stays(order: EvictionOrder) -> None:
    """A block that is held again is not evicted."""
    order.push(1, 101)
    order.push(2, 102)

    order.discard(1)

    assert 1 == len(order)
    assert 2 == order.pop()


def test_lru_ignores_use() -> None:
    """Only the time of release counts."""
    order = LruOrder()
    order.used([101, 101])
    order.push(1, 101)
    order.push(2, 102)

    assert 1 == order.pop()


def test_lfu_keeps_what_is_used() -> None:
    """The least used hash is evicted first, also if its use was recent."""
    order = LfuOrder()
    order.used([101, 101, 102])
    order.push(1, 101)
    order.push(2, 102)

    assert 2 == order.pop()


def test_lfu_count_ends_with_eviction() -> None:
    """A hash that was evicted starts with no uses again."""
    order = LfuOrder()
    order.used([101, 101, 102])
    order.forget(101)
    order.push(2, 102)
    order.push(1, 101)

    assert 1 == order.pop()


@given(st.lists(st.integers(0, 30), max_size=400))
def test_lfu_compacts(blocks: list[int]) -> None:
    """Stale entries are bounded, and every live block comes out exactly once."""
    order = LfuOrder()
    idle: set[int] = set()
    for block in blocks:
        order.used([block])
        if block in idle:
            order.discard(block)
        order.push(block, block)
        idle.add(block)

    assert len(order._heap) <= 65 + 2 * len(idle)
    assert sorted(idle) == sorted(order.pop() for _ in range(len(order)))
