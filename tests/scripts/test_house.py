"""Sizes of the package."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.kit.house import main


def test_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files, lines, functions and written comments are counted; comments for tools are not."""
    feeds = tmp_path / "kvrouter" / "core" / "feeds"
    feeds.mkdir(parents=True)
    (feeds / "__init__.py").write_text("")
    (feeds / "reader.py").write_text(
        "from kvrouter.core.feeds.source import X\n"
        "from kvrouter.core.wire.ops import Op  # noqa: F401\n"
        "# why it is so\n"
        "def two() -> None:\n"
        "    pass\n"
    )

    assert 0 == main(["--root", str(tmp_path)])

    values = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert {
        "Python files of kvrouter": "2",
        "lines": "5",
        "fullest folder": "kvrouter/core/feeds, 2 files",
        "files of 60 lines or fewer": "1, without __init__.py",
        "lines of a function": "median 2, p90 2, longest 2",
        "arrows between folders of core/": "1",
        "lines with a comment per 1,000": "200.0",
    } == {name: value.strip() for name, value in values.items()}
