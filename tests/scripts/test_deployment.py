"""The demo's deployment starts every time."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrouter.tokens.tiny import build_tiny_model
from scripts.kit import deployment
from scripts.kit.deployment import Plan
from scripts.kit.fleet import Fleet
from scripts.kit.http_client import Client
from tests.long import needs_long

STARTS = 50


@needs_long("minutes")
@pytest.mark.timeout(3600)
async def test_starts_and_stops(tmp_path: Path) -> None:
    """NATS, four engines with their agents and two replicas become ready, several times in a row."""
    build_tiny_model(tmp_path / "model")
    client = Client()
    for number in range(STARTS):
        directory = tmp_path / str(number)
        directory.mkdir()
        async with Fleet(directory) as fleet:
            nats_url = await deployment.start_nats(fleet, client)
            deployed = await deployment.deploy(fleet, client, Plan("kv", tmp_path / "model"), nats_url)
            await deployment.stop(fleet, deployed)
    await client.close()
