"""The bus with a real nats-server that is stopped and started."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from uuid import uuid4

import pytest

from kvrouter.bus import Bus, NatsOptions
from tests.bus.watching import SOON_S, Connections, Inbox, ask, client_of
from tests.conftest import NatsServer

NewServer = Callable[[], NatsServer]


async def disconnected(bus: Bus) -> None:
    """Wait until the bus has noticed; it has no callback for this."""
    async with asyncio.timeout(SOON_S):
        while bus.connected:  # noqa: ASYNC110  # the bus has no event for a lost server
            await asyncio.sleep(0)


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[Bus]:
    """A bus that is connected to the shared server."""
    async with Bus.open(NatsOptions((nats_url,)), name="test") as bus:
        await Connections(bus).reach(1)
        yield bus


@pytest.fixture
def subject() -> str:
    """A unique subject for this test."""
    return f"test.{uuid4().hex}"


async def test_published_messages_arrive_in_order(bus: Bus, subject: str) -> None:
    """Two subjects under one subscription: each message arrives once, in the order of publishing."""
    inbox = Inbox()
    await bus.subscribe(f"{subject}.>", inbox)
    sent = [(f"{subject}.{n % 2}", str(n).encode()) for n in range(2000)]

    taken = [bus.publish(to, payload) for to, payload in sent]
    await inbox.holds(len(sent))

    assert all(taken)
    assert sent == inbox.messages
    assert (2000, 0) == (bus.counters.published, bus.counters.unsent)
    assert 2000 == bus.counters.received


async def test_request_is_answered(bus: Bus, subject: str, nats_url: str) -> None:
    """A request reaches a subscriber on another connection, whose answer comes back."""
    async with Bus.open(NatsOptions((nats_url,)), name="other") as other:
        await Connections(other).reach(1)
        await other.subscribe(subject, lambda _, payload, reply: _answer(other, reply, payload[::-1]))
        await _subscribed(other, subject)

        assert b"cba" == await ask(bus, subject, b"abc")


def _answer(bus: Bus, reply: str, payload: bytes) -> None:
    bus.publish(reply, payload)


async def _subscribed(bus: Bus, subject: str) -> None:
    """The server handles a connection's commands in order: a reply shows that it has subscribed."""
    await ask(bus, subject, b"")


async def test_part(bus: Bus, subject: str) -> None:
    """The subscriptions of a part of the process end with it; others still receive the subject."""
    inbox, left = Inbox(), Inbox()
    await bus.subscribe(subject, inbox)
    async with bus.part() as part:
        await part.subscribe(subject, left)
        part.publish(subject, b"1")
        await left.holds(1)

    bus.publish(subject, b"2")
    await inbox.holds(2)
    assert [b"1"] == left.payloads


async def test_subject_that_nobody_receives(bus: Bus, subject: str) -> None:
    """The server sends a part's subjects no longer once it has ended; the next part receives them again."""
    after = Inbox()
    await bus.subscribe(subject, after)
    for round_ in range(1, 4):
        inbox = Inbox()
        async with bus.part() as part:
            await part.subscribe(f"{subject}.*", inbox)
            bus.publish(f"{subject}.a", b"x")
            await inbox.holds(1)
        received = bus.counters.received
        bus.publish(f"{subject}.a", b"x")
        bus.publish(subject, b"after")
        await after.holds(round_)

        assert received + 1 == bus.counters.received


async def test_too_large_a_message(bus: Bus, subject: str) -> None:
    """A message above max_payload is not sent, and the connection stays."""
    inbox = Inbox()
    await bus.subscribe(subject, inbox)

    bus.publish(subject, bytes(bus.max_payload + 1))
    bus.publish(subject, b"after")
    await inbox.holds(1)

    assert [b"after"] == inbox.payloads
    assert 1 == bus.counters.unsent


async def test_full_outbox(bus: Bus, subject: str) -> None:
    """Messages beyond the limit of the outbox are dropped, not queued."""
    payload = bytes(1024 * 1024)

    taken = [bus.publish(subject, payload) for _ in range(40)]

    assert (True, False) == (taken[0], taken[-1])
    assert 32 == sum(taken)


async def test_callback_that_fails(bus: Bus, subject: str) -> None:
    """An error in the handling of one message does not stop the next one."""
    inbox = Inbox()

    def handle(to: str, payload: bytes, reply: str) -> None:
        inbox(to, payload, reply)
        if payload == b"bad":
            raise ValueError(payload)

    await bus.subscribe(subject, handle)
    for payload in (b"bad", b"good"):
        bus.publish(subject, payload)

    await inbox.holds(2)


async def test_subscribed_before_connected(nats_url: str, subject: str) -> None:
    """Subscriptions made before the connection exists take effect, at any moment."""
    async with Bus.open(NatsOptions((nats_url,)), name="test") as bus:
        inboxes = []
        connected = Connections(bus)
        while not connected.count:
            inboxes.append(Inbox())
            await bus.subscribe(subject, inboxes[-1])
            await asyncio.sleep(0)
        bus.publish(subject, b"x")

        for inbox in inboxes:
            await inbox.holds(1)


