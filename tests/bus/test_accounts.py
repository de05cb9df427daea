"""`kvrouter nats-accounts` with a real nats-server: what each user can publish, and that a fleet works so."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import nats.errors
import pytest
from nats.aio.client import Client
from structlog.testing import capture_logs

from kvrouter.bus import Bus, NatsOptions, accounts, outage
from kvrouter.core.fleet.replica import Replica
from kvrouter.core.wire.heartbeats import Card, RankBeat, WorkerBeat, encode
from kvrouter.core.wire.ids import WorkerId
from kvrouter.core.wire.ops import VERSION
from kvrouter.core.wire.senders import KvSource
from kvrouter.frontend.run import running_frontend
from kvrouter.frontend.settings import parse_options
from kvrouter.lab.mocker.config import MockerConfig
from kvrouter.lab.mocker.server import running_mocker
from kvrouter.worker.agent import serve as serve_agent
from kvrouter.worker.engines.facts import EngineFacts
from kvrouter.worker.engines.http import Models
from kvrouter.worker.engines.metrics import Scrape
from kvrouter.worker.options import AgentOptions
from kvrouter.worker.pool_choice import choose_pool
from kvrouter.worker.zmq.sockets import EventEndpoints
from tests.conftest import NatsServer
from tests.e2e.fleet import frontend_flags, until
from tests.frontend.clients import ask

NS = "guarded"
JSON = "content-type: application/json"
ROOT = f"kvrouter.{NS}"
# What w1 may not publish: cards, events, answers and bookings of others, hellos, requests, plain inboxes.
OF_OTHERS = [
    f"{ROOT}.live.worker.w2",
    f"{ROOT}.live.kv.tiny-1.w2.0",
    f"{ROOT}.answer.kv.w2.asker.1",
    f"{ROOT}.answer.sync.r1.asker.1",
    f"{ROOT}.live.router.r1",
    f"{ROOT}.live.sync.tiny-1.r1",
    f"{ROOT}.hello",
    f"{ROOT}.kv-replay.w2",
    f"{ROOT}.sync-replay.r1",
    "kvrouter.other.live.worker.w1",
    "_INBOX.any.1",
]
# Each agent's user, with its worker id.
AGENTS = {"w1": "w1", "pool": "gpus.w1"}


def own(worker_id: str) -> list[str]:
    return [f"{ROOT}.live.worker.{worker_id}", f"{ROOT}.live.kv.tiny-1.{worker_id}.0", end(worker_id, "1")]


def end(worker_id: str, token: str = "end") -> str:
    return f"{ROOT}.answer.kv.{worker_id}.asker.{token}"


@pytest.fixture
def users(tmp_path: Path) -> Path:
    """The directory of the seeds of w1, w2, the group gpus, and a tool."""
    words = [str(tmp_path), "--namespace", NS, "--agent", "w1", "--agent", "w2", "--tool", "reader"]
    words += ["--agent", "pool=gpus.*"]
    assert 0 == accounts.main(words)
    return tmp_path


@pytest.fixture
def server(users: Path, new_nats_server: Callable[..., NatsServer]) -> NatsServer:
    """A server with these users, and one of the tests that may do everything."""
    file = users / "accounts.conf"
    control = '      { user: control, password: "x" }\n    ]'
    file.write_text(file.read_text().replace("    ]", control))
    running = new_nats_server(file)
    running.start()
    return running


class Wire:
    """A client that counts what the server refuses, and one that receives everything."""

    def __init__(self, client: Client, control: Client, refused: list[str]) -> None:
        self.client, self.control, self.refused = client, control, refused
        self.received: list[str] = []

    async def watch(self) -> None:
        async def take(message: object) -> None:
            self.received.append(message.subject)  # type: ignore[attr-defined]

        await self.control.subscribe(">", cb=take)
        await self.publish(self.control, marker="ready")

    async def publish(self, client: Client, *subjects: str, marker: str) -> list[str]:
        """What arrives of these, in order, before the marker, which the user may publish."""
        # not flush(): nats-py (2.16) sends its PING before what it has queued
        self.received.clear()
        for subject in (*subjects, marker):
            await client.publish(subject, b"forged")
        await until(lambda: marker in self.received)
        return self.received[: self.received.index(marker)]


@contextlib.asynccontextmanager
async def wire(server: NatsServer, seed: Path) -> AsyncIterator[Wire]:
    """Connect as this user, next to the control."""
    refused: list[str] = []

    async def note(error: Exception) -> None:
        refused.append(str(error))

    client, control = Client(), Client()
    await client.connect(server.url, nkeys_seed=str(seed), error_cb=note, allow_reconnect=False)
    await control.connect(server.url, user="control", password="x")
    try:
        made = Wire(client, control, refused)
        await made.watch()
        yield made
    finally:
        await client.close()
        await control.close()


@pytest.mark.parametrize("user", AGENTS)
async def test_an_agent_publishes_only_its_own(server: NatsServer, users: Path, user: str) -> None:
    """Its own subjects arrive and no other; the control shows that the others would arrive."""
    worker_id, others = AGENTS[user], OF_OTHERS + own("others.w1")
    others += [subject for each in AGENTS.values() if each != AGENTS[user] for subject in own(each)]
    async with wire(server, users / f"{user}.nk") as one:
        sent = [*others, *own(worker_id)]
        assert own(worker_id) == await one.publish(one.client, *sent, marker=end(worker_id))
        await until(lambda: len(one.refused) == len(others))

        assert others == await one.publish(one.control, *others, marker="end")


async def test_an_answer_opens_no_other_subject(server: NatsServer, users: Path) -> None:
    """An agent that asks itself for an answer on another's subject may not publish there.

    With `allow_responses` in its rights it could.
    """
    async with wire(server, users / "w1.nk") as one:
        asked = asyncio.Event()

        async def take(_message: object) -> None:
            asked.set()

        await one.client.subscribe(own("w1")[0], cb=take)
        await one.client.publish(own("w1")[0], b"", reply=OF_OTHERS[0])
        await asyncio.wait_for(asked.wait(), 10)

        assert OF_OTHERS[0] not in await one.publish(one.client, OF_OTHERS[0], marker=end("w1"))
        assert len(one.refused) == 1


async def test_a_tool_publishes_nothing(server: NatsServer, users: Path) -> None:
    """It receives heartbeats and events, and may send nothing at all."""
    async with wire(server, users / "reader.nk") as one:
        heard = asyncio.Event()

        async def take(_message: object) -> None:
            heard.set()

        await one.client.subscribe(f"{ROOT}.live.>", cb=take)
        await one.client.flush()
        for subject in (*own("w1"), *OF_OTHERS):
            await one.client.publish(subject, b"forged")
        await until(lambda: len(one.refused) == len(own("w1")) + len(OF_OTHERS))

        assert [] == await one.publish(one.control, marker=own("w1")[0])
        await asyncio.wait_for(heard.wait(), 10)


def test_again_with_more_agents(users: Path) -> None:
    """Users keep their seeds, which only their owner can read; the file has the new user, too."""
    seed, file = (users / "w1.nk").read_bytes(), (users / "accounts.conf").read_text()

    assert 0 == accounts.main([str(users), "--namespace", NS, "--agent", "w1", "--agent", "gpu=w8+w9"])

    assert seed == (users / "w1.nk").read_bytes()
    assert 0o600 == stat.S_IMODE(os.stat(users / "gpu.nk").st_mode)
    added = (users / "accounts.conf").read_text()
    assert next(line for line in file.splitlines() if ".w1" in line) in added
    assert "live.worker.w8" in added
    assert "live.worker.w9" in added
    assert "w2" not in added


@pytest.mark.parametrize(
    ("agent", "reason"),
    [
        ("vllm.*", "NAME=vllm.*"),
        ("vllm.0", "NAME=vllm.0"),
        ("vllm=*", "worker id '*'"),
        ("vllm=.*", "group ''"),
        ("vllm=*.*", "group '*'"),
        ("vllm=a.b.*", "group 'a.b'"),
        ("vllm=vllm-*", "worker id 'vllm-*'"),
        ("vllm=vllm-0..49", "GROUP.NAME"),
    ],
)
def test_a_group_that_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], agent: str, reason: str
) -> None:
    """The message says what is wrong; no file is written."""
    assert 2 == accounts.main([str(tmp_path / "users"), "--agent", agent])

    assert reason in capsys.readouterr().err
    assert not (tmp_path / "users").exists()


def test_a_damaged_seed(users: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is named, and the server's file stays as it is."""
    before = (users / "accounts.conf").read_text()
    (users / "w1.nk").write_text("no seed")

    assert 1 == accounts.main([str(users), "--namespace", NS, "--agent", "w1"])

    assert "w1.nk: it has no nkey seed; remove it" in capsys.readouterr().err
    assert before == (users / "accounts.conf").read_text()


