"""A stream that may go on at another worker: whole events only, and a record of them.

    held ──first output──> passed on and kept ──the worker is lost, or gives up──> between two workers
                                 ^                                                    │
                                 └──────── the next worker's first output ────────────┘

Nothing is parsed while all is well. C passes on such a stream, too (native/streams.pyx), and keeps the bytes;
they are copied only if another worker goes on.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import Struct, field

from kvrouter.relay.begun import Begun
from kvrouter.relay.events import MOST_EVENT_BYTES, EventError, EventReader, names_failure
from kvrouter.relay.framing import LAST_CHUNK, chunk, content_of

if TYPE_CHECKING:
    from kvrouter.relay.native import streams as native

# Of one stream: with token ids an event takes 250 bytes. A longer one stays at its worker.
RECORD_BYTES = 16 * 1024 * 1024
# The first event has the ids of the prompt: 8 bytes each.
_MOST_REST = 64 * MOST_EVENT_BYTES
# Of all streams of a process; C has as much for those that it passes on.
RECORDS_BYTES = 256 * 1024 * 1024
# What an object takes beside its bytes.
_OBJECT_BYTES = 48
_ENDS = (b"\n\n", b"\n\r\n", b"\r\r")
# Chunks that end events. No CR: else a chunk could end amid a word, unseen.
_EVENTS = re.compile(rb"(?:[0-9a-fA-F]{1,16}\r\n[^\r]*\n\n\r\n)+")
_MOST_END = 2  # bytes of an end that may have come before


class RewriteError(Exception):
    """An event of the next worker cannot become one of the client's."""


class Records(Struct):
    """What the records of all streams take."""

    bytes: int = 0


class Seam(Begun, kw_only=True):
    """What the client of one request has so far. `release` it at the end of the request."""

    records: Records

    moves: int
    """How often it may still move."""
    rewrite: Callable[[bytes], bytes] | None = None
    """How its worker's events become the client's; None: as they are."""
    is_full: bool = False
    """It has become too long to be kept."""
    failure: EventError | None = None
    """What its worker ended it with. Its client has not seen that."""
    rest: bytearray = bytearray()
    """The beginning of an event."""
    _kept: list[bytes | native.Stream] = field(default_factory=list)
    """Chunks, and streams of which C keeps them."""
    _kept_bytes: int = 0
    _native_bytes: int = 0

    @property
    def may_move(self) -> bool:
        """Whether another worker may go on with it."""
        return self.moves > 0 and not self.is_full

    def after(self, begun: Begun | None) -> Seam:
        """Go on with an answer that has begun."""
        if begun is not None:
            self.is_chunked, self.keeps_alive, self.openings = (
                begun.is_chunked,
                begun.keeps_alive,
                begun.openings,
            )
        return self

    @property
    def is_plain(self) -> bool:
        """Whether events pass as they are, and the last one was whole."""
        return self.rewrite is None and not self.rest

    @property
    def record(self) -> bytes:
        """The events that the client has of the first worker, before they were rewritten."""
        return content_of(b"".join([one if isinstance(one, bytes) else one.record() for one in self._kept]))

    def passes(self, chunks: bytes) -> bool:
        """Whether these whole chunks pass as they are, unless one is a failure: each ends an event."""
        return self.is_chunked and self.is_plain and _EVENTS.fullmatch(chunks) is not None

    def keep(self, chunks: bytes) -> None:
        """Whole events have been passed on, each in chunks."""
        size, records = len(chunks) + _OBJECT_BYTES, self.records
        kept, recorded = self._kept_bytes + size, records.bytes + size
        if self.is_full or kept + self._native_bytes > RECORD_BYTES or recorded > RECORDS_BYTES:
            self._give_up()
            return
        self._kept.append(chunks)
        self._kept_bytes, records.bytes = kept, recorded

    def keep_native(self, stream: native.Stream) -> None:
        """C has passed on whole events; they stay there."""
        if stream.is_over or self._kept_bytes + self._native_bytes + stream.recorded > RECORD_BYTES:
            self._give_up()
        elif stream.recorded and not self.is_full:
            self._kept.append(stream)
            self._native_bytes += stream.recorded

    def _give_up(self) -> None:
        self.is_full = True
        self.release()

    def release(self) -> None:
        """Drop the record."""
        self.records.bytes -= self._kept_bytes
        self._kept_bytes = self._native_bytes = 0
        self._kept.clear()

    def frame(self, content: bytes) -> bytes:
        """The whole events of a piece and what was left of those before it; the rest of it waits."""
        whole = self._whole(content) if self.rest or not content.endswith(_ENDS[0]) else content
        if whole.endswith(_ENDS) and names_failure(whole):  # else it is a part of an event that is too long
            whole = self._before_failure(whole)
        if not whole:
            return b""
        if self.may_move:
            self.keep(chunk(whole))
        if self.rewrite is not None:
            try:
                whole = self.rewrite(whole)
            except RewriteError as error:
                self.failure, whole = EventError(str(error)), b""
        return chunk(whole) if self.is_chunked and whole else whole

    def _whole(self, content: bytes) -> bytes:
        """The events that this piece ends; what is left of it is now `rest`."""
        searched = max(0, len(self.rest) - _MOST_END)
        self.rest += content
        end = max(at + len(one) if (at := self.rest.rfind(one, searched)) >= 0 else 0 for one in _ENDS)
        if not end and len(self.rest) > _MOST_REST:
            end, self.is_full = len(self.rest), True
        whole = bytes(self.rest[:end])
        del self.rest[:end]
        return whole

    def _before_failure(self, whole: bytes) -> bytes:
        """The events before one by which a worker gives up. If it stays, its client is told."""
        good, reader = [], EventReader()
        for event in reader.feed(whole):
            error = event.error
            if error is not None and not error.is_clients and (self.may_move or not error.body):
                self.failure = error
                self.rest.clear()
                break
            good.append(event.text)
        else:
            good.append(reader.rest)  # more empty lines
        return b"".join(good)

    def close(self, event: bytes = b"") -> bytes:
        """What ends the body; `event`: an error, in place of what is left of the last one."""
        rest = b""
        if event:
            rest = chunk(event) if self.is_chunked else event
        elif self.rest.strip():
            rest = self.frame(b"\n\n")
        self.rest.clear()
        return rest + (LAST_CHUNK if self.is_chunked else b"")
