"""Agents that are stopped and started with one simulated engine, over real sockets and a real NATS."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import pytest

from kvrouter.core.wire.hashes import block_hashes, sequence_hashes
from kvrouter.core.wire.heartbeats import WorkerBeat
from kvrouter.lab.mocker.config import MockerConfig
from kvrouter.lab.mocker.engine import EngineConfig
from kvrouter.lab.mocker.events import KvEvent, StoredBlocks
from kvrouter.lab.mocker.server import Mocker, running_mocker
from kvrouter.worker.agent import serve
from kvrouter.worker.blocks.state import StateFile
from kvrouter.worker.options import AgentOptions
from kvrouter.worker.zmq.sockets import EventEndpoints
from tests.worker.listener import Listener

SIZE = 4
HOT = list(range(100, 117))
_namespaces = itertools.count()


def prompt(number: int) -> list[int]:
    """A prompt of four blocks and a token, with a unique beginning."""
    return list(range(1000 * number, 1000 * number + 17))


@dataclass
class Scene:
    """A mocker, the sequence hashes that it has cached, a listener, and the options of an agent."""

    mocker: Mocker
    listener: Listener
    options: AgentOptions
    http: aiohttp.ClientSession
    names: dict[int, int]
    # The incarnation of the last agent.
    newest: int = 0

    @property
    def cached(self) -> set[int]:
        """The sequence hashes of all blocks that the engine can hit."""
        return {self.names[engine_hash] for engine_hash in self.mocker.engine.cache.cached_hashes()}

    async def ask(self, *prompts: Sequence[int]) -> None:
        """Send prompts, one after the other."""
        for tokens in prompts:
            body = {"prompt": tokens, "max_tokens": 4, "ignore_eos": True}
            async with self.http.post(f"{self.mocker.url}/v1/completions", json=body) as response:
                assert 200 == response.status

    async def until_exact(self) -> None:
        """Return when exactly the engine's blocks are published."""
        await self.listener.until(lambda: self.listener.held == self.cached)

    @contextlib.asynccontextmanager
    async def agent(self, options: AgentOptions | None = None) -> AsyncIterator[WorkerBeat]:
        """An agent that leaves in order at the end; yields its first heartbeat."""
        stop = asyncio.Event()
        task = asyncio.create_task(serve(options or self.options, stop))
        yield await self.first_beat()
        stop.set()
        await task

    @contextlib.asynccontextmanager
    async def agent_to_be_killed(self) -> AsyncIterator[WorkerBeat]:
        """An agent that neither leaves nor saves its state at the end."""
        task = asyncio.create_task(serve(self.options, asyncio.Event()))
        yield await self.first_beat()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def first_beat(self) -> WorkerBeat:
        """The first heartbeat of a new agent."""
        beat = await self.listener.beat(lambda beat: beat.incarnation > self.newest)
        self.newest = beat.incarnation
        return beat


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of the state file."""
    return tmp_path / "state"


@pytest.fixture
async def scene(
    nats_url: str, free_port: Callable[[], int], path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Scene]:
    """Everything except the agent. The engine has 64 blocks and replays its last 12 batches."""
    monkeypatch.setattr("kvrouter.lab.mocker.publisher.BUFFER_STEPS", 12)
    namespace = f"restart-{next(_namespaces)}-{free_port()}"
    engine = EngineConfig(num_blocks=64, block_size=SIZE, max_model_len=128)
    async with (
        running_mocker(MockerConfig(engine=engine, speedup=1000)) as mocker,
        Listener.open(nats_url, namespace, "mock") as listener,
        aiohttp.ClientSession() as http,
    ):
        options = AgentOptions(
            mocker.url, "w", nats_url, namespace, [EventEndpoints(mocker.kv_events, mocker.kv_replay)],
            heartbeat_s=0.05, flush_s=0.001, state_file=path, state_every_s=3600,
        )  # fmt: skip
        yield Scene(mocker, listener, options, http, _eavesdrop(mocker, monkeypatch))


def _eavesdrop(mocker: Mocker, monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The sequence hash of every engine hash that the mocker will announce."""
    names: dict[int, int] = {}
    publisher = mocker.ranks[0].publisher
    publish = publisher.publish

    def publish_and_learn(timestamp: float, events: list[KvEvent]) -> None:
        for event in events:
            if isinstance(event, StoredBlocks):
                above = None if event.parent_block_hash is None else names[event.parent_block_hash]
                chain = sequence_hashes(block_hashes(event.token_ids, SIZE), above)  # type: ignore[arg-type]
                names.update(zip(event.block_hashes, chain, strict=True))
        publish(timestamp, events)

    monkeypatch.setattr(publisher, "publish", publish_and_learn)
    return names


def partial_of(beat: WorkerBeat) -> bool:
    """The `partial` of rank 0 in a heartbeat."""
    return beat.ranks[0].partial


