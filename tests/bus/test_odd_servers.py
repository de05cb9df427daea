"""Another program answers on NATS's port for a while: the bus connects as soon as NATS is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from structlog.testing import capture_logs

from kvrouter.bus import Bus, NatsOptions, connection
from tests.bus.watching import SOON_S, Connections, Inbox, client_of
from tests.conftest import NatsServer

NewServer = Callable[[], NatsServer]
pytestmark = pytest.mark.filterwarnings(
    # nats-py forgets the socket of a handshake that failed; the garbage collector closes it
    "ignore:Exception ignored in. <function StreamWriter.__del__:pytest.PytestUnraisableExceptionWarning"
)

ODD_ANSWERS = {
    "a line without end": b"x" * 300_000,
    "an INFO without end": b'INFO {"a":"' + b"y" * 200_000,
    "an INFO that is a list": b"INFO []\r\n",
    "an INFO that is not text": b"INFO \xff\xfe\r\n",
    "an INFO with a wrong type": b'INFO {"connect_urls": 7}\r\n',
    "HTTP": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "nothing": b"",
}
ODD_ONCE_CONNECTED = {
    "an INFO that is a list": b"INFO [1]\r\n",
    "an INFO that is not JSON": b"INFO {bad\r\n",
    "an unknown message": b"FOO\r\n",
    "a message of no subscription": b"MSG a 77 x\r\n",
    "an error without text": b"-ERR \r\n",
}
GREETING = b'INFO {"server_id":"x","version":"2.10.0","max_payload":1048576}\r\n'


class OddServer:
    """Sends the same bytes to every client, and counts the clients."""

    def __init__(self, answer: bytes) -> None:
        self.clients = 0
        self._answer = answer
        self._connected = asyncio.Event()

    async def speak(self, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        self.clients += 1
        self._connected.set()
        writer.write(self._answer)
        try:
            await writer.drain()
        except ConnectionError:
            pass  # the client has closed the connection already
        finally:
            writer.close()

    async def was_tried(self, times: int) -> None:
        """Wait until there were this many clients."""
        async with asyncio.timeout(SOON_S):
            while self.clients < times:
                self._connected.clear()
                await self._connected.wait()


@asynccontextmanager
async def odd_server(port: int, answer: bytes) -> AsyncIterator[OddServer]:
    """A server that listens until the block ends."""
    server = OddServer(answer)
    async with await asyncio.start_server(server.speak, "127.0.0.1", port):
        yield server


@pytest.mark.parametrize("answer", ODD_ANSWERS.values(), ids=ODD_ANSWERS)
async def test_odd_answers_at_the_first_connection(new_nats_server: NewServer, answer: bytes) -> None:
    """A process that starts while another program has NATS's port connects when NATS is back."""
    server, inbox = new_nats_server(), Inbox()
    with capture_logs() as logs:
        async with Bus.open(NatsOptions((server.url,)), name="test") as bus:
            connected = Connections(bus)
            await bus.subscribe("a", inbox)
            async with odd_server(server.port, answer) as odd:
                await odd.was_tried(2)
            assert bus.outage_reason
            server.start()

            await connected.reach(1)
            bus.publish("a", b"x")
            await inbox.holds(1)
            assert not bus.outage_reason
    warnings = [(entry["event"], entry.get("error")) for entry in logs]
    assert len(warnings) == len(set(warnings))


@pytest.mark.parametrize("answer", ODD_ANSWERS.values(), ids=ODD_ANSWERS)
async def test_odd_answers_when_connecting_again(new_nats_server: NewServer, answer: bytes) -> None:
    """A connected process that finds another program on NATS's port reconnects later."""
    server, inbox = new_nats_server(), Inbox()
    server.start()
    async with Bus.open(NatsOptions((server.url,)), name="test") as bus:
        connected = Connections(bus)
        await bus.subscribe("a", inbox)
        await connected.reach(1)

        server.stop()
        async with odd_server(server.port, answer) as odd:
            await odd.was_tried(2)
        server.start()
        await connected.reach(2)

        assert bus.publish("a", b"after")
        await inbox.holds(1)


@pytest.mark.parametrize("answer", ODD_ONCE_CONNECTED.values(), ids=ODD_ONCE_CONNECTED)
async def test_nonsense_in_a_connection(new_nats_server: NewServer, answer: bytes) -> None:
    """The bus leaves a server that sends nonsense, and connects to NATS once it runs."""
    server, inbox = new_nats_server(), Inbox()

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING)
        while line := await reader.readline():
            writer.write(b"PONG\r\n" * line.startswith(b"PING") + answer * line.startswith(b"SUB b"))
        writer.close()

    async with Bus.open(NatsOptions((server.url,)), name="test") as bus:
        connected = Connections(bus)
        await bus.subscribe("a", inbox)
        async with await asyncio.start_server(speak, "127.0.0.1", server.port):
            await connected.reach(1)
            await bus.subscribe("b", inbox)
            await asyncio.sleep(0)
        server.start()
        await connected.reach(2)

        assert bus.publish("a", b"after")
        await inbox.holds(1)


async def test_stuck_client_is_replaced(new_nats_server: NewServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """If nats-py neither connects nor ends, a new client takes over after a while."""
    monkeypatch.setattr(connection, "MAX_AWAY_S", 0.5)
    server = new_nats_server()
    server.start()
    async with Bus.open(NatsOptions((server.url,)), name="test") as bus:
        connected, endless = Connections(bus), asyncio.Event()
        await connected.reach(1)
        client = client_of(bus)
        monkeypatch.setattr(client, "_select_next_server", endless.wait)

        server.stop()
        server.start()
        await connected.reach(2)

        assert client_of(bus) is not client
        assert client.is_closed


async def test_cancelled_future_of_nats_py(
    new_nats_server: NewServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancellation inside nats-py ends no task of the bus."""
    server, inbox = new_nats_server(), Inbox()
    server.start()

    async def cancelled(*_: object) -> None:
        raise asyncio.CancelledError

    async with Bus.open(NatsOptions((server.url,)), name="test") as bus:
        await Connections(bus).reach(1)
        await bus.subscribe("a", inbox)
        with monkeypatch.context() as patch:
            patch.setattr(client_of(bus), "publish", cancelled)
            bus.publish("a", b"lost")
            async with asyncio.timeout(SOON_S):
                while not bus.counters.unsent:  # noqa: ASYNC110  # counters have no event
                    await asyncio.sleep(0)
        bus.publish("a", b"after")

        await inbox.holds(1)
    assert [b"after"] == inbox.payloads
