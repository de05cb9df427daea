"""Targets that asked to be left alone: they answered 429 or 503, and said for how long (Retry-After).

A target that rests gets no request while another one can take it (`Rest` in filters.py).
"""

from __future__ import annotations

from kvrouter.core.wire.ids import Target


class Rests:
    """Only targets that asked have an entry, until somebody looks after its end."""

    def __init__(self) -> None:
        self.until: dict[Target, float] = {}
        """The end of each rest. Nearly always empty, which every request looks at."""

    def ask(self, target: Target, until: float) -> None:
        """Let the target rest until this time; a longer rest that it asked for before stays."""
        self.until[target] = max(until, self.until.get(target, until))

    def is_awake(self, target: Target, now: float) -> bool:
        until = self.until.get(target)
        if until is not None and until <= now:
            del self.until[target]
            return True
        return until is None

    def forget(self, target: Target) -> None:
        """The target is gone, or has taken a request."""
        self.until.pop(target, None)
