"""What users rely on by name stays, or a change file says that it goes.

public_names.txt has the names of the commit in PREVIOUS; `scripts/release` writes both.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable
from pathlib import Path

import pytest

from kvrouter.settings.commands import MODULES, command_named
from scripts.kit.public_names import fields, named_in_code, served, small_fleet

ROOT = Path(__file__).resolve().parents[2]
COMMIT, *BEFORE = Path(__file__).with_name("public_names.txt").read_text().splitlines()
UNTIL_ALL_SHOWN_S = 10.0
ENTRY = re.compile(r"^- .*?(?=^- |^#|\Z)", re.MULTILINE | re.DOTALL)
FLAG = re.compile(r"command (\S+) --(\S+)")


def unsaid(before: Iterable[str], now: Collection[str], changes: str) -> list[str]:
    """The lines that are gone without a change that names them. What goes with its owner is not listed."""
    gone = set(before) - set(now)
    entries = [entry for entry in ENTRY.findall(changes) if re.search(r"\*\*(Changed|Removed)\b", entry)]
    code = "\n".join(span for entry in entries for span in re.findall(r"`([^`]+)`", entry))
    owner_and_name = ((line, *line.rpartition(" ")[::2]) for line in gone)
    return sorted(line for line, owner, name in owner_and_name if owner not in gone and not has(code, name))


def has(code: str, name: str) -> bool:
    """Whether a name stands there whole."""
    return bool(re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", code))


def changes() -> str:
    """What changed since the release before."""
    _, _, unreleased = (ROOT / "CHANGELOG.md").read_text().partition("\n## Unreleased\n")
    files = sorted((ROOT / "docs/changes").glob("*.md"))
    return "\n".join([unreleased.partition("\n## ")[0], *(file.read_text() for file in files)])


async def test_what_is_gone_stands_in_a_change_file(tmp_path: Path) -> None:
    """Commands, flags, routes, fields, metrics, errors, the library and the wire of the version before."""
    said, found = changes(), named_in_code()
    async with small_fleet(tmp_path) as (deployed, client):
        until_s = time.monotonic() + UNTIL_ALL_SHOWN_S
        while True:  # some fields show only after a while
            found |= await served(deployed, client)
            gone = unsaid(BEFORE, found, said)
            if not gone or time.monotonic() > until_s:
                break

    assert not gone, (
        f"gone since {COMMIT[:12]}: {gone}. Put them back, or write an entry into a file of docs/changes: "
        "with **Changed:** or **Removed:**, and the last word of each line in backquotes"
    )


def test_a_flag_that_is_gone_answers() -> None:
    """With what to use instead."""
    gone = sorted({*FLAG.findall("\n".join(set(BEFORE) - named_in_code()))})

    assert [] == [(name, flag) for name, flag in gone if name in MODULES and not answers(name, flag)]


def answers(name: str, flag: str) -> bool:
    """Whether a command still has a flag, or knows that it had it."""
    command = command_named(name)
    known = {*command.removed, *command.left_out}
    return command.has(f"--{flag}") or not known.isdisjoint({flag, flag.removeprefix("no-")})


def test_the_names_are_those_of_the_commit() -> None:
    """`scripts/release` changes both files together."""
    assert COMMIT == Path(__file__).with_name("PREVIOUS").read_text().strip()


@pytest.mark.parametrize(
    ("gone", "said", "reported"),
    [
        ("command worker --made-up", "", True),
        ("command worker --made-up", "- **Removed:** `--made-up`: use `--other`.", False),
        ("command worker --made-up", "- **Changed:** in two\n  lines, `kvrouter worker --made-up`.", False),
        ("command worker --made-up", "- New: `--made-up`.\n- **Removed:** `--other`.", True),
        ("command worker --made-up", "- **Removed:** `--made-up-s`, and made-up.", True),
        ("json GET /workers targets made_up", "- **Changed:** `targets[].made_up` is gone.", False),
        ("json GET /workers targets made_up", "- **Changed:** `made_up_s` is gone.", True),
    ],
)
def test_what_counts_as_said(gone: str, said: str, reported: bool) -> None:
    """An entry that tells of a change or a removal, with the whole name in backquotes."""
    assert [gone] * reported == unsaid([*BEFORE, gone], BEFORE, said)


def test_what_goes_with_its_owner() -> None:
    """A route takes its fields with it: one line names both."""
    gone = ["http admin GET /old", "http admin GET /old limit", "json GET /old", "json GET /old rows id"]

    assert [gone[0], gone[2]] == unsaid([*gone, "json GET /old rows"], [], "")
    assert [] == unsaid([*gone, "json GET /old rows"], [], "- **Removed:** `GET /old`.")


def test_fields() -> None:
    """Each with what it is in; a key that is data counts as one name."""
    answer = {"targets": [{"lag": 1}, {"url": ""}], "owners": {"r-1f": {"count": 2}}}

    named = {"targets", "targets lag", "targets url", "owners", "owners *", "owners * count"}
    assert named == {*fields(answer)}
