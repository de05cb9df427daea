"""Leases: silence is counted in one's own rounds."""

from __future__ import annotations

import pytest

from kvrouter.core.feeds.lease import DEFAULT_ROUNDS, Leases


@pytest.fixture
def leases() -> Leases[str]:
    """Leases of the default length."""
    return Leases()


def test_silent_source_is_dropped(leases: Leases[str]) -> None:
    """Whoever stays silent for five rounds is lost, once."""
    leases.renew("w1")

    lost = [leases.round(number) for number in range(1, DEFAULT_ROUNDS + 3)]

    assert [[]] * (DEFAULT_ROUNDS - 1) + [["w1"], [], []] == lost


def test_heard_again(leases: Leases[str]) -> None:
    """A word in the last moment begins the lease anew."""
    leases.renew("w1")
    for number in range(1, DEFAULT_ROUNDS):
        leases.round(number)

    leases.renew("w1")

    assert [] == leases.round(DEFAULT_ROUNDS)


def test_repeated_round_counts_once(leases: Leases[str]) -> None:
    """The same heartbeat, delivered many times, is one round; so is an older one that comes late."""
    leases.renew("w1")

    for _ in range(100):
        assert [] == leases.round(7)
        assert [] == leases.round(3)


def test_rounds_that_were_missed_do_not_count(leases: Leases[str]) -> None:
    """Only rounds that came back count, whatever their numbers: a gap in them is our own deafness."""
    leases.renew("w1")

    assert [] == leases.round(1)
    assert [] == leases.round(1000)


def test_goodbye(leases: Leases[str]) -> None:
    """Who said goodbye is not lost later; saying it twice does no harm."""
    leases.renew("w1")
    leases.forget("w1")
    leases.forget("w1")

    assert [] == [lost for number in range(1, 20) for lost in leases.round(number)]


def test_each_has_its_own_lease() -> None:
    """One source's silence is not another's."""
    leases = Leases[str](rounds=2)
    leases.renew("w1")
    leases.renew("w2")
    leases.round(1)

    leases.renew("w2")

    assert ["w1"] == leases.round(2)
    assert ["w2"] == leases.round(3)


def test_source_that_beats_slower_than_we_do() -> None:
    """Its lease is five of its own intervals, however many of our rounds those are."""
    leases = Leases[str](rounds=5, interval_s=0.1)
    leases.renew("slow", 1000)
    leases.renew("fast", 100)

    lost = [leases.round(number) for number in range(1, 51)]

    assert (["fast"], ["slow"]) == (lost[4], lost[49])
    assert 2 == sum(map(len, lost))


def test_interval_is_kept_and_may_change() -> None:
    """A word without an interval keeps the lease's length; a shorter interval shortens it."""
    leases = Leases[str](rounds=5, interval_s=1.0)
    leases.renew("w1", 2000)
    leases.renew("w1")
    assert not [lost for number in range(9) for lost in leases.round(number + 1)]

    leases.renew("w1", 1000)

    assert ["w1"] == [lost for number in range(9, 14) for lost in leases.round(number + 1)]


def test_absurd_interval_is_bounded() -> None:
    """A source that says to send a heartbeat once in a century is lost after 50 s all the same."""
    leases = Leases[str]()
    leases.renew("w1", 10**12)
    leases.renew("w2", -5)

    lost = [leases.round(number) for number in range(1, 51)]

    assert (["w2"], ["w1"]) == (lost[4], lost[49])
