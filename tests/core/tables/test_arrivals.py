"""How many requests arrive, and how many of them share a prefix."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.core.tables.arrivals import Arrivals, PrefixShares


def test_the_rate_follows_arrivals() -> None:
    """Ten a second, then none."""
    arrivals = Arrivals()
    for step in range(2000):
        arrivals.count(step / 10)

    assert 10 == pytest.approx(arrivals.per_s(200.0), rel=0.02)
    assert 10 / 2.718 == pytest.approx(arrivals.per_s(230.0), rel=0.02)
    # a clock that goes back adds nothing
    assert arrivals.per_s(100.0) == pytest.approx(arrivals.per_s(199.9), rel=0.01)


def test_a_share_is_of_recent_requests() -> None:
    """A third of a hundred requests; nothing before the second one."""
    shares = PrefixShares()
    shares.count([7], 1)
    assert 0.0 == shares.share(7)

    for number in range(99):
        shares.count([7 if number % 3 == 0 else 1000 + number], 1)

    assert 0.34 == pytest.approx(shares.share(7))
    assert 0.0 == shares.share(1001)


def test_a_prefix_has_the_share_of_all_that_begin_with_it() -> None:
    """Of 300 requests all begin with block 7; for most, some target holds more."""
    shares = PrefixShares()
    for number in range(300):
        shares.count([7, 100 + number % 10], 1 if number % 10 == 0 else 2)

    assert 0.8 < shares.share(7) <= 1.0
    assert 0.1 == pytest.approx(shares.share(103), abs=0.02)


@given(st.lists(st.lists(st.integers(0, 40), max_size=4, unique=True), max_size=400))
def test_counts_are_bounded(prompts: list[list[int]]) -> None:
    """At most as many as requests are remembered, each at least 1, and no share above 1."""
    shares = PrefixShares(most=32)

    for hashes in prompts:
        shares.count(hashes, len(hashes))

        counts = shares._counts
        assert len(counts) <= 33
        assert all(count >= 1 for count in counts.values())
        assert all(shares.share(block) <= 1 for block in counts)
