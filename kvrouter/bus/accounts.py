"""`kvrouter nats accounts`: users of NATS with the rights that their part needs, and no others.

DIR/NAME.nk has a user's seed, for `--nats-nkey`. The rights are those of kvrouter/bus/rights.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kvrouter.bus.rights import (
    FRONTEND,
    VERIFY,
    NatsRights,
    agent_rights,
    caller_rights,
    frontend_rights,
    leaf_rights,
    public_key,
    server_file,
    tool_rights,
    verify_rights,
)
from kvrouter.bus.subjects import Subjects
from kvrouter.core.wire.ids import WorkerId, check_identifier, check_worker_id, is_in_group
from kvrouter.errors import ConfigError
from kvrouter.settings.declare import Command, Settings, setting
from kvrouter.settings.read import Loaded, run

SERVER_FILE = "accounts.conf"
LEAF = "leaf"
_RESERVED = (FRONTEND, VERIFY, LEAF)
_EVERY = ".*"


@dataclass(frozen=True, slots=True)
class AgentUser:
    """A user that announces these workers: an agent, a process with several, or all agents of a group."""

    name: str
    worker_ids: tuple[WorkerId, ...]

    def __str__(self) -> str:
        return f"{self.name}={'+'.join(self.worker_ids)}"


def _read_agent(text: str) -> AgentUser:
    name, _, ids = text.partition("=")
    worker_ids = tuple(map(WorkerId, (ids or name).split("+")))
    for worker_id in worker_ids:
        if worker_id.endswith(_EVERY):
            check_identifier("group", worker_id.removesuffix(_EVERY))
        else:
            check_worker_id("worker id", worker_id)
    if not ids and is_in_group(worker_ids[0]):
        raise ValueError(f"give the user a name, as in NAME={text}")
    return AgentUser(_read_name(name), worker_ids)


def _read_name(text: str) -> str:
    check_identifier("user", text)
    if text in _RESERVED:
        raise ValueError(f"{text} is made in any case; use another name")
    return text


@dataclass(frozen=True, slots=True)
class AccountsSettings(Settings):
    heading = "Users"

    directory: Path = setting(
        Path("nats"), f"where {SERVER_FILE} and NAME.nk go", metavar="DIR", is_positional=True, is_top=True
    )
    agent: tuple[AgentUser, ...] = setting(
        (),
        "an agent by its worker id; NAME=ID+ID for a process with several workers; NAME=GROUP.* for all "
        "agents of a group",
        metavar="ID|NAME=ID[+ID…]",
        read=_read_agent,
        is_repeated=True,
        is_top=True,
    )
    tool: tuple[str, ...] = setting(
        (), "a user that only reads", metavar="NAME", read=_read_name, is_repeated=True, is_top=True
    )
    caller: tuple[str, ...] = setting(
        (),
        "a user that calls `kvrouter router` over NATS",
        metavar="NAME",
        read=_read_name,
        is_repeated=True,
        is_top=True,
    )
    namespace: str = setting("default", "the namespace of frontends and agents", metavar="NAME", is_top=True)

    def checked(self) -> Self:
        check_identifier("namespace", self.namespace)
        names = [*(agent.name for agent in self.agent), *self.tool, *self.caller]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"two users are named {twice[0]!r}")
        return self


COMMAND = Command(
    "nats-accounts",
    AccountsSettings,
    f"Write DIR/{SERVER_FILE} for nats-server, and DIR/NAME.nk for --nats-nkey of each process. Users\n"
    "frontend, verify and leaf are always made. Seeds that are in DIR already are kept, so run it again\n"
    "with more agents.\n"
    "The same: kvrouter nats accounts.",
)


def rights_of(settings: AccountsSettings) -> Iterator[tuple[str, NatsRights]]:
    """Each user's name and rights."""
    subjects = Subjects(settings.namespace)
    yield FRONTEND, frontend_rights(subjects)
    yield VERIFY, verify_rights(subjects)
    yield LEAF, leaf_rights(subjects)
    for agent in settings.agent:
        yield agent.name, agent_rights(subjects, agent.worker_ids)
    for tool in settings.tool:
        yield tool, tool_rights(subjects)
    for caller in settings.caller:
        yield caller, caller_rights(subjects, caller)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files; returns the exit code."""
    return run(COMMAND, arguments, _main)


def _main(loaded: Loaded[AccountsSettings]) -> int:
    directory, rights = loaded.settings.directory, dict(rights_of(loaded.settings))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        public_keys = {name: public_key(directory / f"{name}.nk") for name in rights}
        (directory / SERVER_FILE).write_text(server_file(rights, public_keys))
    except OSError as error:
        print(f"kvrouter nats-accounts: {error}", file=sys.stderr)  # noqa: T201
        return 1
    print(f"{directory / SERVER_FILE}: {len(rights)} users of namespace {loaded.settings.namespace}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
