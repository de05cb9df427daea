"""Which target a session is bound to: a bounded table with a time to live.

    bind(session, target, now)  →  target_of(session) until ttl_s after the last use

Every use renews the binding. Beyond `max_sessions` the least recently used is forgotten.
Invariant: `_bindings` stands in the order of last use.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from kvrouter.core.ids import Target

DEFAULT_TTL_S = 600.0
DEFAULT_MAX_SESSIONS = 100_000


class Binding(NamedTuple):
    """A session's target, and until when it holds."""

    target: Target
    expires: float


class SessionTable:
    """Sessions and their targets, in one pool."""

    def __init__(self, ttl_s: float = DEFAULT_TTL_S, max_sessions: int = DEFAULT_MAX_SESSIONS) -> None:
        self.ttl_s = ttl_s
        self.max_sessions = max_sessions
        self._bindings: OrderedDict[str, Binding] = OrderedDict()

    def __len__(self) -> int:
        return len(self._bindings)

    def bind(self, session: str, target: Target, now: float, ttl_s: float | None = None) -> None:
        """The session was served by this target just now; whatever it was bound to before."""
        self._bindings[session] = Binding(target, now + (self.ttl_s if ttl_s is None else ttl_s))
        self._bindings.move_to_end(session)
        while len(self._bindings) > self.max_sessions:
            self._bindings.popitem(last=False)

    def target_of(self, session: str, now: float) -> Target | None:
        """Where the session is bound to, if it still is."""
        binding = self._bindings.get(session)
        return binding.target if binding is not None and binding.expires > now else None

    def expire(self, now: float) -> None:
        """Forget the bindings whose time is over, least recently used first."""
        while self._bindings:
            session, binding = next(iter(self._bindings.items()))
            if binding.expires > now:
                return  # a shorter time to live further back waits for its turn
            del self._bindings[session]

    def drop(self, target: Target) -> None:
        """The target is gone, and with it every binding to it."""
        gone = [session for session, binding in self._bindings.items() if binding.target == target]
        for session in gone:
            del self._bindings[session]
