"""Session bindings: time to live, bound, and targets that leave."""

from __future__ import annotations

import pytest

from kvrouter.core.tables.sessions import SessionTable
from tests.policies.tables import target

W1, W2 = target("w1"), target("w2")


@pytest.fixture
def sessions() -> SessionTable:
    """A table of ten seconds and three sessions."""
    return SessionTable(ttl_s=10.0, max_sessions=3)


def test_binding_lives_from_its_last_use(sessions: SessionTable) -> None:
    """Each use begins the time again."""
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
    """Beyond three sessions the least recently used is removed."""
    for name in ("a", "b", "c", "a", "d"):
        sessions.bind(name, W1, 0.0)

    assert 3 == len(sessions)
    assert None is sessions.target_of("b", 1.0)
    assert W1 == sessions.target_of("a", 1.0)


def test_expire(sessions: SessionTable) -> None:
    """Expired bindings are removed; one with a shorter time behind a longer one goes after it."""
    sessions.bind("a", W1, 0.0)
    sessions.bind("b", W1, 5.0, ttl_s=1.0)

    sessions.expire(9.9)
    assert 2 == len(sessions)
    assert None is sessions.target_of("b", 9.9)

    sessions.expire(10.0)
    assert 0 == len(sessions)


def test_drop(sessions: SessionTable) -> None:
    """A target's sessions are removed with it."""
    sessions.bind("a", W1, 0.0)
    sessions.bind("b", W2, 0.0)

    sessions.drop({W1})

    assert (None, W2) == (sessions.target_of("a", 1.0), sessions.target_of("b", 1.0))


def test_a_peer_cannot_bind_for_longer(sessions: SessionTable) -> None:
    """A binding of another replica ends as early as an own one: a longer one would hold up all behind it."""
    sessions.receive("a", W1, 0.0, 1e9, "peer")
    sessions.restore("b", W1, 0.0, 1e9, "peer")
    sessions.bind("c", W1, 0.0)

    sessions.expire(10.0)

    assert 0 == len(sessions)


def test_replicas_that_bind_at_once_settle(sessions: SessionTable) -> None:
    """Two replicas bind a new session to different targets at one moment: both keep the smaller."""
    other = SessionTable(ttl_s=10.0)
    sessions.bind("s", W2, 5.0)
    other.bind("s", W1, 5.0)

    sessions.receive("s", W1, 5.01, 10.0, "other")
    other.receive("s", W2, 5.01, 10.0, "this")

    assert W1 == sessions.target_of("s", 6.0) == other.target_of("s", 6.0)


def test_a_later_binding_counts(sessions: SessionTable) -> None:
    """One replica may move a session at once; another's move counts if our binding is old."""
    sessions.receive("s", W1, 0.0, 10.0, "other")
    sessions.receive("s", W2, 0.01, 10.0, "other")
    assert W2 == sessions.target_of("s", 0.02)

    sessions.bind("s", W1, 1.0)
    sessions.receive("s", W2, 2.0, 10.0, "other")
    assert W2 == sessions.target_of("s", 11.9)


def test_a_snapshot_does_not_replace_newer_bindings(sessions: SessionTable) -> None:
    """Its binding counts only if it lasts longer."""
    sessions.bind("s", W1, 5.0)

    sessions.restore("s", W2, 5.5, 9.0, "other")
    assert W1 == sessions.target_of("s", 6.0)
    sessions.restore("s", W2, 5.5, 9.9, "other")
    assert W2 == sessions.target_of("s", 6.0)


def test_snapshot_has_the_newest_bindings(sessions: SessionTable) -> None:
    """At most `most`, in the order of their use, with their remaining time."""
    for number, session in enumerate("abc"):
        sessions.bind(session, W1, float(number))

    assert [("b", W1, 8.0), ("c", W1, 9.0)] == list(sessions.newest(3.0, 2))
    assert [("c", W1, 0.5)] == list(sessions.newest(11.5, 3))


def test_each_use_removes_expired_bindings(sessions: SessionTable) -> None:
    """No sweep of the table is needed."""
    sessions.bind("a", W1, 0.0)
    sessions.bind("b", W1, 1.0)

    sessions.bind("c", W1, 30.0)

    assert 1 == len(sessions)


@pytest.mark.parametrize("name", ["x" * 1000, "é" * 1000, "𝄞" * 1000])
def test_bound_in_bytes(name: str) -> None:
    """Names of any length and width take no more than the bound; what is used last stays."""
    sessions = SessionTable(ttl_s=10.0, most_bytes=50_000)
    for number in range(200):
        sessions.receive(f"{name}{number % 150}", W1, number / 1000, 10.0, "other")
        assert sessions.used_bytes <= 50_000

    assert 10 <= len(sessions) <= 40
    assert W1 == sessions.target_of(f"{name}49", 1.0)


def test_bytes_are_freed(sessions: SessionTable) -> None:
    """However a binding ends or moves, its bytes are counted once."""
    sessions.bind("a", W1, 0.0)
    once = sessions.used_bytes
    sessions.bind("a", target("w11"), 0.0)
    assert once + 1 == sessions.used_bytes
    for name in "bcde":
        sessions.bind(name, W2, 0.0)
    assert 3 * once == sessions.used_bytes
    sessions.drop({W2})
    assert 0 == sessions.used_bytes
    sessions.bind("a", W1, 0.0)
    sessions.expire(10.0)
    assert 0 == sessions.used_bytes
