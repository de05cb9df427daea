"""Fixtures of the end-to-end tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrouter.tokens.tiny import build_tiny_model


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model directory."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    build_tiny_model(path)
    return path