@contextlib.asynccontextmanager
async def fleet(url: str, users: Path, user: str) -> AsyncIterator[Callable[[], Awaitable[Replica]]]:
    """An agent of this user whose engine has six blocks; starts replicas that ask it for them."""
    config = MockerConfig(model_name="tiny", speedup=20.0)
    options, worker_id = NatsOptions((url,), nkey_file=users / f"{user}.nk"), AGENTS[user]
    flags = [*frontend_flags(url, NS, None), "--nats-nkey", str(users / "frontend.nk")]
    body = {"model": "tiny", "prompt": list(range(100, 200)), "max_tokens": 2}
    async with contextlib.AsyncExitStack() as stack:
        mocker = await stack.enter_async_context(running_mocker(config))
        endpoints = [EventEndpoints(mocker.kv_events, mocker.kv_replay)]
        agent = AgentOptions(mocker.url, worker_id, nats=options, namespace=NS, endpoints=endpoints)
        stop = asyncio.Event()
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        stack.callback(stop.set)
        tasks.create_task(serve_agent(agent, stop))
        first = await stack.enter_async_context(running_frontend(parse_options(flags)))
        await until(lambda: any(router.pool.targets for router in first.replica.routers.values()))
        assert 200 == (await ask(first.url, body, JSON, path="/v1/completions")).status

        async def late() -> Replica:
            made = await stack.enter_async_context(running_frontend(parse_options(flags)))
            await until(lambda: bool(made.replica.routers) and held(made.replica) == 6)
            return made.replica

        yield late


