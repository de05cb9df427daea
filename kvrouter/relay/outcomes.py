"""How an attempt ended (exchange.py), and the limits that it was given."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from msgspec import Struct


class Limits(Struct, frozen=True):
    """How long a worker may send no output, in seconds, what its client gets then, and who else is tried."""

    first_byte_s: float = 600.0
    idle_s: float = 300.0
    keep_alive_s: float = 0.0
    """After this long without output, and again, the client of a stream gets a comment; 0: it gets none."""
    retries: int = 2
    """Other workers that are tried before the first byte of an answer."""
    retries_after_death: int = 1
    """Of these, those tried after a worker was lost with the request in hand."""


class Done(Struct, frozen=True):
    """The client has the whole answer, or the part that arrived before `failure`."""

    status: int
    keeps_alive: bool
    failure: str = ""
    # The framing left no place for an error event: only a reset shows the client that the answer is cut.
    needs_reset: bool = False
    # The worker is not to blame: no circuit opens because of it.
    spares_worker: bool = False
    # The connection broke: the worker may be gone.
    is_cut: bool = False
    # It sent nothing for too long.
    is_silent: bool = False
    rest: Callable[[], None] | None = None
    """Another worker may go on with the stream (seam.py). If none does, this writes the error event."""


class Rejected(Struct, frozen=True):
    """The worker rejected the request, with this answer. No output has reached the client."""

    status: int
    content_type: bytes
    advice: tuple[tuple[bytes, bytes], ...]
    """Headers that tell the client when to ask again."""
    body: bytes


class Lost(Struct, frozen=True):
    """The connection broke, or the answer ended, before any output. No output has reached the client."""

    reason: str
    # The connection had served before, and broke before a byte of this answer arrived: most likely the worker
    # closed it while the request was on its way.
    was_idle: bool = False
    # The connection broke with the request at the worker: the worker may be gone.
    is_cut: bool = False
    # A part of an answer that is not streamed had arrived. (The head of a stream comes before its prefill.)
    had_begun: bool = False


class Retried(Struct, frozen=True):
    """The engine hangs, so another worker should be tried. No output has reached the client."""

    reason: str


class TimedOut(Struct, frozen=True):
    """The worker sent no output for too long. No output has reached the client."""

    silent_s: float


Outcome: TypeAlias = Done | Rejected | Lost | Retried | TimedOut
