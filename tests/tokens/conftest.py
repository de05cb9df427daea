from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrouter.tokens.prompt import PromptEncoder
from kvrouter.tokens.tiny import build_tiny_model
from kvrouter.tokens.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model directory."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    build_tiny_model(path)
    return path


@pytest.fixture(scope="session")
def tokenizer(tiny: Path) -> Iterator[Tokenizer]:
    """Its tokenizer."""
    with Tokenizer.load(tiny, threads=2) as tokenizer:
        yield tokenizer


@pytest.fixture(scope="session")
def encoder(tiny: Path) -> Iterator[PromptEncoder]:
    """Its tokenizer and template."""
    with PromptEncoder.load(tiny, threads=2) as encoder:
        yield encoder