async def test_last_message_is_sent(bus: Bus, subject: str, nats_url: str) -> None:
    """A message published right before the end is sent."""
    inbox = Inbox()
    await bus.subscribe(subject, inbox)
    await bus.subscribe(f"{subject}.x", lambda _, payload, reply: _answer(bus, reply, payload))
    await _subscribed(bus, f"{subject}.x")

    async with Bus.open(NatsOptions((nats_url,)), name="other") as other:
        await Connections(other).reach(1)
        other.publish(subject, b"leave")

    await inbox.holds(1)


async def test_server_that_starts_late(new_nats_server: NewServer, subject: str) -> None:
    """The bus works before the server exists: publish returns False, and it connects by itself."""
    server, inbox = new_nats_server(), Inbox()
    async with Bus.open(NatsOptions((server.url,)), name="test") as bus:
        connected = Connections(bus)
        await bus.subscribe(subject, inbox)
        assert not bus.connected
        assert not bus.publish(subject, b"too early")

        server.start()
        await connected.reach(1)
        assert bus.publish(subject, b"now")
        await inbox.holds(1)

    assert [b"now"] == inbox.payloads


async def test_absent_server_does_not_keep_the_process(new_nats_server: NewServer) -> None:
    """The bus closes quickly if no server has ever answered."""
    async with asyncio.timeout(SOON_S):
        async with Bus.open(NatsOptions((new_nats_server().url,)), name="test") as bus:
            await asyncio.sleep(0)
            assert not bus.connected


async def test_server_restarts(new_nats_server: NewServer, subject: str) -> None:
    """While NATS is away publish returns False; afterwards subscriptions work, without stale messages."""
    server, inbox = new_nats_server(), Inbox()
    server.start()
    async with Bus.open(NatsOptions((server.url,)), name="test") as bus:
        connected = Connections(bus)
        await connected.reach(1)
        await bus.subscribe(subject, inbox)
        bus.publish(subject, b"before")
        await inbox.holds(1)

        server.stop()
        await disconnected(bus)
        assert [False] * 100 == [bus.publish(subject, b"stale") for _ in range(100)]
        server.start()
        await connected.reach(2)

        assert bus.publish(subject, b"after")
        await inbox.holds(2)

    assert [b"before", b"after"] == inbox.payloads
    assert (100, 2) == (bus.counters.unsent, bus.counters.connections)


async def test_on_connect_of_a_connected_bus(bus: Bus) -> None:
    """A callback that is registered late is called at once."""
    assert 1 == Connections(bus).count


async def test_second_server_takes_over(new_nats_server: NewServer, subject: str) -> None:
    """With two servers, the bus uses the other one when one dies."""
    (first, second), inbox = [new_nats_server(), new_nats_server()], Inbox()
    first.start()
    async with Bus.open(NatsOptions((first.url, second.url)), name="test") as bus:
        connected = Connections(bus)
        await bus.subscribe(subject, inbox)
        await connected.reach(1)

        second.start()
        first.stop()
        await connected.reach(2)
        assert bus.publish(subject, b"there")
        await inbox.holds(1)


async def test_closed_client_is_replaced(bus: Bus, subject: str) -> None:
    """If nats-py closes its client, a new one is built and subscribed."""
    inbox, connected = Inbox(), Connections(bus)
    await bus.subscribe(subject, inbox)

    await client_of(bus).close()
    assert not bus.publish(subject, b"stale")
    await connected.reach(2)
    bus.publish(subject, b"after")
    await inbox.holds(1)

    assert [b"after"] == inbox.payloads


async def test_server_that_dies_during_the_handshake(free_port: Callable[[], int]) -> None:
    """A server that dies between CONNECT and the first flush does not end the bus: it tries again."""
    port, clients = free_port(), 0

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal clients
        clients += 1
        pongs = 1 if clients < 3 else 1000
        writer.write(b'INFO {"server_id":"x","version":"2.10.0","max_payload":1048576}\r\n')
        while pongs and (line := await reader.readline()):
            if line.startswith(b"PING"):
                writer.write(b"PONG\r\n")
                pongs -= 1
        writer.close()

    async with (
        await asyncio.start_server(speak, "127.0.0.1", port),
        Bus.open(NatsOptions((f"nats://127.0.0.1:{port}",)), name="test") as bus,
    ):
        await bus.subscribe("a", lambda *_: None)

        await Connections(bus).reach(1)

    assert clients >= 3


@pytest.mark.parametrize("is_there", [True, False])
async def test_leaving_at_any_moment_of_connecting(
    nats_url: str, free_port: Callable[[], int], is_there: bool
) -> None:
    """At any step of connecting, leaving ends the bus at once and leaves no task behind.

    nats-py sometimes swallows a cancellation: measured in about 1 of 50 such ends.
    """
    url = nats_url if is_there else f"nats://127.0.0.1:{free_port()}"
    for turns in range(60):
        async with asyncio.timeout(5), Bus.open(NatsOptions((url,)), name="test") as bus:
            await bus.subscribe("a", lambda _subject, _data, _reply: None)
            for _ in range(turns):
                await asyncio.sleep(0)

    await asyncio.sleep(0)
    assert {asyncio.current_task()} == asyncio.all_tasks()
