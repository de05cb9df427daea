"""The NATS connection for the rest of kvrouter: `publish` never waits, and no error of nats-py ends it.

It hides these properties of nats-py:

- `connect` does not return while the server is away, so a task of the bus connects in the background.
- A client can close itself, or its tasks can end without an error report. The bus replaces such a client by a
  new one and subscribes again.
- While it is disconnected it would buffer frames and send them later, when they are stale. The bus gives it
  none: readers request missing frames from their source's ring.
- Its `publish` is a coroutine. One task sends in order what the plain `publish` of the bus has queued.
- It passes each received message through a queue to a task, see NatsClient.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import nats.errors
import structlog
from nats.aio.client import Client, Srv
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from kvrouter.bus import endings
from kvrouter.bus.addresses import host_of
from kvrouter.bus.local_users import LocalUser, is_here, signature
from kvrouter.bus.messages import PlainMessages, text_of
from kvrouter.bus.options import NatsOptions
from kvrouter.bus.outage import Outage
from kvrouter.core.wire.senders import Message

log = structlog.get_logger()

# More than this waits only if NATS does not read. Further messages are dropped, and readers request them
# later.
OUTBOX_BYTES = 32 * 1024 * 1024
# A server must accept the largest frame (512 KiB) and its envelope. NATS's default limit is 1 MiB.
LEAST_PAYLOAD_BYTES = 513 * 1024
# nats-py keeps this much of one subscription if it queues messages (see NatsClient), and drops the rest.
PENDING_MESSAGES = 512 * 1024
PENDING_BYTES = 128 * 1024 * 1024
# nats-py does not report the end of its tasks, so they are checked this often.
CHECK_EVERY_S = 0.2
# How often is looked whether NATS is awaited for long.
LOOK_EVERY_S = 1.0
# A client that is not connected to any server for this long is replaced by a new one.
MAX_AWAY_S = 10.0
# A new client gets the given servers and at most this many that the cluster has announced.
MOST_DISCOVERED = 64
# Closing waits for this long at most: a server that does not read would delay it without end.
CLOSE_S = 2.0

# `(subject, payload, reply)`. It must be quick: it runs between two reads of the socket.
OnMessage = Callable[[str, bytes, str], None]
# The same for what a read of the socket has brought.
OnMessages = Callable[[list[Message]], None]


@dataclass(frozen=True, slots=True)
class Each:
    """Calls a function for each message. One that raises delays no other."""

    on_message: OnMessage

    def __call__(self, messages: list[Message]) -> None:
        errors = []
        for message in messages:
            try:
                self.on_message(*message)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]


@dataclass(slots=True)
class BusCounters:
    """Totals since the start, for metrics."""

    published: int = 0
    published_bytes: int = 0
    unsent: int = 0
    received: int = 0
    received_bytes: int = 0
    slow_consumer_drops: int = 0
    connections: int = 0


class Bus:
    """One connection that reconnects by itself. Open it with `async with Bus.open(...)`."""

    def __init__(self, options: NatsOptions, name: str, user: str = "") -> None:
        self.counters = BusCounters()
        self._arguments = options.connect_arguments()
        self._name = name
        self._user = LocalUser(user) if user and not options.has_credentials else None
        self._outage = Outage(options.shown(), self._user)
        self._client: NatsClient | None = None
        self._client_closed = asyncio.Event()
        self._discovered: list[str] = []
        self._receivers: dict[str, list[OnMessages]] = {}  # by subject
        self._subscriptions: dict[str, Subscription] = {}  # of the present client
        self._connect_callbacks: list[Callable[[], None]] = []
        self._outbox: deque[tuple[str, bytes, str]] = deque()
        self._outbox_bytes = 0
        self._outbox_filled = asyncio.Event()
        self._closing = False
        self._keeper: asyncio.Task[None] | None = None
        self._has_ended = False
        # What still calls `leave`. The program's end does it until the last messages are sent.
        self._leaves: list[Callable[[], None]] = []
        self._ending = contextlib.ExitStack()

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, options: NatsOptions, *, name: str, user: str = "") -> AsyncIterator[Bus]:
        """Connect in the background. The bus can be used at once; `connected` becomes true later.

        `user`: who this client is on a server that kvrouter has started on this machine (local_users.py).
        """
        bus = cls(options, name, user)
        keeper = asyncio.create_task(bus._repeat(bus._use_one_client), name="nats keeper")
        sender = asyncio.create_task(bus._repeat(bus._send_next), name="nats sender")
        looker = asyncio.create_task(bus._look_forever(), name="nats looker")
        bus._keeper = keeper
        try:
            yield bus
        finally:
            await _end(sender)
            await bus._send_last()
            bus._ending.close()
            bus._closing = True
            await asyncio.gather(_end(keeper), _end(looker))

    @property
    def connected(self) -> bool:
        """Whether a message published now would be sent."""
        return self._client is not None and self._client.is_connected

    @property
    def outage_reason(self) -> str:
        """Why the bus is not connected, and what to do; empty if it is, or if the reason is not known."""
        if self.connected or not self._outage.reason:
            return ""
        return f"{self._outage.reason}: {self._outage.remedy}"

    @property
    def is_rejected(self) -> bool:
        """Whether the bus is not connected because NATS refuses its credentials, or wants some."""
        return self._outage.is_rejected and not self.connected

    @property
    def last_error(self) -> str:
        """What NATS, or the attempt to connect, last reported since the last connection; empty: nothing.

        Of a connection that works: a subject that this client may not use.
        """
        return self._outage.reason

    @property
    def local_host(self) -> str:
        """The address of this host on the way to NATS, as other hosts reach it; empty if it is not known."""
        return self._client.local_host if self._client is not None else ""

    @property
    def max_payload(self) -> int:
        """The server's limit for one message, in bytes."""
        return self._client.max_payload if self._client is not None else 1024 * 1024  # NATS's default

    def publish(self, subject: str, payload: bytes, reply: str = "") -> bool:
        """Queue a message, in order. Returns False, and sends nothing, while NATS is away.

        `reply`: the subject for answers.
        """
        if not (self.connected or self._is_cut) or self._outbox_bytes + len(payload) > OUTBOX_BYTES:
            self.counters.unsent += 1
            return False
        self._outbox.append((subject, payload, reply))
        self._outbox_bytes += len(payload)
        if not self._has_ended:
            self._outbox_filled.set()
        return True

    @contextlib.contextmanager
    def leaving(self, leave: Callable[[], None]) -> Iterator[None]:
        """Call `leave`, which publishes, at the end of the block, or of the program: see endings.py."""
        if not self._leaves:
            self._ending.close()
            self._ending.enter_context(endings.open_until(endings.Ending(self._end_program, self._send_anew)))
        self._leaves.append(leave)
        try:
            yield
        finally:
            self._leaves.remove(leave)
            leave()

    def _end_program(self) -> None:
        """Queue the last messages. The loop of this bus may be closed: nothing may wake its tasks."""
        self._has_ended = True
        for leave in self._leaves:
            leave()

    @property
    def _is_cut(self) -> bool:
        """Whether the connection ends before the bus: `asyncio.run` cancels all tasks at once."""
        keeper = self._keeper
        # done: a SystemExit of the program's signal handler is raised in whatever task runs at that moment
        is_cut = keeper is not None and (keeper.cancelling() > 0 or keeper.done())
        return self._has_ended or (is_cut and not self._closing)

    async def subscribe(self, subject: str, on_message: OnMessage) -> None:
        """Call `on_message` for each message, also after reconnects. `SUBJECT GROUP`: one of a group."""
        await self.subscribe_all(subject, Each(on_message))

    async def subscribe_all(self, subject: str, on_messages: OnMessages) -> None:
        """The same for all messages of a read at once."""
        is_new = subject not in self._receivers
        self._receivers.setdefault(subject, []).append(on_messages)
        if is_new and self._client is not None and not self._client.is_closed:
            await self._subscribe_client(self._client, subject)

    async def flush(self, timeout_s: float) -> None:
        """Wait for the server's answer to a ping. Raises an Exception without one."""
        if self._client is None:
            raise ConnectionError("not connected")
        await self._client.flush(timeout=timeout_s)  # type: ignore[arg-type]  # nats-py only waits with it

    def on_connect(self, callback: Callable[[], None]) -> None:
        """Call `callback` after every (re)connection, and now if connected."""
        self._connect_callbacks.append(callback)
        if self.connected:
            callback()

    @contextlib.asynccontextmanager
    async def part(self) -> AsyncIterator[BusPart]:
        """The same connection for a part of the process. Its subscriptions end with the block."""
        part = BusPart(self)
        try:
            yield part
        finally:
            for callback in part.callbacks:
                self._connect_callbacks.remove(callback)
            for subject, on_messages in part.subscriptions:
                self._receivers[subject].remove(on_messages)
            for subject in {subject for subject, _ in part.subscriptions}:
                await self._leave_subject(subject)

    async def _leave_subject(self, subject: str) -> None:
        """Unsubscribe, if nobody in this process receives it any more."""
        if self._receivers.get(subject) != []:
            return
        del self._receivers[subject]
        subscription = self._subscriptions.pop(subject, None)
        if self._client is not None and subscription is not None:
            with contextlib.suppress(nats.errors.Error):  # of a closed connection: nothing is subscribed
                await self._client.unsubscribe_plain(subscription)

    async def _look_forever(self) -> None:
        """Say what is awaited while NATS is away, also if no attempt to connect comes to an end."""
        while True:
            self._outage.look(asyncio.get_running_loop().time(), is_connected=self.connected)
            await asyncio.sleep(LOOK_EVERY_S)

    async def _repeat(self, turn: Callable[[], Awaitable[None]]) -> None:
        """Repeat `turn` after any error."""
        # also after a CancelledError that this task did not get: nats-py cancels futures that others await
        while True:
            try:
                await turn()
            except (Exception, asyncio.CancelledError) as error:
                if _is_cancelled(error):
                    raise
                self._outage.failed(error)
                await asyncio.sleep(_jitter(0.2))

    async def _use_one_client(self) -> None:
        """Use one client from its connection until it is useless."""
        client = await self._build_client()
        try:
            reason = await self._until_useless(client)
        finally:
            self._discovered = [server.geturl() for server in client.discovered_servers][:MOST_DISCOVERED]
            self._client = None
            await discard(client)
        log.warning("nats.client_replaced", name=self._name, reason=reason)
        await asyncio.sleep(_jitter(0.2))

    async def _until_useless(self, client: NatsClient) -> str:
        """Wait until the client has stopped working; returns the reason."""
        loop = asyncio.get_running_loop()
        connected_at = loop.time()
        while loop.time() - connected_at < MAX_AWAY_S:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_EVERY_S):
                    await self._client_closed.wait()
            self._client_closed.clear()
            if reason := why_useless(client):
                return reason
            if client.is_connected:
                connected_at = loop.time()
        return f"not connected for {MAX_AWAY_S:g} s"

    async def _build_client(self) -> NatsClient:
        """Return a new client once it is connected and has all subscriptions."""
        client = NatsClient(self._user)
        self._client_closed.clear()
        try:
            await self._connect(client)
            self._subscriptions = {}
            # some may come and go during the loop
            while missing := [each for each in self._receivers if each not in self._subscriptions]:
                await self._subscribe_client(client, missing[0])
            self._client = client
            await client.flush()
        except BaseException:
            self._client = None
            await discard(client)
            raise
        self._connected()
        return client

    async def _connect(self, client: NatsClient) -> None:
        await client.connect(
            **self._arguments | {"servers": [*self._arguments["servers"], *self._discovered]},
            name=self._name,
            error_cb=self._on_error,
            closed_cb=self._on_closed,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._on_reconnected,
            connect_timeout=2,
            ping_interval=1,  # a dead connection is noticed after some 2 s; nats-py's default is 4 minutes
            max_outstanding_pings=2,
            reconnect_time_wait=_jitter(0.2),  # type: ignore[arg-type]  # it only sleeps on it
            max_reconnect_attempts=-1,
        )

    async def _subscribe_client(self, client: NatsClient, subject: str) -> None:
        counters, receivers = self.counters, self._receivers[subject]

        def deliver(messages: list[Message]) -> None:
            counters.received += len(messages)
            counters.received_bytes += sum([len(data) for _, data, _ in messages])
            for on_messages in receivers:
                on_messages(messages)

        self._subscriptions[subject] = await client.subscribe_plain(
            subject, deliver, pending_msgs_limit=PENDING_MESSAGES, pending_bytes_limit=PENDING_BYTES
        )

    async def _send_next(self) -> None:
        await self._outbox_filled.wait()
        self._outbox_filled.clear()
        await self._send_outbox()

    async def _send_outbox(self) -> None:
        while self._outbox:
            subject, payload, reply = self._outbox.popleft()
            self._outbox_bytes -= len(payload)
            await self._send(subject, payload, reply)

    async def _send(self, subject: str, payload: bytes, reply: str) -> None:
        if self._client is None or not self.connected or len(payload) > self.max_payload:
            self.counters.unsent += 1
            return  # readers that miss it request a replay
        try:
            await self._client.publish(subject, payload, reply)
            self.counters.published += 1
            self.counters.published_bytes += len(payload)
        except (Exception, asyncio.CancelledError) as error:
            if _is_cancelled(error):
                raise
            self.counters.unsent += 1
            self._outage.warn("nats.unsent", error=str(error) or type(error).__name__, subject=subject)

    async def _send_last(self) -> None:
        """Send what is queued (a `leave`), in bounded time."""
        with contextlib.suppress(Exception):  # an error of NATS must not turn an orderly end into a failure
            async with asyncio.timeout(endings.MOST_S if self._is_cut else 1.0):
                if self._is_cut:
                    await self._send_anew()
                elif self._client is not None:
                    await self._send_outbox()
                    await _flush(self._client)

    async def _send_anew(self) -> None:
        """Send what is queued over a connection that begins and ends here, on any loop."""
        if not self._outbox:
            return
        client = NatsClient(self._user)
        try:
            await client.connect(
                **self._arguments, name=self._name, error_cb=_ignore, allow_reconnect=False, connect_timeout=2
            )
            for message in self._outbox:
                await client.publish(*message)
            await _flush(client)
            self._outbox.clear()  # only now: at the program's end this may be cut off, and is done again
            self._outbox_bytes = 0
        finally:
            await discard(client)

    def _connected(self) -> None:
        self.counters.connections += 1
        self._outage.end()
        log.info("nats.connected", name=self._name)
        if self.max_payload < LEAST_PAYLOAD_BYTES:
            log.warning("nats.max_payload_too_small", bytes=self.max_payload, least=LEAST_PAYLOAD_BYTES)
        for callback in self._connect_callbacks:
            try:
                callback()
            except Exception:  # it may run inside a task of nats-py, which an exception would end
                log.exception("nats.on_connect_failed", name=self._name)

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            self.counters.slow_consumer_drops += 1  # nats-py calls this once per dropped message
            self._outage.warn("nats.slow_consumer", effect="messages dropped; feeds request them again")
            return
        self._outage.failed(error)

    async def _on_closed(self) -> None:
        self._client_closed.set()

    async def _on_disconnected(self) -> None:
        if not self._closing and self._client is not None:
            log.warning("nats.disconnected", name=self._name)

    async def _on_reconnected(self) -> None:
        self._connected()


