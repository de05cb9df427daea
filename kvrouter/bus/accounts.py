"""`kvrouter nats accounts`: users of NATS with the rights that their part needs, and no others.

A user is an nkey: the server's file has the public half, and DIR/NAME.nk the seed, for `--nats-nkey`.

    user       publishes                                          subscribes
    agent W    live.worker.W  live.kv.*.W.*  answer.kv.W.>        hello  live.worker.*  kv-replay.W
    frontend   live.router.*  live.sync.>  answer.sync.>  hello   live.>  hello  sync-replay.*  answer.>
               kv-replay.*  sync-replay.*
    verify     hello  kv-replay.*                                 live.>  answer.>
    a tool     nothing                                            live.>
    leaf       the whole namespace: a leaf node passes on what its own users may

Replicas trust each other: one user for all, with random router ids.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import nkeys  # type: ignore[import-untyped]

from kvrouter.bus.subjects import Subjects
from kvrouter.core.wire.ids import PoolId, RouterId, WorkerId, check_identifier
from kvrouter.errors import ConfigError
from kvrouter.settings.declare import Command, Settings, setting
from kvrouter.settings.read import Loaded, run

SERVER_FILE = "accounts.conf"
ACCOUNT = "KVROUTER"
FRONTEND, VERIFY, LEAF = "frontend", "verify", "leaf"
_RESERVED = (FRONTEND, VERIFY, LEAF)


@dataclass(frozen=True, slots=True)
class Agent:
    """A user that announces these workers: an agent, or a process with several."""

    name: str
    worker_ids: tuple[WorkerId, ...]

    def __str__(self) -> str:
        return f"{self.name}={'+'.join(self.worker_ids)}"


def _read_agent(text: str) -> Agent:
    name, _, ids = text.partition("=")
    worker_ids = tuple(WorkerId(part) for part in (ids or name).split("+"))
    for worker_id in worker_ids:
        check_identifier("worker id", worker_id)
    return Agent(_read_name(name), worker_ids)


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
    agent: tuple[Agent, ...] = setting(
        (),
        "an agent by its worker id; NAME=ID+ID for a process with several workers",
        metavar="ID|NAME=ID[+ID…]",
        read=_read_agent,
        is_repeated=True,
        is_top=True,
    )
    tool: tuple[str, ...] = setting(
        (), "a user that only reads", metavar="NAME", read=_read_name, is_repeated=True, is_top=True
    )
    namespace: str = setting("default", "the namespace of frontends and agents", metavar="NAME", is_top=True)

    def checked(self) -> Self:
        check_identifier("namespace", self.namespace)
        names = [*(agent.name for agent in self.agent), *self.tool]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"two users are named {twice[0]!r}")
        return self


COMMAND = Command(
    "nats-accounts",
    AccountsSettings,
    f"Write DIR/{SERVER_FILE} for nats-server, and DIR/NAME.nk for --nats-nkey of each process: an agent\n"
    "may publish in the name of its own workers only, a tool nothing. Users frontend, verify and leaf are\n"
    "always made. Seeds that are in DIR already are kept, so run it again with more agents.\n"
    "The same: kvrouter nats accounts.",
)


@dataclass(frozen=True, slots=True)
class Rights:
    """The subjects that a user may publish and subscribe."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]

    def __str__(self) -> str:
        publish = f"allow: {_listed(self.publish)}" if self.publish else 'deny: ">"'
        return f"{{ publish: {{ {publish} }}, subscribe: {{ allow: {_listed(self.subscribe)} }} }}"


def _listed(subjects: Sequence[str]) -> str:
    return json.dumps(list(subjects))


def agent_rights(subjects: Subjects, worker_ids: Sequence[WorkerId]) -> Rights:
    """No `allow_responses`: see kvrouter/bus/subjects.py."""
    publish, subscribe = [], [subjects.hello]
    for worker_id in worker_ids:
        publish += [subjects.live_worker(worker_id), subjects.live_kv(PoolId("*"), worker_id, "*")]
        publish.append(subjects.kv_answer(worker_id, "*", "*"))
        subscribe.append(subjects.kv_replay(worker_id))
    return Rights(tuple(publish), (*subscribe, subjects.live_worker(WorkerId("*"))))


def frontend_rights(subjects: Subjects) -> Rights:
    every_worker, every_router = WorkerId("*"), RouterId("*")
    requests = (subjects.kv_replay(every_worker), subjects.sync_replay(every_router))
    own = (subjects.live_router(every_router), subjects.live_sync(PoolId("*"), every_router))
    answers = subjects.sync_answer(every_router, "*", "*")
    received = (subjects.live, subjects.hello, subjects.sync_replay(every_router), subjects.answers("*"))
    return Rights((*own, subjects.hello, *requests, answers), received)


def verify_rights(subjects: Subjects) -> Rights:
    every = WorkerId("*")
    return Rights(
        (subjects.hello, subjects.kv_replay(every)),
        (subjects.live, subjects.answers("*")),
    )


def tool_rights(subjects: Subjects) -> Rights:
    return Rights((), (subjects.live,))


def leaf_rights(subjects: Subjects) -> Rights:
    return Rights((subjects.everything,), (subjects.everything,))


def rights_of(settings: AccountsSettings) -> Iterator[tuple[str, Rights]]:
    """Each user's name and rights."""
    subjects = Subjects(settings.namespace)
    yield FRONTEND, frontend_rights(subjects)
    yield VERIFY, verify_rights(subjects)
    yield LEAF, leaf_rights(subjects)
    for agent in settings.agent:
        yield agent.name, agent_rights(subjects, agent.worker_ids)
    for tool in settings.tool:
        yield tool, tool_rights(subjects)


def server_file(rights: Mapping[str, Rights], public_keys: Mapping[str, str]) -> str:
    """What nats-server includes."""
    users = "".join(
        f"      # {name}\n      {{ nkey: {public_keys[name]}, permissions: {each} }}\n"
        for name, each in rights.items()
    )
    return (
        "# Written by `kvrouter nats accounts`; nats-server reads it again on SIGHUP.\n"
        f"accounts {{\n  {ACCOUNT} {{\n    users = [\n{users}    ]\n  }}\n}}\n"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files; returns the exit code."""
    return run(COMMAND, arguments, _main)


def _main(loaded: Loaded[AccountsSettings]) -> int:
    directory, rights = loaded.settings.directory, dict(rights_of(loaded.settings))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        public_keys = {name: _public_key(directory / f"{name}.nk") for name in rights}
        (directory / SERVER_FILE).write_text(server_file(rights, public_keys))
    except OSError as error:
        print(f"kvrouter nats-accounts: {error}", file=sys.stderr)  # noqa: T201
        return 1
    print(f"{directory / SERVER_FILE}: {len(rights)} users of namespace {loaded.settings.namespace}")  # noqa: T201
    return 0


def _public_key(file: Path) -> str:
    """Of the seed in this file, which is made if it does not exist. Raises OSError."""
    if not file.exists():
        seed: bytes = nkeys.encode_seed(secrets.token_bytes(32), nkeys.PREFIX_BYTE_USER)
        with os.fdopen(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as made:
            made.write(seed + b"\n")
    try:
        pair = nkeys.from_seed(bytearray(file.read_bytes().strip()))
        return str(pair.public_key.decode()).rstrip("=")
    except Exception:  # nkeys raises many kinds
        raise OSError(f"{file}: it has no nkey seed; remove it, and a new one is made") from None


if __name__ == "__main__":
    sys.exit(main())
