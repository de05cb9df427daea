"""Several engines that connect to one bound endpoint, with the real captured batches of both wire shapes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgpack
import pytest

from kvrouter.errors import ConfigError
from kvrouter.worker.engines.adapter import MAX_REASONS
from kvrouter.worker.engines.vllm import VllmAdapter
from kvrouter.worker.publisher import KvPublisher
from kvrouter.worker.rank import EngineRank
from kvrouter.worker.zmq.ordering import EngineStream
from kvrouter.worker.zmq.shared_socket import SharedSocket
from kvrouter.worker.zmq.sockets import EngineEvents, EventEndpoints, agent_binds
from tests.frontend.workers import until
from tests.worker.connecting_engine import Connecting
from tests.worker.fakes import FakeBus

DATA = Path(__file__).parents[2] / "data"
TOPICS = ("kv@10.0.0.1@", "kv@10.0.0.12@tiny")


def captured(name: str) -> list[bytes]:
    """The payloads of a real engine, in order."""
    return [payload for _, _, payload in msgpack.unpackb((DATA / name).read_bytes())]


class Scene:
    """A bound socket, the events of two engines on it, and the engines, which connect."""

    def __init__(
        self,
        endpoint: str,
        socket: SharedSocket,
        events: list[EngineEvents],
        stack: contextlib.AsyncExitStack,
    ) -> None:
        self.socket = socket
        self.events = events
        self.ranks = [
            EngineRank(
                KvPublisher(FakeBus(), f"w{number}", 32, model="tiny", incarnation=1),
                events.stream,
                adapter=VllmAdapter(),
            )
            for number, events in enumerate(events)
        ]
        self._endpoint = endpoint
        self._stack = stack

    async def engine(self, topic: str) -> Connecting:
        """A connected engine."""
        return await self._stack.enter_async_context(Connecting.open(self._endpoint, topic))

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Return when `is_so` holds."""
        await until(is_so)

    def count(self, number: int) -> int:
        """Blocks that an engine's rank has published."""
        return self.ranks[number].publisher.blocks.count()

    def next_seqs(self) -> list[int | None]:
        """The number of the batch that each rank waits for."""
        return [events.stream.next_seq for events in self.events]


@contextlib.asynccontextmanager
async def open_scene(port: int, topic_filter: str = "") -> AsyncIterator[Scene]:
    """Everything, running."""
    endpoint = f"tcp://*:{port}"
    async with contextlib.AsyncExitStack() as stack:
        socket = await stack.enter_async_context(SharedSocket.open(endpoint, TOPICS, topic_filter))
        events = [
            stack.enter_context(socket.events(EventEndpoints(endpoint, topic=topic))) for topic in TOPICS
        ]
        scene = Scene(f"tcp://127.0.0.1:{port}", socket, events, stack)
        tasks = [asyncio.create_task(socket.run())]
        tasks += [
            asyncio.create_task(events.run(rank.on_action))
            for events, rank in zip(events, scene.ranks, strict=True)
        ]
        yield scene
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_two_engines(free_port: Callable[[], int]) -> None:
    """Batches of two engines, mixed on one endpoint, build the table that each would build alone."""
    maps, arrays = captured("vllm_capture.msgpack"), captured("vllm_capture_array_0.23.msgpack")
    async with open_scene(free_port(), "kv@") as scene:
        first, second = await scene.engine("kv@10.0.0.1@tiny"), await scene.engine("kv@10.0.0.12@tiny")
        for number, payload in enumerate(maps):
            await first.send(payload)
            if number < 60:
                await second.send(arrays[number])
        await scene.until(lambda: scene.next_seqs() == [125, 60])

        for rank in scene.ranks:
            rank.publisher.blocks.check()
        assert [alone(maps), alone(arrays[:60])] == [scene.count(0), scene.count(1)]
        assert scene.count(0) != scene.count(1)
        assert all(events.stream.is_complete for events in scene.events)
        assert {} == scene.socket.unknown


