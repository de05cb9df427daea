"""Prefill rates: measured on streamed requests, used for all others."""

from __future__ import annotations

import pytest

from kvrouter.core.tables.prefill_speeds import MIN_SECONDS, POOL_SAMPLES, SAMPLES, PrefillRates
from kvrouter.core.wire.ids import Target, WorkerId

T1, T2 = Target(WorkerId("w1")), Target(WorkerId("w2"))


@pytest.fixture
def rates() -> PrefillRates:
    return PrefillRates()


def test_nothing_is_predicted_without_samples(rates: PrefillRates) -> None:
    """Without samples nothing is predicted: the charge stays until the response ends."""
    assert rates.seconds(T1, 1000) is None


def test_median_of_the_target(rates: PrefillRates) -> None:
    """The target's median rate counts, not that of other targets."""
    for tokens in (1000, 2000, 90_000):
        rates.observe(T1, tokens, 1.0)
    rates.observe(T2, 1, 1.0)

    assert 2.0 == rates.seconds(T1, 4000)


def test_a_median_that_was_asked_for_changes(rates: PrefillRates) -> None:
    """Medians are kept until the next sample, or until the target leaves."""
    rates.observe(T1, 1000, 1.0)
    rates.observe(T2, 10, 1.0)
    first = rates.seconds(T1, 3000)
    rates.observe(T1, 5000, 1.0)
    second = rates.seconds(T1, 3000)
    rates.forget(T1)

    assert (3.0, 1.0, 300.0) == (first, second, rates.seconds(T1, 3000))


def test_pools_median_without_samples(rates: PrefillRates) -> None:
    """A target without samples is predicted like the others."""
    rates.observe(T2, 500, 0.5)

    assert 3.0 == rates.seconds(T1, 3000)


def test_only_the_last_samples_count(rates: PrefillRates) -> None:
    """32 new samples displace all older ones."""
    for _ in range(SAMPLES):
        rates.observe(T1, 10, 1.0)
    for _ in range(SAMPLES):
        rates.observe(T1, 1000, 1.0)

    assert 1.0 == rates.seconds(T1, 1000)


def test_worthless_samples_are_ignored(rates: PrefillRates) -> None:
    """Samples without charged tokens, or without time, are no measurement."""
    rates.observe(T1, 0, 1.0)
    rates.observe(T1, 100, MIN_SECONDS / 2)
    rates.observe(T1, 100, 0.0)
    rates.observe(T1, 100, -1.0)

    assert rates.seconds(T1, 100) is None


def test_departed_target_is_forgotten(rates: PrefillRates) -> None:
    """A target that left no longer counts in the pool's median."""
    rates.observe(T1, 100, 1.0)

    rates.forget(T1)
    rates.forget(T1)

    assert rates.seconds(T2, 100) is None


def test_pool_median_is_of_the_latest() -> None:
    """In a large fleet it is the median of the latest samples, without samples of targets that left."""
    rates = PrefillRates()
    for number in range(POOL_SAMPLES):
        rates.observe(Target(WorkerId(f"w{number}")), 1000, 1.0)
    for number in range(POOL_SAMPLES // 2 + 1):
        rates.observe(Target(WorkerId(f"w{number}")), 4000, 1.0)
    stranger = Target(WorkerId("stranger"))

    assert 2.0 == rates.seconds(stranger, 8000)

    for number in range(3):
        rates.forget(Target(WorkerId(f"w{number}")))
    assert 8.0 == rates.seconds(stranger, 8000)
