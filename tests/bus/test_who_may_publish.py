"""Who may publish what on NATS: a row for each user, each subject, each message and each op.

The rows are complete by construction: a new subject, message or op without a row fails. A real nats-server
with the users of `kvrouter nats accounts`, and one with those of an embedded server, gets each message from
each user: it arrives, or the server refuses it. Nobody without a user gets in.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast, get_args

import pytest
from msgspec import Struct
from nats.aio.client import Client
from nats.errors import Error, NoServersError

from kvrouter.bus import Subjects, accounts, local_users
from kvrouter.bus.rights import AGENT, CALLER, FRONTEND, TOOL, VERIFY
from kvrouter.core.feeds.sinks import KvSink, SyncSink
from kvrouter.core.tables.block_index import BlockIndex
from kvrouter.core.tables.bookings import BookingTable
from kvrouter.core.tables.prefill_speeds import PrefillSpeeds
from kvrouter.core.tables.sessions import SessionTable
from kvrouter.core.wire import heartbeats, ops
from kvrouter.core.wire.ids import PoolId, RouterId, Target, WorkerId
from kvrouter.core.wire.ops import Op
from kvrouter.router import over_nats
from tests.conftest import NatsServer

NS = "guarded"
SUBJECTS = Subjects(NS)
W1, R1, POOL = WorkerId("w1"), RouterId("r1"), PoolId("tiny-1")
# In a group of the name of the worker above.
MEMBER = WorkerId("w1.w1")
LEAF, OTHER_AGENT, TOOL_USER, GATEWAY = "leaf", "w2", "reader", "gateway"
# All agents of the group w1, those of the group w2, and a process with a worker of each group.
GROUP, OTHER_GROUP, BOTH = "group", "others", "both"
MEMBERS = {GROUP, BOTH}
USERS = {FRONTEND, VERIFY, LEAF, str(W1), OTHER_AGENT, OTHER_GROUP, TOOL_USER, GATEWAY} | MEMBERS
# On an embedded server all agents share a user, see kvrouter/bus/local_users.py; there is no leaf.
LOCAL_USERS = {FRONTEND, AGENT, VERIFY, TOOL, CALLER}

# Who may publish on each subject of the worker w1 and the replica r1. GROUP_ROWS: of the worker MEMBER.
ROWS: dict[str, tuple[str, set[str]]] = {
    "hello": (SUBJECTS.hello, {FRONTEND, VERIFY, LEAF}),
    "live_worker": (SUBJECTS.live_worker(W1), {LEAF, str(W1)}),
    "live_kv": (SUBJECTS.live_kv(POOL, W1, 0), {LEAF, str(W1)}),
    "live_router": (SUBJECTS.live_router(R1), {FRONTEND, LEAF}),
    "live_sync": (SUBJECTS.live_sync(POOL, R1), {FRONTEND, LEAF}),
    "kv_replay": (SUBJECTS.kv_replay(W1), {FRONTEND, VERIFY, LEAF}),
    "sync_replay": (SUBJECTS.sync_replay(R1), {FRONTEND, LEAF}),
    "kv_answer": (SUBJECTS.kv_answer(W1, "asker", "1"), {LEAF, str(W1)}),
    "sync_answer": (SUBJECTS.sync_answer(R1, "asker", "1"), {FRONTEND, LEAF}),
    "place": (SUBJECTS.place, {GATEWAY, LEAF}),
    "place_at": (SUBJECTS.place_at(R1), {GATEWAY, LEAF}),
    "placed": (SUBJECTS.placed(GATEWAY, "1"), {FRONTEND, LEAF}),
}
GROUP_ROWS: dict[str, tuple[str, set[str]]] = {
    "live_worker": (SUBJECTS.live_worker(MEMBER), {LEAF} | MEMBERS),
    "live_kv": (SUBJECTS.live_kv(POOL, MEMBER, 0), {LEAF} | MEMBERS),
    "kv_replay": (SUBJECTS.kv_replay(MEMBER), {FRONTEND, VERIFY, LEAF}),
    "kv_answer": (SUBJECTS.kv_answer(MEMBER, "asker", "1"), {LEAF} | MEMBERS),
}
# Members of Subjects that name no further subject: wildcards to subscribe, and choices among the rows above.
NO_SUBJECT = {
    "namespace", "of_every_namespace", "parse_live", "live", "everything", "answers", "group_answers",
    "replay", "answer", "caller",
}  # fmt: skip
# What is nobody's to publish but the leaf's: outside the namespace not even its.
OUTSIDE = ["kvrouter.other.live.worker.w1", "_INBOX.any.1", "kvrouter", "$SYS.REQ.SERVER.PING"]

KV, SYNC = ("live_kv", "kv_answer"), ("live_sync", "sync_answer")
# Which subjects carry each op. Only the sink of that feed obeys it: see test_no_other_feed_obeys.
OPS: dict[type[Op], tuple[str, ...]] = {
    ops.Stored: KV,
    ops.Removed: KV,
    ops.Cleared: KV,
    ops.Resumable: KV,
    ops.NotResumable: KV,
    ops.CheckResumable: KV,
    ops.Check: KV + SYNC,
    ops.AddRequest: SYNC,
    ops.MarkPrefillCompleted: SYNC,
    ops.Free: SYNC,
    ops.Progress: SYNC,
    ops.Bind: SYNC,
    ops.ApproxEntry: SYNC,
    ops.SentText: SYNC,
    ops.TenantUse: SYNC,
    ops.LostWith: SYNC,
    ops.DeadlyPrompt: SYNC,
    ops.Pardon: SYNC,
    ops.FirstByte: SYNC,
    ops.PrefillSpeed: SYNC,
}
# Which subjects carry each message; None: it is a part of another one.
MESSAGES: dict[type[Struct], tuple[str, ...] | None] = {
    heartbeats.WorkerBeat: ("live_worker",),
    heartbeats.RouterBeat: ("live_router",),
    heartbeats.Hello: ("hello",),
    over_nats.Call: ("place", "place_at"),
    over_nats.CallReply: ("placed",),
    ops.Frame: ("live_kv", "live_sync"),
    ops.ReplayRequest: ("kv_replay", "sync_replay"),
    ops.ReplayFrames: ("kv_answer", "sync_answer"),
    ops.SnapshotChunk: ("kv_answer", "sync_answer"),
    ops.PartialChunk: None,  # as it is read, with the ops of unknown codes left out
    ops.Decoded: None,  # as a frame is read
    heartbeats.Card: None,
    heartbeats.RankBeat: None,
    heartbeats.RoutingChange: None,
    heartbeats.Heard: None,
    heartbeats.Times: None,
    heartbeats.Traffic: None,
}
HASHES = (7).to_bytes(8, "little")
SAMPLES: dict[type[Op], Op] = {
    ops.Stored: ops.Stored(0, None, HASHES),
    ops.Removed: ops.Removed(0, HASHES),
    ops.Cleared: ops.Cleared(),
    ops.Resumable: ops.Resumable(HASHES),
    ops.NotResumable: ops.NotResumable(HASHES),
    ops.CheckResumable: ops.CheckResumable(1, 7),
    ops.Check: ops.Check(1, 7),
    ops.AddRequest: ops.AddRequest(1, "request", W1, 0, HASHES, 16, 0, 16),
    ops.MarkPrefillCompleted: ops.MarkPrefillCompleted(1),
    ops.Free: ops.Free(1),
    ops.Progress: ops.Progress(1, 2),
    ops.Bind: ops.Bind("session", W1, 0, 1000),
    ops.ApproxEntry: ops.ApproxEntry(W1, 0, HASHES, 1000),
    ops.SentText: ops.SentText(W1, 0, "text"),
    ops.TenantUse: ops.TenantUse("tenant", 1000, 1, 100),
    ops.LostWith: ops.LostWith(bytes(16), W1, 2, 1),
    ops.DeadlyPrompt: ops.DeadlyPrompt(bytes(16), [W1], 1000),
    ops.Pardon: ops.Pardon(bytes(16), 1000),
    ops.FirstByte: ops.FirstByte(1, 1000),
    ops.PrefillSpeed: ops.PrefillSpeed(1, 1, 0, 1),
}


def test_every_subject_has_a_row() -> None:
    """A new subject needs a row in ROWS, or a place in NO_SUBJECT."""
    members = {name for name in {*dir(Subjects), *vars(SUBJECTS)} if not name.startswith("_")}

    assert {*ROWS} | NO_SUBJECT == members
    assert all(users <= USERS for rows in (ROWS, GROUP_ROWS) for _, users in rows.values())
    assert {name for name, (subject, _) in ROWS.items() if W1 in subject.split(".")} == {*GROUP_ROWS}


def test_every_op_has_a_row() -> None:
    """A new op needs a row in OPS and a sample."""
    assert {*get_args(Op)} == {*OPS} == {*SAMPLES}
    assert all({*carriers} <= {*ROWS} for carriers in OPS.values())


def test_every_message_has_a_row() -> None:
    """A new message needs a row in MESSAGES."""
    found = {
        one
        for module in (heartbeats, ops, over_nats)
        for name, one in inspect.getmembers(module, inspect.isclass)
        if issubclass(one, Struct) and one.__module__ == module.__name__ and not name.startswith("_")
    }

    assert {*MESSAGES} == found - {*OPS}
    carried = {subject for carriers in MESSAGES.values() for subject in carriers or ()}
    assert {*ROWS} == carried


class Untouched:
    """A table that nothing may read or change, but for the begin of a snapshot."""

    def begin_load(self, *_: object) -> Untouched:
        return self

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was used")


def _untouched(*_: object) -> None:
    raise AssertionError("it was called")


@pytest.mark.parametrize("op", SAMPLES.values(), ids=lambda op: type(op).__name__)
def test_no_other_feed_obeys(op: Op) -> None:
    """An op on the feed of the other kind changes nothing there: whoever may publish one, has not both."""
    table = Untouched()
    kv = KvSink(cast(BlockIndex, table), Target(W1, 0), 1, {})
    sync = SyncSink(
        cast(BookingTable, table), R1, booked=_untouched, prefill_completed=_untouched, assume=_untouched,
        sessions=cast(SessionTable, table), learn=_untouched, speeds=cast(PrefillSpeeds, table),
        hear_of_prompt=_untouched,
    )  # fmt: skip
    kv.begin_load()
    carriers = OPS[type(op)]
    if "live_kv" not in carriers:
        assert "" == kv.apply(op, 0.0)
        assert "" == kv.load(op, 0.0)
    if "live_sync" not in carriers:
        assert "" == sync.apply(op, 0.0)
        assert "" == sync.load(op, 0.0)


def subjects_of(carriers: tuple[str, ...]) -> list[str]:
    """Subjects of the worker w1 or the replica r1, and subjects of the worker in a group."""
    return [rows[name][0] for rows in (ROWS, GROUP_ROWS) for name in carriers if name in rows]


def published() -> list[tuple[str, bytes]]:
    """A subject and a payload for each row of each table, and for what is outside of them."""
    found = [(SUBJECTS.hello, b"")]
    for message, carriers in MESSAGES.items():
        found += [(subject, message.__name__.encode()) for subject in subjects_of(carriers or ())]
    for kind, carriers in OPS.items():
        frame = ops.encode(ops.Frame(ops.VERSION, 1, 1, [SAMPLES[kind]]))
        found += [(subject, frame) for subject in subjects_of(carriers)]
    return found + [(subject, b"outside") for subject in OUTSIDE]


class Trial:
    """One user's connection, and one of the tests that hears everything."""

    def __init__(self) -> None:
        self.arrived: list[tuple[str, bytes]] = []
        self.refused = 0
        self._changed = asyncio.Event()

    async def take(self, message: Any) -> None:
        self.arrived.append((message.subject, message.data))
        self._changed.set()

    async def refuse(self, error: Exception) -> None:
        assert "permissions violation for publish" in str(error).lower(), error
        self.refused += 1
        self._changed.set()

    async def publish(self, client: Client, messages: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
        """Which of these arrive; all others were refused."""
        for subject, payload in messages:
            await client.publish(subject, payload)
        async with asyncio.timeout(20):
            while len(self.arrived) + self.refused < len(messages):
                self._changed.clear()
                await self._changed.wait()
        return self.arrived


@contextlib.asynccontextmanager
async def trial(server: NatsServer, seed: Path) -> AsyncIterator[tuple[Trial, Client]]:
    """Connect as this user, next to one that hears everything."""
    made, client, control = Trial(), Client(), Client()
    await control.connect(server.url, user="control", password="x")
    try:
        await control.subscribe(">", cb=made.take)
        await control.flush()
        await client.connect(server.url, nkeys_seed=str(seed), error_cb=made.refuse, allow_reconnect=False)
        yield made, client
    finally:
        await client.close()
        await control.close()


def with_control(file: Path, new: Callable[..., NatsServer]) -> NatsServer:
    """A server with these users, and one of the tests that may do everything."""
    text = file.read_text()
    assert "    ]" in text
    file.write_text(text.replace("    ]", '      { user: control, password: "x" }\n    ]'))
    server = new(file)
    server.start()
    return server


@pytest.fixture
def server(tmp_path: Path, new_nats_server: Callable[..., NatsServer]) -> NatsServer:
    """With the users of `kvrouter nats accounts`: agents w1 and w2, agents of two groups, and a tool."""
    words = ["--namespace", NS, "--agent", W1, "--agent", OTHER_AGENT, "--tool", TOOL_USER]
    words += ["--caller", GATEWAY]
    words += [
        "--agent",
        f"{GROUP}={W1}.*",
        "--agent",
        f"{OTHER_GROUP}=w2.*",
        "--agent",
        f"{BOTH}={MEMBER}+w2.w2",
    ]
    assert 0 == accounts.main([str(tmp_path), *words])
    assert USERS == {file.stem for file in tmp_path.glob("*.nk")}
    return with_control(tmp_path / "accounts.conf", new_nats_server)


@pytest.fixture
def local(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_nats_server: Callable[..., NatsServer]
) -> tuple[NatsServer, Path]:
    """With the users of an embedded server, and their directory."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    file = local_users.make(4222)
    assert LOCAL_USERS == {seed.stem for seed in file.parent.glob("*.nk")}
    return with_control(file, new_nats_server), file.parent


def allowed(user: str) -> set[str]:
    return {subject for subject, users in [*ROWS.values(), *GROUP_ROWS.values()] if user in users}


@pytest.mark.parametrize("user", sorted(USERS))
async def test_who_may_publish(server: NatsServer, tmp_path: Path, user: str) -> None:
    """Each user's messages arrive on the subjects of its rows, and the server refuses all others."""
    messages = published()
    async with trial(server, tmp_path / f"{user}.nk") as (made, client):
        arrived = await made.publish(client, messages)

    assert [one for one in messages if one[0] in allowed(user)] == arrived


@pytest.mark.parametrize("user", sorted(LOCAL_USERS))
async def test_who_may_publish_on_an_embedded_server(local: tuple[NatsServer, Path], user: str) -> None:
    """The same parts have the same rights, in every namespace; its agents are of any worker."""
    server, directory = local
    messages = published()
    same = allowed({AGENT: str(W1), TOOL: TOOL_USER, CALLER: GATEWAY}.get(user, user))
    if user == AGENT:
        same |= allowed(GROUP) | {"kvrouter.other.live.worker.w1"}
    async with trial(server, directory / f"{user}.nk") as (made, client):
        arrived = await made.publish(client, messages)

    assert [one for one in messages if one[0] in same] == arrived


@pytest.mark.parametrize("claim", [{}, {"user": "frontend", "password": "frontend"}, {"token": "frontend"}])
async def test_nobody_without_a_user(
    server: NatsServer, local: tuple[NatsServer, Path], claim: dict[str, Any]
) -> None:
    """Who has no seed is not let in at all: no message of it can arrive."""
    for one in (server, local[0]):
        client = Client()
        with pytest.raises((Error, NoServersError)):
            await client.connect(one.url, **claim, allow_reconnect=False, connect_timeout=5)
        await client.close()


async def test_seed_of_another_server(server: NatsServer, local: tuple[NatsServer, Path]) -> None:
    """A user of one server is unknown on another one."""
    client = Client()
    with pytest.raises((Error, NoServersError)):
        await client.connect(
            server.url, nkeys_seed=str(local[1] / "frontend.nk"), allow_reconnect=False, connect_timeout=5
        )
    await client.close()
