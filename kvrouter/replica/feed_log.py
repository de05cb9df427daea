"""What a replica logs about messages that it cannot use: once for each subject or feed."""

from __future__ import annotations

import structlog

from kvrouter.core.fleet.routing_changes import LEAP
from kvrouter.core.wire.heartbeats import RoutingChange
from kvrouter.core.wire.ids import RouterId

log = structlog.get_logger()

# Subjects come from the network, so what is remembered of them is bounded. Counters go on beyond that.
MOST_NAMED = 1000


class FeedLog:
    """Logs the first malformed message and the first bug of each subject or feed, and refused changes."""

    def __init__(self) -> None:
        self.errors = 0
        """Messages that raised. Each is a bug here: a malformed message raises nothing."""
        self._malformed: set[str] = set()
        self._failed: set[str] = set()
        self._refused: set[str] = set()

    def malformed(self, subject: str, reason: str) -> None:
        """A message could not be read. The replica counts each one."""
        if _is_new(subject, self._malformed):
            log.warning("feed.malformed", subject=subject, error=reason[:300])

    def refused_routing(self, router_id: RouterId, change: RoutingChange) -> None:
        """A peer's change of routing is not followed."""
        if _is_new(router_id, self._refused):
            facts = {"epoch": change.epoch, "revision": change.revision}
            reason = f"more than {LEAP} changes ahead, and not what most replicas follow"
            log.warning("routing.refused", replica=router_id, **facts, reason=reason)

    def failed(self, about: str, error: Exception) -> None:
        """Applying a message raised: log where, and count it."""
        self.errors += 1
        if _is_new(about, self._failed):
            log.error("feed.error", about=about, exc_info=error)


def _is_new(about: str, named: set[str]) -> bool:
    if about in named or len(named) >= MOST_NAMED:
        return False
    named.add(about)
    return True
