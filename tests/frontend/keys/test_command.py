"""`kvrouter keys`."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from kvrouter.cli import main
from kvrouter.frontend.keys.keys_file import Keys, now_utc, read_keys


def keys(file: Path, *words: str) -> int:
    return main(["keys", *words, "--file", str(file)])


def test_added(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The key is printed once; only its owner can read the file, which has the hash."""
    file = tmp_path / "keys.toml"
    words = (
        "--tenant",
        "t",
        "--model",
        "m",
        "--model",
        "n/1",
        "--requests-per-minute",
        "60",
        "--override",
        "mode",
    )

    assert 0 == keys(file, "add", "alice", *words, "--expires", "90d", "--cache-salt", 'a "b" \\ é')

    text = capsys.readouterr().out.strip()
    found = Keys(read_keys(file)).find(text)
    assert found is not None
    assert ("t", ("m", "n/1"), 60, ("mode",), 'a "b" \\ é') == (
        found.tenant, found.models, found.requests_per_minute, found.overrides, found.cache_salt
    )  # fmt: skip
    assert found.expires is not None
    assert 89 <= (found.expires - now_utc()).days <= 90
    assert text not in file.read_text()
    assert 0o600 == stat.S_IMODE(file.stat().st_mode)


def test_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rest of the file, comments and mode included, stays as it was."""
    file = tmp_path / "keys.toml"
    texts = []
    for name in ("alice", "bob", "carol"):
        assert 0 == keys(file, "add", name)
        texts.append(capsys.readouterr().out.strip())
    file.write_text("# ours\n" + file.read_text().replace("[carol]", "[carol] # last\n# hers"))
    file.chmod(0o640)

    assert 0 == keys(file, "revoke", "bob")
    assert 0 == keys(file, "expire", "carol")
    assert 0 == keys(file, "expire", "alice", "--expires", "2999-01-31")

    found = read_keys(file)
    assert ["alice", "carol"] == list(found)
    assert ["alice"] == [name for name, key in found.items() if not key.has_expired(now_utc())]
    assert [True, False, True] == [Keys(found).find(text) is not None for text in texts]
    assert {"# ours", "# hers"} <= set(file.read_text().splitlines())
    assert 0o640 == stat.S_IMODE(file.stat().st_mode)
    assert 0 == keys(file, "list")
    assert ["alice kvr", "carol kvr"] == [line[:9] for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (("add", "alice"), 1, "has a key 'alice'"),
        (("add", "a b"), 1, "must be a name"),
        (("add",), 1, "must be a name"),
        (("add", "x", "--expires", "soon"), 2, "must be a date"),
        (("add", "x", "--override", "all"), 2, "must be target"),
        (("add", "x", "--expires", "0001-01-01T00:00+23:00"), 2, "must be a date"),
        (("add", "x", "--cache-salt", "team:x"), 1, "regex"),
        (("revoke", "x"), 1, "has no key 'x'; it has: alice"),
        (("expire", "x"), 1, "has no key 'x'"),
    ],
)
def test_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], code: int, why: str
) -> None:
    """One line says what is wrong; the file stays as it was."""
    file = tmp_path / "keys.toml"
    keys(file, "add", "alice")
    before = file.read_text()
    capsys.readouterr()

    assert code == keys(file, *words)

    (line,) = capsys.readouterr().err.splitlines()
    assert why in line
    assert before == file.read_text()


def test_names_with_dots(tmp_path: Path) -> None:
    """They are quoted: [a.b] would be a table in another one, and end every reload."""
    file = tmp_path / "keys.toml"
    assert [0, 0, 0] == [keys(file, "add", name) for name in ("a", "a.b", "a.c")]
    assert 0 == keys(file, "revoke", "a.b")

    assert ["a", "a.c"] == list(read_keys(file))


def test_a_link_stays_one(tmp_path: Path) -> None:
    """As a Secret is mounted."""
    file, link = tmp_path / "real.toml", tmp_path / "keys.toml"
    link.symlink_to(file)

    assert [0, 0] == [keys(link, "add", name) for name in ("a", "b")]
    assert link.is_symlink()
    assert ["a", "b"] == list(read_keys(file))


def test_written_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table in another spelling is read, and left to be changed by hand."""
    file = tmp_path / "keys.toml"
    keys(file, "add", "alice")
    file.write_text(file.read_text().replace("[alice]", "['alice']"))

    assert 1 == keys(file, "revoke", "alice")
    assert "by hand" in capsys.readouterr().err
