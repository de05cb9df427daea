"""What the frontend's tests share."""

from __future__ import annotations

import pytest


@pytest.fixture
def quiet_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `main` run without changing the logs of the test session."""
    monkeypatch.setattr("kvrouter.frontend.__main__.set_up_logs", lambda *_: None)
