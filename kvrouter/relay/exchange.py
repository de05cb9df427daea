"""One attempt to have a worker answer a client: inspect the beginning, then pass the bytes on.

    holding ──the answer is good──> relaying ──body complete──> Done
       │ 5xx, 408, 429, error event     │ worker dies: error event, or a reset of the connection
       └──> Rejected                    └──> Done
       │ connection lost, or aborted ──> Lost
       │ the engine hangs            ──> Retried
       │ silent for too long         ──> TimedOut (while relaying: error event, Done)

While an attempt is holding, nothing has reached the client, so another worker can be tried. A stream is good
from its first event that is neither an error nor the role alone, audio and images from their first byte, and
any other answer when it is complete: engines send those in one piece.
While relaying, each read from the worker's socket is one write to the client's, chunk framing included. (A
client that speaks HTTP/1.0 does not understand chunks and gets their content.)
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeAlias

from msgspec import Struct

from kvrouter.errors import KvRouterError, WorkerDiedError, WorkerSilentError
from kvrouter.relay.engine_answers import (
    ANSWER_BYTES,
    ANSWER_READS,
    TAIL_BYTES,
    TAIL_READS,
    error_status_in,
    find_output_tokens,
    first_line,
    has_failed,
    is_rejection,
    is_role_only,
)
from kvrouter.relay.framing import LAST_CHUNK, Body, ChunkContent, ResponseHead, chunk, content_of
from kvrouter.relay.upstream import WorkerConnection

# A longer answer is passed on before it is complete: this bounds the memory that one request holds here.
HELD_BYTES = 1024 * 1024
# The bound for the first event of a stream. It is smaller, and looks are counted, since each read is
# inspected together with all reads before it: a worker that sends a byte at a time costs their square.
STREAM_HELD_BYTES = 64 * 1024
MOST_LOOKS = 64
# Searched with `find`, not `in`: bytes' `in` first tries its operand as a number, and the exception that this
# raises inside makes it half as slow again (CPython 3.11).
_ABORT = b'"abort"'
_ERROR = b'"error"'
# vLLM ends requests that it aborts with status 200 and this reason.
_ABORTED = re.compile(rb'"finish_reason": ?"abort"')
_ABORTED_REASON = "the worker aborted the request"
_FAILED_REASON = "the worker ended the request with an error, before any output"
_DATA_LINE = b"\ndata:"
_EVENT_END = b"\n\n"
# nginx buffers a proxied stream unless the response has this header.
_UNBUFFERED = b"x-accel-buffering: no\r\n"


class Done(Struct, frozen=True):
    """The client has the whole answer, or the part that arrived before `failure`."""

    status: int
    keeps_alive: bool
    failure: str = ""
    # The framing left no place for an error event: only a reset shows the client that the answer is cut.
    needs_reset: bool = False
    # The worker is not to blame: no circuit opens because of it.
    spares_worker: bool = False


class Rejected(Struct, frozen=True):
    """The worker rejected the request, with this answer. Nothing has reached the client."""

    status: int
    content_type: bytes
    retry_after: bytes
    body: bytes


class Lost(Struct, frozen=True):
    """The connection broke before the first body byte. Nothing has reached the client."""

    reason: str
    # The connection had served before, and broke before a byte of this answer arrived: most likely the worker
    # closed it while the request was on its way.
    was_idle: bool = False


class Retried(Struct, frozen=True):
    """The engine hangs, so another worker should be tried. Nothing has reached the client."""

    reason: str


class TimedOut(Struct, frozen=True):
    """The worker was silent for too long. Nothing has reached the client."""

    silent_s: float


Outcome: TypeAlias = Done | Rejected | Lost | Retried | TimedOut


class ClientSide(Protocol):
    """What an attempt needs of the client's connection."""

    is_http_10: bool  # it does not understand chunks
    has_begun: bool  # a part of the answer has been written
    address: str  # of the other end of the connection; empty: not known

    def write(self, data: bytes) -> None:
        """Send. If the client has left, this does nothing."""
        ...

    @property
    def is_slow(self) -> bool:
        """Whether more unsent bytes wait than the transport's limit."""
        ...

    def when_drained(self, call: Callable[[], None]) -> None:
        """Call once the client has caught up; never if it leaves."""
        ...


