"""A TensorRT-LLM that speaks its documented HTTP interface, behind a real agent and a NATS server."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web

from kvrouter.core.wire.hashes import block_hashes, sequence_hashes
from kvrouter.worker import polled_events
from kvrouter.worker.engines.http import EngineHttp
from kvrouter.worker.options import AgentOptions
from kvrouter.worker.polled_events import PolledEvents
from kvrouter.worker.zmq.ordering import Action, Apply, LostBatches, Restarted
from tests.worker.listener import Listener
from tests.worker.test_agent import Scene

TOKENS = list(range(8))
A, B = sequence_hashes(block_hashes(TOKENS, 4))


class Tensorrt:
    """`trtllm-serve`: an answer of /kv_cache_events has the events since the answer before."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.is_up = True
        self._numbered = 0
        self._waiting: list[dict[str, Any]] = []
        self.start()

    def start(self) -> None:
        """Begin as a new process: its events are numbered from 0."""
        self._numbered, self._waiting = 0, []
        self.add({"type": "created", "num_blocks_per_cache_level": [100, 0]})

    def add(self, data: dict[str, Any], *, is_lost: bool = False) -> None:
        """Record an event, or let it fall out of the engine's buffer."""
        if not is_lost:
            self._waiting.append({"event_id": self._numbered, "data": data, "window_size": 512})
        self._numbered += 1

    def store(self, index: int, parent: int | None = None) -> None:
        """A block of four tokens is stored; its hash is its index."""
        tokens = [{"token_id": token, "token_extra_id": 0} for token in TOKENS[index * 4 : index * 4 + 4]]
        block = {
            "type": "stored_block",
            "block_hash": index,
            "tokens": tokens,
            "cache_level": 0,
            "priority": 35,
        }
        self.add({"type": "stored", "parent_hash": parent, "blocks": [block]})

    async def answer(self, request: web.Request) -> web.Response:
        if not self.is_up:
            return web.Response(status=503)
        if (request.method, request.path) == ("POST", "/kv_cache_events"):
            events, self._waiting = self._waiting, []
            return web.json_response(events)
        texts = {
            "/v1/models": '{"data": [{"id": "tiny", "owned_by": "tensorrt_llm"}]}',
            "/version": '{"version": "1.3.0"}',
            "/prometheus/metrics": "trtllm_kv_cache_utilization 0.25\n",
            "/health": "",
        }
        is_known = request.method == "GET" and request.path in texts
        return web.Response(text=texts[request.path]) if is_known else web.Response(status=404)


@pytest.fixture
async def engine(free_port: Callable[[], int]) -> AsyncIterator[Tensorrt]:
    """The fake, serving."""
    port = free_port()
    fake = Tensorrt(f"http://127.0.0.1:{port}")
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", fake.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    yield fake
    await runner.cleanup()


class Asked:
    """The source alone, asked by hand."""

    def __init__(self, http: EngineHttp) -> None:
        self.events = PolledEvents(http)
        self._actions: list[Action] = []

    def is_complete(self) -> bool:
        return self.events.stream.is_complete

    async def ask(self) -> list[type[Action]]:
        """Ask once; returns the kinds of actions."""
        await self.events._ask(self._actions.append)
        kinds, self._actions = [type(action) for action in self._actions], []
        return kinds


@contextlib.asynccontextmanager
async def asked(engine: Tensorrt) -> AsyncIterator[Asked]:
    async with EngineHttp.open(engine.url) as http:
        yield Asked(http)


async def test_order(engine: Tensorrt) -> None:
    """From number 0 the history is complete; a missing number is lost history, number 0 another process."""
    async with asked(engine) as source:
        engine.store(0)
        assert [Restarted, Apply, Apply] == await source.ask()
        assert source.is_complete()
        assert [] == await source.ask()
        engine.add({"type": "created"}, is_lost=True)
        engine.store(1, 0)
        assert [LostBatches, Apply] == await source.ask()
        assert not source.is_complete()
        engine.start()
        engine.store(0)
        assert [Restarted, Apply, Apply] == await source.ask()
        assert source.is_complete()


async def test_asked_too_late(engine: Tensorrt) -> None:
    """If another program has taken the first events, the history is not complete."""
    async with asked(engine) as first, asked(engine) as second:
        await first.ask()
        engine.store(0)

        assert [Restarted, Apply] == await second.ask()
        assert not second.is_complete()


async def test_outage(engine: Tensorrt) -> None:
    """An engine that does not answer changes nothing here: probes notice it."""
    async with asked(engine) as source:
        await source.ask()
        engine.is_up = False
        assert [] == await source.ask()
        engine.is_up = True
        engine.store(0)

        assert [Apply] == await source.ask()


async def test_agent(engine: Tensorrt, nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent announces the engine, publishes its blocks, and follows it into another life."""
    monkeypatch.setattr(polled_events, "POLL_S", 0.005)
    monkeypatch.setattr(polled_events, "PAUSE_S", 0.005)
    namespace = "tensorrt"
    options = AgentOptions(
        engine.url, "w", nats_url, namespace, heartbeat_s=0.05, probe_s=0.02, flush_s=0.001, block_size=4
    )
    async with Listener.open(nats_url, namespace, "tiny") as listener:
        scene = Scene(engine, None, listener, options)  # type: ignore[arg-type]
        async with scene.agent():
            engine.store(0)
            beat = await listener.beat(lambda beat: bool(beat.card and beat.ranks[0].kv_usage))
            await listener.until_held({A})
            engine.store(1, 0)
            await listener.until_held({A, B})
            engine.is_up = False
            await listener.beat(lambda beat: beat.state == "down")
            engine.start()
            engine.store(0)
            engine.is_up = True
            up = await listener.beat(lambda beat: beat.state == "up")
            await listener.until_held({A})

    assert beat.card is not None
    assert ("tensorrt_llm", "1.3.0", 4, True) == (
        beat.card.engine,
        beat.card.engine_version,
        beat.card.block_size,
        beat.card.publishes_events,
    )
    assert 0.25 == beat.ranks[0].kv_usage
    assert not up.ranks[0].partial
