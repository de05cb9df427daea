"""One attempt to have a worker answer a client: inspect the beginning, then pass the bytes on.

    holding ──the answer is good──> relaying ──body complete──> Done
       │ 5xx, 408, 429, error event     │ worker dies, no good end: error event, or a reset of the connection
       └──> Rejected                    └──> Done
       │ connection lost, aborted, nothing in it ──> Lost
       │ the engine hangs            ──> Retried
       │ no output for too long      ──> TimedOut (while relaying: error event, Done)

While an attempt is holding, no output has reached the client, so another worker can be tried. A stream is
good from its first output (events.py), audio and images from their first byte, and any other answer when it
is complete: engines send those in one piece. Openings, comments and pings of a stream are passed on while it
is held, as they keep connections open (begun.py); the next worker then goes on with the same answer.

While relaying, each read from the worker's socket is one write to the client's, chunk framing included, and
no event is parsed before the last read, which shows how the stream ended. (A client that speaks HTTP/1.0 does
not understand chunks and gets their content.) After a few chunks C does that (native/streams.pyx), and comes
back with the first read that is more than whole events.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from kvrouter.errors import KvRouterError, WorkerDiedError, WorkerRejectedError, WorkerSilentError
from kvrouter.relay.begun import UNBUFFERED, Begun, begin
from kvrouter.relay.engine_answers import (
    ANSWER_BYTES,
    ANSWER_READS,
    TAIL_BYTES,
    TAIL_READS,
    advice_in,
    find_output_tokens,
    is_rejection,
)
from kvrouter.relay.events import (
    MOST_EVENT_BYTES,
    Event,
    EventError,
    EventKind,
    EventReader,
    error_in_whole,
    events_at_the_end,
    is_empty_answer,
    is_half,
    is_plain_end,
    is_plain_output,
    is_suspicious,
    message_in,
    names_failure,
)
from kvrouter.relay.framing import (
    LAST_CHUNK,
    Body,
    ChunkContent,
    LengthBody,
    ResponseHead,
    UntilCloseBody,
    chunk,
    content_of,
)
from kvrouter.relay.hops import ROUTER
from kvrouter.relay.outcomes import Done, Limits, Lost, Outcome, Rejected, Retried, TimedOut
from kvrouter.relay.seam import RECORD_BYTES, Seam
from kvrouter.relay.upstream import WorkerConnection

if TYPE_CHECKING:
    from kvrouter.relay.native import streams as native

# A longer answer is passed on before it is complete: this bounds the memory that one request holds here.
HELD_BYTES = 1024 * 1024
# They show only that a connection is open.
_PINGS = (b"event: ping", b"event: keepalive")
# Small reads are kept as one, up to this much: an engine may send each byte by itself.
_JOINED_BYTES = 4096
_DATA = b"data:"
# In JSON a line end is escaped, so this is always the beginning of a line.
_DATA_LINE = b"\ndata:"
_BLANK_LINES = b"\n\n"
# Of a chunk with one event of one line: what is behind its data, and how long the line with its size may be.
_ONE_END_BYTES = len(b"\n\n\r\n")
_SIZE_BYTES = len(b"ffffff\r\n")
# An event that ends so has not finished, so it was not aborted either.
_UNFINISHED = b'"finish_reason":null'
_MOST_QUIET_BYTES = 128
# Whole chunks in a row that pass through Python before C takes over, and after it could not.
PYTHON_CHUNKS = 2
MORE_PYTHON_CHUNKS = 16
_EVENT_ENDS = (b"\n\n", b"\n\r\n", b"\r\r", b"\n\n\r\n", b"\n\r\n\r\n")
"""As a read may end that ends an event; the last two have the line end of a chunk behind it."""
_CHUNK_ENDS = (b"\n\n\r\n", b"\n\r\n\r\n")
_EMPTY = "the worker answered 200 with nothing in it"
_NO_END = "the worker's stream ended without a finish reason"
_NO_STREAM = "the worker did not answer with a stream"


class _Trouble(Struct, frozen=True):
    """Why an answer that was passed on to its end is not a good one."""

    reason: str
    spares_worker: bool = False
    is_unsaid: bool = False
    """Whether nothing in the answer tells the client."""


_GOOD = _Trouble("")


# In place of events that were not parsed.
_OUTPUT = Event(EventKind.OUTPUT)
# A chat's role comes without a token.
_NO_TOKENS = (EventKind.COMMENT, EventKind.OPENING)


class ClientSide(Protocol):
    """What an attempt needs of the client's connection."""

    is_http_10: bool  # it does not understand chunks
    has_begun: bool  # a part of the answer has been written
    begun: Begun | None  # set if that part has no output
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

    def lend(self, begin: Callable[[int], native.Stream | None]) -> native.Stream | None:
        """Call `begin` with the descriptor of the socket, and stop its stream before the socket is closed.

        None: it is no socket, it is encrypted, or something waits for the client.
        """
        ...


