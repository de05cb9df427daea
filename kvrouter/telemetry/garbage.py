"""Keeps Python's garbage collector from holding up the event loop.

By default Python examines all live objects whenever a quarter of them is new: with 1,000 workers that takes
0.1 s, in one piece. Nearly all of these objects are state that stays, and others are freed by their reference
counts; only reference cycles need the collector. So:

    young objects   collected by Python as usual (two young generations, 1 ms at most)
    every 2 s       all objects made since the last time are collected once; survivors are frozen (gc.freeze)
    once an hour    everything, for cycles that became garbage after they were frozen
    every minute    memory that the C library keeps after it was freed is returned to the system (malloc_trim)

Without malloc_trim, memory stays at its peak: 1,000 pools that were added and removed left 279 MB behind, and
14 MB with it. The call takes 0.2 ms if nothing can be returned, else 12 ms (60 ms for the 279 MB).

Frozen objects are still freed by their reference counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry

from kvrouter.telemetry.loop_lag import Longest
from kvrouter.telemetry.metrics import StateCollector

SET_ASIDE_S, TRIM_S, EVERYTHING_S = 2.0, 60.0, 3600.0
# New containers before a collection of the youngest generation; collections before one of the next. The last
# number keeps Python away from the oldest generation, which `collect_and_freeze` handles.
THRESHOLDS = (5_000, 10, 1_000_000)


class Pauses:
    """The longest time that the collector held up the process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._longest = Longest(time.monotonic)
        registry.register(
            StateCollector(lambda: [("kvrouter_gc_longest_seconds", {}, self._longest.value())])
        )
        self._began = 0.0

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Measure while inside."""
        gc.callbacks.append(self._record)
        try:
            yield
        finally:
            gc.callbacks.remove(self._record)

    def _record(self, phase: str, _: dict[str, Any]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
            return
        self._longest.note(time.perf_counter() - self._began)


@contextlib.contextmanager
def thresholds_raised() -> Iterator[None]:
    """While inside, leave the oldest generation to `collect_and_freeze`."""
    before = gc.get_threshold()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


async def collect_and_freeze() -> None:
    """Collect new objects every SET_ASIDE_S and freeze the survivors; collect all every EVERYTHING_S."""
    loop = asyncio.get_running_loop()
    due, trim_due = loop.time() + EVERYTHING_S, loop.time() + TRIM_S
    while True:
        gc.freeze()  # the first time: everything made during start-up
        await asyncio.sleep(SET_ASIDE_S)
        if loop.time() >= due:
            due = loop.time() + EVERYTHING_S
            gc.unfreeze()  # so that the next line examines the frozen objects, too
        gc.collect()
        if loop.time() >= trim_due:
            trim_due = loop.time() + TRIM_S
            give_back()


def give_back() -> bool:
    """Return freed memory to the system; False if the C library, unlike glibc, has no call for it."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return False
    trim(0)
    return True
