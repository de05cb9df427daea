"""Incidents on a real fleet. The whole run is long: KVROUTER_TEST_LONG=1, with Prometheus installed."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from scripts.kit.incidents.__main__ import main
from scripts.kit.incidents.faults import INCIDENTS
from scripts.kit.incidents.traffic import Documents
from scripts.kit.prometheus import RULES, alerts_of


def test_each_alert_has_an_incident() -> None:
    """And each expected alert is a rule."""
    expected = {name for incident in INCIDENTS for name in incident.alerts}

    assert set(alerts_of(RULES.read_text())) == expected


def test_documents() -> None:
    """Chats about the same few documents, the same each time."""
    chats = Documents(count=3, tokens=50).chats(20)
    systems = {json.loads(chat.body)["messages"][0]["content"] for chat in chats}

    assert chats == Documents(count=3, tokens=50).chats(20)
    assert 3 == len(systems)
    assert len({chat.body for chat in chats}) == 20


@pytest.mark.skipif(
    "KVROUTER_TEST_LONG" not in os.environ, reason="takes twelve minutes: KVROUTER_TEST_LONG=1"
)
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed")
def test_alerts_fire_and_end() -> None:
    """No alert fires in the healthy fleet; each fault makes its alerts fire, and they end with it."""
    assert 0 == main([])