class BusPart:
    """A Bus for a part of the process, see `Bus.part`. Its methods are those of Bus."""

    def __init__(self, bus: Bus) -> None:
        self.subscriptions: list[tuple[str, OnMessages]] = []
        self.callbacks: list[Callable[[], None]] = []
        self._bus = bus

    @property
    def local_host(self) -> str:
        return self._bus.local_host

    @property
    def max_payload(self) -> int:
        return self._bus.max_payload

    def publish(self, subject: str, payload: bytes) -> bool:
        return self._bus.publish(subject, payload)

    async def subscribe(self, subject: str, on_message: OnMessage) -> None:
        await self.subscribe_all(subject, Each(on_message))

    async def subscribe_all(self, subject: str, on_messages: OnMessages) -> None:
        self.subscriptions.append((subject, on_messages))
        await self._bus.subscribe_all(subject, on_messages)

    def on_connect(self, callback: Callable[[], None]) -> None:
        self.callbacks.append(callback)
        self._bus.on_connect(callback)


async def _flush(client: NatsClient) -> None:
    """Return when the server has what was published."""
    for _ in range(2):  # nats-py (2.16) sends a PING before what it has queued: the second one follows it
        await client.flush()


async def _ignore(_error: Exception) -> None:
    """For nats-py, which logs errors otherwise."""


