"""scripts/words finds words that make riddles, where a person reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.kit import words

SENTENCES = {
    "told": "The worker was told of it.",
    "nobody": "Nobody reads the pipe.",
    "beside": "It runs for ever.",
    "those-that": "It drops those that are late.",
    "is-no": "A 200 that is none.",
    "whoever": "Whoever asks gets it.",
    "hear": "It hears heartbeats.",
    "so-many": "It stops after so many failures.",
    "foretold": "What was foretold of a request.",
    "ones-own": "A policy of one's own.",
}
PLAIN = "The router sends each request to one worker. " * 30


def found(path: Path) -> list[tuple[str, int]]:
    """The rows found in a file, by line."""
    prose = words.read_prose(path)
    return [(row, number) for row in words.ROWS for number, _ in words.find_words(row, prose)]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_each_row_has_a_sentence() -> None:
    assert set(words.ROWS) == set(SENTENCES)


@pytest.mark.parametrize("row", SENTENCES)
def test_found_once_wherever_a_person_reads(row: str, tmp_path: Path) -> None:
    sentence = SENTENCES[row]
    python = f'"""{sentence}"""\n\nx = 1  # {sentence}\ny = f"{{x}}: {sentence}"\n'

    assert [(row, 1), (row, 3), (row, 4)] == found(write(tmp_path / "a.py", python))
    assert [(row, 1)] == found(write(tmp_path / "a.pyx", f"cdef int x = <int>y  # {sentence}\n"))
    assert [(row, 2)] == found(write(tmp_path / "a", f"#!/bin/bash\necho  # {sentence}\n"))
    assert [(row, 3)] == found(write(tmp_path / "a.md", f"# Page\n\n{sentence}\n"))


def test_found_in_names_of_tests_and_of_log_events(tmp_path: Path) -> None:
    source = 'def test_is_told() -> None:\n    log.info("worker.told_late", told="told")\n'

    assert [("told", 1), ("told", 2)] == found(write(tmp_path / "a.py", source))


def test_found_across_lines(tmp_path: Path) -> None:
    assert [("those-that", 2)] == found(
        write(tmp_path / "a.py", "x = 1\n# It drops those\n# that are late.\n")
    )


def test_not_found_in_code_keys_and_bytes(tmp_path: Path) -> None:
    source = (
        'told = {"told": b"told so", "x": f"a {whoever} b", "y": f"{x}told{x}"}\ndef hear() -> None: ...\n'
    )

    assert not found(write(tmp_path / "a.py", source))


def test_not_found_in_fenced_code(tmp_path: Path) -> None:
    page = "Before.\n```sh\necho told\n```\nIt is told.\n\n  ~~~\n  nobody\n  ~~~\n```\nwhoever, to the end\n"

    assert [("told", 5)] == found(write(tmp_path / "a.md", page))


def test_exceptions(tmp_path: Path) -> None:
    page = "The worker is no longer live, is no\nlonger asked. An intellect, a dearth, a shear.\n"

    assert not found(write(tmp_path / "a.md", page))


def test_files(tmp_path: Path) -> None:
    """Generated and recorded files and programs are left out."""
    names = ["README.md", "docs/a.md", "kvrouter/a.py", "kvrouter/b.pyx", "scripts/run", "tests/test_a.py"]
    others = [
        "kvrouter/b.c",
        "kvrouter/py.typed",
        "tests/data/README.md",
        "scripts/kit/words.py",
        ".venv/a.py",
    ]
    for name in names + others:
        write(tmp_path / name, "#!/bin/sh\n")

    assert names == [str(path.relative_to(tmp_path)) for path in words.find_files(tmp_path, [])]
    assert [tmp_path / "docs/a.md"] == list(words.find_files(tmp_path, [tmp_path / "docs"]))


@pytest.mark.parametrize(("folder", "area"), [("kvrouter", "code"), ("tests", "tests"), ("docs", "docs")])
def test_a_row_above_its_limit(
    folder: str, area: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "README.md", PLAIN)
    assert words.main(["--root", str(tmp_path)]) == 0

    write(tmp_path / folder / "a.md", f"It is told. {PLAIN}")
    assert words.main(["--root", str(tmp_path)]) == 1
    assert f"told in {area} " in capsys.readouterr().err


def test_all_rows_above_their_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three words, each of another row, in 1,005 words and more."""
    three = "It is told. Nobody hears. "

    write(tmp_path / "README.md", three + "plain " * 1200)
    assert words.main(["--root", str(tmp_path)]) == 0
    write(tmp_path / "README.md", three + "plain " * 1000)
    assert words.main(["--root", str(tmp_path)]) == 1
    assert capsys.readouterr().err.endswith("in all: all rows in docs 2.99\n")


def test_lists_the_places_in_files_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A few files are too short for a limit."""
    asked = write(tmp_path / "docs/a.md", "One.\nIt is told, whoever asks.\n")
    write(tmp_path / "docs/b.md", "It is told.\n")

    assert words.main(["--root", str(tmp_path), "--list", "told", str(asked)]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("docs/")] == [
        "docs/a.md:2: told: It is told, whoever asks."
    ]


def test_neither_a_row_nor_a_path(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        words.main(["--root", str(tmp_path), "tolled"])
