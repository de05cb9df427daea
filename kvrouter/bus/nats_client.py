"""A client of nats-py: plain callbacks, whether it is past help, and how to be rid of it.

nats-py hands each message through a queue to a task, which costs as much as all the rest and a turn of
the loop; here it goes to a plain callback at once. What the parser calls for each message has no public name:
should a later nats-py not call it, messages take the long way to the same callback.

nats-py runs tasks of its own. An error that it does not expect (a line without end, an INFO that is
no object) ends them, and it tells nobody: it goes on as "reconnecting" or "connected" for ever.
Its tasks have no public names. Nor does it close the socket of an attempt at which the server says nothing
it understands: one descriptor for each, until the garbage collector comes by.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from nats.aio import client
from nats.aio.msg import Msg

CLOSE_S = 2.0
"""What closing may take: a server that does not read would hold it up."""

OnMessage = Callable[[str, bytes, str], None]
"""`(subject, payload, reply)`; plain, and quick: it runs between two reads of the socket."""


class NatsClient(client.Client):
    """nats-py's, where a subscription may have a plain callback."""

    def __init__(self) -> None:
        super().__init__()
        self._plain: dict[object, OnMessage] = {}

    async def subscribe_plain(
        self, subject: str, on_message: OnMessage, *, pending_msgs_limit: int, pending_bytes_limit: int
    ) -> None:
        """Call `on_message` for each message, in their order. The limits are those of the long way."""

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
        if left is not None:  # by an attempt that failed once connected: nobody else closes it
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
        except Exception as error:  # it would end nats-py's reading task
            await self._error_cb(error)


def why_past_help(client: NatsClient) -> str:
    """Why nothing will happen any more on this client, which was connected once; empty if it may."""
    if client.is_closed:
        return "it has closed"
    names = ("_reading_task", "_flusher_task") if client.is_connected else ("_reconnection_task",)
    return next(filter(None, (_end_of(client, name) for name in names)), "")


def _end_of(client: NatsClient, name: str) -> str:
    """How one of its tasks has ended, asked for so that asyncio does not log it."""
    task: asyncio.Task[Any] | None = getattr(client, name, None)
    if task is None or not task.done():
        return ""
    error = None if task.cancelled() else task.exception()
    return f"its {name.strip('_').replace('_', ' ')} has ended" + (f": {error!r:.300}" if error else "")


async def discard(client: NatsClient) -> None:
    """Close a client, whatever state it is in, in bounded time.

    After a refused password nats-py believes it is closed and leaves its socket open, hence the
    transport; and its waits swallow a cancellation now and then, hence the loop.
    """
    transport = getattr(client, "_transport", None)
    closing = asyncio.create_task(client.close())
    try:
        await asyncio.wait([closing], timeout=CLOSE_S)
    finally:
        for _ in range(20):
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
    """Nothing that closing raises matters; unseen, asyncio would log it."""
    if not task.cancelled():
        task.exception()
