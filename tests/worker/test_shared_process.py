"""One process with the agents of several engines, which all connect to one bound endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvrouter.core.wire.hashes import block_hashes, sequence_hashes
from kvrouter.core.wire.heartbeats import Card, WorkerBeat
from kvrouter.core.wire.ops import VERSION
from kvrouter.long_wait import LongWait
from kvrouter.worker.announcer import Announcer
from kvrouter.worker.drain import Duty
from kvrouter.worker.engines_file import EngineList
from kvrouter.worker.options import AgentOptions
from kvrouter.worker.shared_process import serve_all
from kvrouter.worker.zmq.sockets import EventEndpoints
from tests.worker.connecting_engine import Connecting
from tests.worker.fake_engine import EngineServer, pack, store
from tests.worker.listener import Listener

A, B = sequence_hashes(block_hashes([1, 1, 2, 2], 2))
_namespaces = itertools.count()


@dataclass
class Scene:
    """Two engines of one model, and a listener to the agent of each."""

    servers: list[EngineServer]
    listeners: list[Listener]
    port: int
    namespace: str
    nats_url: str

    def engines(self) -> EngineList:
        """Both engines, as a file would list them."""
        endpoint = f"tcp://*:{self.port}"
        topics = ("kv@a@tiny", "kv@b@tiny")
        agents = [
            AgentOptions(
                server.url, worker_id, self.nats_url, self.namespace, [EventEndpoints(endpoint, topic=topic)],
                heartbeat_s=0.05, probe_s=0.02, flush_s=0.001,
            )
            for server, worker_id, topic in zip(self.servers, "ab", topics, strict=True)
        ]  # fmt: skip
        return EngineList(agents, {endpoint: topics}, "kv@")

    @contextlib.asynccontextmanager
    async def publishers(self) -> AsyncIterator[list[Connecting]]:
        """The engines' event sockets, once they have a subscriber."""
        async with contextlib.AsyncExitStack() as stack:
            topics = ("kv@a@tiny", "kv@b@tiny")
            yield [
                await stack.enter_async_context(Connecting.open(f"tcp://127.0.0.1:{self.port}", topic))
                for topic in topics
            ]


@pytest.fixture
async def scene(nats_url: str, free_port: Callable[[], int]) -> AsyncIterator[Scene]:
    """Everything except the agents."""
    namespace = f"several-{next(_namespaces)}-{free_port()}"
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        servers = [await enter(EngineServer.open(free_port())) for _ in "ab"]
        listeners = [await enter(Listener.open(nats_url, namespace, "tiny", worker)) for worker in "ab"]
        yield Scene(servers, listeners, free_port(), namespace, nats_url)


@contextlib.asynccontextmanager
async def running(engines: EngineList) -> AsyncIterator[asyncio.Task[None]]:
    """The running agents."""
    stop = asyncio.Event()
    task = asyncio.create_task(serve_all(engines, [Duty(stop), Duty(stop)], retry_s=0.05))
    yield task
    stop.set()
    await task


async def test_engines_are_separate(scene: Scene) -> None:
    """Each engine has its own blocks, although all arrive at one endpoint."""
    first, second = scene.listeners
    async with running(scene.engines()), scene.publishers() as (a, b):
        await a.send(pack(store(1, 2)))
        await b.send(pack(store(1)))

        await first.until_held({A, B})
        await second.until_held({A})
    await first.beat(lambda beat: beat.state == "leave")
    await second.beat(lambda beat: beat.state == "leave")


async def test_unknown_topic_is_on_the_cards(scene: Scene) -> None:
    """The topic of an engine that is not listed is on every card of its endpoint."""
    async with running(scene.engines()), scene.publishers() as (a, _):
        await a.send_raw([b"kv@c@tiny", bytes(8), pack(store(1))])

        note = f"unknown topic on tcp://*:{scene.port}: kv@c@tiny; add it to --engines"
        await scene.listeners[1].beat(lambda beat: beat.card is not None and note in beat.card.notes)


