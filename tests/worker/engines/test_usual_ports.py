"""Events at vLLM's usual ports count only if the engine proves that they are its own. Real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from aiohttp import web

from kvrouter.worker.engines import usual_ports
from kvrouter.worker.engines.endpoints import NO_REPLAY, EventsConfig
from kvrouter.worker.engines.facts import EngineFacts
from kvrouter.worker.engines.http import EngineHttp, Models
from kvrouter.worker.engines.metrics import Scrape
from kvrouter.worker.engines.usual_ports import NOT_ITS_OWN, with_usual_events
from kvrouter.worker.engines.vllm import CACHING_OFF, ENDPOINTS_UNKNOWN
from kvrouter.worker.options import AgentOptions
from kvrouter.worker.zmq.sockets import EventEndpoints
from tests.worker.fake_engine import EventSockets, pack

BLOCK = 32
FACTS = EngineFacts(
    Models(("tiny",), ()), "0.30.0", Scrape(block_size=BLOCK), lacks=(CACHING_OFF, ENDPOINTS_UNKNOWN)
)


@dataclass
class OldEngine:
    """An engine that completes prompts, and publishes their blocks where nobody is told."""

    url: str
    publishes: EventSockets | None = None
    lost: int = 0
    status: int = 200
    prompts: list[Any] = field(default_factory=list)

    async def complete(self, http: web.Request) -> web.Response:
        """POST /v1/completions."""
        prompt = (await http.json())["prompt"]
        self.prompts.append(prompt)
        if self.publishes is not None and len(self.prompts) > self.lost:
            size = len(prompt) // BLOCK * BLOCK
            store = ["BlockStored", [*range(size // BLOCK)], None, prompt[:size], BLOCK]
            await self.publishes.send(pack(store))
        return web.json_response({}, status=self.status)

    async def learn(self, config: EventsConfig, **facts: Any) -> EngineFacts:
        """What an agent knows, with these as the usual ports."""
        async with EngineHttp.open(self.url) as http:
            return await with_usual_events(http, AgentOptions(self.url, "w"), replace(FACTS, **facts), config)


@pytest.fixture
async def engine(free_port: Callable[[], int]) -> AsyncIterator[OldEngine]:
    """An engine that publishes nothing so far."""
    old = OldEngine(f"http://127.0.0.1:{free_port()}")
    app = web.Application()
    app.router.add_post("/v1/completions", old.complete)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", int(old.url.rpartition(":")[2])).start()
    try:
        yield old
    finally:
        await runner.cleanup()


@pytest.fixture
async def sockets() -> AsyncIterator[EventSockets]:
    """Event sockets of some engine at the usual ports."""
    async with EventSockets.open() as opened:
        yield opened


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not come is not awaited for long."""
    monkeypatch.setattr(usual_ports, "_EVENT_TIMEOUT_S", 0.5)


def at(events: str, replay: str) -> EventsConfig:
    return EventsConfig(publisher="zmq", endpoint=_everywhere(events), replay_endpoint=_everywhere(replay))


def _everywhere(endpoint: str) -> str:
    return endpoint.replace("127.0.0.1", "*")


async def test_its_own(engine: OldEngine, sockets: EventSockets) -> None:
    """The block of a request comes as an event: this is the engine's endpoint, and so is the replay's."""
    engine.publishes = sockets

    facts = await engine.learn(at(sockets.events, sockets.replay))

    assert (EventEndpoints(sockets.events, sockets.replay),) == facts.endpoints
    assert (CACHING_OFF,) == facts.lacks


async def test_first_event_before_the_subscription(engine: OldEngine, sockets: EventSockets) -> None:
    """A second request proves it then; its prompt is another one, or the cache would have it."""
    engine.publishes, engine.lost = sockets, 1

    assert (await engine.learn(at(sockets.events, sockets.replay))).endpoints
    first, second = engine.prompts
    assert first != second


async def test_those_of_another_engine(engine: OldEngine, sockets: EventSockets) -> None:
    """Of two engines on one host one has the usual ports: the other gets no events, and the reason."""
    async with publishing_others(sockets):
        facts = await engine.learn(at(sockets.events, sockets.replay))

    assert () == facts.endpoints
    assert (CACHING_OFF, NOT_ITS_OWN.format(events=sockets.events)) == facts.lacks


@contextlib.asynccontextmanager
async def publishing_others(sockets: EventSockets) -> AsyncIterator[None]:
    """An engine that stores other prompts all the time, and whose events cannot always be read."""

    async def publish() -> None:
        while True:
            await sockets.send(pack(["BlockStored", [7], None, [1] * BLOCK, BLOCK]))
            await sockets.send(b"\xc1")
            await asyncio.sleep(0.01)

    task = asyncio.create_task(publish())
    try:
        yield
    finally:
        task.cancel()


async def test_replay_of_another_engine(engine: OldEngine, sockets: EventSockets) -> None:
    """Events of its own, and a replay endpoint that does not have them: it is not used."""
    engine.publishes = sockets
    async with EventSockets.open() as others:
        facts = await engine.learn(at(sockets.events, others.replay))

    assert (EventEndpoints(sockets.events),) == facts.endpoints
    assert (CACHING_OFF, NO_REPLAY) == facts.lacks


async def test_engine_that_rejects_the_request(engine: OldEngine, sockets: EventSockets) -> None:
    """Without an answer there is no proof."""
    engine.status = 400

    facts = await engine.learn(at(sockets.events, sockets.replay))

    assert NOT_ITS_OWN.format(events=sockets.events) in facts.lacks
    assert 1 == len(engine.prompts)


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\xff"])
async def test_no_zmq(engine: OldEngine, said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that does not greet as ZMQ does is left alone, and so is the engine: events are off."""
    monkeypatch.setattr(usual_ports, "_GREETING_TIMEOUT_S", 0.2)

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        await reader.read()
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        endpoint = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        facts = await engine.learn(at(endpoint, endpoint))

    assert FACTS == facts
    assert [] == engine.prompts


async def test_closed_port(engine: OldEngine) -> None:
    """Nothing listens: events are off."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{reserved.getsockname()[1]}"
        assert FACTS == await engine.learn(at(endpoint, endpoint))


@pytest.mark.parametrize(
    "known",
    [
        {"lacks": ()},  # endpoints are reported, or given
        {"version": ""},  # not a vLLM
        {"ranks": 2},
    ],
)
async def test_not_asked(engine: OldEngine, sockets: EventSockets, known: dict[str, Any]) -> None:
    """Only a vLLM with one rank whose endpoints nobody has named is asked."""
    engine.publishes = sockets

    facts = await engine.learn(at(sockets.events, sockets.replay), **known)

    assert replace(FACTS, **known) == facts
    assert [] == engine.prompts


@pytest.mark.parametrize(
    ("tokens", "proves"), [([*range(BLOCK)], True), ([*range(16)], True), ([*range(8)], False), ([], False)]
)
def test_enough_tokens(tokens: Sequence[int], proves: bool) -> None:
    """A few equal tokens prove nothing."""
    stored = pack(["BlockStored", [1], None, tokens, max(1, len(tokens))])

    assert proves is usual_ports._stores(stored, [*range(BLOCK + 1)])
