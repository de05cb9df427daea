"""Dynamo's flags that need nothing here."""

from __future__ import annotations

import pytest

from kvrouter.frontend.settings import parse_options


@pytest.mark.parametrize(
    "flag",
    ["--router-snapshot-threshold=1000000", "--router-reset-states", "--router-durable-kv-events"],
)
def test_accepted_with_a_reason(flag: str) -> None:
    (note,) = parse_options([flag]).dynamo.notes()

    assert note.startswith(f"{flag.partition('=')[0]} is not needed: ")


@pytest.mark.parametrize("flags", [[], ["--no-router-reset-states", "--no-durable-kv-events"]])
def test_nothing_is_said_without_them(flags: list[str]) -> None:
    assert [] == [*parse_options(flags).dynamo.notes()]
