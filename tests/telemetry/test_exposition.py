"""/metrics as text: the same as by prometheus_client, written in slices."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from prometheus_client import Counter, generate_latest

from kvrouter.telemetry.catalog import METRICS
from kvrouter.telemetry.exposition import Registry, exposition
from kvrouter.telemetry.metrics import Sample, StateCollector

KINDS: list[Sample] = [
    ("kvrouter_workers", {}, 1.5),
    ("kvrouter_feed_events_total", {"feed": 'w"1"\\', "event": "p\n"}, 1_000_000),
    ("kvrouter_prediction_error_blocks_bucket", {"le": "0.5"}, 2),
    ("kvrouter_feed_events_total", {"feed": "w2", "event": "p"}, 3),
    ("kvrouter_feed_live", {}, True),
]


async def test_same_text_as_the_librarys() -> None:
    """The text equals that of prometheus_client, including escapes and numbers."""
    registry = Registry()
    Counter("k_plain", "Counted by the library", ["status"], registry=registry).labels("200").inc(7)
    registry.register(StateCollector(lambda: KINDS))

    assert generate_latest(registry) == await exposition(registry)


async def test_single_samples() -> None:
    """Only the samples with the given names, after HELP and TYPE of their families."""
    registry = Registry()
    Counter("k_plain", "Counted by the library", ["status"], registry=registry).labels("200").inc(7)
    odd: Sample = ("kvrouter_sessions", {"pool": "x\u2028y"}, 1)
    registry.register(StateCollector(lambda: [*KINDS, odd]))

    wanted = ["k_plain_total", "kvrouter_feed_live", "kvrouter_none", "kvrouter_sessions"]
    text = await exposition(registry, names=wanted)

    assert [
        "# HELP k_plain_total Counted by the library",
        "# TYPE k_plain_total counter",
        'k_plain_total{status="200"} 7.0',
        f"# HELP kvrouter_feed_live {METRICS['kvrouter_feed_live'].text}",
        "# TYPE kvrouter_feed_live gauge",
        "kvrouter_feed_live 1.0",
        f"# HELP kvrouter_sessions {METRICS['kvrouter_sessions'].text}",
        "# TYPE kvrouter_sessions gauge",
        'kvrouter_sessions{pool="x\u2028y"} 1.0',
        "",
    ] == text.decode().split("\n")


@pytest.mark.parametrize(("names", "lines"), [((), 5 * 1000 + 2 * 4), (("kvrouter_feed_live",), 1000 + 2)])
async def test_others_run_between_slices(names: tuple[str, ...], lines: int) -> None:
    """Neither a long list nor a search for a few names in it blocks the event loop."""
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    registry = Registry()
    registry.register(StateCollector(lambda: KINDS * 1000))
    task = asyncio.create_task(others())
    await asyncio.sleep(0)
    text = await exposition(registry, slice_s=0.0, names=names)
    task.cancel()

    assert turns > 50
    assert lines == text.count(b"\n")


async def test_table_that_grows_meanwhile() -> None:
    """A table that changes between two slices is read again in one piece."""
    table = {number: float(number) for number in range(500)}

    def samples() -> Iterator[Sample]:
        for number, value in table.items():
            yield "kvrouter_target_blocks", {"rank": str(number)}, value

    async def grow() -> None:
        for number in range(500, 510):
            table[number] = 0.0
            await asyncio.sleep(0)

    registry = Registry()
    registry.register(StateCollector(samples))
    task = asyncio.create_task(grow())
    text = await exposition(registry, slice_s=0.0)
    await task

    assert text.count(b"kvrouter_target_blocks{") >= 501
