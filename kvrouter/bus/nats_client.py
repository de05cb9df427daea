"""nats-py's client with plain callbacks; whether it still works; how to close it in bounded time.

nats-py (2.16) passes each message through a queue to a task. That costs as much as the rest of receiving, and
a turn of the event loop; NatsClient calls a plain function at once. The method that the parser calls for each
message is private: if a later nats-py does not call it, messages reach the same function through the queue.

An error that nats-py does not expect (an endless line, an INFO that is not an object) ends its internal
tasks. It reports nothing, and stays "reconnecting" or "connected" for good; the tasks are private attributes.
It also leaves the socket open after an attempt whose answer it does not understand: one descriptor per
attempt, until the garbage collector runs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from nats.aio import client
from nats.aio.msg import Msg

# Closing waits for this long at most: a server that does not read would delay it without end.
CLOSE_S = 2.0

# `(subject, payload, reply)`. It must be quick: it runs between two reads of the socket.
OnMessage = Callable[[str, bytes, str], None]


class NatsClient(client.Client):
    """A client whose subscriptions may have plain callbacks."""

    def __init__(self) -> None:
        super().__init__()
        self._plain: dict[object, OnMessage] = {}

    async def subscribe_plain(
        self, subject: str, on_message: OnMessage, *, pending_msgs_limit: int, pending_bytes_limit: int
    ) -> None:
        """Call `on_message` for each message, in order. The limits hold only for messages that are queued."""

        async def deliver(message: Msg) -> None:
            on_message(message.subject, message.data, message.reply)

        self._plain[deliver] = on_message
        await self.subscribe(
            subject,
            cb=deliver,
            pending_msgs_limit=pending_msgs_limit,
            pending_bytes_limit=pending_bytes_limit,
        )

    async def _connect_to_server(self, s: client.Srv) -> None:
        left, self._transport = self._transport, None
        if left is not None:  # of a failed attempt: nats-py does not close it
            left.close()  # type: ignore[no-untyped-call]
        await super()._connect_to_server(s)

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        subscription = self._subs.get(sid)
        on_message = self._plain.get(subscription._cb) if subscription is not None else None
        if on_message is None:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        try:
            on_message(subject.decode(), data, reply.decode())
        except Exception as error:  # it would end nats-py's reading task without a report
            await self._error_cb(error)


def why_useless(client: NatsClient) -> str:
    """Why this client, which was connected once, will do nothing more; empty if it works."""
    if client.is_closed:
        return "it has closed"
    names = ("_reading_task", "_flusher_task") if client.is_connected else ("_reconnection_task",)
    return next(filter(None, (_end_of(client, name) for name in names)), "")


def _end_of(client: NatsClient, name: str) -> str:
    """How one of the client's tasks has ended; empty if it runs."""
    task: asyncio.Task[Any] | None = getattr(client, name, None)
    if task is None or not task.done():
        return ""
    # reading the exception also keeps asyncio from logging it as never retrieved
    error = None if task.cancelled() else task.exception()
    return f"its {name.strip('_').replace('_', ' ')} has ended" + (f": {error!r:.300}" if error else "")


async def discard(client: NatsClient) -> None:
    """Close a client in any state, in bounded time."""
    # the transport too: after a rejected password nats-py counts as closed and leaves its socket open
    transport = getattr(client, "_transport", None)
    closing = asyncio.create_task(client.close())
    try:
        await asyncio.wait([closing], timeout=CLOSE_S)
    finally:
        for _ in range(20):  # waits inside nats-py may swallow a cancellation
            if closing.done():
                break
            closing.cancel()
            await asyncio.wait([closing], timeout=0.1)
        closing.add_done_callback(_look_at_error)
    if transport is not None:
        with contextlib.suppress(Exception):
            transport.close()
            async with asyncio.timeout(CLOSE_S):
                await transport.wait_closed()


def _look_at_error(task: asyncio.Task[None]) -> None:
    # errors of closing do not matter, but asyncio would log an exception that is never read
    if not task.cancelled():
        task.exception()
