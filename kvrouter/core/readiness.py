"""Whether a replica knows enough to get traffic: once it does, it does for ever.

hello ──> answers of workers and replicas ──> first recoveries ──> ready
                 │
                 └─ a replica's answer names the workers it hears; those are waited for too,
                    each until it is heard or as long as a lease lasts
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from kvrouter.core.feed import FeedReader
from kvrouter.core.feed_state import FeedState
from kvrouter.core.ids import RouterId, WorkerId
from kvrouter.core.pool import NAMED_MOST
from kvrouter.core.sources import Feed, name

HELLO_S = 0.2
"""Everyone answers a hello within 50 ms; who is slower has to be named by somebody who is not."""
AWAITED_MOST = 4096
"""Workers that are waited for, and named in one heartbeat (270 KB)."""


class Readiness:
    """What is still missing, until nothing is."""

    def __init__(self) -> None:
        self.is_ready = False
        self._hello_at: float | None = None
        self._awaited: dict[WorkerId, RouterId] = {}

    def said_hello(self, now: float) -> None:
        """A hello has gone out (again, after a reconnect)."""
        if self._hello_at is None:
            self._hello_at = now

    def wait_for(self, workers: Iterable[WorkerId], known_to: RouterId) -> None:
        """A replica hears these workers, and they have not been heard here."""
        for worker_id in workers:
            if len(self._awaited) < AWAITED_MOST:
                self._awaited.setdefault(worker_id, known_to)

    def is_waiting_for(self, worker_id: WorkerId) -> bool:
        """Whether its card is missing."""
        return worker_id in self._awaited

    def met(self, worker_id: WorkerId) -> None:
        """It is known now, or gone."""
        self._awaited.pop(worker_id, None)

    def missing(self, has_worker: bool, readers: Mapping[Feed, FeedReader], now: float) -> list[str]:
        """Why this replica should not get traffic yet; empty once it was ready, and for ever after."""
        if self.is_ready:
            return []
        reasons = [*self._greetings(has_worker, now), *self._absent(), *behind(readers)]
        self.is_ready = not reasons
        return reasons

    def _greetings(self, has_worker: bool, now: float) -> Iterator[str]:
        if self._hello_at is None:
            yield "not connected to NATS yet"
        elif now < self._hello_at + HELLO_S:
            yield "waiting for the answers to hello"
        if not has_worker:
            yield "no worker has been seen"

    def _absent(self) -> Iterator[str]:
        for worker_id, router_id in list(self._awaited.items())[:NAMED_MOST]:
            yield f"worker {worker_id}, known to replica {router_id}, has not been heard"
        if len(self._awaited) > NAMED_MOST:
            yield f"nor have {len(self._awaited) - NAMED_MOST} other workers"


def behind(readers: Mapping[Feed, FeedReader]) -> Iterator[str]:
    """The feeds that are not in step."""
    for source, reader in readers.items():
        if reader.state is not FeedState.LIVE:
            yield f"{name(source)}: {reader.state.value}, {reader.lag} frames behind"
