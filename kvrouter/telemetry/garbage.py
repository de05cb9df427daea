"""Python's garbage collector, kept from holding up the event loop.

Of itself it walks everything alive whenever a quarter is new: with a thousand workers that takes 0.1 s, in
one piece. Nearly all of it is state that stays, and what goes is freed by its reference count; only what
refers to itself in a ring needs the collector. So:

    young objects   collected by Python, as ever (two young generations, a ms at most)
    every 2 s       what has been made since then and lives is collected once, and then set aside (gc.freeze)
    once an hour    everything: rings that died after they were set aside
    every minute    what the C library keeps of freed memory goes back to the system (malloc_trim)

Without the last, memory stays at its peak: 1,000 pools that came and went left 279 MB behind, 14 MB with it.
It takes 0.2 ms, and 12 ms (60 for 279 MB) when there is something to give back.

What was set aside is freed by its reference count like everything else.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Gauge

from kvrouter.telemetry.loop_lag import Longest
from kvrouter.telemetry.metrics import CountBy

SET_ASIDE_S, TRIM_S, EVERYTHING_S = 2.0, 60.0, 3600.0
# New containers before the youngest are looked at; such looks before the next ones; the oldest are ours.
THRESHOLDS = (5_000, 10, 1_000_000)


class Pauses:
    """How long the collector has held everything up, for metrics."""

    def __init__(self, registry: CollectorRegistry) -> None:
        text = "Time the garbage collector has taken, by generation"
        self._seconds = CountBy("kvrouter_gc_seconds", text, "generation", registry)
        self._longest = Longest(time.monotonic)
        text = "Its longest pause of the last minute"
        longest = Gauge("kvrouter_gc_longest_seconds", text, registry=registry)
        longest.set_function(self._longest.value)
        self._began = 0.0

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Measure while inside."""
        gc.callbacks.append(self._heard)
        try:
            yield
        finally:
            gc.callbacks.remove(self._heard)

    def _heard(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
            return
        seconds = time.perf_counter() - self._began
        self._seconds.inc(str(info["generation"]), seconds)
        self._longest.note(seconds)


@contextlib.contextmanager
def thresholds_raised() -> Iterator[None]:
    """Leave the oldest generation to `set_aside_for_ever` while inside."""
    before = gc.get_threshold()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


async def set_aside_for_ever() -> None:
    """What lives is set aside every few seconds, and all of it looked through once in a long while."""
    loop = asyncio.get_running_loop()
    due, trim_due = loop.time() + EVERYTHING_S, loop.time() + TRIM_S
    while True:
        gc.freeze()
        await asyncio.sleep(SET_ASIDE_S)
        if loop.time() >= due:
            due = loop.time() + EVERYTHING_S
            gc.unfreeze()
        gc.collect()
        if loop.time() >= trim_due:
            trim_due = loop.time() + TRIM_S
            give_back()


def give_back() -> bool:
    """Give freed memory back to the system; False where the C library (not glibc) has no call for it."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return False
    trim(0)
    return True
