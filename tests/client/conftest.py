"""Fixtures of the library's tests."""

from __future__ import annotations

from functools import partial

import pytest

from tests.frontend.fleet import FleetOf, running_fleet


@pytest.fixture
def fleet_of(nats_url: str) -> FleetOf:
    """Opens fleets of scripted workers, each in its own namespace."""
    return partial(running_fleet, nats_url)
