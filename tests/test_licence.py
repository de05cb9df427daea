"""The package says which licences its files are under, and comes with their texts."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_vendored_header() -> None:
    """xxhash.h is under another licence than our own files: named, and its text among the licence files."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [(ROOT / name).read_text() for name in project["license-files"]]
    header = (ROOT / "kvrouter/core/native/xxhash.h").read_text()

    assert "BSD 2-Clause License" in header
    assert "Apache-2.0 AND BSD-2-Clause" == project["license"]
    assert any("Yann Collet" in text and "THIS SOFTWARE IS PROVIDED" in text for text in texts)
