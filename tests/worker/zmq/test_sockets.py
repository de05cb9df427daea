"""Event and replay sockets, with a real publisher on the other side."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest
import zmq
import zmq.asyncio
from structlog.testing import capture_logs

from kvrouter.errors import ConfigError
from kvrouter.worker.zmq import sockets as sockets_module
from kvrouter.worker.zmq.ordering import Action, Apply, Numbered
from kvrouter.worker.zmq.sockets import EngineEvents, EventEndpoints, ask_replay
from tests.worker.fake_engine import EventSockets


class Received:
    """A short form of the actions of a rank."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[str] = asyncio.Queue()

    def on_action(self, action: Action) -> None:
        """Record an action."""
        name = action.payload.decode() if isinstance(action, Apply) else type(action).__name__
        self._queue.put_nowait(name)

    async def next(self, count: int) -> list[str]:
        """The next actions, this many."""
        async with asyncio.timeout(5):
            return [await self._queue.get() for _ in range(count)]


@contextlib.asynccontextmanager
async def running(options: EventEndpoints) -> AsyncIterator[tuple[EngineEvents, Received]]:
    """Running engine events."""
    received = Received()
    async with EngineEvents.open(options) as events:
        task = asyncio.create_task(events.run(received.on_action))
        yield events, received
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.fixture
async def engine() -> AsyncIterator[EventSockets]:
    """An engine's sockets, with a batch sent before there was a subscriber."""
    async with EventSockets.open() as sockets:
        await sockets.send(b"a0")
        yield sockets


def options(engine: EventSockets) -> EventEndpoints:
    """Its endpoints."""
    return EventEndpoints(engine.events, engine.replay)


async def test_replay_then_live(engine: EventSockets) -> None:
    """Former batches are replayed, then live ones follow; lost ones are replayed, too."""
    async with running(options(engine)) as (_, received):
        assert ["Restarted", "a0"] == await received.next(2)
        await engine.until_subscribed()
        await engine.send(b"a1")
        await engine.send(b"a2", is_lost=True)
        await engine.send(b"a3")

        assert ["a1", "a2", "a3"] == await received.next(3)


async def test_restart(engine: EventSockets) -> None:
    """A restarted engine is recognised by its first batch."""
    async with running(options(engine)) as (_, received):
        await engine.until_subscribed()
        await received.next(2)
        engine.restart()
        await engine.send(b"b0")

        assert ["Restarted", "b0"] == await received.next(2)


async def test_read_again(engine: EventSockets) -> None:
    """On request the whole history is read again."""
    async with running(options(engine)) as (events, received):
        await received.next(2)
        events.restart()

        assert ["Restarted", "a0"] == await received.next(2)


async def test_quiet_engine(engine: EventSockets) -> None:
    """In quiet times a lost tail is found."""
    async with running(replace(options(engine), verify_after_s=0.05)) as (_, received):
        await received.next(2)
        await engine.send(b"a1", is_lost=True)

        assert ["a1"] == await received.next(1)


async def test_no_replay_answer(engine: EventSockets, free_port: Callable[[], int]) -> None:
    """Without an answer to replays, live batches are applied as they arrive."""
    nobody = EventEndpoints(engine.events, f"tcp://127.0.0.1:{free_port()}", replay_timeout_s=0.02)
    async with running(nobody) as (events, received):
        await engine.until_subscribed()
        await engine.send(b"a1")

        assert ["Restarted", "a1"] == await received.next(2)
        assert not events.stream.is_complete


async def test_outage_of_replays_is_logged_once(
    engine: EventSockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restarted engine answers no replay until its first event: one log entry, and one when it does."""
    ask, asked, enough = ask_replay, 0, asyncio.Event()

    async def ask_in_vain_at_times(
        context: zmq.asyncio.Context, endpoint: str, from_seq: int, timeout_s: float
    ) -> list[Numbered] | None:
        nonlocal asked
        asked += 1
        if asked == 10:
            enough.set()
        return None if 2 <= asked <= 8 else await ask(context, endpoint, from_seq, timeout_s)

    monkeypatch.setattr(sockets_module, "ask_replay", ask_in_vain_at_times)
    with capture_logs() as logs:
        async with running(replace(options(engine), verify_after_s=0.01)), asyncio.timeout(5):
            await enough.wait()

    assert ["engine.no_replay", "engine.replays_again"] == [entry["event"] for entry in logs]


async def test_bound_endpoint(free_port: Callable[[], int]) -> None:
    """An endpoint with a star is bound: the engine connects."""
    port = free_port()
    context = zmq.asyncio.Context()
    pub = context.socket(zmq.XPUB)
    pub.connect(f"tcp://127.0.0.1:{port}")
    async with running(EventEndpoints(f"tcp://*:{port}")) as (events, received):
        async with asyncio.timeout(5):
            await pub.recv()
        await pub.send_multipart([b"t", (0).to_bytes(8, "big"), b"a0"])

        assert ["Restarted", "a0"] == await received.next(2)
        assert events.stream.is_complete
    context.destroy(linger=0)


async def test_malformed_messages(engine: EventSockets) -> None:
    """Messages of another form are counted and ignored."""
    async with running(options(engine)) as (events, received):
        await engine.until_subscribed()
        await received.next(2)
        await engine.send_raw([b"topic"])
        await engine.send_raw([b"topic", b"12", b"x"])
        await engine.send(b"a1")

        assert ["a1"] == await received.next(1)
        assert 2 == events.malformed


async def test_too_long_a_message(engine: EventSockets) -> None:
    """It ends the connection; missed batches are replayed, and the agent reconnects."""
    feed_options = replace(options(engine), verify_after_s=0.05)
    async with running(feed_options) as (_, received):
        assert ["Restarted", "a0"] == await received.next(2)
        await engine.until_subscribed()
        await engine.send_raw([b"topic", bytes(8), bytes(sockets_module.MOST_MESSAGE_BYTES + 1)])
        await engine.until_subscribed()  # the XPUB receives the end of the subscription
        await engine.send(b"a1", is_lost=True)
        assert ["a1"] == await received.next(1)

        await engine.until_subscribed()  # and the new subscription
        await engine.send(b"a2")
        assert ["a2"] == await received.next(1)


async def test_bad_endpoint() -> None:
    """An invalid endpoint is rejected at once, with the flag."""
    with pytest.raises(ConfigError, match="--kv-events nonsense"):
        async with EngineEvents.open(EventEndpoints("nonsense")):
            pass
