"""The package names the licences of its files, and contains their texts."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_vendored_header() -> None:
    """xxhash.h has another licence than our own files: it is named, and its text is a licence file."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [(ROOT / name).read_text() for name in project["license-files"]]
    header = (ROOT / "kvrouter/core/native/xxhash.h").read_text()

    assert "BSD 2-Clause License" in header
    assert "Apache-2.0 AND BSD-2-Clause" == project["license"]
    assert any("Yann Collet" in text and "THIS SOFTWARE IS PROVIDED" in text for text in texts)
