"""The same classes as in the Python version."""

from collections.abc import Sequence

from kvrouter.core.feeds.position import Position as Position
from kvrouter.core.tables.table import CountedSet as CountedSet
from kvrouter.core.tables.table import FlatTable as FlatTable
from kvrouter.core.tables.table import SlotSet as SlotSet
from kvrouter.core.wire.senders import Message

def take_run(
    messages: Sequence[Message], at: int, stop: int, positions: dict[str, Position], now: float
) -> int: ...