class AnswerForm(Protocol):
    """What an attempt needs to know of the API (frontend/bodies/apis.py)."""

    @property
    def error_event(self) -> Callable[[KvRouterError], bytes]:
        """Encodes an error as the last event of a stream that has begun."""
        ...

    @property
    def is_native(self) -> bool:
        """Whether every engine has the route, so that a 404 is about the model (see is_rejection)."""
        ...

    @property
    def has_end(self) -> bool:
        """Whether a good stream has a finish reason or a last event. Of other APIs any end is good."""
        ...


class Attempt:
    """The Receiver of one request (upstream.py). Await `outcome`; cancel with `cancel`."""

    __slots__ = (
        "_active_at", "_added_headers", "_begun", "_body", "_client", "_connection", "_content", "_count",
        "_events", "_form", "_head", "_held", "_is_flowing", "_is_holding", "_is_in_data", "_is_paused",
        "_is_stream", "_keeps_alive", "_last_reads", "_limits", "_loop", "_most_tail_bytes",
        "_on_first_output", "_quiet_end", "_reader", "_seam", "_sent_before", "_stream", "_trouble",
        "_until_native", "_was_at_boundary", "outcome",
    )  # fmt: skip

    def __init__(  # noqa: PLR0917  (passing them by keyword takes 0.4 µs a request)
        self,
        client: ClientSide,
        connection: WorkerConnection,
        limits: Limits,
        form: AnswerForm,
        added_headers: bytes,
        on_first_output: Callable[[], None],
        may_stay: bool,
        keeps_answer: bool = False,
        seam: Seam | None = None,
    ) -> None:
        """`added_headers` go to the client after the worker's. `on_first_output` is called for streams.

        `may_stay`: the client's connection may serve another request. `keeps_answer`: `tail` is all of a
        short answer, and of a stream its last event. `seam`: of a stream that may move to another worker.
        """
        self.outcome: asyncio.Future[Outcome] = connection.loop.create_future()
        self._count = 0  # events that Python has passed on
        self._stream: native.Stream | None = None  # set while C passes on what follows
        self._until_native = 0  # whole chunks until it does; 0: it does not, or is about to
        self._loop = connection.loop
        self._client = client
        self._connection = connection
        self._limits = limits
        self._form = form
        self._added_headers = added_headers
        self._on_first_output = on_first_output
        self._head: ResponseHead | None = None
        self._body: Body | None = None
        self._held = bytearray()
        # Set where the content is needed without chunks: to read events, or for a client that gets no chunks.
        self._content: ChunkContent | None = None
        self._reader: EventReader | None = None  # set while a stream is held
        self._events: list[Event] = []  # complete ones that are held
        self._is_holding = True
        self._is_stream = False
        # A whole chunk can pass as it is: nothing is held, unpacked or searched for.
        self._is_flowing = False
        self._quiet_end = b"\0"  # from _UNFINISHED on, of the last event that was searched; at first none
        self._sent_before: frozenset[str] | None = None  # the openings that the client has from other workers
        self._begun: Begun | None = None  # set where the client has the head from elsewhere
        # while a stream may move, and while one that has moved is passed on, `_begun` is it
        self._seam = seam
        self._trouble: _Trouble | None = None
        self._was_at_boundary = True
        self._is_in_data = False  # whether the last read had a data line, which the next one may continue
        self._keeps_alive = may_stay
        self._active_at = 0.0
        self._is_paused = False
        self._most_tail_bytes = ANSWER_BYTES if keeps_answer else TAIL_BYTES
        reads = ANSWER_READS if keeps_answer else TAIL_READS
        self._last_reads: deque[bytes] = deque((), reads)  # noqa: RUF037  (by keyword it takes twice as long)

    @property
    def events(self) -> int:
        """Server-sent events with data relayed so far: an estimate of the tokens produced."""
        return self._count + (self._stream.events if self._stream is not None else 0)

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
    def is_of_router(self) -> bool:
        """Whether the answer came through another router, or through a replica of this fleet."""
        return self._head is not None and ROUTER in self._head.headers

    @property
    def is_committed(self) -> bool:
        """Whether output has been sent to the client: no other worker can be tried."""
        return not self._is_holding

    def cut_off(self, error: KvRouterError) -> None:
        """End an answer that has begun, with an error event, because this process ends."""
        if not self.outcome.done():
            self._connection.take_back(self)
            self._keeps_alive = False  # the client's next request must go to another replica
            self._break_off(str(error), error, spares_worker=True)

    def move(self, reason: str) -> None:
        """Give up an answer that has no output yet, so that another worker is tried."""
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
        if self.outcome.done():
            return
        if head.is_event_stream:
            self._is_stream = head.status < 300
            self._events = EventReader().feed(data + _BLANK_LINES)
        self._judge_whole(head, data)

    def opened(self, head: ResponseHead, body: Body) -> None:
        """The head has arrived. It is held until the body's beginning shows whether to pass it on."""
        self._head, self._body = head, body
        if head.is_event_stream and head.status < 300:  # a head is no output: the time goes on
            self._is_stream = True
            self._reader = EventReader()
            self._content = ChunkContent() if head.is_chunked else None
        else:
            self._active_at = self._loop.time()

    def received(self, data: bytes) -> None:
        """Bytes of the body: inspected while holding, relayed after that."""
        body = self._body
        if self._is_holding:
            self._hold(data)
        elif self._is_stream and self._was_at_boundary and self._is_broken_off(data):
            return
        elif body is not None and body.is_over:
            self._pass_last(data)
        else:
            self._pass_on(data)
            if self._until_native and self._is_flowing and self._was_at_boundary and not self._is_paused:
                self._near_native()

    def received_chunk(self, data: bytes) -> None:
        """`received` for an event amid a stream, without the steps that cannot apply to it.

        Where C does not take over, all events come here: a third of the instructions of looking at each.
        """
        seam = self._seam
        if seam is not None and not (seam.is_plain and data.endswith(_CHUNK_ENDS)):
            self.received(data)
            return
        if data.endswith(self._quiet_end) and data.find(b"\n", _SIZE_BYTES) == len(data) - _ONE_END_BYTES:
            self._count += 1  # as the last one was
            self._active_at = self._loop.time()
            self._last_reads.append(data)
        elif not self._is_flowing or names_failure(data):
            self.received(data)
            return
        else:
            self._look_at(data)
        if seam is not None:
            seam.keep(data)
        self._client.write(data)
        if self._client.is_slow:
            self._hold_up()
        elif self._until_native:
            self._near_native()

    def _near_native(self) -> None:
        """Whole chunks were passed on; after some of them C does that."""
        self._until_native -= 1
        if not self._until_native:
            self._loop.call_soon(self._pass_natively)  # by then they are written

    def taken_back(self, stream: native.Stream) -> None:
        """C passes on no longer: what follows comes here."""
        self._stream, self._until_native = None, PYTHON_CHUNKS
        self._count += stream.events
        self._active_at = max(self._active_at, stream.active_at)
        self._was_at_boundary, self._is_in_data = not stream.left, bool(stream.left)
        self._keep(stream.tail())
        if self._seam is not None:
            self._seam.keep_native(stream)
        if stream.unsent:
            self._client.write(stream.unsent)
            if self._client.is_slow:
                self._hold_up()

    def _pass_natively(self) -> None:
        """Have C pass on what follows, unless something waits on its way to the client."""
        most = 0
        if self._seam is not None:
            most = (RECORD_BYTES if self._seam.may_move else 1) if self._seam.is_plain else -1
        if not self.outcome.done() and not self._is_paused and most >= 0:
            self._stream = self._client.lend(partial(self._connection.pass_natively, self, most))
        if self._stream is None:
            self._until_native = MORE_PYTHON_CHUNKS

    def _is_broken_off(self, data: bytes) -> bool:
        """Whether these bytes, amid an answer, ended it. An error that tells the client is only counted."""
        if self._seam is not None or not names_failure(data):  # a seam's `frame` finds it
            return False
        error, good = _first_error(b"" if self._ends_event else self._last_reads[-1], data)
        if error is None:
            return False
        if not error.body:
            if good:
                self._pass_on(chunk(good) if self._head is not None and self._head.is_chunked else good)
                self._was_at_boundary = True
            self._break_off(error.message)
            return True
        self._trouble = self._trouble or _reported(error)
        return False

    def _look_at(self, data: bytes) -> None:
        """Look at a chunk; its end is remembered if the next ones may look the same."""
        at = data.rfind(_UNFINISHED, -_MOST_QUIET_BYTES)
        if at >= 0:
            self._quiet_end = data[at:]
        self._keep(data)
        lines = data.count(_DATA_LINE)
        if lines and not data.startswith(_PINGS, data.find(b"\n") + 1):  # else nothing of an answer
            self._count += lines
            self._active_at = self._loop.time()

    def ended(self) -> None:
        """The body is complete."""
        head = self._head
        if head is None or self.outcome.done():
            return
        if self._is_holding:
            if self._reader is not None and self._reader.rest.strip():  # an event without its empty line
                if is_half(self._reader.rest):
                    self.lost(_NO_END)
                    return
                self._events += self._reader.feed(_BLANK_LINES)
            self._judge_whole(head, bytes(self._held))
            return
        if isinstance(self._body, UntilCloseBody):
            self._pass_last(b"")
        if not self.outcome.done():
            if self._begun is not None:
                self._client.write(self._begun.close())
            self._finish_good(head)

    def lost(self, reason: str) -> None:
        """The connection ended before the body did."""
        if self.outcome.done():
            return
        if self._is_holding:
            had_begun = bool(self._held) and not self._is_stream
            self._finish(Lost(reason, self._connection.is_stale, self._connection.is_cut, had_begun))
        elif not self._ends_already():
            self._break_off(f"the worker broke off: {reason}", is_cut=self._connection.is_cut)

    # Holding

    def _hold(self, data: bytes) -> None:
        """Decide, once enough has arrived, whether the client should get the answer."""
        head, reader, body = self._head, self._reader, self._body
        assert head is not None
        self._held += data
        if reader is not None:
            if self._is_plain(reader, data):
                self._events += [_OUTPUT] * (data.count(_DATA_LINE) + data.startswith(_DATA))
                self._commit(head)
                return
            events = reader.feed(data if self._content is None else self._content.feed(data))
            self._events += events
            if body is not None and not body.is_over:  # else `ended` follows, and judges it as a whole
                self._judge_stream(head, events)
            return
        self._active_at = self._loop.time()
        is_much = len(self._held) > HELD_BYTES
        if is_rejection(head.status, serves_model=self._form.is_native):
            if is_much:
                self._reject(head.status, _content(head, bytes(self._held)))
        elif is_much or head.status >= 300 or head.is_media:
            self._commit(head)

    def _is_plain(self, reader: EventReader, data: bytes) -> bool:
        """Whether a read commits this attempt without being parsed."""
        body = self._body
        if body is None or body.is_over or reader.rest or self._client.begun is not None:
            return False
        if self._seam is not None:
            passes_chunks = self._content is not None and body.is_at_boundary and not self._client.is_http_10
            if not passes_chunks or not self._seam.passes(bytes(self._held)):
                return False
        return is_plain_output(data)

    def _judge_stream(self, head: ResponseHead, events: list[Event]) -> None:
        """Judge a stream by its newest events."""
        error = _error_of(events)
        if error is not None and self._is_failure(error):
            self._fail(error)
        elif any(event.commits for event in events) or len(self._held) > MOST_EVENT_BYTES:
            self._commit(head)
        elif head.length is None and any(event.passes_early for event in events):
            self._pass_early(head)

    def _judge_whole(self, head: ResponseHead, held: bytes) -> None:
        """Judge a complete answer, and pass it on unless another worker should be tried."""
        if head.status == 200:
            self._judge_good(head, held)
        elif is_rejection(head.status, serves_model=self._form.is_native):
            self._reject(head.status, _content(head, held))
        if self.outcome.done():
            return
        if head.length is not None and not self._is_stream and self._client.begun is None:  # nearly always
            self._is_holding = False
            self._client.write(self._client_head(head, passes_chunks=False) + held)
            self._keep(held)
            self._finish_good(head)
            return
        self._held = bytearray(held)
        self._commit(head, is_whole=True)
        if not self.outcome.done():
            self.ended()

    def _judge_good(self, head: ResponseHead, held: bytes) -> None:
        """Look for an error, or for nothing, in a complete answer with status 200."""
        if head.is_event_stream:
            error, is_empty = _error_of(self._events), not any(event.commits for event in self._events)
        else:
            text = _content(head, held)
            error = error_in_whole(text) if is_suspicious(text) else None
            is_empty = is_empty_answer(text, is_native=self._form.is_native)
        if error is not None and self._is_failure(error):
            self._fail(error)
        elif error is not None:
            self._trouble = _reported(error)
        elif is_empty:
            self._finish(Lost(_EMPTY))

    def _is_failure(self, error: EventError) -> bool:
        """Whether another worker may do better. An error of the client is passed on as it is."""
        return not error.body or is_rejection(error.status, serves_model=self._form.is_native)

    def _fail(self, error: EventError) -> None:
        if error.body:
            self._reject(error.status, error.body)
        else:
            self._finish(Lost(error.message))

    def _pass_early(self, head: ResponseHead) -> None:
        """Pass on the events so far, which have no output, so that the client's connection stays open."""
        client = self._client
        if self._seam is not None:
            self._choose_seam(head, self._seam, is_whole=False)
        begun = client.begun or self._begin(head)
        if text := self._unsent(begun):
            client.write(begun.frame(text))

    def _unsent(self, begun: Begun) -> bytes:
        """The text of the held events, without openings that the client has from another worker."""
        if self._sent_before is None:
            self._sent_before = frozenset(begun.openings)
        sent = self._sent_before
        kept = [one for one in self._events if one.kind is not EventKind.OPENING or one.name not in sent]
        begun.openings.update(event.name for event in kept if event.kind is EventKind.OPENING)
        self._events, self._held = [], bytearray()
        return b"".join([event.text for event in kept])

    def _commit(self, head: ResponseHead, *, is_whole: bool = False) -> None:
        """Choose this worker for good, and pass on what is held. `is_whole`: that is all of the answer."""
        client, held, events = self._client, bytes(self._held), self._events
        self._is_holding, self._active_at = False, self._loop.time()
        if self._seam is not None:
            self._choose_seam(head, self._seam, is_whole=is_whole)
        if client.begun is not None:
            self._go_on(head, client.begun, is_whole=is_whole)
        else:
            self._held, self._events = bytearray(), []
            passes_chunks = head.is_chunked and not client.is_http_10
            self._content = ChunkContent() if head.is_chunked and client.is_http_10 else None
            self._keeps_alive = self._keeps_alive and (passes_chunks or head.length is not None)
            self._flow(self._reader is not None and passes_chunks)
            relay = self._pass_last if is_whole and self._is_stream else self._pass_on
            relay(held, self._client_head(head, passes_chunks=passes_chunks))
        self._reader = None
        if self._is_stream:
            self._count = len([event for event in events if event.kind not in _NO_TOKENS])
            if len(held) > MOST_EVENT_BYTES or any(event.shows_output for event in events):
                self._on_first_output()

    def _choose_seam(self, head: ResponseHead, seam: Seam, *, is_whole: bool) -> None:
        """Let this stream move if its worker is lost, unless it is none, or whole with its end."""
        client = self._client
        if seam is client.begun:
            return
        is_good = is_whole and seam.rewrite is None and self._trouble_in(bytes(self._held)) is None
        is_needed = self._is_stream and not is_good
        if not is_needed or head.status != 200 or head.length is not None:
            self._seam = None
            return
        client.begun = seam.after(client.begun or self._begin(head))

    def _begin(self, head: ResponseHead) -> Begun:
        """Send the head of a stream whose chunks are framed here."""
        client = self._client
        self._keeps_alive = self._keeps_alive and not client.is_http_10
        own = self._client_head(head, passes_chunks=not client.is_http_10)
        return begin(client, own, keeps_alive=self._keeps_alive)

    def _go_on(self, head: ResponseHead, begun: Begun, *, is_whole: bool) -> None:
        """Pass on what is held of a stream whose client has its head already."""
        begun.has_output, self._begun, self._keeps_alive = True, begun, begun.keeps_alive
        reader, body = self._reader, self._body
        if self._events and self._events[-1] is _OUTPUT:  # what is held passes as it is
            held, self._held, self._events = bytes(self._held), bytearray(), []
            self._content = ChunkContent()  # these are whole chunks; the former one had only seen a part
            self._pass_on(held)
            return
        if head.is_event_stream and head.status < 300:
            rest = reader.rest if reader is not None else b""
            text, content, self._content = self._unsent(begun) + rest, self._content, None  # has no chunks
            (self._pass_last if is_whole else self._pass_on)(text)
            self._content = content
            if self._seam is not None:  # `_pass_on` lets chunks flow, perhaps only later
                return
            if head.is_chunked and begun.is_chunked and body is not None and body.is_at_boundary and not rest:
                # From here on the worker's own chunks can follow.
                self._content = self._begun = None
                self._flow(True)
            return
        error: KvRouterError = WorkerDiedError(_NO_STREAM)
        if head.status >= 300:
            error = WorkerRejectedError(head.status, *message_in(_content(head, bytes(self._held))))
        self._client.write(begun.close(self._form.error_event(error)))
        self._finish(Done(200, self._keeps_alive, str(error), spares_worker=300 <= head.status < 500))

    def _client_head(self, head: ResponseHead, *, passes_chunks: bool) -> bytes:
        framing = b"transfer-encoding: chunked\r\n" if passes_chunks else b""
        buffering = UNBUFFERED if head.is_event_stream else b""
        connection = b"connection: keep-alive\r\n" if self._keeps_alive else b"connection: close\r\n"
        return b"".join((head.forwarded, framing, buffering, connection, self._added_headers, b"\r\n"))

    # Relaying

    def _flow(self, is_flowing: bool) -> None:
        """Let whole chunks pass as they are, in C if it can and nobody wants the whole answer later."""
        self._is_flowing = is_flowing
        if is_flowing and self._connection.may_pass_natively and self._most_tail_bytes == TAIL_BYTES:
            self._until_native = PYTHON_CHUNKS

    def _pass_on(self, data: bytes, head: bytes = b"") -> None:
        client, body = self._client, self._body
        client.write(head + self._framed(data))
        if self._seam is not None and self._seam.failure is not None:
            error, self._seam.failure = self._seam.failure, None
            self._break_off(_reported(error).reason)
            return
        self._keep(data)
        lines = data.count(_DATA_LINE) + data.startswith(_DATA)
        self._count += lines
        # A read within an event may have no data line of its own.
        if lines or self._is_in_data or not self._is_stream:
            self._active_at = self._loop.time()
            self._is_in_data = not data.endswith(_EVENT_ENDS)
        self._was_at_boundary = body is not None and body.is_at_boundary
        if self._seam is not None and not self._is_flowing and self._was_at_boundary and self._seam.is_plain:
            self._flow(self._head is not None and self._head.is_chunked and self._seam.is_chunked)
        if client.is_slow:
            self._hold_up()

    def _framed(self, data: bytes) -> bytes:
        """A read as the client gets it."""
        seam, body = self._seam, self._body
        if seam is not None and self._content is not None and body is not None and self._was_at_boundary:
            whole = data.removesuffix(LAST_CHUNK) if body.is_over else data  # `close` ends the body
            if (body.is_over or body.is_at_boundary) and seam.passes(whole) and not names_failure(whole):
                if seam.may_move:
                    seam.keep(whole)
                return whole
        content = data if self._content is None else self._content.feed(data)
        if self._begun is not None:
            return self._begun.frame(content) if content else b""
        return content

    def _keep(self, data: bytes) -> None:
        """Keep the last reads, for their usage and how they end."""
        reads = self._last_reads
        if reads and len(reads[-1]) + len(data) <= _JOINED_BYTES:
            reads[-1] += data
        elif data:
            reads.append(data[-max(self._most_tail_bytes, MOST_EVENT_BYTES) :])

    def _pass_last(self, data: bytes, head: bytes = b"") -> None:
        """Pass on the last read. A stream that must not look complete ends with an error event instead."""
        trouble = self._trouble
        if trouble is None and self._is_stream:
            trouble = self._trouble_in(b"".join((*self._last_reads, data))[-ANSWER_BYTES:])
        if self._seam is not None:  # its body does not end with this read, but with `close`
            self._pass_on(data, head)
            if self.outcome.done():
                return
            self._trouble = trouble
            if trouble is not None and trouble.is_unsaid:
                self._break_off(trouble.reason)
        elif trouble is not None and trouble.is_unsaid and not isinstance(self._body, LengthBody):
            rest = self._without_end(data)
            self._pass_on(rest or b"", head)
            self._was_at_boundary = rest is not None
            self._break_off(trouble.reason)
        else:
            self._pass_on(data, head)
            self._trouble = trouble

    def _without_end(self, data: bytes) -> bytes | None:
        """The last read of a body, without what ends it; None if a part of its end was passed on before."""
        if self._content is not None or self._begun is not None or isinstance(self._body, UntilCloseBody):
            return data
        if data.endswith(LAST_CHUNK):
            return data[: -len(LAST_CHUNK)]
        if not self._was_at_boundary:
            return None
        content = content_of(data)  # an extension, or trailers
        return chunk(content) if content else b""

    def _trouble_in(self, tail: bytes) -> _Trouble | None:
        """What is wrong with a stream that ends with these bytes."""
        if is_plain_end(tail):
            return None
        events = list(events_at_the_end(tail))
        error = _error_of(events)
        if error is not None:
            return _reported(error)
        is_good = any(event.finishes or event.kind is EventKind.END for event in events)
        return None if is_good or not self._form.has_end else _Trouble(_NO_END, is_unsaid=True)

    def _hold_up(self) -> None:
        """The client reads more slowly than its worker writes: pause the worker."""
        if not self._is_paused:
            self._is_paused = True
            self._connection.pause(self)
            self._client.when_drained(self._resume)

    def _resume(self) -> None:
        self._is_paused = False
        self._active_at = self._loop.time()
        self._connection.resume(self)

    def _break_off(
        self,
        reason: str,
        error: KvRouterError | None = None,
        *,
        spares_worker: bool = False,
        is_cut: bool = False,
    ) -> None:
        """End an answer that has begun, with an error event where the framing allows one.

        With the event the body is complete. Its connection then serves the next request, if its head has
        said so: clients send that one at once, and would lose it if the connection were closed.
        """
        head, begun = self._head, self._begun
        assert head is not None
        is_between = self._was_at_boundary and self._ends_event if begun is None else begun.ends_event
        takes_event = head.is_event_stream and is_between
        end = b""
        if takes_event:
            end = self._framed_end(head, self._form.error_event(error or WorkerDiedError(reason)))
        may_move = self._seam is not None and self._seam.may_move and not spares_worker
        rest = partial(self._client.write, end) if may_move else None
        if end and not may_move:
            self._client.write(end)
        keeps_alive, is_silent = takes_event and self._keeps_alive, isinstance(error, WorkerSilentError)
        facts = not takes_event, spares_worker, is_cut, is_silent, rest
        self._finish(Done(head.status, keeps_alive, reason, *facts))

    def _ends_already(self) -> bool:
        """End a stream that lacks only the end of its body. False: the last event of its API is not there."""
        head, begun = self._head, self._begun
        is_whole = self._was_at_boundary if begun is None else begun.ends_event
        if head is None or not self._is_stream or not is_whole:
            return False
        events = list(events_at_the_end(b"".join(self._last_reads)))
        if _error_of(events) is not None or all(event.kind is not EventKind.END for event in events):
            return False
        if begun is not None or (head.is_chunked and self._content is None):
            self._client.write(LAST_CHUNK if begun is None else begun.close())
        trouble = self._trouble or _GOOD
        needs_reset = head.length is not None and begun is None
        keeps_alive, spares_worker = self._keeps_alive and not needs_reset, trouble.spares_worker
        self._finish(Done(head.status, keeps_alive, trouble.reason, needs_reset, spares_worker))
        return True

    @property
    def _ends_event(self) -> bool:
        """Whether what was passed on ends an event."""
        return not self._last_reads or self._last_reads[-1].endswith(_EVENT_ENDS)

    def _framed_end(self, head: ResponseHead, event: bytes) -> bytes:
        """The last event of a stream, and the end of its body."""
        if self._begun is not None:
            return self._begun.close(event)
        return chunk(event) + LAST_CHUNK if head.is_chunked and self._content is None else event

    # Ends

    def watch(self, now: float) -> float:
        """Seconds until the next call. Ends the attempt if worker or client have been silent too long."""
        limits, stream = self._limits, self._stream
        limit = limits.first_byte_s if self._is_holding else limits.idle_s
        active_at = self._active_at if stream is None else max(self._active_at, stream.active_at)
        left_s = active_at + limit - now
        if left_s > 0:
            return min(left_s, limits.idle_s)  # once it relays, the limit is idle_s, which may be shorter
        self._connection.take_back(self)
        if self._is_holding:
            self._finish(TimedOut(limit))
        elif self._is_paused:
            reason = f"the client read nothing for {limit:g} s"
            self._finish(Done(200, False, reason, needs_reset=True, spares_worker=True))
        elif not self._ends_already():
            reason = f"the worker sent no output for {limit:g} s"
            self._break_off(reason, WorkerSilentError(reason))
        return 0

    def _reject(self, status: int, body: bytes) -> None:
        headers = self._head.headers if self._head else {}
        content_type = headers.get(b"content-type", b"application/json")
        if b"event-stream" in content_type:
            content_type = b"application/json"
        self._finish(Rejected(status, content_type, advice_in(headers), body))

    def _finish_good(self, head: ResponseHead) -> None:
        """The client has the whole answer, with what was found wrong in it."""
        trouble = self._trouble or _GOOD
        self._finish(Done(head.status, self._keeps_alive, trouble.reason, False, trouble.spares_worker))

    def _finish(self, outcome: Outcome) -> None:
        # Does nothing if the answer is complete: the connection may already serve another request.
        self._connection.cancel(self)
        if not self.outcome.done():
            self.outcome.set_result(outcome)


def _content(head: ResponseHead, data: bytes) -> bytes:
    return content_of(data) if head.is_chunked else data


def _error_of(events: Iterable[Event]) -> EventError | None:
    """The first error; None if there is none."""
    return next((event.error for event in events if event.error is not None), None)


def _first_error(before: bytes, data: bytes) -> tuple[EventError | None, bytes]:
    """The first error in a read, and what comes before it. `before`: it has the beginning of an event."""
    events = list(events_at_the_end(before + data))
    at = next((place for place, event in enumerate(events) if event.error is not None), None)
    if at is None:
        return None, b""
    own = list(events_at_the_end(data)) if before else events
    return events[at].error, b"".join([event.text for event in own[: at - len(events)]])


def _reported(error: EventError) -> _Trouble:
    reason = f"the worker's answer has an error: {error.message}"
    return _Trouble(reason, spares_worker=error.is_clients, is_unsaid=not error.body)
