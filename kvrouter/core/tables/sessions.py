"""Which target a session is bound to: a bounded table with a time to live.

    bind(session, target, now)  →  target_of(session) until ttl_s after the last use

Every use renews the binding. Beyond `max_sessions` the least recently used is forgotten.
Replicas tell each other of every use; two that bind one new session in the same moment settle on the
lesser target, both of them. Invariant: `_bindings` stands in the order of last use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from kvrouter.core.wire.ids import Target

DEFAULT_TTL_S = 600.0
DEFAULT_MAX_SESSIONS = 100_000
SETTLE_S = 0.1
"""Bindings of one session by two replicas within this time did not know of each other."""
_EXPIRED_A_USE = 2
"""Each use takes out so many whose time is over, so that nobody has to walk the table."""


class Binding(NamedTuple):
    """A session's target, until when it holds, and which replica bound it when (its own: no name)."""

    target: Target
    expires: float
    bound_at: float = 0.0
    router_id: str = ""


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
        self._put(session, Binding(target, now + (self.ttl_s if ttl_s is None else ttl_s), now))

    def hear(self, session: str, target: Target, now: float, ttl_s: float, router_id: str) -> None:
        """Another replica has bound the session."""
        known = self._bindings.get(session)
        if known is not None and known.router_id != router_id and now - known.bound_at < SETTLE_S:
            target = min(target, known.target)
        self._put(session, Binding(target, now + ttl_s, now, router_id))

    def recall(self, session: str, target: Target, now: float, ttl_s: float, router_id: str) -> None:
        """A snapshot tells what a replica knows: news only if it lasts longer than what is known here."""
        known = self._bindings.get(session)
        if known is None or known.expires < now + ttl_s:
            self._put(session, Binding(target, now + ttl_s, now - SETTLE_S, router_id))

    def newest(self, now: float, most: int) -> Iterator[tuple[str, Target, float]]:
        """The sessions used last, with the seconds they still have, in the order of their use."""
        last = list(islice(reversed(self._bindings.items()), most))
        for session, binding in reversed(last):
            if binding.expires > now:
                yield session, binding.target, binding.expires - now

    def _put(self, session: str, binding: Binding) -> None:
        self._bindings[session] = binding
        self._bindings.move_to_end(session)
        self.expire(binding.bound_at, _EXPIRED_A_USE)
        while len(self._bindings) > self.max_sessions:
            self._bindings.popitem(last=False)

    def target_of(self, session: str, now: float) -> Target | None:
        """Where the session is bound to, if it still is."""
        binding = self._bindings.get(session)
        return binding.target if binding is not None and binding.expires > now else None

    def expire(self, now: float, most: int = DEFAULT_MAX_SESSIONS) -> None:
        """Forget bindings whose time is over, least recently used first."""
        for _ in range(min(most, len(self._bindings))):
            session, binding = next(iter(self._bindings.items()))
            if binding.expires > now:
                return  # a shorter time to live further back waits for its turn
            del self._bindings[session]

    def drop(self, target: Target) -> None:
        """The target is gone, and with it every binding to it."""
        gone = [session for session, binding in self._bindings.items() if binding.target == target]
        for session in gone:
            del self._bindings[session]
