"""Leases: silence is counted in rounds of this process."""

from __future__ import annotations

import pytest

from kvrouter.core.feeds.lease import DEFAULT_ROUNDS, Leases


@pytest.fixture
def leases() -> Leases[str]:
    return Leases()


def test_silent_source_is_lost(leases: Leases[str]) -> None:
    """A source that is silent for five rounds is lost, once."""
    leases.renew("w1")

    lost = [leases.round(number) for number in range(1, DEFAULT_ROUNDS + 3)]

    assert [[]] * (DEFAULT_ROUNDS - 1) + [["w1"], [], []] == lost


def test_message_renews_the_lease(leases: Leases[str]) -> None:
    """A message in the last round begins the lease again."""
    leases.renew("w1")
    for number in range(1, DEFAULT_ROUNDS):
        leases.round(number)

    leases.renew("w1")

    assert [] == leases.round(DEFAULT_ROUNDS)


def test_repeated_round_counts_once(leases: Leases[str]) -> None:
    """A heartbeat that is delivered twice is one round; an older one that arrives late does not count."""
    leases.renew("w1")

    for _ in range(100):
        assert [] == leases.round(7)
        assert [] == leases.round(3)


def test_rounds_that_were_missed_do_not_count(leases: Leases[str]) -> None:
    """Only rounds that came back count: a gap in their numbers means that we received nothing."""
    leases.renew("w1")

    assert [] == leases.round(1)
    assert [] == leases.round(1000)


def test_source_that_left(leases: Leases[str]) -> None:
    """A source that left is not lost later; a second leave changes nothing."""
    leases.renew("w1")
    leases.forget("w1")
    leases.forget("w1")

    assert [] == [lost for number in range(1, 20) for lost in leases.round(number)]


def test_each_source_has_its_own_lease() -> None:
    """One source's silence does not count for another."""
    leases = Leases[str](rounds=2)
    leases.renew("w1")
    leases.renew("w2")
    leases.round(1)

    leases.renew("w2")

    assert ["w1"] == leases.round(2)
    assert ["w2"] == leases.round(3)


def test_source_with_longer_intervals() -> None:
    """Its lease is five of its own intervals, in any number of our rounds."""
    leases = Leases[str](rounds=5, interval_s=0.1)
    leases.renew("slow", 1000)
    leases.renew("fast", 100)

    lost = [leases.round(number) for number in range(1, 51)]

    assert (["fast"], ["slow"]) == (lost[4], lost[49])
    assert 2 == sum(map(len, lost))


def test_interval_is_kept_and_may_change() -> None:
    """A message without an interval keeps the lease's length; a shorter interval shortens it."""
    leases = Leases[str](rounds=5, interval_s=1.0)
    leases.renew("w1", 2000)
    leases.renew("w1")
    assert not [lost for number in range(9) for lost in leases.round(number + 1)]

    leases.renew("w1", 1000)

    assert ["w1"] == [lost for number in range(9, 14) for lost in leases.round(number + 1)]


def test_absurd_interval_is_bounded() -> None:
    """A source that reports one heartbeat in a century is lost after 50 s."""
    leases = Leases[str]()
    leases.renew("w1", 10**12)
    leases.renew("w2", -5)

    lost = [leases.round(number) for number in range(1, 51)]

    assert (["w2"], ["w1"]) == (lost[4], lost[49])
