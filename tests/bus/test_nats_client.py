"""Plain callbacks on nats-py: messages reach them without a queue."""

from __future__ import annotations

import asyncio
import inspect

from nats.aio import client
from nats.aio.subscription import Subscription

from kvrouter.bus.connection import NatsClient
from tests.frontend.workers import until

ROOM = {"pending_msgs_limit": 100, "pending_bytes_limit": 100_000}


def test_private_names() -> None:
    """nats-py has the private names; without them messages take its queue, at twice the cost."""
    names = list(inspect.signature(client.Client._process_msg).parameters)

    assert ["self", "sid", "subject", "reply", "data", "headers"] == names
    assert "_cb" in vars(Subscription(None, cb=None))
    assert "_subs" in vars(client.Client())


async def test_order(nats_url: str) -> None:
    """Messages arrive in order, with subject, payload and reply, and none through nats-py's queue."""
    received: list[tuple[str, bytes, str]] = []
    nats = NatsClient()
    await nats.connect(nats_url)
    await nats.subscribe_plain("plain.>", lambda *message: received.append(message), **ROOM)
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
    await nats.subscribe_plain("raising.>", on_message, **ROOM)
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
        lambda _subject, data, reply: replies.append(asyncio.ensure_future(nats.publish(reply, data * 2))),
        **ROOM,
    )

    answer = await nats.request("asked", b"ab", timeout=5)
    await asyncio.gather(*replies)
    await nats.close()

    assert b"abab" == answer.data