@pytest.mark.parametrize("user", AGENTS)
async def test_fleet_with_rights(server: NatsServer, users: Path, user: str) -> None:
    """Cards, events, bookings and replays pass; another agent's key changes neither card nor index."""
    worker_id = AGENTS[user]
    async with fleet(server.url, users, user) as late_replica:
        late = await late_replica()
        before = card_of(late, worker_id)

        async with wire(server, users / "w2.nk") as forger:
            forged = Card(worker_id=worker_id, model="tiny", url="http://127.0.0.1:9", block_size=16)
            beat = WorkerBeat(VERSION, 2**60, "up", before[1], [RankBeat(0, 2**60, 9)], 99, forged)
            await forger.client.publish(f"{ROOT}.live.worker.{worker_id}", encode(beat))
            await forger.client.publish(f"{ROOT}.live.kv.{before[1]}.{worker_id}.0", b"forged")
            await until(lambda: len(forger.refused) == 2)

        assert before == card_of(late, worker_id)
        assert 6 == held(late)
        for text in forger.refused:
            assert "permissions violation" in text
            away = outage.Outage("nats://here")
            away.failed(nats.errors.Error(text))
            assert outage.OTHER_WORKER == away.remedy


def without_groups(file: Path) -> None:
    """Write the rights as versions without groups did."""
    text = file.read_text()
    for now, before in (
        (f"{ROOT}.live.worker.>", f"{ROOT}.live.worker.*"),
        (f"{ROOT}.kv-replay.>", f"{ROOT}.kv-replay.*"),
        (f', "{ROOT}.answer.kv.*.*.*.*"', ""),
    ):
        assert now in text
        text = text.replace(now, before)
    file.write_text(text)


async def test_users_of_a_version_without_groups(
    users: Path, new_nats_server: Callable[..., NatsServer]
) -> None:
    """What such a version wrote is enough for workers without a group: nothing is refused."""
    without_groups(users / "accounts.conf")
    old = new_nats_server(users / "accounts.conf")
    old.start()
    with capture_logs() as logs:
        async with fleet(old.url, users, "w1") as late_replica:
            await late_replica()

    assert [] == [entry for entry in logs if "permissions" in str(entry.get("error"))]


async def test_agent_without_the_latest_right(
    users: Path, new_nats_server: Callable[..., NatsServer]
) -> None:
    """In a file of a version before, agents may not read cards: one of several names takes the first."""
    file = users / "accounts.conf"
    written, others = file.read_text(), f', "{ROOT}.live.worker.>"'
    assert others in written
    file.write_text(written.replace(others, ""))
    old = new_nats_server(file)
    old.start()
    nats = NatsOptions((old.url,), nkey_file=users / "w1.nk")
    options = AgentOptions("http://127.0.0.1:9", "w1", nats, NS)
    facts = EngineFacts(Models(("k-v2", "k"), ()), "0.33.0", Scrape())

    with capture_logs() as logs:
        async with Bus.open(nats, name="w1") as bus, bus.part() as part:
            assert await choose_pool(options, part, facts, asyncio.Event()) is None

    warnings = [entry for entry in logs if entry["log_level"] == "warning"]
    assert [True, True] == ["live.worker.*" in warning["error"] for warning in warnings]
    assert all("kvrouter nats accounts" in warning["remedy"] for warning in warnings)


def held(replica: Replica) -> int:
    """The blocks in its index."""
    (router,) = replica.routers.values()
    sources = [source for source in replica.readers if isinstance(source, KvSource)]
    return sum(router.pool.index.digest(source.target)[0] for source in sources)


def card_of(replica: Replica, worker_id: str) -> tuple[str, str]:
    """The URL of this worker, and its pool."""
    ((pool, router),) = replica.routers.items()
    return router.pool.workers[WorkerId(worker_id)].card.url, pool
