"""What an attempt says about its worker, told to the circuit breakers (core/breaker.py) if there are any."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

import structlog

from kvrouter.core.breaker import CircuitBreakers
from kvrouter.core.ids import Target
from kvrouter.frontend.relay import Done, Lost, Outcome, Rejected, TimedOut

log = structlog.get_logger()


class Judged:
    """An attempt, while inside. Whatever ends it, its target's circuit hears of it."""

    __slots__ = ("_circuits", "_target", "outcome")

    def __init__(self, circuits: CircuitBreakers | None, target: Target) -> None:
        self.outcome: Outcome | None = None
        """How it ended; None: its client left, or we failed."""
        self._circuits = circuits
        self._target = target

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._circuits is not None:
            _tell(self._circuits, self._target, self.outcome)


def _tell(circuits: CircuitBreakers, target: Target, outcome: Outcome | None) -> None:
    match outcome:
        case None | Done(spares_worker=True):
            circuits.abandoned(target)
        case Lost() | TimedOut():
            _failed(circuits, target)
        case Rejected(status=status) if status >= 500:
            _failed(circuits, target)
        case Done(failure=failure) if failure:
            _failed(circuits, target)
        case Rejected() | Done():
            circuits.succeeded(target)


def _failed(circuits: CircuitBreakers, target: Target) -> None:
    if circuits.failed(target, asyncio.get_running_loop().time()):
        settings = circuits.settings
        log.warning("worker.circuit_opened", worker=str(target), open_s=settings.open_s)
