"""The catalog of metrics, from which docs/metrics.md is made, is what /metrics has."""

from __future__ import annotations

import asyncio
import re
import shutil
from asyncio.subprocess import PIPE, STDOUT
from dataclasses import fields
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvrouter.core.fleet.replica import ReplicaCounters
from kvrouter.telemetry.catalog import METRIC_OF, METRICS
from tests.frontend.fleet import FleetOf

ROOT = Path(__file__).parent.parent.parent
NAME = re.compile(r'"(kvrouter_\w+)"')


def test_every_metric_is_used() -> None:
    """The catalog has exactly the metrics in the sources, also those without a series at the start."""
    sources = [
        file
        for room in ("frontend", "prompts", "replica", "telemetry", "worker")
        for file in (ROOT / "kvrouter" / room).rglob("*.py")
    ]
    samples = {
        name for file in sources if file.name != "catalog.py" for name in NAME.findall(file.read_text())
    }
    # a histogram or summary is also named as a whole
    named = {METRIC_OF.get(name, name) for name in samples}

    assert named == set(METRICS)


def test_not_too_many() -> None:
    """At most 70, and one for streams that move: a value of a label is found sooner than another name."""
    assert len(METRICS) <= 71


def test_events_of_a_replica() -> None:
    """Each counter of the replica is explained."""
    for counter in fields(ReplicaCounters):
        assert f"`{counter.name}`" in METRICS["kvrouter_replica_events_total"].text


async def test_kinds_and_labels(fleet_of: FleetOf) -> None:
    """Kinds and labels of a frontend's metrics after a request equal the catalog's."""
    async with fleet_of("--router-mode", "kv", "--router-queue-threshold", "4") as fleet:
        await fleet.ask()
        text = (await fleet.get("/metrics")).body.decode()

    for family in text_string_to_metric_families(text):
        if family.name.startswith("process_"):
            continue  # the library's own
        metric = METRICS[f"{family.name}_total" if family.type == "counter" else family.name]
        said = {label for sample in family.samples for label in sample.labels}
        assert (family.name, metric.kind) == (family.name, family.type)
        assert said - {"le"} <= set(metric.labels)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
async def test_promtool_accepts(fleet_of: FleetOf) -> None:
    """Prometheus' own check of names, kinds and help texts finds nothing."""
    async with fleet_of("--router-mode", "kv", "--router-queue-threshold", "4") as fleet:
        await fleet.ask()
        text = (await fleet.get("/metrics")).body

    process = await asyncio.create_subprocess_exec(
        *("promtool", "check", "metrics"), stdin=PIPE, stdout=PIPE, stderr=STDOUT
    )
    found, _ = await process.communicate(text)
    assert (0, b"") == (process.returncode, found)
