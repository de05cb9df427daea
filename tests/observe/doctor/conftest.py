"""The doctor's tests do not see other fleets of this machine."""

from __future__ import annotations

import aiohttp
import pytest

from kvrouter.observe.doctor import machine
from kvrouter.observe.doctor.settings import DoctorSettings
from kvrouter.observe.document import ReplicaHealth

USUAL = DoctorSettings().frontend_port


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing listens on the usual ports."""
    real = machine.look_at_port

    async def look(http: aiohttp.ClientSession, port: int) -> tuple[bool, ReplicaHealth | None]:
        if port in {USUAL, USUAL + machine.ADMIN_OFFSET}:
            return False, None
        return await real(http, port)

    monkeypatch.setattr(machine, "look_at_port", look)
