"""Measures how late the event loop runs callbacks that are ready.

A timer fires 50 times a second. Its delay is the delay of anything else that became ready at that moment.
The moments are evenly spaced, so its quantiles are those of an arrival at a random moment. A stall shorter
than the interval may fall between two moments; a longer one never does.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry

from kvrouter.telemetry.metrics import Spread, StateCollector

# Not shorter: each timer wakes an idle process, and costs it more than anything else that it does.
INTERVAL_S = 0.02
LAGS_S = (
    0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0
)  # fmt: skip
# The maximum covers the last minute, in steps of ten seconds.
WINDOW_S, WINDOWS = 10.0, 6


class Longest:
    """The greatest value of the last minute. Bounded: one number for each ten seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._windows: deque[tuple[int, float]] = deque(maxlen=WINDOWS)

    def note(self, value: float) -> None:
        """Record a value that was measured now."""
        window = int(self._clock() / WINDOW_S)
        if self._windows and self._windows[-1][0] == window:
            if value <= self._windows[-1][1]:
                return
            self._windows.pop()
        self._windows.append((window, value))

    def value(self) -> float:
        """The maximum; 0 without values."""
        oldest = int(self._clock() / WINDOW_S) - WINDOWS
        return max((value for window, value in self._windows if window > oldest), default=0.0)


class LoopLag:
    """The timer and its two metrics."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lags = Spread("kvrouter_loop_lag_seconds", registry, bounds=LAGS_S)
        self._longest = Longest(time.monotonic)
        registry.register(
            StateCollector(lambda: [("kvrouter_loop_lag_longest_seconds", {}, self._longest.value())])
        )
        self._timer: asyncio.TimerHandle | None = None

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Measure the running loop while inside."""
        self._wait(asyncio.get_running_loop(), time.perf_counter())
        try:
            yield
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def _wait(self, loop: asyncio.AbstractEventLoop, now: float) -> None:
        loop.time()  # updates uvloop's cached time, from which call_later counts
        self._timer = loop.call_later(INTERVAL_S, self._look, loop, now + INTERVAL_S)

    def _look(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        now = time.perf_counter()
        lag = max(0.0, now - due)
        self._lags.observe(lag)
        self._longest.note(lag)
        self._wait(loop, now)
