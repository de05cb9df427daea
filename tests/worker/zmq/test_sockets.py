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
from kvrouter.worker.zmq import sockets as zmq_feed
from kvrouter.worker.zmq.ordering import Action, Apply, Numbered
from kvrouter.worker.zmq.sockets import EngineEvents, EventEndpoints, ask_replay
from tests.worker.fake_engine import EventSockets


class Heard:
    """What a feed passes on, in short."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[str] = asyncio.Queue()

    def on_action(self, action: Action) -> None:
        """Write it down."""
        name = action.payload.decode() if isinstance(action, Apply) else type(action).__name__
        self._queue.put_nowait(name)

    async def next(self, count: int) -> list[str]:
        """The next so many."""
        async with asyncio.timeout(5):
            return [await self._queue.get() for _ in range(count)]


@contextlib.asynccontextmanager
async def running(options: EventEndpoints) -> AsyncIterator[tuple[EngineEvents, Heard]]:
    """A feed at work."""
    heard = Heard()
    async with EngineEvents.open(options) as feed:
        task = asyncio.create_task(feed.run(heard.on_action))
        yield feed, heard
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.fixture
async def engine() -> AsyncIterator[EventSockets]:
    """An engine's sockets, with a batch sent before anybody listened."""
    async with EventSockets.open() as sockets:
        await sockets.send(b"a0")
        yield sockets


def options(engine: EventSockets) -> EventEndpoints:
    """Where its sockets are."""
    return EventEndpoints(engine.events, engine.replay)


async def test_replay_then_live(engine: EventSockets) -> None:
    """What was sent before is replayed, then live batches follow; so does what the wire loses."""
    async with running(options(engine)) as (_, heard):
        assert ["Restarted", "a0"] == await heard.next(2)
        await engine.until_subscribed()
        await engine.send(b"a1")
        await engine.send(b"a2", is_lost=True)
        await engine.send(b"a3")

        assert ["a1", "a2", "a3"] == await heard.next(3)


async def test_restart(engine: EventSockets) -> None:
    """An engine that restarts is noticed by its first batch."""
    async with running(options(engine)) as (_, heard):
        await engine.until_subscribed()
        await heard.next(2)
        engine.restart()
        await engine.send(b"b0")

        assert ["Restarted", "b0"] == await heard.next(2)


async def test_read_anew(engine: EventSockets) -> None:
    """On demand the whole history is read again."""
    async with running(options(engine)) as (feed, heard):
        await heard.next(2)
        feed.restart()

        assert ["Restarted", "a0"] == await heard.next(2)


async def test_quiet_engine(engine: EventSockets) -> None:
    """In quiet times a lost tail is found."""
    async with running(replace(options(engine), verify_after_s=0.05)) as (_, heard):
        await heard.next(2)
        await engine.send(b"a1", is_lost=True)

        assert ["a1"] == await heard.next(1)


async def test_no_replay_answer(engine: EventSockets, free_port: Callable[[], int]) -> None:
    """Where nobody answers replays, live batches are taken as they come."""
    nobody = EventEndpoints(engine.events, f"tcp://127.0.0.1:{free_port()}", replay_timeout_s=0.02)
    async with running(nobody) as (feed, heard):
        await engine.until_subscribed()
        await engine.send(b"a1")

        assert ["Restarted", "a1"] == await heard.next(2)
        assert not feed.stream.is_complete


async def test_outage_of_replays_is_told_once(engine: EventSockets, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that restarts answers no replay until its first event: one line, and one when it does."""
    ask, asked, enough = ask_replay, 0, asyncio.Event()

    async def ask_in_vain_at_times(
        context: zmq.asyncio.Context, endpoint: str, from_seq: int, timeout_s: float
    ) -> list[Numbered] | None:
        nonlocal asked
        asked += 1
        if asked == 10:
            enough.set()
        return None if 2 <= asked <= 8 else await ask(context, endpoint, from_seq, timeout_s)

    monkeypatch.setattr(zmq_feed, "ask_replay", ask_in_vain_at_times)
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
    async with running(EventEndpoints(f"tcp://*:{port}")) as (feed, heard):
        async with asyncio.timeout(5):
            await pub.recv()
        await pub.send_multipart([b"t", (0).to_bytes(8, "big"), b"a0"])

        assert ["Restarted", "a0"] == await heard.next(2)
        assert feed.stream.is_complete
    context.destroy(linger=0)


async def test_malformed_messages(engine: EventSockets) -> None:
    """Messages of another form are counted and passed over."""
    async with running(options(engine)) as (feed, heard):
        await engine.until_subscribed()
        await heard.next(2)
        await engine.send_raw([b"topic"])
        await engine.send_raw([b"topic", b"12", b"x"])
        await engine.send(b"a1")

        assert ["a1"] == await heard.next(1)
        assert 2 == feed.malformed


async def test_too_long_a_message(engine: EventSockets, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the connection; what was missed is replayed, and the feed hears the engine again."""
    monkeypatch.setattr(zmq_feed, "MOST_MESSAGE_BYTES", 1000)
    feed_options = replace(options(engine), verify_after_s=0.05)
    async with running(feed_options) as (_, heard):
        assert ["Restarted", "a0"] == await heard.next(2)
        await engine.until_subscribed()
        await engine.send_raw([b"topic", bytes(8), bytes(2000)])
        await engine.until_subscribed()  # that it has left
        await engine.send(b"a1", is_lost=True)
        assert ["a1"] == await heard.next(1)

        await engine.until_subscribed()  # again
        await engine.send(b"a2")
        assert ["a2"] == await heard.next(1)


async def test_bad_endpoint() -> None:
    """An endpoint that is none is refused at once, naming the flag."""
    with pytest.raises(ConfigError, match="--kv-events nonsense"):
        async with EngineEvents.open(EventEndpoints("nonsense")):
            pass