async def test_stopped_and_started(scene: Scene) -> None:
    """An agent that leaves in order keeps its table; the next one continues it, and is exact."""
    async with scene.agent() as first:
        await scene.ask(HOT, *map(prompt, range(15)))
        await scene.until_exact()
    await scene.ask(HOT, prompt(15), prompt(16))
    async with scene.agent() as second:
        await scene.until_exact()

    assert (False, False) == (partial_of(first), partial_of(second))
    assert second.incarnation > first.incarnation
    assert second.ranks[0].seq > 0
    assert len(scene.cached) > 4 * SIZE


async def test_readers_never_lose_the_table(scene: Scene) -> None:
    """The first heartbeat of a continuing agent has its table: readers always have blocks."""
    async with scene.agent():
        await scene.ask(HOT)
        await scene.until_exact()
    held = set(scene.listener.held)
    async with scene.agent() as second:
        assert second.ranks[0].seq > 0
        assert held == scene.listener.held
        await scene.listener.until(lambda: True)

        assert held == scene.listener.held == scene.cached


async def test_killed_and_started(scene: Scene) -> None:
    """Killed long after its last save: the engine's buffer reaches back to it, and the table is exact."""
    scene.options = replace(scene.options, state_every_s=0.02)
    async with scene.agent_to_be_killed():
        await scene.ask(HOT, prompt(1))
        await scene.until_exact()
        await _until_saved(scene, blocks=len(scene.cached))
    await scene.ask(prompt(2), HOT)

    async with scene.agent() as second:
        await scene.until_exact()
    assert not partial_of(second)


async def test_killed_before_a_save(scene: Scene, path: Path) -> None:
    """Killed before the first save there is no file, and the buffer still has everything."""
    async with scene.agent_to_be_killed():
        await scene.ask(HOT)
        await scene.until_exact()
    assert not _exists(path)

    async with scene.agent() as second:
        await scene.until_exact()
    assert not partial_of(second)


async def test_lost(scene: Scene) -> None:
    """Without state and with a short buffer: partial, never too much, until the engine empties its cache."""
    await scene.ask(HOT, *map(prompt, range(12)))
    async with scene.agent(replace(scene.options, state_file=None)) as beat:
        assert partial_of(beat)
        await scene.ask(HOT)
        await scene.listener.until(lambda: scene.listener.held <= scene.cached)

        assert scene.mocker.engine.reset_prefix_cache()
        await scene.ask(HOT)
        await scene.listener.beat(lambda beat: not partial_of(beat))
        await scene.until_exact()


async def test_state_too_old(scene: Scene) -> None:
    """If the buffer no longer has the saved batch, no block of the saved table is published."""
    async with scene.agent():
        await scene.ask(HOT)
        await scene.until_exact()
    await scene.ask(*map(prompt, range(20)))

    async with scene.agent() as second:
        await scene.listener.until(lambda: scene.listener.held <= scene.cached)
        assert partial_of(second)


async def test_another_engine(scene: Scene) -> None:
    """The engine restarts between two agents: the saved table is dropped, the new history read."""
    async with scene.agent():
        await scene.ask(HOT, prompt(1))
        await scene.until_exact()
    async with running_mocker(replace(MockerConfig(), engine=scene.mocker.engine.config)) as other:
        other_scene = replace(scene, mocker=other)
        with pytest.MonkeyPatch.context() as monkeypatch:
            other_scene.names = _eavesdrop(other, monkeypatch)
            await other_scene.ask(prompt(2), prompt(3), prompt(4))
            feeds = [EventEndpoints(other.kv_events, other.kv_replay)]
            options = replace(scene.options, engine_url=other.url, endpoints=feeds)
            async with other_scene.agent(options) as second:
                await other_scene.until_exact()

    assert not partial_of(second)


async def test_damaged_file(scene: Scene, path: Path) -> None:
    """Half a file is rejected; the agent runs without it, and writes a complete one at its end."""
    _put(path, b"kvrouter agent state\n half of it")
    async with scene.agent() as beat:
        await scene.ask(HOT)
        await scene.until_exact()

    assert not partial_of(beat)
    assert await _kept_blocks(scene) == len(scene.cached)


async def _until_saved(scene: Scene, blocks: int) -> None:
    """Return when the state file has this many blocks."""
    async with asyncio.timeout(10):
        while await _kept_blocks(scene) != blocks:
            await scene.listener.beat(lambda beat: True)


async def _kept_blocks(scene: Scene) -> int:
    options = scene.options
    assert options.state_file is not None
    with StateFile.open(options.state_file, f"{options.namespace}/w") as file:
        state = await asyncio.to_thread(file.read)
    rank = state.ranks.get(0) if state else None  # no rank before the first batch
    return len(rank.image.known) if rank else 0


def _exists(path: Path) -> bool:
    return path.exists()


def _put(path: Path, data: bytes) -> None:
    path.write_bytes(data)
