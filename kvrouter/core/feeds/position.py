"""How far a reader has come: kept where C finds it, which applies runs of frames without a step in Python.

    messages ──take_run──> a frame that is the next one, with nothing odd in it ──> SlotSet
                  └──any other message: it stops there, and the reader takes that one

What a frame means is said by reader.py and sinks.py; without C they take all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvrouter.core.native import versions
from kvrouter.core.tables.table import SlotSet
from kvrouter.core.wire.senders import Message


class Position:
    """Of one feed."""

    __slots__ = (
        "incarnation", "into", "live_seq", "most", "received_at", "seq", "source_seq", "taken"
    )  # fmt: skip

    def __init__(self) -> None:
        self.incarnation = 0
        self.seq = 0
        """Everything up to here is applied."""
        self.source_seq = 0
        """The last one that the source reports to have sent."""
        self.live_seq = 0
        """The highest one in live messages since the last question: an answer may be older than these."""
        self.received_at: float | None = None
        """When the last message came; None before the first."""
        self.into: SlotSet | None = None
        """Where the next frame goes, if the reader need not see it."""
        self.most = 0
        """Hashes that `into` may hold; 0: any number."""
        self.taken = 0
        """Frames that were applied so, and that the reader has not counted yet."""

    def take(self, frame: bytes, now: float) -> bool:
        """Apply a frame, if C can. False: nothing has changed, and the reader takes it."""
        return False

    def is_told(self, incarnation: int, seq: int, now: float) -> bool:
        """Whether a heartbeat says what is known: it is noted then, and the reader need not see it."""
        if self.into is None or incarnation != self.incarnation or seq != self.seq:
            return False
        self.received_at = now
        self.source_seq, self.live_seq = seq, max(self.live_seq, seq)
        return True


def new_position() -> Position:
    """Of the version in use."""
    native = versions.chosen.table
    return Position() if native is None else native.Position()


def take_run(
    messages: Sequence[Message], at: int, stop: int, positions: Mapping[str, Position], now: float
) -> int:
    """Apply messages from `at` on; returns the place of the first that the reader of its feed must see.

    `positions`: by subject. `stop`: where to end in any case.
    """
    native = versions.chosen.table
    return at if native is None else int(native.take_run(messages, at, stop, positions, now))
