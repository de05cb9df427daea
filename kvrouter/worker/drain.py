"""How a worker is taken out of service without cutting off a request.

    up ──SIGUSR1──> draining ──SIGUSR1──> up
     │ SIGTERM         │ SIGTERM
     └─────────────────┴──> draining, until nothing runs or waits on the engine ──> leave
                                │ a second SIGTERM, --drain-timeout-s, the engine is gone
                                └──> leave at once

Frontends send a draining worker no new requests and finish the running ones. The agent goes on publishing the
engine's events and load. The engine counts as idle after IDLE_LOOKS scrapes in a row without a request: one
that a frontend sent before it received the new state takes a moment to arrive. If the engine does not report
its load, the agent leaves after BLIND_LOOKS scrapes, because it cannot know when the engine will be idle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping

from kvrouter.worker.engines.http import EngineError, EngineGoneError, EngineHttp
from kvrouter.worker.engines.metrics import RankLoad

# Between two scrapes while draining: short, because a deployment waits for it.
LOOK_S = 0.2
# One idle scrape is not enough, see above, and one failed scrape does not justify cutting requests off.
IDLE_LOOKS = 2
BLIND_LOOKS = 3


class Duty:
    """What the operator wants of a worker. Each signal of the process calls one of its methods."""

    def __init__(self, leave: asyncio.Event) -> None:
        self.is_paused = False
        # Set: take no new requests, and leave when the running ones have ended.
        self.retired = asyncio.Event()
        # Set: leave now.
        self.leave = leave
        self._on_change: Callable[[], None] | None = None

    @property
    def is_draining(self) -> bool:
        """Whether new requests should go elsewhere."""
        return self.is_paused or self.retired.is_set()

    def attend(self, on_change: Callable[[], None]) -> None:
        """Begin to serve a worker: call `on_change` whenever `is_draining` may have changed."""
        self._on_change = on_change

    def dismiss(self) -> None:
        """The worker has failed, and may be started again later."""
        self._on_change = None
        if self.retired.is_set():
            self.leave.set()

    def retire(self) -> None:
        """SIGTERM: leave when drained. The second time, or while there is no worker: leave now."""
        if self.retired.is_set() or self._on_change is None:
            self.leave.set()
        self.retired.set()
        self._notify()

    def pause(self) -> None:
        """SIGUSR1: take no new requests until the next SIGUSR1."""
        self.is_paused = not self.is_paused
        self._notify()

    async def until_done(self, *endings: Coroutine[None, None, str]) -> str:
        """Wait until `leave` is set or one of `endings` returns the reason; returns the reason."""
        over, leave = [asyncio.create_task(each) for each in endings], asyncio.create_task(self.leave.wait())
        try:
            await asyncio.wait([*over, leave], return_when=asyncio.FIRST_COMPLETED)
            return next((each.result() for each in over if each.done()), "leaving at once on request")
        finally:
            for task in (*over, leave):
                task.cancel()

    def _notify(self) -> None:
        if self._on_change is not None:
            self._on_change()


class Looks:
    """Counts consecutive looks at an engine's load, until a reason to leave is found."""

    def __init__(self) -> None:
        self._idle = 0
        self._blind = 0

    def take(self, loads: Mapping[int, RankLoad]) -> str:
        """Take one more look; returns the reason to leave, or an empty text."""
        requests = count_requests(loads)
        self._blind = self._blind + 1 if requests is None else 0
        self._idle = self._idle + 1 if requests == 0 else 0
        if self._idle == IDLE_LOOKS:
            return "idle"
        return "the engine does not report its load" if self._blind == BLIND_LOOKS else ""


def count_requests(loads: Mapping[int, RankLoad]) -> int | None:
    """Requests running and waiting on all ranks; None if no rank reports a number."""
    counts = [count for load in loads.values() for count in (load.running, load.waiting) if count is not None]
    return sum(counts) if counts else None


async def until_drained(engine: EngineHttp, is_down: Callable[[], bool]) -> str:
    """Wait until the engine is idle, gone or unreadable; returns the reason."""
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
