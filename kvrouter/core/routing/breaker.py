"""A circuit breaker per target: a target that keeps failing gets no requests for a while.

              10 failures in a row                     60 s over
    closed ─────────────────────────> open ─────────────────────────> half-open
      ^                                ^                                  │
      │  3 successes in a row          └────────── a failure ─────────────┤
      └───────────────────────────────────────────────────────────────────┘

Only a fault of the worker is a failure: a lost connection, a 5xx, a timeout. A 4xx is the client's fault and
never opens a circuit (sglang #25811: clients' 4xx took a fleet down). Half-open lets one request through at
a time. Defaults: SGLang's router.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrouter.core.wire.ids import Target
from kvrouter.settings.declare import Settings, setting


@dataclass(frozen=True, slots=True)
class BreakerSettings(Settings):
    """`failures` in a row open a circuit for `open_s`; then `successes` in a row close it."""

    heading = "Which workers may be chosen"

    failures: int = setting(
        10,
        "consecutive failed attempts after which a worker is skipped",
        name="circuit-breaker-failures",
        least=1,
        reloadable=True,
    )
    successes: int = 3
    open_s: float = setting(
        60.0, "seconds that it is skipped", name="circuit-breaker-open-s", above=0, reloadable=True
    )


@dataclass(slots=True)
class _Circuit:
    failures: int = 0
    successes: int = 0
    opened_at: float | None = None
    probe_at: float | None = None
    """When the one request of a half-open circuit was sent."""


class CircuitBreakers:
    """The circuits of one pool. Only targets that have failed have one."""

    def __init__(self, settings: BreakerSettings | None = None) -> None:
        self.settings = settings or BreakerSettings()
        self._circuits: dict[Target, _Circuit] = {}
        # Targets whose circuit is open or half-open, apart from `_circuits`, so that every request can ask
        # without a walk over the targets that have failed before.
        self._open: set[Target] = set()

    def any_open(self) -> bool:
        """Whether any circuit is not closed. Every request asks."""
        return bool(self._open)

    def open_targets(self) -> list[Target]:
        """The targets whose circuit is not closed."""
        return sorted(self._open)

    def is_closed(self, target: Target, now: float) -> bool:
        """Whether a request may be sent there."""
        if target not in self._open:
            return True
        circuit, open_s = self._circuits[target], self.settings.open_s
        if circuit.opened_at is not None and now - circuit.opened_at < open_s:
            return False
        # a probe may never be answered: after `open_s` the next one goes
        return circuit.probe_at is None or now - circuit.probe_at >= open_s

    def sent(self, target: Target, now: float) -> None:
        """A request is sent there; a half-open circuit lets only this one through."""
        if target in self._open:
            self._circuits[target].probe_at = now

    def failed(self, target: Target, now: float) -> bool:
        """A request failed by a fault of the worker; returns whether the circuit is open now."""
        circuit = self._circuits.setdefault(target, _Circuit())
        circuit.failures += 1
        circuit.successes = 0
        circuit.probe_at = None
        # half-open, one failure is enough: the probe has shown that the target still fails
        if target not in self._open and circuit.failures < self.settings.failures:
            return False
        circuit.opened_at = now
        self._open.add(target)
        return True

    def succeeded(self, target: Target) -> None:
        """A request was answered, perhaps with a 4xx."""
        circuit = self._circuits.get(target)
        if circuit is None:
            return
        circuit.successes += 1
        circuit.failures = 0
        circuit.probe_at = None
        # forgotten, not reset: only targets that fail take memory
        if target not in self._open or circuit.successes >= self.settings.successes:
            self.forget(target)

    def abandoned(self, target: Target) -> None:
        """A request ended without a result for the worker: its client disconnected."""
        if target in self._open:
            self._circuits[target].probe_at = None

    def forget(self, target: Target) -> None:
        """Close the circuit, or drop it with its target."""
        self._circuits.pop(target, None)
        self._open.discard(target)
