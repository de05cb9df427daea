"""The headers in which agents name their session and its parent.

A session is one chain of turns. A subagent is a session of its own, whose parent has begun it. Sources: the
headers of Claude Code 2.1, Codex 0.145 and OpenCode 1.18, and those that Dynamo 1.6 documents (Session IDs).

Nothing is trusted: the names only decide which of equally good workers gets a request. What is too long or
not printable ASCII is ignored, as these headers are not addressed to kvrouter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

MOST_CHARACTERS = 256


class AgentHeaders(NamedTuple):
    """How one kind of client names a session. `child` in place of `root`: the request is a subagent's."""

    root: str
    child: str = ""
    parent: str = ""


# The first one with a session counts.
AGENTS = (
    AgentHeaders("x-dynamo-session-id", parent="x-dynamo-parent-session-id"),
    AgentHeaders("x-claude-code-session-id", "x-claude-code-agent-id", "x-claude-code-parent-agent-id"),
    AgentHeaders("session-id", "thread-id", "x-codex-parent-thread-id"),
    AgentHeaders("x-opencode-session", parent="x-parent-session-id"),
    AgentHeaders("x-session-id", parent="x-parent-session-id"),
    AgentHeaders("x-session-affinity", parent="x-parent-session-id"),
)
HEADERS = frozenset(name for agent in AGENTS for name in agent if name)


def read_sessions(headers: Mapping[str, str]) -> tuple[str, str]:
    """The session of a request, and the session that began it; each empty if it is not named."""
    for agent in AGENTS:
        root, child, parent = (_value(headers, name) for name in agent)
        session = child or root
        if session:
            # a subagent whose parent is not named was begun by the root
            parent = parent or root
            return session, parent if parent != session else ""
    return "", ""


def _value(headers: Mapping[str, str], name: str) -> str:
    value = headers.get(name, "") if name else ""
    return value if len(value) <= MOST_CHARACTERS and value.isascii() and value.isprintable() else ""
