"""What engines can do from which version on."""

from __future__ import annotations

import pytest

from kvrouter.engine_versions import EVERY, Version, reaches, since


@pytest.mark.parametrize(
    ("version", "first", "does_reach"),
    [
        ("0.33.0", (0, 33), True),
        ("v0.33", (0, 33), True),
        ("0.33.1.dev5+g1234567", (0, 33), True),
        ("1.0", (0, 33), True),
        ("0.9.2", (0, 33), False),
        ("0.5.22", (0, 5, 23), False),
        ("0.5.23.post1", (0, 5, 23), True),
        ("", (0, 33), None),
        ("main", (0, 33), None),
        ("0.33.0", None, False),
        ("", None, False),
        ("", EVERY, True),
    ],
)
def test_reaches(version: str, first: Version | None, does_reach: bool | None) -> None:
    """Versions are compared by their numbers; one that cannot be read is neither before nor after."""
    assert does_reach is reaches(version, first)


def test_unknown_kind() -> None:
    """Nothing is assumed of an engine of unknown kind."""
    assert since("other").token_ids_of_chats is None
