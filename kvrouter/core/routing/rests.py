"""Targets that asked to be left alone: they answered 429 or 503, and said for how long (Retry-After).

A target that rests gets no request while another one can take it (`Rest` in filters.py).
"""

from __future__ import annotations

from kvrouter.core.wire.ids import Target


class Rests:
    """Only targets that asked have an entry, until somebody looks after its end."""

    def __init__(self) -> None:
        self._until: dict[Target, float] = {}

    def __bool__(self) -> bool:
        return bool(self._until)

    def ask(self, target: Target, until: float) -> None:
        """Let the target rest until this time; a longer rest that it asked for before stays."""
        self._until[target] = max(until, self._until.get(target, until))

    def is_awake(self, target: Target, now: float) -> bool:
        until = self._until.get(target)
        if until is not None and until <= now:
            del self._until[target]
            return True
        return until is None

    def forget(self, target: Target) -> None:
        """The target is gone, or has taken a request."""
        self._until.pop(target, None)
