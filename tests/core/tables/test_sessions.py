"""Session bindings: a time to live, a bound, and what goes with a target."""

from __future__ import annotations

import pytest

from kvrouter.core.tables.no_hit_lru import NoHitLru
from kvrouter.core.tables.sessions import SessionTable
from tests.policies.tables import target

W1, W2 = target("w1"), target("w2")


@pytest.fixture
def sessions() -> SessionTable:
    """Ten seconds, three sessions."""
    return SessionTable(ttl_s=10.0, max_sessions=3)


def test_binding_lives_from_its_last_use(sessions: SessionTable) -> None:
    """Each use begins the time anew."""
    sessions.bind("a", W1, 0.0)
    assert W1 == sessions.target_of("a", 9.9)
    sessions.bind("a", W1, 9.0)

    assert W1 == sessions.target_of("a", 18.9)
    assert None is sessions.target_of("a", 19.0)
    assert None is sessions.target_of("b", 0.0)


def test_binding_moves(sessions: SessionTable) -> None:
    """The last target counts."""
    sessions.bind("a", W1, 0.0)
    sessions.bind("a", W2, 1.0)

    assert W2 == sessions.target_of("a", 2.0)
    assert 1 == len(sessions)


def test_least_recently_used_goes_first(sessions: SessionTable) -> None:
    """Beyond three sessions one is forgotten."""
    for name in ("a", "b", "c", "a", "d"):
        sessions.bind(name, W1, 0.0)

    assert 3 == len(sessions)
    assert None is sessions.target_of("b", 1.0)
    assert W1 == sessions.target_of("a", 1.0)


def test_expire(sessions: SessionTable) -> None:
    """What is over is dropped; a binding told with less time left goes when its turn comes."""
    sessions.bind("a", W1, 0.0)
    sessions.bind("b", W1, 5.0, ttl_s=1.0)

    sessions.expire(9.9)
    assert 2 == len(sessions)
    assert None is sessions.target_of("b", 9.9)

    sessions.expire(10.0)
    assert 0 == len(sessions)


def test_drop(sessions: SessionTable) -> None:
    """A target takes its sessions with it."""
    sessions.bind("a", W1, 0.0)
    sessions.bind("b", W2, 0.0)

    sessions.drop(W1)

    assert (None, W2) == (sessions.target_of("a", 1.0), sessions.target_of("b", 1.0))


def test_cold_order() -> None:
    """Never used first, ties share a place; then by last use."""
    cold = NoHitLru()
    for one in (W2, W1, W2):
        cold.used(one)
    new, newer = target("w3"), target("w4")

    assert [2, 3, 0, 0] == cold.ranks([W1, W2, new, newer])
    cold.forget(W2)
    assert [1, 0] == cold.ranks([W1, W2])
    assert [] == cold.ranks([])


def test_replicas_that_bind_at_once_settle(sessions: SessionTable) -> None:
    """Two bind a new session to different targets in one moment: both keep the lesser."""
    other = SessionTable(ttl_s=10.0)
    sessions.bind("s", W2, 5.0)
    other.bind("s", W1, 5.0)

    sessions.receive("s", W1, 5.01, 10.0, "other")
    other.receive("s", W2, 5.01, 10.0, "this")

    assert W1 == sessions.target_of("s", 6.0) == other.target_of("s", 6.0)


def test_a_later_binding_counts(sessions: SessionTable) -> None:
    """One replica may move a session at once; another's move counts when ours is old."""
    sessions.receive("s", W1, 0.0, 10.0, "other")
    sessions.receive("s", W2, 0.01, 10.0, "other")
    assert W2 == sessions.target_of("s", 0.02)

    sessions.bind("s", W1, 1.0)
    sessions.receive("s", W2, 2.0, 10.0, "other")
    assert W2 == sessions.target_of("s", 11.9)


def test_a_snapshot_is_no_news_about_what_is_newer(sessions: SessionTable) -> None:
    """It counts only where it lasts longer."""
    sessions.bind("s", W1, 5.0)

    sessions.restore("s", W2, 5.5, 9.0, "other")
    assert W1 == sessions.target_of("s", 6.0)
    sessions.restore("s", W2, 5.5, 9.9, "other")
    assert W2 == sessions.target_of("s", 6.0)


def test_the_newest_are_told(sessions: SessionTable) -> None:
    """So many at most, in the order of their use, with the time they have left."""
    for number, session in enumerate("abc"):
        sessions.bind(session, W1, float(number))

    assert [("b", W1, 8.0), ("c", W1, 9.0)] == list(sessions.newest(3.0, 2))
    assert [("c", W1, 0.5)] == list(sessions.newest(11.5, 3))


def test_use_takes_out_what_is_over(sessions: SessionTable) -> None:
    """Nobody has to walk the table."""
    sessions.bind("a", W1, 0.0)
    sessions.bind("b", W1, 1.0)

    sessions.bind("c", W1, 30.0)

    assert 1 == len(sessions)
