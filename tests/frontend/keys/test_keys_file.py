"""The file of clients' keys: what it may have, and what opens it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.errors import ConfigError
from kvrouter.frontend.keys.keys_file import Key, Keys, given_key, new_key, read_keys

TEXT, KEY = new_key("t", {})
MADE = Keys({"a": KEY}, "sk-single")


def test_a_key_has_256_random_bits() -> None:
    """Its entry has the hash of the whole text, and no part of the secret."""
    text, key = new_key("t", {})

    assert len(text.split("_", 2)[2]) == 43
    assert key.sha256 == hashlib.sha256(text.encode()).hexdigest()
    assert text.split("_", 2)[2] not in repr(key)


def test_found() -> None:
    """By its whole text only; the single key by its own."""
    assert MADE.find(TEXT) == KEY
    assert MADE.find("sk-single") is not None
    wrong = [TEXT[:-1], TEXT + "x", TEXT[:20], TEXT.upper(), "", KEY.sha256, KEY.id, f" {TEXT}"]
    assert [None] * len(wrong) == [MADE.find(one) for one in wrong]
    assert Keys({"a": KEY}).find("sk-single") is None


@given(
    st.text(max_size=2000)
    | st.text("kvr_0123456789abcdef", max_size=70).map(lambda one: f"kvr_{KEY.id}_{one}")
)
@settings(max_examples=500, deadline=None)
def test_nothing_else_is_found(guess: str) -> None:
    """Whatever is sent, no error is raised and no key is found."""
    assert MADE.find(guess) is None
    for header in ("authorization", "x-api-key"):
        for value in (guess, f"Bearer {guess}", f"bearer{guess}", f"Basic {guess}"):
            assert MADE.find(given_key({header: value})) is None


@given(st.binary(max_size=300))
@settings(max_examples=500, deadline=None)
def test_any_bytes_of_a_header(value: bytes) -> None:
    """As the relay reads them: bytes that are not UTF-8 are lone surrogates."""
    text = value.decode("utf-8", "surrogateescape")

    assert MADE.find(given_key({"authorization": text, "x-api-key": text})) is None


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        ({"authorization": f"Bearer {TEXT}"}, True),
        ({"authorization": f"bearer  {TEXT} "}, True),
        ({"x-api-key": TEXT}, True),
        ({"authorization": "Basic eDp5", "x-api-key": TEXT}, True),
        ({"authorization": TEXT}, False),
        ({"authorization": "Bearer other", "x-api-key": TEXT}, False),  # one of them would be ignored
        ({"api-key": TEXT}, False),
    ],
)
def test_where_it_is(headers: dict[str, str], found: bool) -> None:
    """`Authorization: Bearer`, else `x-api-key`."""
    assert found == (MADE.find(given_key(headers)) is not None)


GOOD = f'[a]\nid = "{KEY.id}"\nsha256 = "{KEY.sha256}"\ntenant = "t"\n'


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (GOOD + 'modles = ["m"]', "unknown field `modles`"),
        (GOOD + "expires = 2027-01-01", "expires"),
        (GOOD + "expires = 2027-01-01T00:00:00", "timezone"),
        (GOOD + "requests-per-minute = -1", ">= 0"),
        (GOOD + 'overrides = ["all"]', "overrides"),
        (GOOD.replace('tenant = "t"', 'tenant = "a b"'), "tenant"),
        (GOOD.replace('"t"\n', '"t'), "end of document"),
        (GOOD.replace("[a]", '["a b"]'), "matching regex"),
        (GOOD + GOOD.replace("[a]", "[b]"), "have one id"),
        ("[a]\n", "missing required field `id`"),
        ("\x00", "1"),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, why: str) -> None:
    """A file that is wrong anywhere is refused, with the place."""
    file = tmp_path / "keys.toml"
    file.write_text(text)

    with pytest.raises(ConfigError, match=why) as raised:
        read_keys(file)
    assert str(file) in str(raised.value)


@pytest.mark.parametrize(
    "change", [lambda file: None, lambda file: file.mkdir(), lambda file: file.write_bytes(b"\xff")]
)
def test_unreadable(tmp_path: Path, change: Callable[[Path], object]) -> None:
    """Missing, a folder, or no text."""
    change(tmp_path / "keys.toml")

    with pytest.raises(ConfigError):
        read_keys(tmp_path / "keys.toml")


def test_rights() -> None:
    """All models and no override, unless the entry says otherwise; an expiry ends it at its moment."""
    _, key = new_key(
        "t", {"models": ["m"], "overrides": ["weights"], "expires": datetime(2027, 1, 1, tzinfo=UTC)}
    )

    assert key.may_use({"x", "m"})
    assert not key.may_use({"x", ""})
    assert KEY.may_use({"x"})
    assert {"target", "mode", "priority", "dry_run"} == key.forbidden
    ends = datetime(2027, 1, 1, tzinfo=UTC)
    assert [False, True] == [key.has_expired(ends + timedelta(seconds=one)) for one in (-1, 0)]
    assert not KEY.has_expired(ends)


def test_owners() -> None:
    """Keys of one tenant own the same; a tenant's name is no other tenant's."""
    owners = [new_key(tenant, {})[1].owner for tenant in ("t", "t", "u")]

    assert owners[0] == owners[1] != owners[2]
    assert isinstance(KEY, Key)
