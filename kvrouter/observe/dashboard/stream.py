"""GET /fleet/stream: server-sent events for the page: the last hour's traffic, then a snapshot a second.

FleetTraffic.history ──for each viewer──> event `history`
FleetView.snapshot ──once, for all viewers──> one event ──> each viewer that has read the last one

At 1,000 targets GET /fleet has 0.5 MB, mostly names of fields: here the targets are a table.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

import msgspec
from msgspec.structs import asdict, astuple

from kvrouter.errors import TooManyViewersError
from kvrouter.observe.document import Fleet, TargetRow
from kvrouter.relay.answer import Events
from kvrouter.relay.request import Request

INTERVAL_S = 1.0
MOST_VIEWERS = 32


class FleetStream:
    """`history` returns what FleetTraffic has kept, as JSON."""

    def __init__(self, snapshot: Callable[[], Awaitable[Fleet]], history: Callable[[], bytes]) -> None:
        self._snapshot = snapshot
        self._history = history
        self._viewers = 0
        self._next: asyncio.Task[bytes] | None = None
        self._made_at = float("-inf")

    async def view(self, _request: Request) -> Events:
        """GET /fleet/stream. Raises TooManyViewersError."""
        if self._viewers >= MOST_VIEWERS:
            raise TooManyViewersError(
                f"{MOST_VIEWERS} dashboards are open at this replica: close some of them"
            )
        return Events(self._events())

    async def _events(self) -> AsyncGenerator[bytes, None]:
        self._viewers += 1
        try:
            yield b"event: history\ndata: " + self._history() + b"\n\n"
            while True:
                if self._next is None or self._next.done():
                    self._next = asyncio.create_task(self._make())
                # the others still wait for it if this viewer leaves
                yield await asyncio.shield(self._next)
        finally:
            self._viewers -= 1

    async def _make(self) -> bytes:
        """The event of the next snapshot, an interval after the last one."""
        now = asyncio.get_running_loop().time
        await asyncio.sleep(self._made_at + INTERVAL_S - now())
        self._made_at = now()
        return event(await self._snapshot())


def event(fleet: Fleet) -> bytes:
    """`data: {…}`: the fields of Fleet; `targets` has the names of its columns, and a list for each row."""
    rows = [astuple(row) for row in fleet.targets]
    table = {"columns": TargetRow.__struct_fields__, "rows": rows}
    return b"data: " + msgspec.json.encode(asdict(fleet) | {"targets": table}) + b"\n\n"
