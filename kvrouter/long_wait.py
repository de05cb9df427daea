"""A wait without a limit says what it waits for: after FIRST_S, and again at growing intervals.

    10 s, 20 s, 40 s, 80 s, …, then every MOST_S:
    engine.awaited awaited='the engine at http://h:9000' since=2026-11-28T07:47:37Z waited_s=10
        reason='/v1/models: connection refused' remedy='start the engine, or …'

Each wait without a limit has a LongWait, so a process that does nothing says why.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime

import structlog

log = structlog.get_logger()

FIRST_S = 10.0
# A wait of days then fills neither a log nor the reader's screen.
MOST_S = 600.0


class LongWait:
    """One wait, from `now` on. `event` is the log's, `awaited` the thing; `facts` go on each line."""

    def __init__(self, event: str, awaited: str, now: float, **facts: object) -> None:
        self._event = event
        self._facts = {"awaited": awaited, **facts}
        self._began_at = now
        self._due_s = FIRST_S

    def look(self, now: float, reason: str, remedy: str) -> bool:
        """Log why the wait goes on and what to do, if that is due; returns whether it was."""
        waited_s = now - self._began_at
        if waited_s < self._due_s:
            return False
        while self._due_s <= waited_s:  # looks may be rare: what is overdue is said once
            self._due_s += min(self._due_s, MOST_S)
        since = datetime.fromtimestamp(time.time() - waited_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        facts = {**self._facts, "since": since, "waited_s": round(waited_s)}
        log.warning(self._event, **facts, reason=reason, remedy=remedy)
        return True
