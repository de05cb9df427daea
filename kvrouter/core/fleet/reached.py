"""Which addresses in peers' heartbeats belong to replicas: they have answered `/ready` with a router id.

    heartbeats ──> addresses ──next──> one question at a time ──answered──> router ids

What a peer says of others (the pools that it serves, its addresses) counts only while its address answers as
the peer. Its bookings need no answer: a peer that cannot be reached keeps them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvrouter.core.wire.heartbeats import RouterBeat
from kvrouter.core.wire.ids import RouterId

# An address that has answered is asked again after this time.
AGAIN_S = 30.0
# Pauses after failures double from here, up to the second.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
# After so many failures in a row an address no longer counts: a busy replica may miss one question.
MOST_MISSES = 2


@dataclass(slots=True)
class _Asked:
    due_at: float
    router_id: str = ""
    misses: int = 0


class ReachedPeers:
    """The addresses of peers, and the router ids that they have answered with."""

    def __init__(self) -> None:
        self._asked: dict[str, _Asked] = {}

    def next(self, peers: Mapping[RouterId, RouterBeat], now: float) -> str:
        """The address to ask now; empty if none is due. Those that have not failed come first."""
        wanted = {url for beat in peers.values() for url in urls_of(beat)}
        for gone in self._asked.keys() - wanted:
            del self._asked[gone]
        for url in wanted - self._asked.keys():
            self._asked[url] = _Asked(now)
        due = [(one.misses, one.due_at, url) for url, one in self._asked.items() if one.due_at <= now]
        return min(due)[2] if due else ""

    def answered(self, url: str, router_id: str, now: float) -> bool:
        """Note the id that an address has answered with; empty: it did not answer as a replica.

        Returns whether another id counts for it now.
        """
        one = self._asked.get(url)
        if one is None:
            return False
        before = one.router_id
        one.misses = 0 if router_id else one.misses + 1
        if router_id or one.misses >= MOST_MISSES:
            one.router_id = router_id
        pause_s = min(FIRST_PAUSE_S * 2 ** min(one.misses - 1, 10), LONGEST_PAUSE_S)
        one.due_at = now + (AGAIN_S if router_id else pause_s)
        return one.router_id != before

    def at(self, url: str) -> str:
        """The id of the replica at an address; empty if none has answered."""
        one = self._asked.get(url)
        return one.router_id if one is not None else ""

    def is_reached(self, router_id: RouterId, beat: RouterBeat) -> bool:
        """Whether the peer's address answers as the peer."""
        return bool(beat.address) and self.at(beat.address) == router_id

    def has_failed(self, router_id: RouterId, beat: RouterBeat) -> bool:
        """Whether the peer's address was asked, and does not answer as the peer."""
        one = self._asked.get(beat.address)
        return one is not None and one.router_id != router_id and bool(one.misses or one.router_id)


def urls_of(beat: RouterBeat) -> Iterator[str]:
    """The addresses of both listeners, as far as the heartbeat names them."""
    return filter(None, (beat.address, beat.clients_url))
