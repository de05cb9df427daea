"""The garbage collector: live objects are frozen, and reference cycles are still collected."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import platform
import weakref
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry

from kvrouter.telemetry import garbage
from kvrouter.telemetry.garbage import THRESHOLDS, Pauses, collect_and_freeze, give_back, thresholds_raised
from tests.frontend.workers import until


class Cycle:
    """Refers to itself, so that only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


async def until_gone(cycle: weakref.ref[Cycle]) -> None:
    """Return when the cycle has been collected; bounded."""
    await until(lambda: cycle() is None)


@contextlib.asynccontextmanager
async def collecting() -> AsyncIterator[None]:
    """Runs the collector's task while inside."""
    with thresholds_raised():
        task = asyncio.create_task(collect_and_freeze())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """New objects are set aside after a moment."""
    monkeypatch.setattr(garbage, "SET_ASIDE_S", 0.01)


async def test_new_cycles_are_freed(soon: None) -> None:
    """A cycle made and dropped since the last collection is collected by the next one."""
    async with collecting():
        await asyncio.sleep(0.02)
        cycle = Cycle()
        seen = weakref.ref(cycle)
        del cycle

        await until_gone(seen)


async def test_old_cycles_are_freed_later(soon: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cycle that became garbage after it was frozen is collected with everything."""
    monkeypatch.setattr(garbage, "EVERYTHING_S", 0.2)
    cycle = Cycle()
    seen = weakref.ref(cycle)
    async with collecting():
        await asyncio.sleep(0)
        assert gc.get_freeze_count() > 0
        del cycle

        await until_gone(seen)


def test_thresholds_are_restored() -> None:
    """Afterwards the thresholds are the former ones: a library must not change its host."""
    before = gc.get_threshold()
    with thresholds_raised():
        assert THRESHOLDS == gc.get_threshold()

    assert before == gc.get_threshold()
    assert 0 == gc.get_freeze_count()


def test_pauses_are_measured() -> None:
    """The longest is reported, of those inside."""
    registry = CollectorRegistry()
    with Pauses(registry).watched():
        gc.collect()
    longest = registry.get_sample_value("kvrouter_gc_longest_seconds")
    gc.collect()

    assert longest == registry.get_sample_value("kvrouter_gc_longest_seconds")
    assert longest


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc_trim is glibc's")
def test_freed_memory_goes_back() -> None:
    """Freed memory is returned, also between pieces that stay in use."""
    pieces = [b"x" * 60_000 for _ in range(2000)]  # zeros might not occupy pages
    kept = pieces[::100]
    peak = _resident_bytes()
    del pieces

    assert give_back()

    assert _resident_bytes() < peak - 50_000_000
    assert 20 == len(kept)


def _resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")
