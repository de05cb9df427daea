"""Targets that are left alone: they asked for it (429 or 503 with Retry-After), or refuse connections.

A target that rests gets no request while another one can take it (`Rest` in filters.py).
"""

from __future__ import annotations

from kvrouter.core.wire.ids import Target

# Of a target that refuses connections: as long as its agent takes to see it, and then its probes.
FIRST_S, LONGEST_S = 1.0, 30.0


class Rests:
    """Only targets that rest have an entry, until it is looked at after its end."""

    def __init__(self) -> None:
        self.until: dict[Target, float] = {}
        """The end of each rest. Nearly always empty, which every request looks at."""
        self.refusals: dict[Target, int] = {}
        """How many connections in a row each target has refused."""

    def ask(self, target: Target, until: float) -> None:
        """Let the target rest until this time; a longer rest that it asked for before stays."""
        self.until[target] = max(until, self.until.get(target, until))

    def refused(self, target: Target, now: float, chance: float) -> None:
        """The target accepts no connection, though its agent may say that it is up.

        It rests for FIRST_S, twice as long after each further refusal, up to LONGEST_S; by `chance` in [0, 1)
        up to half as long, so that several do not come back at once.
        """
        before = self.refusals.get(target, 0)
        self.refusals[target] = before + 1
        self.ask(target, now + min(FIRST_S * 2 ** min(before, 10), LONGEST_S) * (1 - chance / 2))

    def accepted(self, target: Target) -> None:
        """The target has accepted a connection."""
        if self.refusals.pop(target, None) is not None:
            self.until.pop(target, None)

    def is_awake(self, target: Target, now: float) -> bool:
        until = self.until.get(target)
        if until is not None and until <= now:
            del self.until[target]
            return True
        return until is None

    def forget(self, target: Target) -> None:
        """The target is gone, or has taken a request."""
        self.until.pop(target, None)
        self.refusals.pop(target, None)
