"""Plain callbacks on nats-py: messages reach them without a queue."""

from __future__ import annotations

import asyncio
import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.aio import client
from nats.aio.subscription import Subscription
from nats.protocol.parser import Parser

from kvrouter.bus.connection import Each, NatsClient
from kvrouter.bus.messages import PlainMessages, text_of
from kvrouter.core.wire.senders import Message
from tests.frontend.workers import until
from tests.long import examples

ROOM = {"pending_msgs_limit": 100, "pending_bytes_limit": 100_000}


def test_private_names() -> None:
    """nats-py has the private names; without them messages take its queue, at twice the cost."""
    names = list(inspect.signature(client.Client._process_msg).parameters)

    assert ["self", "sid", "subject", "reply", "data", "headers"] == names
    assert "_cb" in vars(Subscription(None, cb=None))
    assert {"_subs", "_ps"} <= vars(client.Client()).keys()


class _Recorded:
    """What a parser reports of a connection with plain messages on subscription 1."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def plain(self, sid: int) -> object:
        return self.calls if sid == 1 else None

    async def deliver(self, sid: int, messages: list[Message]) -> None:
        self.calls += [(sid, *message) for message in messages]

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, _headers: object
    ) -> None:
        self.calls.append((sid, text_of(subject), data, text_of(reply)))

    async def _process_ping(self) -> None:
        self.calls.append(("ping",))


FORGED = b"MSG a.b 1 4\r\nEVIL\r\n"
payloads = st.binary(max_size=40) | st.sampled_from(
    [FORGED, 3 * FORGED, FORGED[:9], b"\r\n" + FORGED, b"PING\r\n"]
)


@pytest.mark.usefixtures("core")
@examples(200)
@given(st.lists(st.tuples(st.integers(0, 6), payloads), max_size=12), st.data())
async def test_any_cut(parts: list[tuple[int, bytes]], data: st.DataObject) -> None:
    """However the bytes are cut into reads, all is reported as by nats-py's own parser."""
    heads = (b"a.b 1 ", b"a.c 1 answer.to ", b"a.d 2 ", b"a.\xff 1 ")
    sent = b"".join(
        b"MSG %b%d\r\n%b\r\n" % (heads[kind], len(text), text)
        if kind < len(heads)
        else (
            b"HMSG a.h 1 12 %d\r\nNATS/1.0\r\n\r\n%b\r\n" % (12 + len(text), text),
            b"PING\r\n",
            b"+OK\r\n",
        )[kind - 4]
        for kind, text in parts
    )
    theirs, ours = _Recorded(), _Recorded()
    parser = PlainMessages(ours)
    parser.MOST_BYTES = 20
    await Parser(theirs).parse(sent)
    while sent:
        size = data.draw(st.integers(1, len(sent)))
        await parser.parse(sent[:size])
        sent = sent[size:]

    assert theirs.calls == ours.calls


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("head", [b"MSG a.d 2 ", b"MSG a.b 1 ", b"HMSG a.b 1 25 "])
@pytest.mark.parametrize("cuts", [(0,), (30, 60)])
async def test_forged_payload(head: bytes, cuts: tuple[int, ...]) -> None:
    """A payload that looks like messages is one, whoever may send it and wherever a read ends."""
    text = FORGED + bytes(100)
    sent = b"%b%d\r\n%b\r\nPING\r\n" % (head, len(text), text)
    begin, theirs, ours = sent.index(b"\r\n") + 2, _Recorded(), _Recorded()
    parser, at = PlainMessages(ours), 0
    parser.MOST_BYTES = 20
    await Parser(theirs).parse(sent)
    for end in (*(begin + cut for cut in cuts), len(sent)):
        await parser.parse(sent[at:end])
        at = end

    assert theirs.calls == ours.calls


async def test_order(nats_url: str) -> None:
    """Messages arrive in order, with subject, payload and reply, and none through nats-py's queue."""
    received: list[tuple[str, bytes, str]] = []
    nats = NatsClient()
    await nats.connect(nats_url)
    await nats.subscribe_plain("plain.>", received.extend, **ROOM)
    queues = [subscription._pending_queue for subscription in nats._subs.values()]
    queued: list[object] = []
    for queue in queues:
        vars(queue)["put_nowait"] = queued.append

    for number in range(5):
        await nats.publish(f"plain.{number}", b"%d" % number, reply="answer.here")
    await until(lambda: len(received) == 5, "all have come")
    await nats.close()

    assert [(f"plain.{number}", b"%d" % number, "answer.here") for number in range(5)] == received
    assert not queued


async def test_callback_that_raises(nats_url: str) -> None:
    """The error callback gets the error, and the next message arrives."""
    received: list[str] = []
    errors: list[Exception] = []

    def on_message(subject: str, _data: bytes, _reply: str) -> None:
        received.append(subject)
        if len(received) == 1:
            raise ValueError("no good")

    async def on_error(error: Exception) -> None:
        errors.append(error)

    nats = NatsClient()
    await nats.connect(nats_url, error_cb=on_error)
    await nats.subscribe_plain("raising.>", Each(on_message), **ROOM)
    for number in range(2):
        await nats.publish(f"raising.{number}", b"")
    await until(lambda: len(received) == 2, "both have come")
    await nats.close()

    assert ["no good"] == [str(error) for error in errors]


async def test_requests(nats_url: str) -> None:
    """Requests through nats-py still work."""
    nats = NatsClient()
    await nats.connect(nats_url)
    replies: list[asyncio.Task[None]] = []
    await nats.subscribe_plain(
        "asked",
        Each(lambda _, data, reply: replies.append(asyncio.ensure_future(nats.publish(reply, data * 2)))),
        **ROOM,
    )

    answer = await nats.request("asked", b"ab", timeout=5)
    await asyncio.gather(*replies)
    await nats.close()

    assert b"abab" == answer.data
