"""The run under sanitizers takes minutes and is started by hand; its list of tests is checked here."""

from __future__ import annotations

from scripts.kit.sanitize import ROOT, TESTS


def test_its_tests_exist() -> None:
    """Tests that move are noticed."""
    assert [] == [name for name in TESTS if not (ROOT / name).exists()]
