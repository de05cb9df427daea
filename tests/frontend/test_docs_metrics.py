"""docs/metrics.md lists the metrics of /metrics."""

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
from tests.frontend.fleet import FleetOf

ROOT = Path(__file__).parent.parent.parent
ROW = re.compile(r"^\| `(kvrouter_\w+)` \| (counter|gauge|histogram|summary) \|([^|]*)\|", re.MULTILINE)
NAME = re.compile(r'"(kvrouter_\w+)"')

Row = tuple[str, frozenset[str]]
"""Kind and labels."""


def rows() -> dict[str, Row]:
    """The rows of the page by family; a counter's family has no `_total`."""
    found: dict[str, Row] = {}
    for name, kind, labels in ROW.findall((ROOT / "docs" / "metrics.md").read_text()):
        family = name.removesuffix("_total") if kind == "counter" else name
        found[family] = kind, frozenset(re.findall(r"`(\w+)`", labels))
    return found


def test_page_lists_every_family() -> None:
    """The page lists exactly the families in the sources, also those without a series at the start."""
    sources = [
        file
        for room in ("frontend", "replica", "telemetry", "worker")
        for file in (ROOT / "kvrouter" / room).rglob("*.py")
    ]
    named = {name for file in sources for name in NAME.findall(file.read_text())}
    counted = {f"kvrouter_{counter.name}" for counter in fields(ReplicaCounters)}

    assert named | counted == set(rows())


async def test_kinds_and_labels(fleet_of: FleetOf) -> None:
    """Kinds and labels of a frontend's metrics after a request are those of the page."""
    async with fleet_of("--router-mode", "kv", "--router-queue-threshold", "4") as fleet:
        await fleet.ask()
        text = (await fleet.get("/metrics")).body.decode()

    for family in text_string_to_metric_families(text):
        if family.name.startswith("process_"):
            continue  # the library's own
        kind, labels = rows()[family.name]
        said = {label for sample in family.samples for label in sample.labels}
        assert (family.name, kind) == (family.name, family.type)
        assert said - {"le"} <= labels


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
