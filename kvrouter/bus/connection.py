"""The NATS connection as the rest of kvrouter sees it: publish never waits, nothing ends it.

What nats-py does that this room hides: `connect` does not return while the server is away; a
client can close for good (a new one is built and subscribed anew); while it is disconnected it
would buffer and later send stale frames (nothing is handed to it then: the rings repair); and its
`publish` is a coroutine (one task sends in order what the plain `publish` here has queued).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg

from kvrouter.bus.options import NatsOptions
from kvrouter.errors import KvRouterError

log = structlog.get_logger()

OnMessage = Callable[[str, bytes, str], None]
"""`(subject, payload, reply)`; plain, and quick: it runs between two reads of the socket."""

OUTBOX_BYTES = 32 * 1024 * 1024
LEAST_PAYLOAD_BYTES = 513 * 1024
"""What a server must let through: the largest frame (512 KiB) and its envelope. NATS's default is 1 MiB."""
PENDING_MESSAGES = 512 * 1024
PENDING_BYTES = 128 * 1024 * 1024
"""What nats-py keeps of one subscription for a loop that is held up; beyond either it drops messages."""
_LOG_EVERY_S = 10.0


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
        self._options = options
        self._arguments = options.connect_arguments()
        self._name = name
        self._client: Client | None = None
        self._client_closed = asyncio.Event()
        self._subscriptions: list[tuple[str, OnMessage]] = []
        self._connect_callbacks: list[Callable[[], None]] = []
        self._outbox: deque[tuple[str, bytes]] = deque()
        self._outbox_bytes = 0
        self._outbox_filled = asyncio.Event()
        self._closing = False
        self._logged_at: dict[str, float] = {}

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, options: NatsOptions, *, name: str) -> AsyncIterator[Bus]:
        """Connect in the background; the bus is usable at once and says `connected` when it is."""
        bus = cls(options, name)
        keeper, sender = asyncio.create_task(bus._keep_connected()), asyncio.create_task(bus._keep_sending())
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
    def max_payload(self) -> int:
        """The server's limit for one message, in bytes."""
        return self._client.max_payload if self._client is not None else 1024 * 1024

    def publish(self, subject: str, payload: bytes) -> bool:
        """Queue a message, in order. False, and nothing is sent, while NATS is away."""
        if not self.connected or self._outbox_bytes + len(payload) > OUTBOX_BYTES:
            self.counters.unsent += 1
            return False
        self._outbox.append((subject, payload))
        self._outbox_bytes += len(payload)
        self._outbox_filled.set()
        return True

    async def subscribe(self, subject: str, on_message: OnMessage) -> None:
        """Call `on_message` for each message, also after reconnects."""
        self._subscriptions.append((subject, on_message))
        if self._client is not None and not self._client.is_closed:
            await self._subscribe_client(self._client, subject, on_message)

    def on_connect(self, callback: Callable[[], None]) -> None:
        """Call `callback` after every (re)connection, and now if connected."""
        self._connect_callbacks.append(callback)
        if self.connected:
            callback()

    async def request(self, subject: str, payload: bytes, *, timeout_s: float) -> bytes:
        """Ask and return the first answer. Raises BusError: away, nobody there, or too late."""
        if self._client is None or not self.connected:
            raise BusError("NATS is away")
        try:
            reply = await self._client.request(subject, payload, timeout=timeout_s)
        except (nats.errors.Error, TimeoutError) as error:
            raise BusError(f"no answer on {subject}: {type(error).__name__}") from error
        data: bytes = reply.data
        return data

    async def _keep_connected(self) -> None:
        while True:
            self._client_closed.clear()
            try:
                await self._build_client()
                await self._client_closed.wait()
                log.warning("nats.client_closed", name=self._name)
            except Exception as error:  # it went away again during the handshake; or a bug of nats-py
                self._log_rarely("nats.error", error=str(error) or type(error).__name__)
            await asyncio.sleep(_jitter(0.2))

    async def _build_client(self) -> None:
        """Connect a new client; returns when it is connected, however long that takes."""
        client = Client()
        try:
            await self._connect(client)
            for subject, on_message in self._subscriptions:  # grows if somebody subscribes meanwhile
                await self._subscribe_client(client, subject, on_message)
            self._client = client
            await client.flush()
        except BaseException:
            await _abandon(client)
            raise
        self._connected()

    async def _connect(self, client: Client) -> None:
        await client.connect(
            **self._arguments,
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

    async def _subscribe_client(self, client: Client, subject: str, on_message: OnMessage) -> None:
        async def deliver(message: Msg) -> None:
            self.counters.received += 1
            self.counters.received_bytes += len(message.data)
            on_message(message.subject, message.data, message.reply)

        await client.subscribe(
            subject, cb=deliver, pending_msgs_limit=PENDING_MESSAGES, pending_bytes_limit=PENDING_BYTES
        )

    async def _keep_sending(self) -> None:
        while True:
            await self._outbox_filled.wait()
            self._outbox_filled.clear()
            await self._send_outbox()

    async def _send_outbox(self) -> None:
        while self._outbox:
            subject, payload = self._outbox.popleft()
            self._outbox_bytes -= len(payload)
            await self._send(subject, payload)

    async def _send(self, subject: str, payload: bytes) -> None:
        if self._client is None or not self.connected or len(payload) > self.max_payload:
            self.counters.unsent += 1
            return  # whoever misses it asks for a replay
        try:
            await self._client.publish(subject, payload)
            self.counters.published += 1
            self.counters.published_bytes += len(payload)
        except nats.errors.Error as error:
            self.counters.unsent += 1
            self._log_rarely("nats.unsent", error=str(error), subject=subject)

    async def _finish(self) -> None:
        """Let what was queued (a `leave`) go out, then close."""
        if self._client is None:
            return
        with contextlib.suppress(Exception):  # nothing that NATS does may spoil an orderly end
            async with asyncio.timeout(1.0):
                await self._send_outbox()
                await self._client.flush()
        with contextlib.suppress(Exception):
            await self._client.close()

    def _connected(self) -> None:
        self.counters.connections += 1
        log.info("nats.connected", name=self._name)
        if self.max_payload < LEAST_PAYLOAD_BYTES:
            log.warning("nats.max_payload_too_small", bytes=self.max_payload, least=LEAST_PAYLOAD_BYTES)
        for callback in self._connect_callbacks:
            callback()

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            self.counters.slow_consumer_drops += 1  # one call for each message
            self._log_rarely("nats.slow_consumer", effect="messages dropped; feeds repair what is missing")
            return
        reason = str(error) or type(error).__name__
        facts = {"error": reason, "servers": self._options.shown()}
        if "authorization" in reason.lower():
            facts["remedy"] = "NATS refuses these credentials; see the --nats-… flags in --help"
        self._log_rarely("nats.error", **facts)

    async def _on_closed(self) -> None:
        self._client_closed.set()

    async def _on_disconnected(self) -> None:
        if not self._closing:
            log.warning("nats.disconnected", name=self._name)

    async def _on_reconnected(self) -> None:
        self._connected()

    def _log_rarely(self, event: str, **facts: object) -> None:
        """The same trouble once in 10 s: nats-py reports one error per attempt or dropped message."""
        now = asyncio.get_running_loop().time()
        trouble = f"{event}: {facts.get('error')}"
        if now - self._logged_at.get(trouble, -_LOG_EVERY_S) >= _LOG_EVERY_S:
            self._logged_at = {
                known: at for known, at in self._logged_at.items() if now - at < _LOG_EVERY_S
            } | {trouble: now}
            log.warning(event, **facts)


async def _end(task: asyncio.Task[None]) -> None:
    """Cancel a task until it has ended: nats-py's waits now and then swallow a cancellation."""
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=0.1)


async def _abandon(client: Client) -> None:
    """Close a client that did not get as far as being connected.

    After a refused password nats-py believes it is closed and leaves its socket open: hence the
    private name.
    """
    transport = getattr(client, "_transport", None)
    with contextlib.suppress(Exception):
        await client.close()
    if transport is not None:
        with contextlib.suppress(Exception):
            transport.close()
            await transport.wait_closed()


def _jitter(seconds: float) -> float:
    return seconds * random.uniform(0.75, 1.25)
