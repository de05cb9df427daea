"""The workers that a replica waits for before it can place requests, said at growing intervals (LongWait)."""

from __future__ import annotations

from kvrouter.bus import Bus
from kvrouter.core.fleet.replica import Replica
from kvrouter.long_wait import LongWait

NO_WORKER = (
    "start an agent for each engine (kvrouter worker --engine-url URL) with the same --nats and --namespace; "
    "kvrouter doctor names the namespaces that have agents"
)
NO_TARGET = "look at the log of each agent, which says what its engine lacks; kvrouter doctor looks at all"

_LOOK_EVERY_S = 1.0


class AwaitedWorkers:
    """Looks whether requests would wait for workers, once a second at most however often `look` is called."""

    def __init__(self, replica: Replica, bus: Bus, namespace: str) -> None:
        self._replica = replica
        self._bus = bus
        self.namespace = namespace
        self._wait: LongWait | None = None
        self._next_look_at = 0.0

    def look(self, now: float) -> None:
        """Say what is missing while a known model, or all of them, has no worker that takes requests."""
        if now < self._next_look_at:
            return
        self._next_look_at = now + _LOOK_EVERY_S
        missing = self._replica.readiness.awaited(now)
        # without NATS nothing is known of workers, and the bus itself says what it waits for
        if not missing or not self._bus.connected:
            self._wait = None
            return
        if self._wait is None:
            self._wait = self.begin("workers that take requests", now)
        self._wait.look(now, "; ".join(missing), self.remedy())

    def begin(self, awaited: str, now: float) -> LongWait:
        """A wait for certain workers."""
        return LongWait("workers.awaited", awaited, now, namespace=self.namespace)

    def remedy(self) -> str:
        """What to do about NATS, missing agents, or workers that take no requests."""
        if not self._bus.connected:
            return f"NATS is away ({self._bus.outage_reason or 'no answer yet'})"
        return NO_TARGET if self._replica.has_workers() else NO_WORKER
