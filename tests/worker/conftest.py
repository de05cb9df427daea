"""What several tests of agents share."""

from __future__ import annotations

import pytest

from kvrouter.worker import rank


@pytest.fixture
def reads_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has stopped reads its engine's history again after a moment."""
    monkeypatch.setattr(rank, "READ_AGAIN_S", 0.02)
    monkeypatch.setattr(rank, "MOST_READ_AGAIN_S", 0.1)
