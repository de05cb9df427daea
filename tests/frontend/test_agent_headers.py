"""The sessions that agents name in their headers."""

from __future__ import annotations

import pytest

from kvrouter.frontend.requests.agent_headers import HEADERS, MOST_CHARACTERS, read_sessions
from kvrouter.frontend.requests.overrides import AcceptedOverrides, read_overrides
from kvrouter.policies import SERVED_MODES


@pytest.mark.parametrize(
    ("headers", "session", "parent"),
    [
        ({}, "", ""),
        ({"x-claude-code-session-id": "s"}, "s", ""),
        ({"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"}, "a", "s"),
        (
            {
                "x-claude-code-session-id": "s",
                "x-claude-code-agent-id": "b",
                "x-claude-code-parent-agent-id": "a",
            },
            "b",
            "a",
        ),
        ({"session-id": "s", "thread-id": "s"}, "s", ""),  # Codex's main thread
        ({"session-id": "s", "thread-id": "t"}, "t", "s"),
        ({"session-id": "s", "thread-id": "t", "x-codex-parent-thread-id": "p"}, "t", "p"),
        ({"x-opencode-session": "s", "x-parent-session-id": "p"}, "s", "p"),
        ({"x-session-id": "s", "x-parent-session-id": "p"}, "s", "p"),
        ({"x-session-affinity": "s"}, "s", ""),
        ({"x-dynamo-session-id": "d", "x-claude-code-session-id": "s"}, "d", ""),
        ({"x-parent-session-id": "p"}, "", ""),
        ({"x-session-id": "s" * (MOST_CHARACTERS + 1)}, "", ""),
        ({"x-session-id": "tab\there"}, "", ""),
        ({"x-session-id": "é"}, "", ""),
    ],
)
def test_sessions(headers: dict[str, str], session: str, parent: str) -> None:
    """Subagents are sessions of their own; what cannot be a name is ignored."""
    assert (session, parent) == read_sessions(headers)


def test_named_session_wins() -> None:
    """The session that a client names for kvrouter has precedence; the parent is still the agent's."""
    dialect = AcceptedOverrides(SERVED_MODES, "kv", agent_sessions=True)
    headers = {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a", "x-session-id": "mine"}

    found = read_overrides(headers, None, None, dialect)

    assert ("mine", "s") == (found.session, found.parent_session)
    assert HEADERS <= dialect.headers


def test_flag() -> None:
    """Without it the headers are not read."""
    found = read_overrides(
        {"x-claude-code-session-id": "s"}, None, None, AcceptedOverrides(SERVED_MODES, "kv")
    )

    assert ("", "") == (found.session, found.parent_session)
