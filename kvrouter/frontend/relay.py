"""One attempt to have a worker answer a client: look once, then pass the bytes on.

    holding ──first body bytes are good──> relaying ──body over──> Done
       │ 5xx, 408, 429, error event            │ worker dies: error event, or a torn connection
       └──> Rejected                           └──> Done
       │ connection lost            ──> Lost
       │ silent for too long        ──> TimedOut (either state)

While holding nothing has reached the client, so another worker can be tried. After that each read
from the worker's socket is one write to the client's, chunk framing included.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import msgspec

from kvrouter.errors import KvRouterError
from kvrouter.frontend.framing import LAST_CHUNK, Body, ChunkedBody, FramingError, Head, chunk, content
from kvrouter.frontend.openai import error_event
from kvrouter.frontend.upstream import Connection

HELD_BYTES = 1024 * 1024
"""More of an answer than this is never held back or kept for later."""
_RETRIABLE = frozenset({408, 429})
_ABORTED = re.compile(rb'"finish_reason": ?"abort"')


class WorkerDiedError(KvRouterError):
    """The worker broke off in the middle of its answer."""

    status = 502
    type = "BadGatewayError"


class WorkerSilentError(KvRouterError):
    """The worker said nothing for too long."""

    status = 504
    type = "GatewayTimeoutError"


@dataclass(frozen=True, slots=True)
class Done:
    """The client has its answer, or as much of it as there is. `failure` is empty if all went well."""

    status: int
    keeps_alive: bool
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Rejected:
    """The worker will not serve the request; this is what it said. Nothing has reached the client."""

    status: int
    content_type: bytes
    body: bytes


@dataclass(frozen=True, slots=True)
class Lost:
    """The connection broke before the first body byte. Nothing has reached the client."""

    reason: str
    was_idle: bool = False
    """The connection had served before, and broke before a byte of this answer arrived."""


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The worker was silent for too long. Nothing has reached the client."""

    silent_s: float


Outcome: TypeAlias = Done | Rejected | Lost | TimedOut


class Client(Protocol):
    """The client's side, as far as the relay needs it."""

    is_http_10: bool
    wants_keep_alive: bool

    def write(self, data: bytes) -> None:
        """Send; a client that has left is no error."""
        ...

    def abort(self) -> None:
        """Tear the connection, so that the client sees that its answer is not whole."""
        ...

    @property
    def is_slow(self) -> bool:
        """Whether what was sent piles up."""
        ...

    async def drained(self) -> None:
        """Wait until the client has caught up."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a worker may stay silent, in seconds."""

    first_byte_s: float = 600.0
    idle_s: float = 300.0


