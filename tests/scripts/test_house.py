"""Sizes of the package."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.kit import house
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
        "words of docs/": "0",
        "lines of scripts/": "0",
        "lines of Cython": "0",
        "private reads of tests": "0",
        "patches of tests": "0",
        "sleeps of tests": "0",
    } == {name: value.strip() for name, value in values.items()}


@pytest.mark.parametrize(
    ("source", "trouble"),
    [
        ("# why\ndef long() -> None:\n" + "    pass\n" * 60, "a function of 61 lines"),
        ("# why\nclass Long:\n" + "    x = 1\n" * 300, "Long has 301 lines"),
        ("x = 1\n" * 100, "0.0 comments"),
        ("\n" * (house.LINES + 1), f"{house.LINES + 1} lines"),
    ],
)
def test_limits(source: str, trouble: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is above its limit is named, and the check fails."""
    (tmp_path / "kvrouter").mkdir()
    (tmp_path / "kvrouter" / "a.py").write_text(source)

    assert 1 == main(["--root", str(tmp_path)])
    assert trouble in capsys.readouterr().err


def test_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The name of a class stands in one module."""
    (tmp_path / "kvrouter").mkdir()
    for name in "ab":
        (tmp_path / "kvrouter" / f"{name}.py").write_text("# why\nclass Once:\n    pass\n")

    assert 1 == main(["--root", str(tmp_path)])
    assert "class Once: in 2 modules" in capsys.readouterr().err


def test_long_docs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Words of docs/ have a limit; changes of the next release do not count."""
    (tmp_path / "kvrouter").mkdir()
    (tmp_path / "kvrouter" / "a.py").write_text("# why\nx = 1\n")
    (tmp_path / "docs" / "changes").mkdir(parents=True)
    (tmp_path / "docs" / "changes" / "a.md").write_text("one two three four")
    (tmp_path / "docs" / "a.md").write_text("word " * house.DOC_WORDS)
    assert 0 == main(["--root", str(tmp_path)])

    (tmp_path / "docs" / "a.md").write_text("word " * (house.DOC_WORDS + 1))

    assert 1 == main(["--root", str(tmp_path)])
    assert f"docs: {house.DOC_WORDS + 1} words, more than {house.DOC_WORDS}" in capsys.readouterr().err


def test_long_scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines of scripts/ have a limit, too."""
    (tmp_path / "kvrouter").mkdir()
    (tmp_path / "kvrouter" / "a.py").write_text("# why\nx = 1\n")
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "a.py").write_text("\n" * (house.SCRIPT_LINES + 1))

    assert 1 == main(["--root", str(tmp_path)])
    assert f"scripts: {house.SCRIPT_LINES + 1} lines" in capsys.readouterr().err


def test_shortcuts_of_tests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Reads of private attributes, patches and sleeps have limits; one's own and turns do not count."""
    (tmp_path / "kvrouter").mkdir()
    (tmp_path / "kvrouter" / "a.py").write_text("# why\nx = 1\n")
    (tmp_path / "tests").mkdir()
    few = "self._a\nx.__len__()\nx._a.b\npatch.setattr(x, 'a', 1)\nmock.patch.object(x)\nsleep(0)\n"
    (tmp_path / "tests" / "test_a.py").write_text(few)
    assert 0 == main(["--root", str(tmp_path)])
    told = capsys.readouterr().out.splitlines()[-3:]
    assert ["1", "2", "0"] == [line.split()[-1] for line in told]

    for number, (what, most) in enumerate(house.SHORTCUTS.items()):
        one = ("x._a", "x.setitem(a, b, c)", "time.sleep(0.1)")[number]
        (tmp_path / "tests" / "test_a.py").write_text(f"{one}\n" * (most + 1))
        assert 1 == main(["--root", str(tmp_path)])
        assert f"tests: {most + 1} {what}, more than {most}" in capsys.readouterr().err


def test_full_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder has 25 files at most."""
    folder = tmp_path / "kvrouter" / "full"
    folder.mkdir(parents=True)
    for number in range(26):
        (folder / f"f{number}.py").write_text("# why\nx = 1\n")

    assert 1 == main(["--root", str(tmp_path)])
    assert "kvrouter/full: 26 files, more than 25" in capsys.readouterr().err