async def _end(task: asyncio.Task[None]) -> None:
    """Cancel a task again and again until it has ended: waits inside nats-py may swallow a cancellation."""
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=0.1)


def _is_cancelled(error: BaseException) -> bool:
    """Whether this task was cancelled, rather than a future that it awaited."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def _jitter(seconds: float) -> float:
    return seconds * random.uniform(0.75, 1.25)


class NatsClient(Client):
    """nats-py's client, with plain callbacks and without its leaks.

    nats-py (2.16) passes each message through a queue to a task. That costs as much as the rest of receiving,
    and a turn of the event loop; here a plain function is called at once (PlainMessages). The parser of
    nats-py, and the method that it calls for each message, are private: if a later nats-py has others,
    messages reach the function through the queue.

    nats-py also leaves the socket open after an attempt whose answer it does not understand: one descriptor
    per attempt, until the garbage collector runs.
    """

    def __init__(self, user: LocalUser | None = None) -> None:
        super().__init__()
        self._user = user
        self._plain: dict[object, OnMessages] = {}
        self._ps = PlainMessages(self)

    @property
    def local_host(self) -> str:
        """The connection's own address; empty without one, or over a WebSocket."""
        writer = getattr(self._transport, "_io_writer", None)
        return host_of(writer.get_extra_info("sockname")) if writer is not None else ""

    async def subscribe_plain(
        self, subject: str, on_messages: OnMessages, *, pending_msgs_limit: int, pending_bytes_limit: int
    ) -> Subscription:
        """Report all messages, in order. The limits hold only for messages that are queued."""

        async def deliver(message: Msg) -> None:
            on_messages([(message.subject, message.data, message.reply)])

        self._plain[deliver] = on_messages
        subject, _, group = subject.partition(" ")  # as in NATS's own SUB
        return await self.subscribe(
            subject,
            group,
            cb=deliver,
            pending_msgs_limit=pending_msgs_limit,
            pending_bytes_limit=pending_bytes_limit,
        )

    async def unsubscribe_plain(self, subscription: Subscription) -> None:
        """Get no more messages of it. Raises nats.errors.Error if the connection has closed."""
        self._plain.pop(subscription._cb, None)
        await subscription.unsubscribe()

    async def _connect_to_server(self, s: Srv) -> None:
        left, self._transport = self._transport, None
        if left is not None:  # of a failed attempt: nats-py does not close it
            left.close()  # type: ignore[no-untyped-call]
        await super()._connect_to_server(s)

    def _connect_command(self) -> bytes:
        # the INFO of the server that is connected now was just read
        if self._user is not None:
            self._sign_as(self._user)
        command: bytes = super()._connect_command()
        return command

    def _sign_as(self, user: LocalUser) -> None:
        self._public_nkey, self._signature_cb = None, None
        writer = getattr(self._transport, "_io_writer", None)
        if writer is None or not self._server_info.get("auth_required"):
            return
        host, port = writer.get_extra_info("peername")[:2]
        if not is_here(host, writer.get_extra_info("sockname")[0]):
            return
        pair = user.pair(port, self._server_info.get("server_name", ""))
        if pair is not None:
            self._public_nkey = pair.public_key.decode()
            self._signature_cb = partial(signature, pair)

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        if self.plain(sid) is None:
            await super()._process_msg(sid, subject, reply, data, headers)
        else:
            await self.deliver(sid, [(text_of(subject), data, text_of(reply))])

    def plain(self, sid: int) -> OnMessages | None:
        """What `subscribe_plain` was given for this subscription."""
        subscription = self._subs.get(sid)
        return None if subscription is None else self._plain.get(subscription._cb)

    async def deliver(self, sid: int, messages: list[Message]) -> None:
        """Report them. An error is passed on: it would end nats-py's reading task without a report."""
        on_messages = self.plain(sid)
        try:
            if on_messages is not None:
                on_messages(messages)
        except Exception as error:
            await self._error_cb(error)


def why_useless(client: NatsClient) -> str:
    """Why this client, which was connected once, will do nothing more; empty if it works."""
    # An error that nats-py does not expect (an endless line, an INFO that is not an object) ends its internal
    # tasks. It reports nothing, and stays "reconnecting" or "connected" for good.
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
