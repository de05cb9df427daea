"""How a worker is taken out of service without cutting off a request.

    up ──SIGUSR1──> draining ──SIGUSR1──> up
     │ SIGTERM         │ SIGTERM
     └─────────────────┴──> draining, until nothing runs or waits on the engine ──> leave
                                │ a second SIGTERM, --drain-timeout, the engine is gone
                                └──> leave at once

While a worker is draining, frontends send it nothing new and finish what runs; its events and load
go on being told. Nothing runs if the engine's metrics say so twice in a row: a request that a
frontend had sent before it heard is under way for a moment. An engine that does not tell its load
is left, as nobody can say when it will be idle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping

from kvrouter.worker.engines.http import EngineError, EngineGoneError, EngineHttp
from kvrouter.worker.engines.metrics import RankLoad

LOOK_S = 0.2
IDLE_LOOKS = 2
BLIND_LOOKS = 3


class Duty:
    """What the operator wants of a worker; the signals of the process are its methods."""

    def __init__(self, leave: asyncio.Event) -> None:
        self.is_paused = False
        self.retired = asyncio.Event()
        """Set: take nothing new, and leave when what runs has ended."""
        self.leave = leave
        """Set: leave now."""
        self._on_change: Callable[[], None] | None = None

    @property
    def is_draining(self) -> bool:
        """Whether new requests should go elsewhere."""
        return self.is_paused or self.retired.is_set()

    def attend(self, on_change: Callable[[], None]) -> None:
        """There is a worker now; it is told when `is_draining` changes."""
        self._on_change = on_change

    def dismiss(self) -> None:
        """The worker is gone, and perhaps tried again later."""
        self._on_change = None
        if self.retired.is_set():
            self.leave.set()

    def retire(self) -> None:
        """SIGTERM: leave when drained. A second time, or before there is a worker: now."""
        if self.retired.is_set() or self._on_change is None:
            self.leave.set()
        self.retired.set()
        self._tell()

    def pause(self) -> None:
        """SIGUSR1: take nothing new until the next SIGUSR1."""
        self.is_paused = not self.is_paused
        self._tell()

    async def until_done(self, serving_out: Coroutine[None, None, str]) -> str:
        """Wait until told to leave now, or `serving_out` is over; returns why."""
        over, told = asyncio.create_task(serving_out), asyncio.create_task(self.leave.wait())
        try:
            await asyncio.wait([over, told], return_when=asyncio.FIRST_COMPLETED)
            return over.result() if over.done() else "told to leave now"
        finally:
            over.cancel()
            told.cancel()

    def _tell(self) -> None:
        if self._on_change is not None:
            self._on_change()


class Looks:
    """What a row of looks at an engine's load says."""

    def __init__(self) -> None:
        self._idle = 0
        self._blind = 0

    def take(self, loads: Mapping[int, RankLoad]) -> str:
        """One more look; returns why to wait no longer, or nothing."""
        requests = count_requests(loads)
        self._blind = self._blind + 1 if requests is None else 0
        self._idle = self._idle + 1 if requests == 0 else 0
        if self._idle == IDLE_LOOKS:
            return "idle"
        return "the engine does not tell its load" if self._blind == BLIND_LOOKS else ""


def count_requests(loads: Mapping[int, RankLoad]) -> int | None:
    """Requests running and waiting on all ranks; None if no rank tells."""
    told = [count for load in loads.values() for count in (load.running, load.waiting) if count is not None]
    return sum(told) if told else None


async def until_drained(engine: EngineHttp, is_down: Callable[[], bool]) -> str:
    """Return, with the reason, when there is nothing to wait for any more."""
    looks = Looks()
    while not is_down():
        await asyncio.sleep(LOOK_S)
        try:
            loads = (await engine.scrape()).loads
        except EngineGoneError:
            return "the engine is gone"
        except EngineError:
            loads = {}
        if reason := looks.take(loads):
            return reason
    return "the engine is down"
