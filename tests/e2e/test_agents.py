"""Agents' own headers, through two replicas: a child runs where its parent ran, a session stays."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvrouter.frontend.requests.agent_headers import read_sessions
from tests.e2e.fleet import Fleet, running_fleet, until

# What Claude Code, Codex and OpenCode send: (the parent's headers, its child's)
AGENTS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "claude": (
        {"x-claude-code-session-id": "s"},
        {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "child"},
    ),
    "codex": (
        {"session-id": "s", "thread-id": "s"},
        {"session-id": "s", "thread-id": "child", "x-codex-parent-thread-id": "s"},
    ),
    "opencode": ({"x-opencode-session": "s"}, {"x-opencode-session": "child", "x-parent-session-id": "s"}),
}
ROUNDS = 3


async def ask(fleet: Fleet, replica: int, said: str, headers: Mapping[str, str]) -> str:
    """The worker that answered a prompt that no engine knows, once all replicas know session and end."""
    body: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": said * 20}]}
    url = fleet.frontends[replica].url + "/v1/chat/completions"
    async with fleet.http.post(url, json={**body, "max_tokens": 2}, headers=headers) as response:
        assert 200 == response.status, await response.text()
    session, _ = read_sessions(headers)
    routers = [frontend.replica.router_for("tiny") for frontend in fleet.frontends]
    now = asyncio.get_running_loop().time
    await until(lambda: all(router.tables.sessions.target_of(session, now()) for router in routers))
    await until(lambda: not any(router.pool.active.owners() for router in routers))
    return response.headers["x-kvrouter-worker"]


async def test_children_run_where_their_parents_ran(nats_url: str, tiny: Path) -> None:
    """Prompts that share nothing: only the headers say where tools, files and turns of a session are."""
    async with running_fleet(nats_url, uuid.uuid4().hex, mockers=2, engine_model=tiny) as fleet:
        for number in range(ROUNDS):
            for name, (parent, child) in AGENTS.items():
                # every value is this round's own
                mine, theirs = (
                    {key: f"{name}-{number}-{value}" for key, value in each.items()}
                    for each in (parent, child)
                )
                root = await ask(fleet, 0, f"{name} {number} begins. ", mine)
                assert root == await ask(fleet, 1, f"{number} {name} is a child. ", theirs)
                assert root == await ask(fleet, 1, f"again {name} {number}. ", mine)
        async with fleet.http.get(fleet.frontends[1].admin_url + "/decisions") as response:
            decisions = (await response.json())["decisions"]

    shown = [(one["session"], one["parent_session"]) for one in decisions[:2]]
    assert [("opencode-2-s", ""), ("opencode-2-child", "opencode-2-s")] == shown