class Attempt:
    """The Receiver of one request. Await `outcome`; cancel with `cancel`."""

    def __init__(
        self,
        client: Client,
        connection: Connection,
        limits: Limits,
        added_headers: bytes,
        on_first_data: Callable[[], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.outcome: asyncio.Future[Outcome] = loop.create_future()
        self.events = 0
        """Server-sent events relayed so far: an estimate of the tokens produced."""
        self._loop = loop
        self._client = client
        self._connection = connection
        self._limits = limits
        self._added_headers = added_headers
        self._on_first_data = on_first_data
        self._head: Head | None = None
        self._body: Body | None = None
        self._held = b""
        self._is_holding = True
        self._has_data = False
        self._was_at_boundary = True
        self._keeps_alive = False
        self._heard_at = loop.time()
        self._timer = loop.call_later(limits.first_byte_s, self._watch)
        self._resuming: asyncio.Task[None] | None = None

    def send(self, request: bytes) -> None:
        """Send the request; everything else follows from what comes back."""
        self._connection.send(request, self)

    def cancel(self) -> None:
        """The client has left: so does the request."""
        self._connection.cancel()
        self._stop()
        if not self.outcome.done():
            self.outcome.cancel()

    # Receiver

    def opened(self, head: Head, body: Body) -> None:
        """The head has arrived; it is held."""
        self._heard_at = self._loop.time()
        self._head, self._body = head, body

    def received(self, data: bytes) -> None:
        """Bytes of the body: relayed, or looked at if they are the first."""
        self._heard_at = self._loop.time()
        if self._is_holding:
            self._hold(data)
            return
        if b'"abort"' in data and self._was_at_boundary and _ABORTED.search(data):
            self._break_off("the worker aborted the request")
            return
        self._pass_on(data)

    def ended(self) -> None:
        """The body is complete."""
        head = self._head
        if head is None or self.outcome.done():
            return
        if self._is_holding:
            if _is_refusal(head.status) or _ABORTED.search(self._held):
                self._reject(head.status, self._content())
                return
            self._commit(head)
        self._finish(Done(head.status, self._keeps_alive))

    def lost(self, reason: str) -> None:
        """The connection ended before the body did."""
        if self.outcome.done():
            return
        if self._is_holding:
            self._finish(Lost(reason, self._connection.is_stale))
        else:
            self._break_off(f"the worker broke off: {reason}")

    # Holding

    def _hold(self, data: bytes) -> None:
        head = self._head
        assert head is not None
        self._held += data
        if len(self._held) > HELD_BYTES and _is_refusal(head.status):
            self._connection.cancel()
            self._reject(head.status, self._content())
        elif not _is_refusal(head.status) and not self._must_collect(head):
            self._judge(head)

    def _must_collect(self, head: Head) -> bool:
        """HTTP/1.0 knows no chunks: its client gets the answer when it is whole."""
        return self._client.is_http_10 and head.is_chunked

    def _judge(self, head: Head) -> None:
        """Look at the first content, and decide whether a client should see it."""
        text = self._content()
        if not text.strip():
            return
        if not head.is_event_stream:
            if not _ABORTED.search(text):
                self._commit(head)
            return
        event, newline, _ = text.lstrip().partition(b"\n")
        if event.startswith(b"data:") and not newline and len(self._held) < HELD_BYTES:
            return
        error_status = _error_status(event)
        if error_status:
            self._connection.cancel()
            self._reject(error_status, event.removeprefix(b"data:").strip())
            return
        self._commit(head)

    def _content(self) -> bytes:
        assert self._head is not None
        try:
            return content(self._head, self._held)
        except FramingError:
            return b""  # the connection finds the same and ends the attempt

    def _commit(self, head: Head) -> None:
        self._is_holding = False
        held, self._held = self._held, b""
        whole = self._must_collect(head)
        body_is_bounded = head.is_chunked or head.length is not None
        self._keeps_alive = self._client.wants_keep_alive and body_is_bounded
        if whole:
            held = content(head, held)
        lines = [b"HTTP/1.1 %d %s" % (head.status, head.reason)]
        lines += [b"%s: %s" % header for header in head.headers]
        if whole:
            lines.append(b"content-length: %d" % len(held))
        elif head.is_chunked:
            lines.append(b"transfer-encoding: chunked")
        lines.append(b"connection: keep-alive" if self._keeps_alive else b"connection: close")
        self._pass_on(b"\r\n".join(lines) + b"\r\n" + self._added_headers + b"\r\n", held)

    # Relaying

    def _pass_on(self, *parts: bytes) -> None:
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        self._client.write(data)
        self.events += data.count(b"\n\n")
        if not self._has_data and b"data:" in data and self._head is not None and self._head.is_event_stream:
            self._has_data = True
            self._on_first_data()
        body = self._body
        self._was_at_boundary = isinstance(body, ChunkedBody) and body.is_at_boundary
        if self._client.is_slow and self._resuming is None:
            self._connection.pause()
            self._resuming = self._loop.create_task(self._resume())

    async def _resume(self) -> None:
        try:
            await self._client.drained()
        except ConnectionError:
            return  # the client has left; its handler is cancelled and cancels us
        self._resuming = None
        self._heard_at = self._loop.time()
        self._connection.resume()

    def _break_off(self, reason: str, error: KvRouterError | None = None) -> None:
        """End an answer of which the client has seen a part: say so where the framing allows it."""
        head = self._head
        assert head is not None
        self._connection.cancel()
        if head.is_event_stream and self._was_at_boundary:
            event = error_event(error or WorkerDiedError(reason))
            self._client.write(chunk(event) + LAST_CHUNK)
            self._finish(Done(head.status, False, reason))
            return
        self._client.abort()
        self._finish(Done(head.status, False, reason))

    # Ends

    def _watch(self) -> None:
        """The timer: was the worker silent for too long? A paused worker is not silent."""
        silent = self._loop.time() - self._heard_at
        limit = self._limits.first_byte_s if self._is_holding else self._limits.idle_s
        if silent < limit or self._resuming is not None:
            self._timer = self._loop.call_later(max(limit - silent, 1.0), self._watch)
            return
        self._connection.cancel()
        if self._is_holding:
            self._finish(TimedOut(silent))
            return
        reason = f"the worker said nothing for {limit:g} s"
        self._break_off(reason, WorkerSilentError(reason))

    def _reject(self, status: int, body: bytes) -> None:
        headers = dict(self._head.headers) if self._head else {}
        content_type = headers.get(b"content-type", b"application/json")
        if b"event-stream" in content_type:
            content_type = b"application/json"
        self._finish(Rejected(status, content_type, body))

    def _finish(self, outcome: Outcome) -> None:
        self._stop()
        if not self.outcome.done():
            self.outcome.set_result(outcome)

    def _stop(self) -> None:
        self._timer.cancel()
        if self._resuming is not None:
            self._resuming.cancel()


def _is_refusal(status: int) -> bool:
    return status >= 500 or status in _RETRIABLE


def _error_status(event: bytes) -> int:
    """The status inside an event `data: {"error": …}`; 0 if it is no error."""
    if b'"error"' not in event:
        return 0
    try:
        body = msgspec.json.decode(event.removeprefix(b"data:").strip())
    except msgspec.DecodeError:
        return 0
    error = body.get("error") if isinstance(body, dict) else None
    if not error:
        return 0
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and 400 <= code < 600 else 500
