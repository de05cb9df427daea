"""The NATS connection as the rest of kvrouter sees it: publish never waits, nothing ends it.

What nats-py does that this room hides: `connect` does not return while the server is away; a
client can close for good, or end its own tasks and say nothing (a new one is built and subscribed
anew); while it is disconnected it would buffer and later send stale frames (nothing is handed to it
then: the rings repair); and its `publish` is a coroutine (one task sends in order what the plain
`publish` here has queued).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass

import nats.errors
import structlog

from kvrouter.bus.nats_client import NatsClient, OnMessage, discard, why_past_help
from kvrouter.bus.options import NatsOptions
from kvrouter.bus.outage import Outage
from kvrouter.errors import KvRouterError

log = structlog.get_logger()

OUTBOX_BYTES = 32 * 1024 * 1024
LEAST_PAYLOAD_BYTES = 513 * 1024
"""What a server must let through: the largest frame (512 KiB) and its envelope. NATS's default is 1 MiB."""
PENDING_MESSAGES = 512 * 1024
PENDING_BYTES = 128 * 1024 * 1024
"""What nats-py keeps of one subscription, should it queue messages at all; beyond either it drops some."""
LOOK_EVERY_S = 0.2
"""How often the client is looked at."""
PATIENCE_S = 10.0
"""How long a client may be away from every server before a new one takes over."""
MOST_DISCOVERED = 64
"""How many servers of the cluster, beside the ones given, a new client is told of."""


class BusError(KvRouterError):
    """A request over NATS got no answer."""


@dataclass(slots=True)
class BusCounters:
    """What the bus has done, for metrics."""

    published: int = 0
    published_bytes: int = 0
    unsent: int = 0
    received: int = 0
    received_bytes: int = 0
    slow_consumer_drops: int = 0
    connections: int = 0


