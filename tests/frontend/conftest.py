"""What the frontend's tests share."""

from __future__ import annotations

from functools import partial

import pytest

from tests.frontend.fleet import FleetOf, running_fleet


@pytest.fixture
def fleet_of(nats_url: str) -> FleetOf:
    """Opens fleets on the session's NATS, each in a namespace of its own."""
    return partial(running_fleet, nats_url)


@pytest.fixture
def quiet_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `main` run without changing the logs of the test session."""
    monkeypatch.setattr("kvrouter.frontend.__main__.set_up_logs", lambda *_: None)
