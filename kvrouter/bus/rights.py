"""The rights of each user of NATS: what its part needs, and nothing else.

    user       publishes                                          subscribes
    agent W    live.worker.W  live.kv.*.W.*  answer.kv.W.*.*      hello  live.worker.>  kv-replay.W
    frontend   live.router.*  live.sync.>  answer.sync.>  hello   live.>  hello  sync-replay.*  answers
               kv-replay.>  sync-replay.*  placed.>               place  place.*
    verify     hello  kv-replay.>                                 live.>  answers
    a tool     nothing                                            live.>
    caller C   place  place.*                                     placed.C.>
    leaf       the whole namespace: a leaf node passes on what its own users may

W may be `GROUP.*`, for all agents of a group. NATS's `*` is one token, and a worker in a group has one token
more in its subjects than others. So no user of one kind may publish for the other.

A user is an nkey: the server's file has the public half, and NAME.nk the seed, for `--nats-nkey`. Replicas
trust each other: one user for all, with random router ids.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvrouter.bus.subjects import Subjects
from kvrouter.core.wire.ids import PoolId, RouterId, WorkerId

ACCOUNT = "KVROUTER"
FRONTEND, AGENT, VERIFY, TOOL, CALLER = "frontend", "agent", "verify", "tool", "caller"


@dataclass(frozen=True, slots=True)
class NatsRights:
    """The subjects that a user may publish and subscribe."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]

    def __str__(self) -> str:
        publish = f"allow: {_listed(self.publish)}" if self.publish else 'deny: ">"'
        return f"{{ publish: {{ {publish} }}, subscribe: {{ allow: {_listed(self.subscribe)} }} }}"


def _listed(subjects: Sequence[str]) -> str:
    return json.dumps(list(subjects))


def agent_rights(subjects: Subjects, worker_ids: Sequence[WorkerId]) -> NatsRights:
    """No `allow_responses`: see kvrouter/bus/subjects.py."""
    publish, subscribe = [], [subjects.hello]
    for worker_id in worker_ids:
        publish += [subjects.live_worker(worker_id), subjects.live_kv(PoolId("*"), worker_id, "*")]
        publish.append(subjects.kv_answer(worker_id, "*", "*"))
        subscribe.append(subjects.kv_replay(worker_id))
    return NatsRights(tuple(publish), (*subscribe, subjects.live_worker(WorkerId(">"))))


def frontend_rights(subjects: Subjects) -> NatsRights:
    every_router = RouterId("*")
    requests = (subjects.kv_replay(WorkerId(">")), subjects.sync_replay(every_router))
    own = (subjects.live_router(every_router), subjects.live_sync(PoolId("*"), every_router))
    answers = (subjects.sync_answer(every_router, "*", "*"), subjects.placed("*", ">"))
    received = (subjects.live, subjects.hello, subjects.sync_replay(every_router), *_answers(subjects))
    return NatsRights((*own, subjects.hello, *requests, *answers), (*received, *_calls(subjects)))


def caller_rights(subjects: Subjects, name: str) -> NatsRights:
    """Of a caller of placement. `name`: the same as in the subjects of its answers."""
    return NatsRights(_calls(subjects), (subjects.placed(name, ">"),))


def _calls(subjects: Subjects) -> tuple[str, str]:
    return subjects.place, subjects.place_at(RouterId("*"))


def _answers(subjects: Subjects) -> tuple[str, str]:
    return subjects.answers("*"), subjects.group_answers("*")


def verify_rights(subjects: Subjects) -> NatsRights:
    return NatsRights(
        (subjects.hello, subjects.kv_replay(WorkerId(">"))),
        (subjects.live, *_answers(subjects)),
    )


def tool_rights(subjects: Subjects) -> NatsRights:
    return NatsRights((), (subjects.live,))


def leaf_rights(subjects: Subjects) -> NatsRights:
    return NatsRights((subjects.everything,), (subjects.everything,))


def server_file(rights: Mapping[str, NatsRights], public_keys: Mapping[str, str]) -> str:
    """What nats-server includes."""
    users = "".join(
        f"      # {name}\n      {{ nkey: {public_keys[name]}, permissions: {each} }}\n"
        for name, each in rights.items()
    )
    return (
        "# Written by `kvrouter nats accounts`; nats-server reads it again on SIGHUP.\n"
        f"accounts {{\n  {ACCOUNT} {{\n    users = [\n{users}    ]\n  }}\n}}\n"
    )


def public_key(file: Path) -> str:
    """Of the seed in this file, which is made if it does not exist. Raises OSError.

    Of several processes that make it at once, the first one makes it, and no other reads half of it.
    """
    if not file.exists():
        _make_seed(file)
    try:
        return key_of(file.read_bytes())
    except ValueError:
        raise OSError(f"{file}: it has no nkey seed; remove it, and a new one is made") from None


def key_of(seed: bytes) -> str:
    """The public half, as nats-server's file has it. Raises ValueError if it is not a seed."""
    import nkeys  # type: ignore[import-untyped]  # late: most deployments have no seeds

    try:
        pair = nkeys.from_seed(bytearray(seed.strip()))
        return str(pair.public_key.decode()).rstrip("=")
    except Exception:  # nkeys raises many kinds
        raise ValueError("not an nkey seed") from None


def _make_seed(file: Path) -> None:
    import nkeys

    seed: bytes = nkeys.encode_seed(secrets.token_bytes(32), nkeys.PREFIX_BYTE_USER)
    whole = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    try:
        write_private(whole, seed + b"\n")
        with contextlib.suppress(FileExistsError):  # another process was first: its seed counts
            os.link(whole, file)
    finally:
        whole.unlink(missing_ok=True)


def write_private(file: Path, content: bytes) -> None:
    """Make a file that only its owner can read. Raises OSError, also if it exists."""
    with os.fdopen(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as made:
        made.write(content)