class Bus:
    """One connection that always comes back. Open it with `async with Bus.open(...)`."""

    def __init__(self, options: NatsOptions, name: str) -> None:
        self.counters = BusCounters()
        self._arguments = options.connect_arguments()
        self._name = name
        self._outage = Outage(options.shown())
        self._client: NatsClient | None = None
        self._client_closed = asyncio.Event()
        self._discovered: list[str] = []
        self._subjects: list[str] = []
        self._receivers: dict[str, list[OnMessage]] = {}
        """By subject. A subject stays subscribed when its last receiver has gone: a process has few."""
        self._connect_callbacks: list[Callable[[], None]] = []
        self._outbox: deque[tuple[str, bytes, str]] = deque()
        self._outbox_bytes = 0
        self._outbox_filled = asyncio.Event()
        self._closing = False

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, options: NatsOptions, *, name: str) -> AsyncIterator[Bus]:
        """Connect in the background; the bus is usable at once and says `connected` when it is."""
        bus = cls(options, name)
        keeper = asyncio.create_task(bus._for_ever(bus._live_with_a_client), name="nats keeper")
        sender = asyncio.create_task(bus._for_ever(bus._send_what_comes), name="nats sender")
        try:
            yield bus
        finally:
            bus._closing = True
            await asyncio.gather(_end(keeper), _end(sender))
            await bus._finish()

    @property
    def connected(self) -> bool:
        """Whether what is published now would leave."""
        return self._client is not None and self._client.is_connected

    @property
    def outage_reason(self) -> str:
        """Why it is not connected, as far as that is known."""
        return "" if self.connected else self._outage.reason

    @property
    def max_payload(self) -> int:
        """The server's limit for one message, in bytes."""
        return self._client.max_payload if self._client is not None else 1024 * 1024

    def publish(self, subject: str, payload: bytes, reply: str = "") -> bool:
        """Queue a message, in order. False, and nothing is sent, while NATS is away.

        `reply`: a subject for answers, where more than the first one is to be seen (else see `request`).
        """
        if not self.connected or self._outbox_bytes + len(payload) > OUTBOX_BYTES:
            self.counters.unsent += 1
            return False
        self._outbox.append((subject, payload, reply))
        self._outbox_bytes += len(payload)
        self._outbox_filled.set()
        return True

    async def subscribe(self, subject: str, on_message: OnMessage) -> None:
        """Call `on_message` for each message, also after reconnects."""
        is_new = subject not in self._receivers
        self._receivers.setdefault(subject, []).append(on_message)
        if is_new:
            self._subjects.append(subject)
            if self._client is not None and not self._client.is_closed:
                await self._subscribe_client(self._client, subject)

    def on_connect(self, callback: Callable[[], None]) -> None:
        """Call `callback` after every (re)connection, and now if connected."""
        self._connect_callbacks.append(callback)
        if self.connected:
            callback()

    @contextlib.contextmanager
    def part(self) -> Iterator[BusPart]:
        """The same connection for a part of the process: what it subscribes to ends with the block."""
        part = BusPart(self)
        try:
            yield part
        finally:
            for subject, on_message in part.subscriptions:
                self._receivers[subject].remove(on_message)
            for callback in part.callbacks:
                self._connect_callbacks.remove(callback)

    async def request(self, subject: str, payload: bytes, *, timeout_s: float) -> bytes:
        """Ask and return the first answer. Raises BusError: away, nobody there, or too late."""
        if self._client is None or not self.connected:
            raise BusError("NATS is away")
        try:
            reply = await self._client.request(subject, payload, timeout=timeout_s)
        except (Exception, asyncio.CancelledError) as error:
            if _is_cancelled(error):
                raise
            raise BusError(f"no answer on {subject}: {type(error).__name__}") from error
        data: bytes = reply.data
        return data

    async def _for_ever(self, turn: Callable[[], Awaitable[None]]) -> None:
        """Repeat `turn`, whatever comes out of nats-py: nothing of it ends the bus.

        That includes cancellations that are not ours: nats-py cancels futures that others wait for.
        """
        while True:
            try:
                await turn()
            except (Exception, asyncio.CancelledError) as error:
                if _is_cancelled(error):
                    raise
                self._outage.failed(error)
                await asyncio.sleep(_jitter(0.2))

    async def _live_with_a_client(self) -> None:
        """One client's life; the next one takes over when this one is past help."""
        client = await self._build_client()
        try:
            reason = await self._until_past_help(client)
        finally:
            self._discovered = [server.geturl() for server in client.discovered_servers][:MOST_DISCOVERED]
            self._client = None
            await discard(client)
        log.warning("nats.client_replaced", name=self._name, reason=reason)
        await asyncio.sleep(_jitter(0.2))

    async def _until_past_help(self, client: NatsClient) -> str:
        """Returns why the client is of no use any more."""
        loop = asyncio.get_running_loop()
        connected_at = loop.time()
        while loop.time() - connected_at < PATIENCE_S:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._client_closed.wait()
            self._client_closed.clear()
            if reason := why_past_help(client):
                return reason
            if client.is_connected:
                connected_at = loop.time()
        return f"not connected for {PATIENCE_S:g} s"

    async def _build_client(self) -> NatsClient:
        """Connect a new client; returns when it is connected, however long that takes."""
        client = NatsClient()
        self._client_closed.clear()
        try:
            await self._connect(client)
            for subject in self._subjects:  # grows if somebody subscribes meanwhile
                await self._subscribe_client(client, subject)
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
            ping_interval=1,
            max_outstanding_pings=2,
            reconnect_time_wait=_jitter(0.2),  # type: ignore[arg-type]  # it only sleeps on it
            max_reconnect_attempts=-1,
        )

    async def _subscribe_client(self, client: NatsClient, subject: str) -> None:
        counters, receivers = self.counters, self._receivers[subject]

        def deliver(subject: str, data: bytes, reply: str) -> None:
            counters.received += 1
            counters.received_bytes += len(data)
            for on_message in receivers:
                on_message(subject, data, reply)

        await client.subscribe_plain(
            subject, deliver, pending_msgs_limit=PENDING_MESSAGES, pending_bytes_limit=PENDING_BYTES
        )

    async def _send_what_comes(self) -> None:
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
            return  # whoever misses it asks for a replay
        try:
            await self._client.publish(subject, payload, reply)
            self.counters.published += 1
            self.counters.published_bytes += len(payload)
        except (Exception, asyncio.CancelledError) as error:
            if _is_cancelled(error):
                raise
            self.counters.unsent += 1
            self._outage.warn("nats.unsent", error=str(error) or type(error).__name__, subject=subject)

    async def _finish(self) -> None:
        """Let what was queued (a `leave`) go out, then close."""
        if self._client is None:
            return
        with contextlib.suppress(Exception):  # nothing that NATS does may spoil an orderly end
            async with asyncio.timeout(1.0):
                await self._send_outbox()
                await self._client.flush()
        await discard(self._client)

    def _connected(self) -> None:
        self.counters.connections += 1
        self._outage.end()
        log.info("nats.connected", name=self._name)
        if self.max_payload < LEAST_PAYLOAD_BYTES:
            log.warning("nats.max_payload_too_small", bytes=self.max_payload, least=LEAST_PAYLOAD_BYTES)
        for callback in self._connect_callbacks:
            try:
                callback()
            except Exception:  # it may run inside nats-py, which would end its own task
                log.exception("nats.on_connect_failed", name=self._name)

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            self.counters.slow_consumer_drops += 1  # one call for each message
            self._outage.warn("nats.slow_consumer", effect="messages dropped; feeds repair what is missing")
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
    """See `Bus.part`."""

    def __init__(self, bus: Bus) -> None:
        self.subscriptions: list[tuple[str, OnMessage]] = []
        self.callbacks: list[Callable[[], None]] = []
        self._bus = bus

    @property
    def max_payload(self) -> int:
        """The server's limit for one message, in bytes."""
        return self._bus.max_payload

    def publish(self, subject: str, payload: bytes) -> bool:
        """See Bus."""
        return self._bus.publish(subject, payload)

    async def subscribe(self, subject: str, on_message: OnMessage) -> None:
        """See Bus."""
        self.subscriptions.append((subject, on_message))
        await self._bus.subscribe(subject, on_message)

    def on_connect(self, callback: Callable[[], None]) -> None:
        """See Bus."""
        self.callbacks.append(callback)
        self._bus.on_connect(callback)


async def _end(task: asyncio.Task[None]) -> None:
    """Cancel a task until it has ended: nats-py's waits now and then swallow a cancellation."""
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=0.1)


def _is_cancelled(error: BaseException) -> bool:
    """Whether it is this task that shall end."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def _jitter(seconds: float) -> float:
    return seconds * random.uniform(0.75, 1.25)
