"""The event sockets of one rank: a PUB that is bound, and a ROUTER that replays what a subscriber missed.

Sequence numbers count batches from 0. A replay request is `[b"", start]`; the answer is every buffered batch
from `start` on, `[b"", topic, seq, payload]`, then the end marker. A request without the empty delimiter gets
no answer, and a start beyond the newest batch only the marker. All this is like vLLM's `ZmqEventPublisher`.
Unlike vLLM, which connects its PUB to a plain address, the mocker always binds it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from itertools import dropwhile

import structlog
import zmq

from kvrouter.lab.mocker.events import END_OF_REPLAY, BatchEncoder, KvEvent, sequence_frame

log = structlog.get_logger(__name__)

# vLLM's `hwm`: batches queued for a slow subscriber. More are dropped without an error.
PUB_HIGH_WATER_MARK = 100_000

# vLLM's `buffer_steps`: batches kept for replay.
BUFFER_STEPS = 10_000


def rank_endpoint(endpoint: str, rank: int) -> str:
    """The endpoint of a data-parallel rank: its port is `rank` higher. Port 0 (a free one) stays 0."""
    address, _, port = endpoint.rpartition(":")
    if not port.isdigit() or port == "0":
        return endpoint
    return f"{address}:{int(port) + rank}"


class Publisher:
    """Publishes batches and answers replay requests, both on the event loop."""

    def __init__(
        self,
        pub: zmq.Socket[bytes],
        router: zmq.Socket[bytes] | None,
        encoder: BatchEncoder,
        topic: str,
        buffer_steps: int | None = None,
    ) -> None:
        self.topic = topic
        self.buffer_steps = buffer_steps or BUFFER_STEPS
        self.endpoint = _endpoint(pub)
        self.replay_endpoint = _endpoint(router) if router else None
        self._pub = pub
        self._router = router
        self._encoder = encoder
        self._topic = topic.encode()
        self._next_seq = 0
        self._buffer: deque[tuple[bytes, bytes]] = deque(maxlen=self.buffer_steps)

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        endpoint: str,
        replay_endpoint: str | None,
        encoder: BatchEncoder,
        topic: str,
        *,
        buffer_steps: int | None = None,
    ) -> AsyncIterator[Publisher]:
        """Bind both sockets until the block ends."""
        with zmq.Context() as context, ExitStack() as sockets:
            pub = sockets.enter_context(_bound(context, zmq.PUB, endpoint, PUB_HIGH_WATER_MARK))
            router = None
            if replay_endpoint is not None:
                # no limit: the ROUTER would drop the end of a long replay, and the buffer bounds it already
                router = sockets.enter_context(_bound(context, zmq.ROUTER, replay_endpoint, 0))
            publisher = cls(pub, router, encoder, topic, buffer_steps)
            with publisher._replaying():
                yield publisher

    @contextmanager
    def _replaying(self) -> Iterator[None]:
        if self._router is None:
            yield
            return
        loop = asyncio.get_running_loop()
        descriptor = self._router.fileno()
        loop.add_reader(descriptor, self._serve_replays)
        try:
            yield
        finally:
            loop.remove_reader(descriptor)

    def publish(self, timestamp: float, events: list[KvEvent]) -> None:
        """Send one batch. It never blocks: a full PUB socket drops it."""
        seq = sequence_frame(self._next_seq)
        payload = self._encoder.encode(timestamp, events)
        self._next_seq += 1
        self._buffer.append((seq, payload))
        self._pub.send_multipart((self._topic, seq, payload))

    def _serve_replays(self) -> None:
        """Answer all waiting requests. ZMQ's descriptor is edge-triggered: a request left over would wait."""
        assert self._router is not None
        while self._router.poll(0, zmq.POLLIN):
            with suppress(zmq.Again):
                self._replay(self._router.recv_multipart(zmq.NOBLOCK))

    def _replay(self, request: list[bytes]) -> None:
        assert self._router is not None
        if len(request) != 3 or request[1]:
            log.warning("replay.invalid_request", frames=len(request))
            return
        client, _, start = request
        first = int.from_bytes(start, "big")
        for seq, payload in dropwhile(lambda entry: int.from_bytes(entry[0], "big") < first, self._buffer):
            self._router.send_multipart((client, b"", self._topic, seq, payload))
        self._router.send_multipart((client, b"", b"", END_OF_REPLAY, b""))


def _bound(context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str, hwm: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.linger = 0  # closing does not wait for subscribers that do not read
    socket.set_hwm(hwm)
    socket.ipv6 = "::" in endpoint
    try:
        socket.bind(endpoint)
    except zmq.ZMQError:
        socket.close()
        raise
    return socket


def _endpoint(socket: zmq.Socket[bytes]) -> str:
    """The endpoint of a bound socket, with its real port."""
    return socket.get_string(zmq.LAST_ENDPOINT)
