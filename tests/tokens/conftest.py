from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrouter.tokens.prompt import PromptEncoder
from kvrouter.tokens.tokenizer import Tokenizer


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