class Limits(Struct, frozen=True):
    """How long a worker may stay silent, in seconds."""

    first_byte_s: float = 600.0
    idle_s: float = 300.0


class Attempt:
    """The Receiver of one request (upstream.py). Await `outcome`; cancel with `cancel`."""

    __slots__ = (
        "_active_at", "_added_headers", "_body", "_client", "_connection", "_content", "_error_event",
        "_head", "_held", "_is_flowing", "_is_holding", "_is_paused", "_keeps_alive", "_last_bytes",
        "_last_reads", "_limits", "_looks", "_loop", "_most_tail_bytes", "_on_first_data", "_serves_model",
        "_was_at_boundary", "events", "outcome",
    )  # fmt: skip

    def __init__(  # noqa: PLR0917  (passing them by keyword takes 0.4 µs a request)
        self,
        client: ClientSide,
        connection: WorkerConnection,
        limits: Limits,
        error_event: Callable[[KvRouterError], bytes],
        added_headers: bytes,
        on_first_data: Callable[[], None],
        may_stay: bool,
        serves_model: bool,
        keeps_answer: bool = False,
    ) -> None:
        """`error_event` encodes an error as the last event of a stream that has begun.

        `added_headers` go to the client after the worker's. `may_stay`: the client's connection may serve
        another request. `serves_model`: see is_rejection. `keeps_answer`: `tail` is all of a
        short answer, and of a stream its last event.
        """
        self.outcome: asyncio.Future[Outcome] = connection.loop.create_future()
        self.events = 0  # server-sent events relayed so far: an estimate of the tokens produced
        self._loop = connection.loop
        self._client = client
        self._connection = connection
        self._limits = limits
        self._error_event = error_event
        self._added_headers = added_headers
        self._on_first_data = on_first_data
        self._head: ResponseHead | None = None
        self._body: Body | None = None
        self._held = bytearray()
        self._content: ChunkContent | None = None  # set for an HTTP/1.0 client, which gets no chunks
        self._is_holding = True
        # A whole chunk can pass as it is: nothing is held, unpacked or searched for.
        self._is_flowing = False
        # The end of what was relayed, to find a line that two reads share; None: data has been seen.
        self._last_bytes: bytes | None = b"\n"
        self._was_at_boundary = True
        self._keeps_alive = may_stay
        self._serves_model = serves_model
        self._looks = 0
        self._active_at = 0.0
        self._is_paused = False
        self._most_tail_bytes = ANSWER_BYTES if keeps_answer else TAIL_BYTES
        reads = ANSWER_READS if keeps_answer else TAIL_READS
        self._last_reads: deque[bytes] = deque((), reads)  # noqa: RUF037  (by keyword it takes twice as long)

    @property
    def tail(self) -> bytes:
        """The last bytes that were relayed, framing included: the engine's usage is there."""
        return b"".join(self._last_reads)[-self._most_tail_bytes :]

    def output_tokens(self) -> int | None:
        """From the usage of the answer, else one for each event of a stream; None if there is neither."""
        reads, events = self._last_reads, self.events
        found = find_output_tokens(reads[-1]) if reads else None  # nearly always there
        if found is not None or not (events or len(reads) > 1):
            return found
        tail = self.tail
        found = find_output_tokens(tail) if len(reads) > 1 else None
        return found if found is not None else (events - (tail.find(b"data: [DONE]") >= 0)) or None

    def send(self, request: bytes) -> None:
        """Send the request. All later calls come from the connection (Receiver, below)."""
        limits = self._limits
        self._active_at = now = self._loop.time()
        self._connection.send(request, self, now + min(limits.first_byte_s, limits.idle_s))

    @property
    def is_committed(self) -> bool:
        """Whether a part of the answer has been sent to the client: no other worker can be tried."""
        return not self._is_holding

    def cut_off(self, error: KvRouterError) -> None:
        """End an answer that has begun, with an error event, because this process ends."""
        if not self.outcome.done():
            self._break_off(str(error), error, spares_worker=True)

    def move(self, reason: str) -> None:
        """Give up an answer that has not begun, so that another worker is tried."""
        if self._is_holding:
            self._finish(Retried(reason))

    def cancel(self) -> None:
        """The client has left: close the worker's connection, which ends the request there."""
        self._connection.cancel(self)
        if not self.outcome.done():
            self.outcome.cancel()

    # Receiver

    def answered(self, head: ResponseHead, data: bytes) -> None:
        """The whole answer arrived in one read."""
        self._head = head
        if not self.outcome.done():
            self._judge_whole(head, data)

    def opened(self, head: ResponseHead, body: Body) -> None:
        """The head has arrived. It is held until the body's beginning shows whether to pass it on."""
        self._active_at = self._loop.time()
        self._head, self._body = head, body

    def received(self, data: bytes) -> None:
        """Bytes of the body: inspected while holding, relayed after that."""
        self._active_at = self._loop.time()
        if self._is_holding:
            self._held += data
            self._judge()
            return
        if self._was_at_boundary and _has_aborted(data):
            self._break_off(_ABORTED_REASON)
            return
        self._pass_on(data)

    def received_chunk(self, data: bytes) -> None:
        """`received` for an event amid a stream, without the steps that cannot apply to it.

        This is the hottest path of a stream: 3 calls an event instead of 8.
        """
        if not self._is_flowing or data.find(_ABORT) >= 0:
            self.received(data)
            return
        self._active_at = self._loop.time()
        self._client.write(data)
        self._last_reads.append(data)
        self.events += data.count(_EVENT_END)
        if self._client.is_slow:
            self._hold_up()

    def ended(self) -> None:
        """The body is complete."""
        head = self._head
        if head is None or self.outcome.done():
            return
        if self._is_holding:
            self._judge_whole(head, bytes(self._held))
        else:
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

    def _judge(self) -> None:
        """Decide, once enough has arrived, whether the client should get the answer."""
        head = self._head
        assert head is not None
        is_much = len(self._held) > (STREAM_HELD_BYTES if head.is_event_stream else HELD_BYTES)
        if is_rejection(head.status, serves_model=self._serves_model):
            if is_much:
                self._reject(head.status, _content(head, bytes(self._held)))
        elif is_much or head.status >= 300 or head.is_media:
            self._commit(head, bytes(self._held))
        elif head.is_event_stream:
            self._judge_stream(head, bytes(self._held))

    def _judge_stream(self, head: ResponseHead, held: bytes) -> None:
        text = _content(head, held)
        event, is_whole = first_line(text)
        self._looks += 1
        if (
            not is_whole
            and self._looks < MOST_LOOKS
            and any(name.startswith(event[: len(name)]) for name in (b"data:", b"event:"))
        ):
            return  # only the beginning of the first event is here
        # A chat begins with its role. If an error follows, another worker can still be tried.
        if not self._is_bad(event, text) and not (self._looks < MOST_LOOKS and is_role_only(text)):
            self._commit(head, held)

    def _judge_whole(self, head: ResponseHead, held: bytes) -> None:
        text = _content(head, held)
        if head.status < 300:
            if self._is_bad(first_line(text)[0] if head.is_event_stream else b"", text):
                return
        elif is_rejection(head.status, serves_model=self._serves_model):
            self._reject(head.status, text)
            return
        self._commit(head, held)
        self._finish(Done(head.status, self._keeps_alive))

    def _is_bad(self, event: bytes, text: bytes) -> bool:
        """Whether a 200 response carries an error in its first event. The attempt is over then."""
        if text.find(_ERROR) < 0 and text.find(_ABORT) < 0:  # nearly always
            return False
        error_status = error_status_in(event) if event else 0
        if error_status and is_rejection(error_status, serves_model=self._serves_model):
            self._reject(error_status, event.removeprefix(b"data:").strip())
        elif _has_aborted(text):
            self._finish(Lost(_ABORTED_REASON))
        elif has_failed(text):
            self._finish(Lost(_FAILED_REASON))
        return self.outcome.done()

    def _commit(self, head: ResponseHead, held: bytes) -> None:
        self._held.clear()
        self._is_holding = False
        if self._client.is_http_10 and head.is_chunked:
            self._content = ChunkContent()
        if not head.is_event_stream:
            self._last_bytes = None  # only event streams have data lines
        passes_chunks = head.is_chunked and self._content is None
        self._keeps_alive = self._keeps_alive and (passes_chunks or head.length is not None)
        self._pass_on(held, self._client_head(head, passes_chunks=passes_chunks))

    def _client_head(self, head: ResponseHead, *, passes_chunks: bool) -> bytes:
        framing = b"transfer-encoding: chunked\r\n" if passes_chunks else b""
        buffering = _UNBUFFERED if head.is_event_stream else b""
        connection = b"connection: keep-alive\r\n" if self._keeps_alive else b"connection: close\r\n"
        return b"".join((head.forwarded, framing, buffering, connection, self._added_headers, b"\r\n"))

    # Relaying

    def _pass_on(self, data: bytes, head: bytes = b"") -> None:
        client, body = self._client, self._body
        client.write(head + (data if self._content is None else self._content.feed(data)))
        self._last_reads.append(data[-self._most_tail_bytes :])
        self.events += data.count(_EVENT_END)
        if self._last_bytes is not None:
            self._look_for_data(self._last_bytes + data)
        self._was_at_boundary = body is not None and body.is_at_boundary
        self._is_flowing = self._last_bytes is None and self._content is None
        if client.is_slow:
            self._hold_up()

    def _hold_up(self) -> None:
        """The client reads more slowly than its worker writes: pause the worker."""
        if not self._is_paused:
            self._is_paused = True
            self._connection.pause(self)
            self._client.when_drained(self._resume)

    def _look_for_data(self, text: bytes) -> None:
        """Report the first data line, which marks the end of prefill.

        A comment does not: servers send `: ping` to keep the connection open while nothing is generated.
        """
        self._last_bytes = text[1 - len(_DATA_LINE) :]
        if text.find(_DATA_LINE) >= 0:
            self._last_bytes = None
            self._on_first_data()

    def _resume(self) -> None:
        self._is_paused = False
        self._active_at = self._loop.time()
        self._connection.resume(self)

    def _break_off(
        self, reason: str, error: KvRouterError | None = None, *, spares_worker: bool = False
    ) -> None:
        """End an answer that has begun, with an error event where the framing allows one."""
        head = self._head
        assert head is not None
        takes_event = head.is_event_stream and self._was_at_boundary
        if takes_event:
            event = self._error_event(error or WorkerDiedError(reason))
            self._client.write(chunk(event) + LAST_CHUNK if self._content is None else event)
        self._finish(
            Done(head.status, False, reason, needs_reset=not takes_event, spares_worker=spares_worker)
        )

    # Ends

    def watch(self, now: float) -> float:
        """Seconds until the next call. Ends the attempt if worker or client have been silent too long."""
        limits = self._limits
        limit = limits.first_byte_s if self._is_holding else limits.idle_s
        left_s = self._active_at + limit - now
        if left_s > 0:
            return min(left_s, limits.idle_s)  # once it relays, the limit is idle_s, which may be shorter
        if self._is_holding:
            self._finish(TimedOut(limit))
        elif self._is_paused:
            reason = f"the client read nothing for {limit:g} s"
            self._finish(Done(200, False, reason, needs_reset=True, spares_worker=True))
        else:
            reason = f"the worker sent nothing for {limit:g} s"
            self._break_off(reason, WorkerSilentError(reason))
        return 0

    def _reject(self, status: int, body: bytes) -> None:
        headers = self._head.headers if self._head else {}
        content_type = headers.get(b"content-type", b"application/json")
        if b"event-stream" in content_type:
            content_type = b"application/json"
        self._finish(Rejected(status, content_type, headers.get(b"retry-after", b""), body))

    def _finish(self, outcome: Outcome) -> None:
        # Does nothing if the answer is complete: the connection may already serve another request.
        self._connection.cancel(self)
        if not self.outcome.done():
            self.outcome.set_result(outcome)


def _content(head: ResponseHead, data: bytes) -> bytes:
    return content_of(data) if head.is_chunked else data


def _has_aborted(text: bytes) -> bool:
    return text.find(_ABORT) >= 0 and _ABORTED.search(text) is not None
