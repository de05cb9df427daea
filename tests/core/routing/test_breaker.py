"""Circuit breakers: closed, open, half-open."""

from __future__ import annotations

import pytest

from kvrouter.core.routing.breaker import BreakerSettings, CircuitBreakers
from tests.policies.tables import target

W = target("w1")


@pytest.fixture
def circuits() -> CircuitBreakers:
    """SGLang's settings: 10 failures, 3 successes, 60 s."""
    return CircuitBreakers()


def fail(circuits: CircuitBreakers, times: int, now: float = 0.0) -> list[bool]:
    """Report `times` failures."""
    return [circuits.failed(W, now) for _ in range(times)]


def test_ten_failures_in_a_row_open_it(circuits: CircuitBreakers) -> None:
    """Nine do not open it; the tenth does, and `failed` returns True."""
    assert [False] * 9 == fail(circuits, 9)
    assert circuits.is_closed(W, 0.0)
    assert not circuits.any_open()

    assert [True] == fail(circuits, 1)

    assert circuits.any_open()
    assert not circuits.is_closed(W, 0.0)
    assert circuits.is_closed(target("w2"), 0.0)


def test_an_answer_in_between_starts_the_count_again(circuits: CircuitBreakers) -> None:
    """Failures count only in a row; any answer interrupts them."""
    fail(circuits, 9)
    circuits.succeeded(W)

    fail(circuits, 9)

    assert circuits.is_closed(W, 0.0)


def open_now(circuits: CircuitBreakers) -> None:
    """Opened at 0."""
    fail(circuits, 10)


def test_half_open_lets_one_through(circuits: CircuitBreakers) -> None:
    """After 60 s one request may pass; the next waits until that one was answered."""
    open_now(circuits)
    assert not circuits.is_closed(W, 59.9)
    assert circuits.is_closed(W, 60.0)

    circuits.sent(W, 60.0)

    assert not circuits.is_closed(W, 60.1)
    circuits.succeeded(W)
    assert circuits.is_closed(W, 60.2)


def test_three_successes_close_it(circuits: CircuitBreakers) -> None:
    """After that, ten failures open it again."""
    open_now(circuits)
    for now in (60.0, 61.0, 62.0):
        circuits.sent(W, now)
        circuits.succeeded(W)

    assert not circuits.any_open()
    assert [False] * 9 == fail(circuits, 9, 63.0)


def test_failure_when_half_open_opens_at_once(circuits: CircuitBreakers) -> None:
    """It stays open for another 60 s, and successes count from zero."""
    open_now(circuits)
    circuits.sent(W, 60.0)
    circuits.succeeded(W)

    assert [True] == fail(circuits, 1, 61.0)

    assert not circuits.is_closed(W, 120.9)
    assert circuits.is_closed(W, 121.0)
    circuits.succeeded(W)
    circuits.succeeded(W)
    assert circuits.any_open()


def test_probe_that_is_never_answered(circuits: CircuitBreakers) -> None:
    """The next probe may go 60 s later; at once if the probe's client disconnected."""
    open_now(circuits)
    circuits.sent(W, 60.0)
    assert not circuits.is_closed(W, 119.9)
    assert circuits.is_closed(W, 120.0)
    circuits.sent(W, 120.0)

    circuits.abandoned(W)

    assert circuits.is_closed(W, 120.1)


def test_forget(circuits: CircuitBreakers) -> None:
    """A target that left and came back begins with a closed circuit."""
    open_now(circuits)

    circuits.forget(W)

    assert circuits.is_closed(W, 0.0)
    assert not circuits.any_open()


def test_settings() -> None:
    """One failure, one success, a second."""
    circuits = CircuitBreakers(BreakerSettings(1, 1, 1.0))
    assert circuits.failed(W, 0.0)
    assert circuits.is_closed(W, 1.0)

    circuits.succeeded(W)

    assert not circuits.any_open()


def test_success_of_a_target_that_never_failed(circuits: CircuitBreakers) -> None:
    """It needs no circuit."""
    circuits.succeeded(W)
    circuits.sent(W, 0.0)
    circuits.abandoned(W)

    assert circuits.is_closed(W, 0.0)
