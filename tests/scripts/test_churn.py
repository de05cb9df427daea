"""`scripts/bench churn` and the sanitizers: histories of the tables, and that a wrong table is noticed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence

import pytest

from kvrouter.core.native import versions
from kvrouter.core.tables.table import FlatTable
from scripts.kit import sanitize
from scripts.kit.bench import churn
from scripts.kit.bench.__main__ import main
from scripts.kit.bench.hashes import built


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs a few small sizes, and restores the version in use."""
    before = versions.in_use()
    monkeypatch.setattr(churn, "MOST_ROWS", 3000)
    monkeypatch.setattr(churn, "PHASE_OPERATIONS", 5000)
    yield
    versions.choose(before)


@pytest.mark.parametrize("core", built())
def test_churn(core: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The requested number of operations runs, of every kind, with both versions."""
    assert 0 == main(["churn", "--operations", "20000", "--core", core])

    said = capsys.readouterr().out
    assert all(word in said for word in (f"core {core}", "looked up", "removed", "stored", "checks", "rows"))


class Forgetful(FlatTable):
    """A table that does not sweep one of its shards."""

    def sweep(self, slots: Sequence[int], shard_number: int) -> None:
        if shard_number != 5:
            super().sweep(slots, shard_number)


def test_wrong_table_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few blocks too many make the history fail."""
    monkeypatch.setattr(churn, "new_table", Forgetful)

    with pytest.raises(AssertionError):
        main(["churn", "--operations", "200000", "--core", "python"])


@pytest.mark.skipif(not os.environ.get("KVROUTER_TEST_LONG"), reason="it builds, and takes minutes")
@pytest.mark.skipif(bool(versions.why_not_built) or not shutil.which("gcc"), reason="gcc is needed")
@pytest.mark.timeout(3600)
def test_native_modules_under_sanitizers() -> None:
    """No access out of bounds, use after free, misalignment or overflow."""
    assert 0 == sanitize.main([])