async def test_one_fails(scene: Scene) -> None:
    """An engine that comes back with another model gets a new agent; the other agent is not affected."""
    async with running(scene.engines()), scene.publishers() as (_, b):
        await scene.listeners[0].beat(lambda beat: beat.state == "up")
        scene.servers[0].is_healthy = False
        await scene.listeners[0].beat(lambda beat: beat.state == "down")
        scene.servers[0].model = "other"
        scene.servers[0].is_healthy = True

        beat = await scene.listeners[0].beat(lambda beat: bool(beat.card and beat.card.model == "other"))
        await b.send(pack(store(1)))
        await scene.listeners[1].until_held({A})
    assert "up" == beat.state


@pytest.mark.parametrize("error", [OverflowError("int too big"), TypeError("a bug")])
async def test_one_breaks(scene: Scene, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """An error of any kind ends only its own agent, which starts again."""
    announced = Announcer.update

    def broken(announcer: Announcer, card: Card) -> None:
        if card.worker_id == "a":
            raise error
        announced(announcer, card)

    async with running(scene.engines()), scene.publishers() as (a, b):
        first = await scene.listeners[0].beat(lambda beat: beat.state == "up")
        monkeypatch.setattr(Announcer, "update", broken)
        await scene.listeners[0].beat(lambda beat: beat.incarnation > first.incarnation)
        await b.send(pack(store(1)))
        await scene.listeners[1].until_held({A})
        monkeypatch.undo()
        await a.send(pack(store(1)))
        await scene.listeners[0].until_held({A})


async def test_odd_load(scene: Scene) -> None:
    """An engine whose metrics no heartbeat can carry is announced without a load."""
    async with running(scene.engines()):
        await scene.listeners[0].beat(lambda beat: beat.ranks[0].running == 3)
        scene.servers[0].metrics = 'vllm:num_requests_running{engine="0"} 1e300\n'
        beat = await scene.listeners[0].beat(lambda beat: beat.ranks[0].running is None)

    assert "up" == beat.state


async def test_taken_over(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent whose id is used elsewhere waits, says so, and comes back when the other one is silent."""
    looks: list[tuple[str, str]] = []

    def look(_wait: LongWait, _now: float, reason: str, remedy: str) -> None:
        looks.append((reason, remedy))

    monkeypatch.setattr(LongWait, "look", look)
    later = WorkerBeat(VERSION, 2**62, "up", "p", [], 1)
    first, second = scene.listeners
    async with running(scene.engines()), scene.publishers() as (_, b):
        before = await first.beat(lambda beat: beat.state == "up")
        await first.usurp(later)
        await b.send(pack(store(1)))
        await second.until_held({A})

        await first.beat(lambda beat: beat == later)
        await first.beat(lambda beat: before.incarnation < beat.incarnation < later.incarnation)

    assert any("announces this" in reason and "its own worker id" in remedy for reason, remedy in looks)


async def test_process(scene: Scene, tmp_path: Path) -> None:
    """`python -m kvrouter.worker --engines FILE` serves all of them until SIGTERM."""
    file = tmp_path / "engines.toml"
    file.write_text(
        "".join(
            f"[[engine]]\nengine-url = '{server.url}'\nworker-id = '{name}'\nkv-topic = 'kv@{name}@tiny'\n"
            for server, name in zip(scene.servers, "ab", strict=True)
        )
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvrouter.worker", "--engines", str(file),
        "--kv-events", f"tcp://*:{scene.port}", "--kv-topic", "kv@",
        "--nats", scene.nats_url, "--namespace", scene.namespace, "--drain-timeout-s", "0",
        stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        async with scene.publishers() as (a, b):
            await a.send(pack(store(1)))
            await b.send(pack(store(1, 2)))
            await scene.listeners[0].until_held({A})
            await scene.listeners[1].until_held({A, B})
    finally:
        process.send_signal(signal.SIGTERM)

    assert 0 == await process.wait()


async def test_process_with_a_bad_file(tmp_path: Path) -> None:
    """A mistake in the file ends it with a message that names the entry."""
    file = tmp_path / "engines.toml"
    file.write_text("[[engine]]\nengine-url = 'nowhere'\n")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvrouter.worker", "--engines", str(file), stderr=asyncio.subprocess.PIPE
    )
    _, errors = await process.communicate()

    assert 2 == process.returncode
    assert b"engine 1 (nowhere): --engine-url: url 'nowhere': use http://HOST:PORT" in errors
