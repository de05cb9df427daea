"""The run under sanitizers takes minutes and is started by hand; its list of tests is checked here."""

from __future__ import annotations

import shutil

import pytest

from kvrouter.core.native import versions
from scripts.kit import sanitize
from scripts.kit.sanitize import ROOT, TESTS
from tests.long import needs_long


def test_its_tests_exist() -> None:
    """Tests that move are noticed."""
    assert [] == [name for name in TESTS if not (ROOT / name).exists()]


@needs_long("it builds, and takes minutes")
@pytest.mark.skipif(bool(versions.why_not_built) or not shutil.which("gcc"), reason="gcc is needed")
@pytest.mark.timeout(3600)
def test_native_modules_under_sanitizers() -> None:
    """No access out of bounds, use after free, misalignment or overflow."""
    assert 0 == sanitize.main([])