def alone(payloads: list[bytes]) -> int:
    """The number of blocks after these batches."""
    stream = EngineStream(can_replay=False)
    rank = EngineRank(
        KvPublisher(FakeBus(), "w", 32, model="tiny", incarnation=1), stream, adapter=VllmAdapter()
    )
    for seq, payload in enumerate(payloads):
        for action in stream.receive(seq, payload).actions:
            rank.on_action(action)
    return rank.publisher.blocks.count()


async def test_unknown_topics(free_port: Callable[[], int]) -> None:
    """Messages of unknown topics are counted, for a bounded number of topics, and noted on the cards."""
    async with open_scene(free_port()) as scene:
        engine = await scene.engine("kv@10.0.0.1@tiny")
        for number in range(2 * MAX_REASONS):
            await engine.send_raw([b"kv@10.0.0.%d@tiny" % (100 + number), bytes(8), b"x"])
        await engine.send_raw([b"kv@10.0.0.1", bytes(8), b"x"])
        await engine.send(msgpack.packb([1.0, [], 0]))
        await scene.until(lambda: scene.next_seqs()[0] == 1)

        assert 2 * MAX_REASONS + 1 == sum(scene.socket.unknown.values())
        assert MAX_REASONS + 1 == len(scene.socket.unknown)
        assert "kv@10.0.0.100@tiny; add it to --engines" in scene.events[1].notes[0]


async def test_filter(free_port: Callable[[], int]) -> None:
    """Messages without the prefix of the filter do not arrive."""
    async with open_scene(free_port(), "kv@") as scene:
        engine = await scene.engine("kv@10.0.0.1@tiny")
        await engine.send_raw([b"other", bytes(8), b"x"])
        await engine.send(msgpack.packb([1.0, [], 0]))
        await scene.until(lambda: scene.next_seqs()[0] == 1)

        assert {} == scene.socket.unknown


async def test_malformed_messages(free_port: Callable[[], int]) -> None:
    """Messages of another form are counted and ignored."""
    async with open_scene(free_port()) as scene:
        engine = await scene.engine("kv@10.0.0.1@tiny")
        await engine.send_raw([b"kv@10.0.0.1@tiny"])
        await engine.send_raw([b"kv@10.0.0.1@tiny", b"12", b"x"])
        await engine.send(msgpack.packb([1.0, [], 0]))
        await scene.until(lambda: scene.next_seqs()[0] == 1)

        assert (1, 1) == (scene.socket.malformed, scene.events[0].malformed)


async def test_engine_between_two_attempts(free_port: Callable[[], int]) -> None:
    """An engine whose agent waits for its next attempt is not an unknown topic."""
    endpoint = f"tcp://*:{free_port()}"
    async with SharedSocket.open(endpoint, TOPICS, "") as socket:
        with socket.events(EventEndpoints(endpoint, topic=TOPICS[0])):
            pass
        socket._dispatch([b"kv@10.0.0.1@tiny", bytes(8), b"x"])

        assert {} == socket.unknown


async def test_taken_endpoint(free_port: Callable[[], int]) -> None:
    """An endpoint that is already bound is rejected, with the likely reason."""
    endpoint = f"tcp://*:{free_port()}"
    async with SharedSocket.open(endpoint, TOPICS, ""):
        with pytest.raises(ConfigError, match="if the engine has bound it"):
            async with SharedSocket.open(endpoint, TOPICS, ""):
                pass


@pytest.mark.parametrize(
    ("endpoint", "bound"),
    [
        ("tcp://*:5557", True),
        ("tcp://0.0.0.0:5557", True),
        ("tcp://[::]:5557", True),
        ("tcp://10.0.0.0:5557", False),
        ("tcp://[::1]:5557", False),
        ("ipc:///tmp/events", False),
    ],
)
def test_what_is_bound(endpoint: str, bound: bool) -> None:
    """An endpoint without a host is bound by the agent."""
    assert bound == agent_binds(endpoint)
