"""What an attempt shows of its worker, passed on to its circuit breaker (core/routing/breaker.py), if any."""

from __future__ import annotations

import asyncio

import structlog

from kvrouter.core.routing.breaker import CircuitBreakers
from kvrouter.core.wire.ids import Target
from kvrouter.relay.exchange import Done, Lost, Outcome, Rejected, Retried, TimedOut

log = structlog.get_logger()


def tell(circuits: CircuitBreakers, target: Target, outcome: Outcome | None) -> None:
    """How an attempt ended; None: its client left, or we failed."""
    match outcome:
        case None | Done(spares_worker=True):
            circuits.abandoned(target)
        case Lost() | Retried() | TimedOut():
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
