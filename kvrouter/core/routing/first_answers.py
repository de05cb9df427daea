"""A worker that is up and answers every request with 404.

    404 ────────────> counted ── FEWEST, and no other answer yet ──> a problem ── 2xx ──> proven
    2xx, 400, 422 ──> proven: a later 404 is about one request, as for an adapter that was unloaded

Its agent reaches the engine, so nothing else looks wrong. A gateway may serve /v1 below another path, or the
engine may list a name that it does not serve. Other answers (401, 429, 5xx) say nothing of them.
"""

from __future__ import annotations

from dataclasses import dataclass

# Fewer may come from one client.
FEWEST = 5
_PROVES = frozenset({400, 422})


@dataclass(slots=True)
class FirstAnswers:
    """Of requests for routes that every engine has, since the worker's card."""

    is_proven: bool = False
    not_found: int = 0

    def note(self, status: int) -> None:
        if status < 300 or status in _PROVES:
            self.is_proven = True
        elif status == 404:
            self.not_found += 1

    @property
    def are_not_found(self) -> bool:
        return not self.is_proven and self.not_found >= FEWEST
