"""Targets by their last request without a cached block."""

from __future__ import annotations

from kvrouter.core.tables.no_hit_lru import NoHitLru
from tests.policies.tables import target

W1, W2 = target("w1"), target("w2")


def test_ranks() -> None:
    """Targets never used come first and share a place; then by last use."""
    order = NoHitLru()
    for one in (W2, W1, W2):
        order.used(one)
    new, newer = target("w3"), target("w4")

    assert [2, 3, 0, 0] == order.ranks([W1, W2, new, newer])
    order.forget(W2)
    assert [1, 0] == order.ranks([W1, W2])
    assert [] == order.ranks([])
