"""The delay of the event loop."""

from __future__ import annotations

import asyncio
import time

from prometheus_client import CollectorRegistry

from kvrouter.telemetry.loop_lag import INTERVAL_S, WINDOW_S, WINDOWS, Longest, LoopLag


async def test_stall_is_measured() -> None:
    """A stall longer than the interval is measured with its length."""
    registry = CollectorRegistry()
    stall_s = 10 * INTERVAL_S
    with LoopLag(registry).watched():
        await asyncio.sleep(3 * INTERVAL_S)
        end = time.perf_counter() + stall_s
        while time.perf_counter() < end:
            pass
        await asyncio.sleep(2 * INTERVAL_S)

    longest = registry.get_sample_value("kvrouter_loop_lag_longest_seconds")
    looks = registry.get_sample_value("kvrouter_loop_lag_seconds_count")
    short = registry.get_sample_value("kvrouter_loop_lag_seconds_bucket", {"le": "0.03"})
    assert longest is not None
    assert longest >= stall_s - 2 * INTERVAL_S
    assert (looks or 0) > (short or 0)


async def test_stops_after_the_block() -> None:
    """The measurement ends with the context."""
    registry = CollectorRegistry()
    with LoopLag(registry).watched():
        pass
    await asyncio.sleep(3 * INTERVAL_S)

    assert 0 == registry.get_sample_value("kvrouter_loop_lag_seconds_count")


def test_longest_of_a_minute() -> None:
    """The longest delay is reported for a minute, then the next one."""
    now = 1000.0
    longest = Longest(lambda: now)
    assert 0 == longest.value()

    longest.note(0.5)
    now += 2 * WINDOW_S
    longest.note(0.1)
    longest.note(0.2)
    longest.note(0.1)

    assert 0.5 == longest.value()
    now += (WINDOWS - 2) * WINDOW_S
    assert 0.2 == longest.value()
    now += WINDOWS * WINDOW_S
    assert 0 == longest.value()
