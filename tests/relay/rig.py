"""One attempt on one connection with a fake transport, so that a test can play any read."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from kvrouter.bodies.apis import COMPLETION
from kvrouter.relay.begun import Begun
from kvrouter.relay.exchange import Attempt
from kvrouter.relay.outcomes import Limits, Outcome
from kvrouter.relay.upstream import WorkerConnection


class FakeTransport(asyncio.Transport):
    """Records what it is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.aborted = False
        self.paused = False

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        self.written += bytes(data)

    def abort(self) -> None:
        self.aborted = True

    def is_closing(self) -> bool:
        return self.aborted

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


class FakeClient:
    """Keeps what it is sent. It is slow until `catch_up` is called."""

    def __init__(self, *, is_http_10: bool = False) -> None:
        self.is_http_10 = is_http_10
        self.has_begun = False
        self.begun: Begun | None = None
        self.address = "127.0.0.1"
        self.is_slow = False
        self.got = b""
        self._waiting: list[Callable[[], None]] = []

    def write(self, data: bytes) -> None:
        self.got += data

    def catch_up(self) -> None:
        self.is_slow = False
        for call in self._waiting:
            call()

    def when_drained(self, call: Callable[[], None]) -> None:
        self._waiting.append(call)

    def lend(self, _begin: Callable[[int], Any]) -> None:
        return None


def attempt_on(
    connection: WorkerConnection,
    client: FakeClient,
    headers: bytes = b"",
    mark: Callable[[], None] = lambda: None,
) -> Attempt:
    """An attempt whose client's connection may stay open."""
    return Attempt(client, connection, Limits(), COMPLETION, headers, mark, True)


class Rig:
    """One attempt on one connection, without sockets."""

    def __init__(self, pool: deque[WorkerConnection] | None = None, **client: Any) -> None:
        self.pool = deque() if pool is None else pool
        self.connection = WorkerConnection(self.pool)
        self.transport = FakeTransport()
        self.connection.connection_made(self.transport)
        self.begin(**client)

    def begin(self, **client: Any) -> Attempt:
        """Send a request."""
        self.client = FakeClient(**client)
        self.marks = 0
        self.attempt = attempt_on(self.connection, self.client, b"x-kvrouter-worker: w\r\n", self._mark)
        self.attempt.send(b"request")
        return self.attempt

    def _mark(self) -> None:
        self.marks += 1

    def read(self, *pieces: bytes) -> None:
        """The worker's bytes arrive while the connection reads."""
        for piece in pieces:
            if piece and not self.transport.aborted:
                self.connection.data_received(piece)

    def lose(self, error: Exception | None = None) -> None:
        """The connection ends."""
        self.transport.aborted = True
        self.connection.connection_lost(error)

    def outcome(self) -> Outcome:
        """How the attempt ended."""
        return self.attempt.outcome.result()
